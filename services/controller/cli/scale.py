"""`slipstream scale`: more or fewer replicas of a run that goes on."""

from __future__ import annotations

import asyncio
import json as jsonlib
import time
import urllib.error
import urllib.request
import uuid
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import CONFIG, FAILED, AsJson, Nats, RunName, Sets, fail, open_run, print_json, run_async

if TYPE_CHECKING:
    from services.controller.attach import Run

HTTP_S = 10.0
PATIENCE_S = 30.0
POLL_S = 0.5
GOOD = ("ACTIVE", "COMPLETED", "NOOP")
OVER = (*GOOD, "PARTIAL", "FAILED", "CANCELLED")


def scale(
    targets: Annotated[list[str], typer.Argument(metavar="[RUN.yaml] ROLE=N...", help="Such as rollout=4 reward=2.")],
    sets: Sets = None,
    nats: Nats = None,
    run: RunName = None,
    wait: Annotated[bool, typer.Option(help="Wait until it is done.")] = True,
    json: AsJson = False,
) -> None:
    """Set how many replicas of a role a run has, while it goes on.

    Newcomers are started by the run's launcher and take part once they hold verified weights; whoever leaves finishes what it
    holds first. Roles are rollout, reward, teacher and reference.

    `slipstream scale run.yaml rollout=4`

    `slipstream scale rollout=4 reward=2 --nats nats://10.0.0.5:4222 --run sort-letters`

    Exit codes: 0 done, 1 not or only in part, 2 the command is wrong, 3 broker.
    """
    from pathlib import Path

    files = [Path(text) for text in targets if "=" not in text]
    if len(files) > 1:
        raise fail(f"two run files: {files[0]} and {files[1]}", CONFIG)
    wanted = dict(parse(text) for text in targets if "=" in text)

    async def do() -> list[dict[str, Any]]:
        async with open_run(files[0] if files else None, sets, nats, run) as handle:
            return list(await asyncio.gather(*(one(handle, role, count, wait) for role, count in wanted.items())))

    results = run_async(do)
    for result in results:
        print_json(result) if json else typer.echo(line(result))
    if any(result["status"] in OVER and result["status"] not in GOOD for result in results):
        raise typer.Exit(FAILED)


def parse(text: str) -> tuple[str, int]:
    role, _, count = text.partition("=")
    if role not in ("rollout", "reward", "teacher", "reference") or not count.isdigit():
        raise typer.BadParameter(f"{text!r}: write ROLE=N, with a role of rollout, reward, teacher, reference")
    return role, int(count)


async def controller_url(run: Run) -> str:
    """Where the active controller's API is; '' if there is none at the moment."""
    return next(
        (str(beat.detail["url"]) for beat in await run.registry.alive("controller") if beat.detail.get("url")), ""
    )


async def one(run: Run, role: str, count: int, wait: bool) -> dict[str, Any]:
    """Ask, and watch until it is over."""
    there = (await call(run, "GET", f"/{role}/engines"))["num_replicas"]
    path = f"/{role}/{'scale_out' if count >= there else 'scale_in'}"
    body = {"num_replicas": count, "idempotency_key": uuid.uuid4().hex}  # so that it may be asked for again
    result = await call(run, "POST", path, body)
    while wait and result["status"] not in OVER:
        await asyncio.sleep(POLL_S)
        result = await call(run, "GET", f"{path}/{result['request_id']}")
    return result


async def call(run: Run, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The controller's answer; one that is being replaced is waited for, and looked for at its new address."""
    from shared.http_auth import headers

    data = None if body is None else jsonlib.dumps(body).encode()
    deadline, why = time.monotonic() + PATIENCE_S, "no controller is there; is the run going on?"
    while time.monotonic() < deadline:
        if url := await controller_url(run):
            about = {"Content-Type": "application/json", **headers()}
            try:
                return await asyncio.to_thread(_send, urllib.request.Request(url + path, data, about, method=method))
            except urllib.error.HTTPError as error:
                raise fail(f"the controller refused: {_detail(error)}", FAILED) from error
            except (OSError, TimeoutError) as error:
                why = f"the controller at {url} does not answer: {error}"
        await asyncio.sleep(POLL_S)
    raise fail(why, FAILED)


def _send(request: urllib.request.Request) -> dict[str, Any]:
    with urllib.request.urlopen(request, timeout=HTTP_S) as answer:
        found: dict[str, Any] = jsonlib.loads(answer.read())
        return found


def _detail(error: urllib.error.HTTPError) -> str:
    text = error.read().decode(errors="replace")
    try:
        return str(jsonlib.loads(text)["detail"])
    except (ValueError, KeyError, TypeError):
        return text or str(error)


def line(result: dict[str, Any]) -> str:
    """One operation for people."""
    names = result["engine_ids"] if result["kind"] == "scale_out" else result["removed_engines"]
    seconds = result["seconds"].get(result["status"])
    parts = [f"{result['role']}: {result['kind']} {result['status']}"]
    parts += [f"after {seconds:.1f} s"] if seconds else []
    parts += [f"({', '.join(names)})"] if names else []
    trained = result["first_trained_secs"]
    parts += [f"first group trained after {min(trained.values()):.1f} s"] if trained else []
    return " ".join(parts) + (f": {result['message']}" if result["message"] else "")
