"""The demo under Docker Compose, as a user would run it: `make test-compose`.

Builds the images, brings everything up, scales the rollout 1 -> 3 -> 1 in mid-run, kills one replica and the broker's container,
takes all down and up again, and ends with an audit that holds and a reward that has risen. Says how large the images are and
how long each part took.

Needs a container engine with Compose (engine.py: one that runs, or ENGINE). Without it fails, saying so; `SKIP_COMPOSE=1`
switches it off.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from tests.deploy.engine import BUILD_S, COMMAND_S, ROOT, Failed, broker_image, engine, part, run

FILES = [ROOT / "deploy" / "compose.yaml", ROOT / "tests" / "deploy" / "compose.test.yaml"]
PROJECT = "slipstream-test"
IMAGES = ("controller", "dcs", "reward", "rollout", "trainer")
STEPS = 200
STEP_S = 600


def compose(*arguments: str, timeout: float = COMMAND_S, check: bool = True) -> str:
    files = [part for file in FILES for part in ("-f", str(file))]
    return run("docker", "compose", "-p", PROJECT, *files, *arguments, timeout=timeout, check=check)


def free_ports() -> None:
    import socket

    with contextlib.ExitStack() as stack:
        for name in ("SLIPSTREAM_BROKER_PORT", "SLIPSTREAM_API_PORT"):
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            os.environ[name] = str(probe.getsockname()[1])


class Api:
    """The controller's, through the published port."""

    def __init__(self) -> None:
        self.url = f"http://127.0.0.1:{os.environ['SLIPSTREAM_API_PORT']}/status"
        self.token = ""

    def status(self) -> dict[str, Any]:
        """{} while it does not answer."""
        if not self.token:
            found = compose("exec", "-T", "controller", "cat", "/run/slipstream/token", check=False).split()
            self.token = found[0] if found else ""
        request = urllib.request.Request(self.url, headers={"Authorization": f"Bearer {self.token}"})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return json.load(answer)
        except OSError:
            return {}

    def step(self) -> int:
        return int(self.status().get("step", -1))

    def rollouts(self) -> int:
        return sum(1 for one in self.status().get("replicas") or [] if one["service"] == "rollout")

    def refuses_strangers(self) -> bool:
        try:
            urllib.request.urlopen(self.url, timeout=10).close()
        except urllib.error.HTTPError as error:
            return error.code == 401
        return False


def until(condition: Callable[[], Any], what: str, timeout: float = STEP_S, every: float = 1.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise Failed(f"not within {timeout:.0f} s: {what}")
        time.sleep(every)


def containers(*services: str) -> list[dict[str, Any]]:
    lines = compose("ps", "-a", "--format", "json", *services).splitlines()
    found = [json.loads(line) for line in lines if line.strip()]
    return [one for entry in found for one in (entry if isinstance(entry, list) else [entry])]


def running(service: str) -> list[str]:
    return [one["Name"] for one in containers(service) if one["State"] == "running"]


def scale(rollouts: int) -> None:
    compose("up", "-d", "--no-recreate", "--scale", f"rollout={rollouts}")


def the_run() -> None:
    """Up, 1 -> 3 -> 1, two kills, down and up, to the end."""
    api = Api()
    with part("up, until the first update"):
        scale(1)
        until(lambda: api.step() >= 1, "the first update")
    if not api.refuses_strangers():
        raise Failed("the controller's API answers without a token")
    with part("scaled to 3, until they are there"):
        scale(3)
        until(lambda: api.rollouts() == 3, "three rollout replicas")
    with part("one replica and the broker killed, until the run has gone on"):
        before = api.step()
        run("docker", "kill", running("rollout")[0], running("broker")[0])
        scale(3)
        until(lambda: api.step() >= before + 2, f"two updates after step {before}")
    with part("scaled to 1"):
        scale(1)
        until(lambda: api.rollouts() == 1 or api.step() < 0, "one rollout replica")
    with part("down and up, until it has gone on"):
        before = api.step()
        compose("down")
        api.token = ""
        scale(1)
        until(lambda: api.step() > before, f"an update after step {before}")
    with part("to the end of the run"):
        until(finished, "the run's end", every=5.0)


def finished() -> bool:
    """Every service has left, and each says that all was well."""
    for one in containers(*IMAGES):
        if one["State"] != "exited":
            return False
        if one["ExitCode"]:
            log = run("docker", "logs", "--tail", "30", one["Name"])
            raise Failed(f"{one['Name']}: exit code {one['ExitCode']}\n{log}")
    return True


def judge() -> None:
    """The books and the reward."""
    audit = json.loads(compose("run", "--rm", "-T", "cli", "audit", "--json"))
    if not audit["ok"] or audit["pending"] or audit["issued"] != audit["trained"] + sum(audit["dropped"].values()):
        raise Failed(f"the audit does not hold: {json.dumps(audit)[:3000]}")
    print(
        f"           audit: {audit['issued']} issued, {audit['trained']} trained, dropped {audit['dropped']}",
        flush=True,
    )
    lines = compose("run", "--rm", "-T", "cli", "events", "--kind", "evaluated", "--json").splitlines()
    rewards = {event["detail"]["step"]: event["detail"]["reward"] for event in map(json.loads, lines)}
    first, last = rewards[min(rewards)], rewards[max(rewards)]
    print(f"           held-out reward {first:.3f} -> {last:.3f} after {max(rewards)} updates", flush=True)
    if max(rewards) != STEPS or last < first + 0.1:
        raise Failed(f"the reward has not risen: {rewards}")


def sizes() -> None:
    for image in IMAGES:
        size = int(run("docker", "image", "inspect", "-f", "{{.Size}}", f"slipstream/{image}"))
        print(f"{size / 1e6:7.0f} MB slipstream/{image}", flush=True)


def main() -> int:
    if os.environ.get("SKIP_COMPOSE"):
        print("test-compose: switched off by SKIP_COMPOSE")
        return 0
    began = time.monotonic()
    try:
        with engine("switch this off with SKIP_COMPOSE=1"):
            free_ports()
            try:
                with part("images"):
                    broker_image(os.environ.setdefault("SLIPSTREAM_NATS_IMAGE", "nats:2-alpine"))
                    compose("build", timeout=BUILD_S)
                sizes()
                the_run()
                with part("audit and reward"):
                    judge()
            except BaseException:
                print(compose("logs", "--tail", "40", "--no-color", check=False)[-20000:], flush=True)
                raise
            finally:
                compose("down", "-v", "--remove-orphans", check=False)
    except (Failed, subprocess.TimeoutExpired) as error:
        print(f"test-compose: {error}", file=sys.stderr)
        return 1
    print(f"test-compose: all holds, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
