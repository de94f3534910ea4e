"""Services as actors of a Ray cluster: one actor a replica, with the resources that the run file's section `ray` names.

The actor starts the service as a child process and waits for it, so that a service is the same program everywhere; the child
dies with the actor, whatever kills it, and a death is an exit like others, which the keeper answers with another actor. An actor
for which the cluster has no room waits in Ray, and nobody accuses it meanwhile. All ranks of a trainer are in one actor; over
several nodes services/trainer/ray_ranks.py starts them instead. Every node needs Slipstream installed, the model and the run's
files at the same paths, and a way to the broker. tests/ray/test_ray.py: `make test-ray`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.exceptions import RayError

from services.controller.launchers.launcher import REASON, Exit, tail
from shared.config import ConfigError, RunConfig
from shared.network import is_loopback

log = logging.getLogger(__name__)

CONNECT_S = 60.0
OWN = ("num_cpus", "num_gpus", "memory")
"""Resources that Ray knows by name; all others are custom."""
LOST = -int(signal.SIGKILL)
"""Stands for the exit code of a process whose actor is gone."""
THREADS = 4


class Replica:
    """In the actor: one service process."""

    def __init__(self, service: str, replica: str, options: list[str], log: str) -> None:
        self._log = Path(log)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        words = ["-m", "services.controller.cli", "serve", service, *options, "--parent", str(os.getpid())]
        with self._log.open(
            "ab"
        ) as output:  # from this thread, which lives as long as the actor: its end is the child's
            self._process = subprocess.Popen(
                [sys.executable, *words, "--replica", replica],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )

    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> tuple[int, list[str]]:
        """Its exit code and last lines."""
        return self._process.wait(), tail(self._log)

    def terminate(self) -> None:
        self._process.terminate()


@dataclass(slots=True)
class Placed:
    """One actor."""

    service: str
    replica: str
    actor: Any
    started: float
    pid: int = 0
    """0 until the cluster has placed it."""


class RayLauncher:
    """See the protocol in launcher.py."""

    kind = "ray"

    def __init__(self, config: RunConfig, url: str) -> None:
        self.config, self.logs = config, config.work_path / "logs"
        self.children: dict[str, Placed] = {}
        self.exits: asyncio.Queue[Exit] = asyncio.Queue()
        self._options = ["--nats", url, "--run", config.run]
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def connect(cls, config: RunConfig, url: str, address: str) -> RayLauncher:
        """Reach the cluster. ConfigError says what is missing."""
        if strange := sorted(set(config.ray.resources) - SERVICES):
            known = ", ".join(sorted(SERVICES))
            raise ConfigError(f"ray.resources: {strange[0]!r} is no service; they are {known}")
        try:
            nodes = await asyncio.wait_for(asyncio.to_thread(_connect, config, address), CONNECT_S)
        except (RayError, ConnectionError, TimeoutError, ValueError, RuntimeError) as error:
            raise ConfigError(f"--address {address}: no Ray cluster answers there ({error})") from error
        if nodes > 1 and is_loopback(urlsplit(url.split(",")[0]).hostname or ""):
            raise ConfigError(
                f"broker.url: the Ray cluster has {nodes} nodes, and the broker can be reached from this one only; "
                "start one that all of them reach, and name it with --nats"
            )
        return cls(config, url)

    async def start(self, service: str, replica: str) -> int:
        file = self.logs / f"{replica}.log"
        actor = _actor(self.config, service, replica).remote(service, replica, self._options, str(file))
        placed = self.children[replica] = Placed(service, replica, actor, time.monotonic())
        self._watchers[replica] = asyncio.create_task(self._watch(placed, file))
        return 0

    async def _watch(self, placed: Placed, file: Path) -> None:
        try:
            placed.pid = await placed.actor.pid.remote()
            code, last = await placed.actor.wait.remote()
        except RayError as error:
            code, last = LOST, [f"{REASON}the actor is gone: {str(error).splitlines()[0]}"]
        if self.children.get(placed.replica) is placed:
            del self.children[placed.replica]
        ray.kill(placed.actor)
        if not file.exists():  # it was written on another node
            self.logs.mkdir(parents=True, exist_ok=True)
            file.write_text("\n".join(last) + "\n")
        seconds = time.monotonic() - placed.started
        self.exits.put_nowait(Exit(placed.service, placed.replica, placed.pid, code, file, seconds))

    def terminate(self, replica: str) -> None:
        if (placed := self.children.get(replica)) is not None:
            task = asyncio.create_task(_terminate(placed))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def kill(self, replica: str) -> None:
        if (placed := self.children.get(replica)) is not None:
            ray.kill(placed.actor)

    def signal(self, number: signal.Signals, services: Sequence[str] | None = None) -> None:
        for replica in self._of(services):
            if number == signal.SIGKILL:
                self.kill(replica)
            else:
                self.terminate(replica)

    async def stop(self, drain_s: float, services: Sequence[str] | None = None) -> list[str]:
        self.signal(signal.SIGTERM, services)
        if await self._gone(drain_s, services):
            return []
        late = sorted(self._of(services))
        self.signal(signal.SIGKILL, services)
        await self._gone(drain_s, services)
        return late

    async def close(self) -> None:
        """Leave the cluster; one that was made for this run ends."""
        for task in (*self._watchers.values(), *self._tasks):
            task.cancel()
        await asyncio.to_thread(ray.shutdown)

    async def _gone(self, timeout_s: float, services: Sequence[str] | None) -> bool:
        watchers = [self._watchers[replica] for replica in self._of(services)]
        if not watchers:
            return True
        _, left = await asyncio.wait(watchers, timeout=timeout_s)
        return not left

    def _of(self, services: Sequence[str] | None) -> list[str]:
        return [name for name, one in self.children.items() if services is None or one.service in services]


SERVICES = frozenset({"controller", "dcs", "reference", "reward", "rollout", "teacher", "trainer"})


def _connect(config: RunConfig, address: str) -> int:
    """How many nodes the cluster has."""
    source = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    variables = {"PYTHONPATH": path, **config.ray.runtime_env.get("env_vars", {})}
    ray.init(
        address=address,
        namespace=f"slipstream-{config.run}",
        runtime_env={**config.ray.runtime_env, "env_vars": variables},
        log_to_driver=False,
        include_dashboard=False if address == "local" else None,
        configure_logging=False,
    )
    return len([node for node in ray.nodes() if node["Alive"]])


def _actor(config: RunConfig, service: str, replica: str) -> Any:
    """The actor's class with its name and resources."""
    wanted = config.ray.resources.get(service, {})
    options: dict[str, Any] = {"num_cpus": 0, **{name: wanted[name] for name in OWN if name in wanted}}
    custom = {name: amount for name, amount in wanted.items() if name not in OWN}
    return ray.remote(Replica).options(
        **options, resources=custom or None, max_restarts=0, max_concurrency=THREADS, enable_task_events=False
    )


async def _terminate(placed: Placed) -> None:
    try:
        await placed.actor.terminate.remote()
    except RayError as error:  # it is gone, which its watcher tells
        log.debug("%s cannot be asked to leave: %s", placed.replica, error)
