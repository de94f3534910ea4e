"""Ranks that the leader starts itself: errors come to the leader, and a rank that dies or hangs ends all of them in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ended
from tests.trainer.layouts.measure import means, resume, run_config, update
from tests.trainer.models import build_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several ranks are tried on Linux only")

HANG_S = 15
"""What a rank may let the others wait for, where one is stopped. Waited out by the test; a slow rank has to keep to it."""

LEADER = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
import psutil
from services.trainer import channel
from services.trainer.build import build
from services.trainer.channel import RankLost, gather
from services.trainer.checkpoint import CheckpointStore
from services.trainer.megatron.policy import NonFiniteError, StateMismatch
from services.trainer.saving import save
from services.trainer.spread import spread
from shared import failpoints
from tests.trainer.conftest import samples
from tests.trainer.layouts.measure import BUDGET, GRPO, run_config, update

what, folder, out, timeout_s = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4])
channel.LEAVE_S = 300.0
if what == "dies":
    channel.ENDING_S = 60.0
config = run_config(folder, 2, {"tensor_model_parallel_size": 2}, rank_timeout_s=timeout_s)
policy = build(config, gather(config))
follower = psutil.Process().children()[0]
sums = update(policy, seed=6)
print(follower.pid, flush=True)

def spoilt():
    one = samples(4)
    return spread([(replace(one[0], advantage=float("nan")),), *((other,) for other in one[1:])], BUDGET, policy.layout)

if what == "dies":
    try:
        policy.forward_backward(spoilt()[0], GRPO)
    except NonFiniteError as error:
        assert "groups 0-0" in str(error)
        policy.discard()
    try:
        policy.restore(out / "absent")
    except OSError:
        pass
    for _, tensor in policy.hf_tensors():
        break  # whoever stops early leaves the ranks in step
    assert update(policy, seed=7)["updated"] == 1.0
    print("in step", flush=True)

if what in ("dies", "hangs"):
    follower.send_signal(signal.SIGKILL if what == "dies" else signal.SIGSTOP)
    try:
        update(policy, seed=7)
    except RankLost as error:
        print(error, flush=True)
        policy.close()
        assert not follower.is_running()
    else:
        sys.exit("nothing was missed")
elif what == "leaves":
    policy.close()
    assert policy.ranks.channel.processes[0].returncode == 0
elif what == "saves":
    store = CheckpointStore(out / "checkpoints")
    save(store, policy.ranks, {"policy": ""}, 1, {"step": 1})
    update(policy, seed=8)
    failpoints.arm("checkpoint.writing:20")
    save(store, policy.ranks, {"policy": ""}, 2, {"step": 2})
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("ranks") / "model", "qwen3", tied=True)


def lead(what: str, folder: Path, out: Path) -> subprocess.Popen[str]:
    timeout_s = HANG_S if what == "hangs" else 300
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", LEADER, what, str(folder), str(out), str(timeout_s)],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(what: str, folder: Path, out: Path) -> tuple[int, str]:
    process = lead(what, folder, out)
    stdout, stderr = process.communicate(timeout=600)
    return process.returncode, stdout + stderr


def test_errors_come_to_the_leader_and_leave_all_in_step_and_a_dead_rank_is_missed(
    folder: Path, tmp_path: Path
) -> None:
    code, output = run("dies", folder, tmp_path)
    assert code == 0, output
    assert "in step" in output
    assert "rank 0 of 2 lost another rank: rank 1 ended with exit code -9" in output


def test_a_rank_that_hangs_is_missed(folder: Path, tmp_path: Path) -> None:
    code, output = run("hangs", folder, tmp_path)
    assert code == 0, output
    assert "rank 0 of 2 lost another rank: no rank of this machine has ended, so one hangs for more than 15 s" in output


def test_ranks_that_are_dismissed_end_well(folder: Path, tmp_path: Path) -> None:
    code, output = run("leaves", folder, tmp_path)
    assert code == 0, output


def test_killed_while_saving_in_one_layout_goes_on_in_another(folder: Path, tmp_path: Path) -> None:
    """Two tensor-parallel ranks save, and the leader is killed in the middle of the next save; one process goes on. The other
    rank dies with its leader."""
    from services.trainer.build import build

    config: Any = run_config(folder, 1, {})
    reference = build(config)
    update(reference, seed=6)
    expected = update(reference, seed=8)

    code, output = run("saves", folder, tmp_path)
    assert code == -signal.SIGKILL, output
    follower, deadline = int(output.splitlines()[0]), time.monotonic() + 60
    while not ended(follower):
        assert time.monotonic() < deadline, "a rank outlived its leader"
        time.sleep(0.05)
    assert any(path.name.startswith("saving-") for path in (tmp_path / "checkpoints").iterdir())
    policy = build(config)
    resume(policy, tmp_path)
    assert means(update(policy, seed=8)) == pytest.approx(means(expected), rel=5e-6, abs=1e-6)
