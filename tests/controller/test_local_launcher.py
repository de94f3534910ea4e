"""Children: their logs, their exits, and that none is left."""

import asyncio
import os
import signal
import sys
import textwrap
from pathlib import Path

from services.controller.launchers.launcher import tail
from services.controller.launchers.local import LocalLauncher
from tests.processes import ended
from tests.shared.runs import until

QUIET = "import signal; print('up', flush=True); signal.pause()"
DRAINS = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: (print("drained", flush=True), sys.exit(0)))
print("up", flush=True)
signal.pause()
"""
STUBBORN = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("child", subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid, flush=True)
signal.pause()
"""


def launcher(tmp_path: Path, code: str) -> LocalLauncher:
    return LocalLauncher(lambda service, replica: [sys.executable, "-c", code, service, replica], tmp_path / "logs")


async def says(tmp_path: Path, replica: str, word: str) -> str:
    log = tmp_path / "logs" / f"{replica}.log"
    await until(lambda: log.exists() and word in log.read_text(), f"{replica} says {word!r}")
    return log.read_text()


async def test_an_exit_is_told_with_its_code_and_last_lines(tmp_path):
    one = launcher(
        tmp_path, "import os, sys; print(sys.argv[1], os.environ['OMP_NUM_THREADS']); sys.exit('no such thing')"
    )
    pid = await one.start("reward", "reward-3")
    gone = await asyncio.wait_for(one.exits.get(), 60)
    assert (gone.replica, gone.code, gone.how, gone.pid) == ("reward-3", 1, "exit code 1", pid)
    assert sorted(gone.tail()) == ["no such thing", "reward 1"]
    assert one.children == {}


async def test_a_killed_child_is_told_by_its_signal(tmp_path):
    one = launcher(tmp_path, QUIET)
    pid = await one.start("rollout", "rollout-0")
    os.kill(pid, signal.SIGKILL)
    gone = await asyncio.wait_for(one.exits.get(), 60)
    assert gone.how == "killed by SIGKILL"


async def test_stopping_lets_children_drain(tmp_path):
    one = launcher(tmp_path, DRAINS)
    await one.start("rollout", "rollout-0")
    await one.start("rollout", "rollout-1")
    for number in (0, 1):
        await says(tmp_path, f"rollout-{number}", "up")
    assert await one.stop(60) == []
    assert "drained" in await says(tmp_path, "rollout-1", "drained")


async def test_who_does_not_leave_is_killed_with_all_it_started(tmp_path):
    one = launcher(tmp_path, STUBBORN)
    await one.start("rollout", "rollout-0")
    grandchild = int((await says(tmp_path, "rollout-0", "child")).split()[1])
    assert await one.stop(0.2) == ["rollout-0"]
    await until(lambda: ended(grandchild), "the grandchild is gone")


async def test_children_die_with_their_parent(tmp_path):
    """The parent is killed; nothing asks the child, and it is gone all the same."""
    child = "import sys, signal; from shared.parent import die_with_parent; "
    child += "die_with_parent(int(sys.argv[1])); print('up', flush=True); signal.pause()"
    parent = textwrap.dedent(f"""
        import os, subprocess, sys, signal
        child = subprocess.Popen([sys.executable, "-c", {child!r}, str(os.getpid())], stdout=subprocess.PIPE)
        child.stdout.readline()
        print(child.pid, flush=True)
        signal.pause()
    """)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", parent, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    pid = int(await asyncio.wait_for(process.stdout.readline(), 60))
    process.kill()
    await process.wait()
    await until(lambda: ended(pid), "the child is gone")


def test_the_end_of_a_long_log(tmp_path):
    log = tmp_path / "x.log"
    log.write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert tail(log, 2) == ["line 99998", "line 99999"]
