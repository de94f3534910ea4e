"""What the world is told of a version, and a member of its group. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.dcs.offers import Offer
from services.dcs.snapshots import Manifest
from services.dcs.state import Group, Version
from shared import clock
from shared.config import RunConfig
from shared.records import Announcement


def announcement(
    known: Version,
    manifest: Manifest,
    config: RunConfig,
    snapshot: str,
    *,
    new_group: bool,
    resync: Sequence[str] = (),
    offer: Offer | None = None,
) -> Announcement:
    """Of a version that was announced. `snapshot`: the URL of its files. `resync`: told again, for these replicas.

    Who has which rank is told once, with the first version of a `new_group`: it goes to every member, and is as long as they are
    many.
    """
    group = None
    if known.group and not resync:
        group = group_fields(known.group, config) | {"sent_by": manifest.sent_by or [0] * len(manifest.buckets)}
        if new_group:
            ranks = known.group.ranks()
            group["ranks"] = {member.incarnation: ranks[member.replica] for member in known.group.members}
    return Announcement(
        version=known.version,
        step=known.step,
        names=[spec.name for spec in manifest.tensors],
        dtypes=[spec.dtype for spec in manifest.tensors],
        shapes=[list(spec.shape) for spec in manifest.tensors],
        checksums=[spec.sha256 for spec in manifest.tensors],
        digest=known.digest,
        group=group,
        buckets=manifest.buckets,
        snapshot=snapshot,
        reason=known.reason,
        at=clock.now() if resync else known.announced_at,
        resync=list(resync),
        shared=None if offer is None else {"host": offer.host, "segments": offer.segments},
    )


def group_fields(group: Group, config: RunConfig) -> dict[str, Any]:
    """What a member has to know of its group."""
    return {
        "epoch": group.epoch,
        "backend": config.dcs.backend,
        "senders": [
            {"name": f"{config.run}-{group.epoch}-{number}-{one.port}", "host": one.host, "port": one.port}
            for number, one in enumerate(group.senders)
        ],
        "world_size": group.world_size,
        "timeout_s": config.dcs.timeout_s,
    }
