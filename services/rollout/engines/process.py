"""An engine as a child process: started with a deadline, watched, ended with everything that it started.

Guarantees: `start` returns an engine that answers `/ready`, or raises EngineStartError with the child's last words and leaves
nothing running; the child never outlives `stop` (SIGTERM, then SIGKILL to its whole process group), and it does not
outlive this process either, however it dies (Linux ties it to the thread that started it: start it from a thread that stays,
such as an event loop's). Options pass through to the engine under their own names. An engine kind is
one function from (folder, options, host) to a `Launch`. tests/rollout/test_engine_process.py is its check.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from services.rollout.engines.client import EngineClient
from services.rollout.engines.sglang import command
from shared.config import RunConfig

log = logging.getLogger(__name__)

TAIL_LINES = 40
READY_POLL_S = 0.05
STOP_GRACE_S = 10.0
SGLANG_GRACE_S = 3.0
"""SGLang waits for its requests after SIGTERM, without end; by then there are none that matter."""
SOURCE_ROOT = Path(__file__).resolve().parents[3]
SGLANG_SETTINGS = tuple(field.name for field in fields(command.Settings))


class EngineStartError(RuntimeError):
    """The engine did not come up. The text holds its command and last lines."""


class EngineKilled(EngineStartError):
    """Something killed it while it started: trying again is sensible."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How an engine is started. `url` None: the child prints it on the line that matches `url_pattern`."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    url: str | None = None
    url_pattern: str = r"ready at (http://\S+)"
    noise: str | None = None
    """Lines that match it are not kept among the last ones."""
    grace_s: float = STOP_GRACE_S
    """What it may take to end after SIGTERM."""


