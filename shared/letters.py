"""What the transport itself says of a group, and what it believes when others say it: receipts of dead letters and of workers.

Pure. tests/shared/test_letters.py.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Literal

from shared import wire
from shared.ledger import REPORTS, is_eval
from shared.pull import Delivery
from shared.records import Group, Receipt

log = logging.getLogger("slipstream.transport")


def may_be_reported(data: bytes, seq: int) -> bool:
    """A worker may say that a group is dropped or evaluated, and nothing else of the ledger's matters."""
    with contextlib.suppress(wire.WireError):
        if (receipt := wire.decode(data, Receipt)).kind in REPORTS:
            return True
        log.error("receipt %d: %r may not say %r of %r: ignored", seq, receipt.replica, receipt.kind, receipt.group_id)
    return False


def too_often(delivery: Delivery, most: int) -> str:
    """The reason of a message that goes to the dead letters."""
    return f"delivered {delivery.delivered} times, at most {most} are allowed"


def dropped(group_id: str, payload: bytes, stage: str, reason: str, now: float) -> Receipt:
    """The entry of a dead group. A message that cannot be read is dropped by its id alone. An evaluation has no fate in the
    ledger: its entry is `evaluated` with a reason, so that nobody waits for it."""
    kind: Literal["dropped", "evaluated"] = "evaluated" if is_eval(group_id) else "dropped"
    receipt = Receipt(kind, group_id, reason=f"dead:{stage}", detail={"why": reason}, at=now)
    with contextlib.suppress(wire.WireError):
        record = wire.decode_any(payload)
        if isinstance(record, Group):
            receipt.kind = "evaluated" if record.kind == "eval" else "dropped"
            receipt.group_id, receipt.issue, receipt.seat = record.id, record.issue, record.seat
            receipt.min_step = record.min_step
    return receipt
