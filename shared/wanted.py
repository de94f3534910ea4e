"""Which replicas are to run, and which are asked to leave: one record in the run's config bucket.

Written by `slipstream up` when a run starts and by the controller's scale operations afterwards, always by compare-and-set.
Launchers start what is in `replicas` and is not there, and start nothing that is not; a replica that finds itself in `leaving`
drains and leaves by itself, wherever it was started; launchers kill what is in `killed`. The merge is pure:
services/controller/scaling/operation.py. tests/controller/test_scaling.py.

Each replica looks every two seconds whether it is to leave, and the record grows with every replica. So `leaving` is told under
a key of its own too, which is short: `change` keeps it as the record has it, also after a writer that died between the two.
tests/controller/test_wanted.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shared import wire
from shared.errors import Conflict, KeyExists

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from shared.kv import KV

KEY = "replicas"
LEAVING_KEY = "leaving"
SCALABLE = ("rollout", "reward", "teacher", "reference")
"""Services of which there may be any number."""
TRIES = 20


@wire.schema("wanted", 1)
@dataclass(slots=True)
class Wanted:
    """Plain values only."""

    replicas: dict[str, dict[str, str]] = field(default_factory=dict)
    """By name: `service`; `by`, the scale operation that asked for it ('' for those of the run file); `engine_url` of an engine
    that runs elsewhere ('' for one of its own)."""
    leaving: list[str] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    """What the run file said when this was first written."""

    def of(self, service: str) -> list[str]:
        """Its replicas that are to run."""
        return [name for name, one in self.replicas.items() if one["service"] == service]


@wire.schema("leaving", 1)
@dataclass(slots=True)
class Leaving:
    """What replicas look at."""

    revision: int
    """Of the record that it is taken from."""
    names: list[str]


@wire.schema("launcher", 1)
@dataclass(slots=True)
class Launcher:
    """A process that follows `Wanted`, as it tells of itself in the registry."""

    name: str
    kind: str
    """local | ray"""
    gone: dict[str, str] = field(default_factory=dict)
    """Replicas that it will not start again, and why."""


def load(entry: tuple[bytes, int] | None) -> Wanted:
    """What `kv.get(KEY)` gave."""
    return wire.decode(entry[0], Wanted) if entry is not None else Wanted()


async def leaves(kv: KV, replica: str) -> bool:
    """Whether this replica is asked to leave."""
    entry = await kv.get(LEAVING_KEY)
    return entry is not None and replica in wire.decode(entry[0], Leaving).names


async def change(
    kv: KV, edit: Callable[[Wanted], Wanted], check: Callable[[], Awaitable[None]] | None = None
) -> Wanted:
    """Write `edit(record)`, whoever else writes meanwhile. `edit` must be pure: it is called again after a conflict. `check`
    is called between reading and writing, and raises if the writer may not go on."""
    for _ in range(TRIES):
        entry = await kv.get(KEY)
        if check is not None:
            await check()
        before = load(entry)
        after = edit(before)
        try:
            if entry is None:
                revision = await kv.create(KEY, wire.encode(after))
            else:
                revision = entry[1] if after == before else await kv.update(KEY, wire.encode(after), entry[1])
            await _tell(kv, Leaving(revision, after.leaving))
            return after
        except (KeyExists, Conflict):
            continue
    raise RuntimeError(f"the record {KEY!r} was changed by others {TRIES} times in a row")


async def _tell(kv: KV, leaving: Leaving) -> None:
    """Unless a newer one is told. Raises Conflict or KeyExists if another writes at the same time."""
    entry = await kv.get(LEAVING_KEY)
    if entry is None:
        await kv.create(LEAVING_KEY, wire.encode(leaving))
        return
    told = wire.decode(entry[0], Leaving)
    if told.revision < leaving.revision:
        await kv.update(LEAVING_KEY, wire.encode(leaving), entry[1])
