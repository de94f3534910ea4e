"""A run's streams at the broker: made by whoever owns the run, waited for by all others.

Creating streams is a right of its own (shared/permissions.py), so a service other than the controller never tries.
tests/shared/test_transfer_queue.py, tests/shared/test_jetstream.py.
"""

from __future__ import annotations

import asyncio
import time

from shared.config import RunConfig
from shared.errors import ApiError, StreamMissing
from shared.feed import NOT_FOUND
from shared.jetstream import Connection
from shared.streams import SPECS, allocate, stream_config
from shared.subjects import Subjects

API_DEADLINE_S = 30.0
POLL_S = 0.5
NAME_IN_USE = 10058


async def ensure(connection: Connection, subjects: Subjects, config: RunConfig) -> None:
    """Create them, or bring their limits up to `config`."""
    sizes = allocate(config)
    for spec in SPECS.values():
        body = stream_config(subjects, spec, sizes[spec.name], config.broker.replicas)
        try:
            await connection.api(f"STREAM.CREATE.{body['name']}", body, API_DEADLINE_S)
        except ApiError as error:
            if error.err_code != NAME_IN_USE:
                raise
            await connection.api(f"STREAM.UPDATE.{body['name']}", body, API_DEADLINE_S)


async def wait(connection: Connection, subjects: Subjects, deadline_s: float) -> None:
    """Until all are there. Raises StreamMissing, naming those that are not."""
    deadline = time.monotonic() + deadline_s
    missing = [subjects.stream(name) for name in SPECS]
    while missing := [stream for stream in missing if not await _exists(connection, stream)]:
        if time.monotonic() > deadline:
            raise StreamMissing(", ".join(missing))
        await asyncio.sleep(POLL_S)


async def _exists(connection: Connection, stream: str) -> bool:
    """Asked one by one: a cluster lists a stream before its leader answers for it."""
    try:
        await connection.api(f"STREAM.INFO.{stream}", deadline_s=API_DEADLINE_S)
    except ApiError as error:
        if error.err_code in NOT_FOUND:
            return False
        raise
    return True
