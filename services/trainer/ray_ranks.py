"""Ranks of the trainer as a group of Ray actors, over as many nodes as it takes: what torchrun is elsewhere.

    python -m services.trainer.ray_ranks --ranks 16 --gpus 1 --address auto -- --nats nats://broker:4222 --run my-run

A placement group holds a bundle for each rank, all or none; an actor in each starts `slipstream serve trainer` as a child with
torchrun's variables, so that a rank is the same program everywhere (channel.py). SIGTERM and SIGINT go to rank 0, which drains
and lets the others go. The exit code is rank 0's; if the group does not come together, or a node is lost, it is 1. No rank
outlives its actor or this program. Each node needs Slipstream at the same path, the model, and the work folder.
tests/ray/test_trainer_ranks.py (`make test-ray`).
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

log = logging.getLogger(__name__)

ROOT = Path(__file__).parents[2]
LEAVE_S = 30.0
"""What the other ranks may take to end once rank 0 has."""


class Rank:
    """In the actor: one rank."""

    def address(self) -> tuple[str, int]:
        """This node's address, and a port that is free on it."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def start(self, environment: dict[str, str], options: list[str]) -> int:
        """Start the service; its process id. The child dies with this process."""
        command = [sys.executable, "-m", "services.controller.cli", "serve", "trainer", *options]
        # Its end is that of the thread that starts it: the actor's main one, not one of the pool that answers calls.
        self._child = subprocess.Popen(
            [*command, "--parent", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            env={"OMP_NUM_THREADS": "1", **os.environ, **environment},
        )
        return self._child.pid

    def wait(self, timeout_s: float) -> int | None:
        """The exit code; None while it lives."""
        try:
            return self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """Ask it to drain."""
        self._child.terminate()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line asks for."""

    ranks: int
    gpus: float
    cpus: float
    address: str
    strategy: str
    timeout_s: float
    options: list[str]
    """Of `slipstream serve trainer`."""


def read(arguments: list[str]) -> Wanted:
    parser = argparse.ArgumentParser(
        prog="python -m services.trainer.ray_ranks", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--ranks", type=int, required=True, help="as trainer.ranks in the run file")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of a rank")
    parser.add_argument("--cpus", type=float, default=1, help="CPUs of a rank")
    parser.add_argument("--address", default="auto", help="of the cluster; local: one of this machine, for this run")
    parser.add_argument("--strategy", default="PACK", choices=["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"])
    parser.add_argument(
        "--timeout", type=float, default=600, metavar="S", help="how long to wait for room in the cluster"
    )
    parser.add_argument("options", nargs="*", help="after --: options of `slipstream serve trainer`")
    found = parser.parse_args(arguments)
    return Wanted(found.ranks, found.gpus, found.cpus, found.address, found.strategy, found.timeout, found.options)


def main(arguments: list[str] | None = None) -> int:
    """Bring the ranks up and wait for rank 0. Returns its exit code."""
    wanted = read(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(format="%(asctime)s trainer ranks %(levelname)s %(message)s", stream=sys.stderr)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
    try:
        ray.init(
            address=wanted.address,
            runtime_env={"env_vars": {"PYTHONPATH": path}},
            log_to_driver=True,
            configure_logging=False,
        )
        return bring_up(wanted, asked)
    except (RayError, ConnectionError, TimeoutError) as error:
        log.error("%s", str(error).splitlines()[0])
        return 1
    finally:
        ray.shutdown()


def bring_up(wanted: Wanted, asked: threading.Event) -> int:
    """Place the ranks, start them, and stay until rank 0 ends."""
    resources = {"CPU": wanted.cpus} | ({"GPU": wanted.gpus} if wanted.gpus else {})
    group = placement_group([resources] * wanted.ranks, strategy=wanted.strategy)
    try:
        if not group.wait(wanted.timeout_s):
            each = ", ".join(f"{count:g} {name}" for name, count in resources.items())
            raise TimeoutError(
                f"the cluster has no room for {wanted.ranks} ranks with {each} each after {wanted.timeout_s:g} s; it has "
                f"{ {name: ray.available_resources().get(name, 0) for name in resources} } free"
            )
        ranks = [_place(group, number, wanted) for number in range(wanted.ranks)]
        host, port = ray.get(ranks[0].address.remote())
        common = {"WORLD_SIZE": str(wanted.ranks), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
        # Ray shows each actor its own GPUs only, so that the first is always the right one.
        starts = [
            rank.start.remote({**common, "RANK": str(number), "LOCAL_RANK": "0"}, wanted.options)
            for number, rank in enumerate(ranks)
        ]
        ray.get(starts)
        return _until_over(ranks, asked)
    finally:
        remove_placement_group(group)  # its actors end with it, and their children with them


def _place(group: Any, number: int, wanted: Wanted) -> Any:
    where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=number)
    return ray.remote(Rank).options(num_cpus=wanted.cpus, num_gpus=wanted.gpus, scheduling_strategy=where).remote()


def _until_over(ranks: list[Any], asked: threading.Event) -> int:
    """Rank 0's exit code. The others may end a little later."""
    while (code := ray.get(ranks[0].wait.remote(1.0))) is None:
        if asked.is_set():
            asked.clear()
            ray.get(ranks[0].terminate.remote())
    ray.get([rank.wait.remote(LEAVE_S) for rank in ranks[1:]])
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
