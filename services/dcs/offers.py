"""Weights that are announced before there is a snapshot, because the engines take them from the trainer's memory.

What `POST /versions/{v}/announce` holds then in place of a finished snapshot (`placement: colocate`, docs/colocate.md). The
manifest is checked like one that lies on disk: its tensors have the version's digest. tests/dcs/test_colocate.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from services.dcs.handles import Place
from services.dcs.snapshots import Manifest, SnapshotError
from services.dcs.state import Version


@dataclass(frozen=True, slots=True)
class Offer:
    """Weights in memory that the engines on the publisher's device take, before there is a snapshot."""

    manifest: dict[str, Any]
    host: str
    segments: list[Place]

    def of(self, known: Version) -> Manifest:
        """The manifest, checked. Raises SnapshotError."""
        manifest = Manifest.load(json.dumps(self.manifest))
        if (manifest.version, manifest.digest, len(manifest.buckets)) != (
            known.version,
            known.digest,
            len(self.segments),
        ):
            raise SnapshotError(f"what is offered is not version {known.version}")
        return manifest
