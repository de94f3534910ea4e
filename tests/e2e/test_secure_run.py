"""Whole runs at brokers with keys, permissions and TLS: no permission that a service needs is missing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from shared.errors import StreamMissing
from shared.jetstream import Connection
from shared.subjects import Subjects
from shared.transfer_queue import TransferQueue
from tests.shared.runs import until
from tests.shared.secure import SecureBroker

RUN = "secured"
DEADLINE_S = 900.0
EXAMPLE = Path(__file__).parents[2] / "examples" / "sort_letters" / "run.yaml"
SHORT = [
    f"run={RUN}",
    "steps=4",
    "groups_per_step=4",
    "samples_per_group=4",
    "eval.prompts.size=8",
    "trainer.warm_start.steps=4",
    "trainer.warm_start.optimizer.warmup_steps=1",
    "trainer.checkpoint.every=2",
]


def environment(secure: SecureBroker, role: str) -> dict[str, str]:
    return os.environ | {"SLIPSTREAM_CREDENTIALS": str(secure.clients / role), "SLIPSTREAM_NATS": secure.url}


def slipstream(secure: SecureBroker, role: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.controller.cli", *arguments]
    settings: dict[str, Any] = {"capture_output": True, "text": True, "timeout": DEADLINE_S, "check": False}
    return subprocess.run(command, env=environment(secure, role), **settings)


def up(folder: Path, *changes: str) -> list[str]:
    """`slipstream up` of the example: each service gets the folder of its role."""
    places = [f"workdir={folder / 'work'}", f"model.path={folder / 'model'}"]
    return ["up", str(EXAMPLE), *(part for change in (*SHORT, *places, *changes) for part in ("--set", change))]


def logs(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted((folder / "work" / "logs").glob("*.log")))


def test_a_run_at_a_guarded_broker(tmp_path: Path) -> None:
    with SecureBroker(tmp_path, [RUN]) as secure:
        done = slipstream(secure, "operator", *up(tmp_path))
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs(tmp_path)}"
        assert "refuses" not in logs(tmp_path) + done.stderr
        assert "Permissions Violation" not in secure.log(), secure.log()
        for command in (["audit", "--json"], ["status", "--json"], ["events", "--json"]):
            looked = slipstream(secure, "observer", *command, "--run", RUN)
            assert looked.returncode == 0, looked.stderr
            assert json.loads(looked.stdout.splitlines()[-1])
        wrong = slipstream(secure, "reward", "serve", "rollout", "--run", RUN)
        assert wrong.returncode == 2
        assert f"refuses publish on '$kv.{RUN}_services.beat.rollout" in wrong.stderr
        assert "Traceback" not in wrong.stderr


async def test_a_run_at_a_cluster_that_loses_the_receipts_leader(tmp_path: Path) -> None:
    """Three nodes hold all streams; the one that leads the receipts is killed in mid-run, with its disk as good as lost."""
    with SecureBroker(tmp_path, [RUN], nodes=3) as secure:
        await secure.formed(RUN)
        command = [sys.executable, "-m", "services.controller.cli", *up(tmp_path, "broker.replicas=3", "steps=8")]
        process = await asyncio.create_subprocess_exec(
            *command,
            env=environment(secure, "operator"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        told = asyncio.create_task(process.communicate())
        connection = await Connection.open(secure.url, name="test", options=secure.options("operator"), deadline_s=60)
        try:
            queue = TransferQueue(connection, Subjects(RUN))

            async def under_way() -> bool:
                assert not told.done(), told.result()[0].decode()
                with contextlib.suppress(StreamMissing):  # `up` has not created it yet
                    return await queue.last_seq("receipts") >= 10
                return False

            await until(under_way, "groups are issued", DEADLINE_S)
            info = await connection.api(f"STREAM.INFO.{queue.subjects.stream('receipts')}")
            assert len(info["cluster"]["replicas"]) == 2
            await asyncio.to_thread(secure.kill, info["cluster"]["leader"])
        finally:
            await connection.close()
        output = (await asyncio.wait_for(told, DEADLINE_S))[0].decode()
        assert process.returncode == 0, f"{output}\n{logs(tmp_path)}\n{secure.log()[-5000:]}"
        audit = slipstream(secure, "observer", "audit", "--json", "--run", RUN)
        assert json.loads(audit.stdout)["ok"], audit.stdout
