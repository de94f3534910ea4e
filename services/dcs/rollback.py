"""The wish to go back to an earlier version of the weights, from whoever states it to the trainer, which fulfils it.

Weights alone cannot go back: the optimiser, the books and the staleness of what is on its way belong to the step. So the wish is
stored under one KV key; the trainer starts again from the checkpoint of that version's step and publishes its weights as a new
version (numbers are never used again), or refuses. It takes the wish back only when that is on record, so no crash loses it.
tests/dcs/test_control.py, tests/e2e/test_rollback.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.kv import KV
from shared.wire import decode, encode, schema

KEY = "rollback"
REFUSED = "rollback_refused"
"""The event that says so."""


@schema("rollback_wish", 1)
@dataclass(frozen=True, slots=True)
class Wish:
    """Back to the weights that `version` holds, those after `step` updates."""

    version: int
    step: int

    @property
    def reason(self) -> str:
        """Why the new version was published."""
        return f"rollback to version {self.version}"


async def ask(kv: KV, wish: Wish) -> None:
    await kv.put(KEY, encode(wish))


async def asked(kv: KV) -> Wish | None:
    entry = await kv.get(KEY)
    return None if entry is None else decode(entry[0], Wish)


async def done(kv: KV) -> None:
    """It is fulfilled, or refused."""
    await kv.delete(KEY)