def light_command(model_dir: Path, options: Mapping[str, Any], host: str) -> Launch:
    argv = [sys.executable, "-m", "services.rollout.engines.light", "--model", str(model_dir), "--host", host]
    path = os.pathsep.join(filter(None, [str(SOURCE_ROOT), os.environ.get("PYTHONPATH", "")]))
    threads = str(options.get("threads", 1))
    return Launch(
        argv + flags(options), env={"PYTHONPATH": path, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    )


def sglang_command(model_dir: Path, options: Mapping[str, Any], host: str) -> Launch:
    own = {name: options[name] for name in SGLANG_SETTINGS if name in options}
    settings = command.Settings(**own)
    native = {name: value for name, value in options.items() if name not in SGLANG_SETTINGS}
    served = command.server_options(settings, native)
    port = int(served.pop("port", 0)) or command.free_port(host)
    argv = [command.interpreter(settings.python), "-m", command.module(settings), "--model-path", str(model_dir)]
    argv += ["--host", host, "--port", str(port), *flags(served)]
    return Launch(
        argv,
        env=command.environment(settings),
        url=f"http://{host}:{port}",
        noise=r"nanobind: | - (leaked|\.\.\. skipped)",  # pages of it, behind what went wrong
        grace_s=SGLANG_GRACE_S,
    )


COMMANDS: dict[str, Callable[[Path, Mapping[str, Any], str], Launch]] = {
    "light": light_command,
    "sglang": sglang_command,
}


def flags(options: Mapping[str, Any]) -> list[str]:
    """{"max_total_tokens": 5, "verbose": True, "seed": None} -> --max-total-tokens 5 --verbose. False and None are left out."""
    result: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        result.append("--" + name.lstrip("-").replace("_", "-"))
        if isinstance(value, list | tuple):
            result += [str(item) for item in value]
        elif value is not True:
            result.append(str(value))
    return result


def vocabulary(folder: Path) -> int | None:
    """Rows of the model's embedding, from config.json; None if that does not say."""
    config = json.loads((folder / "config.json").read_text())
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return int(size) if size else None


class EngineProcess:
    """A running engine: `url`, `pid`, `alive`, `await wait()`, `await stop()`."""

    def __init__(self, process: asyncio.subprocess.Process, launch: Launch) -> None:
        self._process = process
        self._launch = launch
        self.url = launch.url or ""
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._url_told = asyncio.Event()
        if self.url:
            self._url_told.set()
        self._readers = [
            asyncio.create_task(self._drain(stream))
            for stream in (process.stdout, process.stderr)
            if stream is not None
        ]

    @classmethod
    async def start(
        cls,
        kind: str,
        model_dir: str | Path,
        options: Mapping[str, Any] | None = None,
        *,
        host: str = "127.0.0.1",
        ready_timeout_s: float = 120.0,
    ) -> Self:
        """Start an engine and wait until it is ready. Raises EngineStartError."""
        if kind not in COMMANDS:
            raise EngineStartError(f"rollout.engine: {kind!r} cannot be started here; known are {', '.join(COMMANDS)}")
        launch = COMMANDS[kind](Path(model_dir), options or {}, host)
        process = await asyncio.create_subprocess_exec(
            *launch.argv,
            env={**os.environ, **launch.env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # a group of its own, so that the whole tree can be ended
        )
        engine = cls(process, launch)
        try:
            await engine._wait_ready(ready_timeout_s)
        except BaseException:
            await engine.stop(grace_s=0.0)
            raise
        return engine

    @classmethod
    async def start_for(cls, config: RunConfig, folder: str | Path, weight_version: str | None = None) -> Self:
        """The engine that a run file asks for, on the weights in `folder`."""
        rollout = config.rollout
        options: dict[str, Any] = {"dtype": config.model.dtype, "device": rollout.device, "threads": rollout.threads}
        options |= {"weight_version": weight_version} | (rollout.light if rollout.engine == "light" else rollout.sglang)
        if rollout.engine == "sglang":
            options |= {"in_place": rollout.on_new_weights == "in_place", "hooks": rollout.sglang_hooks}
            options |= {"python": rollout.sglang_python, "memory_saver": config.colocated}
        return await cls.start(rollout.engine, folder, options, ready_timeout_s=rollout.start_timeout_s)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @property
    def last_lines(self) -> str:
        """The end of what the engine printed."""
        return "\n".join(self._tail)

    async def wait(self) -> int:
        """Returns when the engine has ended, with its exit code (negative: the signal)."""
        return await self._process.wait()

    async def stop(self, grace_s: float | None = None) -> int:
        """End the engine and all that it started. Returns the exit code."""
        grace_s = self._launch.grace_s if grace_s is None else grace_s
        if self.alive and grace_s > 0:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_s)
        # Children of the engine may be left even if it ended well.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        code = await self._process.wait()
        await asyncio.gather(*self._readers)
        return code

    async def _drain(self, stream: asyncio.StreamReader) -> None:
        """Keep the pipe empty, remember the last lines, and catch the URL."""
        while True:
            try:
                raw = await stream.readline()
            except ValueError:
                continue  # a line longer than the reader's limit: that piece is dropped
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip()
            if self._launch.noise is None or not re.match(self._launch.noise, line):
                self._tail.append(line)
            log.debug("engine %d: %s", self.pid, line)
            if not self._url_told.is_set() and (match := re.search(self._launch.url_pattern, line)):
                self.url = match.group(1)
                self._url_told.set()

    async def _wait_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        ready = asyncio.create_task(self._ready())
        ended = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({ready, ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
                return
            if ended.done():
                await asyncio.wait(self._readers, timeout=max(0.1, deadline - time.monotonic()))
                code = ended.result()
                if code < 0:
                    raise EngineKilled(self._failure(f"was killed by signal {-code} before it was ready"))
                raise EngineStartError(self._failure(f"ended with exit code {code} before it was ready"))
            raise EngineStartError(self._failure(f"was not ready within {timeout_s:g} s"))
        finally:
            for task in (ready, ended):
                task.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)

    async def _ready(self) -> None:
        await self._url_told.wait()
        async with EngineClient(self.url, timeout_s=5.0) as client:
            while not await client.ready():  # noqa: ASYNC110 - another process: there is no event to wait for
                await asyncio.sleep(READY_POLL_S)

    def _failure(self, what: str) -> str:
        command = " ".join(self._launch.argv)
        return f"the engine {what}: {command}\n{self.last_lines or '(it printed nothing)'}"
