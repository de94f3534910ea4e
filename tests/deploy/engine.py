"""A container engine for tests: the one that runs, or the one that ENGINE starts. Standard library only.

Where none runs, `ENGINE=path/to/script` may name one that starts it: `script up`, `script env` (prints exports), `script down`.
Without either it is `Failed`, saying so.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD_S, COMMAND_S = 1800, 300


class Failed(Exception):
    """What a test with containers found."""


def run(*command: str, timeout: float = COMMAND_S, check: bool = True) -> str:
    """Its output. Failed, with the end of what it printed, if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT)
    if check and done.returncode:
        raise Failed(
            f"{shlex.join(command)}: exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
    return done.stdout


@contextlib.contextmanager
def part(name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"{time.monotonic() - began:7.1f} s  {name}", flush=True)


@contextlib.contextmanager
def engine(off: str) -> Iterator[None]:
    """One that answers, for as long as this is open. `off` is what a person may do who wants no test with containers."""
    if engine_answers():
        yield
        return
    script = os.environ.get("ENGINE")
    if not script:
        raise Failed(
            "no container engine: `docker compose version` and `docker info` do not both answer. Start Docker with Compose, or "
            f"set ENGINE to a script that does, or {off}"
        )
    try:
        with part("the engine starts"):
            run("bash", script, "up", timeout=BUILD_S)
        for line in run("bash", script, "env").splitlines():
            for word in shlex.split(line.removeprefix("export ")):
                name, _, value = word.partition("=")
                os.environ[name] = value
        if not engine_answers():
            raise Failed(f"no container engine: {script} ran, and `docker info` still does not answer")
        yield
    finally:
        run("bash", script, "down", timeout=BUILD_S, check=False)


def engine_answers() -> bool:
    try:
        run("docker", "info")
        run("docker", "compose", "version")
    except (Failed, OSError):
        return False
    return True


def broker_image(name: str, version: str = "") -> None:
    """NATS' own image, or where that cannot be pulled one with the same server, of that version ('': the newest)."""
    if run("docker", "image", "ls", "-q", name):
        return
    try:
        run("docker", "pull", name)
    except Failed:
        wanted = {
            "BASE": os.environ.get("SLIPSTREAM_BASE", "python:3.11-slim"),
            "VERSION": f"=={version}" if version else "",
        }
        arguments = [part for key, value in wanted.items() for part in ("--build-arg", f"{key}={value}")]
        folder = ROOT / "tests" / "deploy"
        run("docker", "build", "-t", name, *arguments, "-f", str(folder / "broker.Dockerfile"), str(folder))
        print(f"           {name} cannot be pulled: built one with the same server", flush=True)
