"""What people ask of the DCS: keep a snapshot, have a replica fetch its weights anew, go back to an earlier version."""

from __future__ import annotations

from fastapi import FastAPI
from pydantic import BaseModel

from services.dcs.announcing import group_fields
from services.dcs.coordinator import Coordinator
from services.dcs.state import Group
from shared.config import RunConfig


class SenderAnswer(BaseModel):
    name: str
    """Of its process group."""
    host: str
    port: int


class GroupAnswer(BaseModel):
    epoch: int
    backend: str
    senders: list[SenderAnswer]
    world_size: int
    """Of each process group: a sender and all engines."""
    members: dict[str, int]
    """Replica -> the first rank of its engine."""
    timeout_s: float

    @classmethod
    def of(cls, group: Group, config: RunConfig) -> GroupAnswer:
        return cls(**group_fields(group, config), members=group.ranks())


class Pins(BaseModel):
    pins: list[int]
    """Versions whose snapshots are kept."""


class Resync(BaseModel):
    version: int
    """What the replicas are to fetch."""
    replicas: list[str]


class RollbackAnswer(BaseModel):
    version: int
    step: int
    """The trainer goes back to the checkpoint of this step, or refuses: see the event."""


def add_routes(app: FastAPI, coordinator: Coordinator) -> None:
    @app.get("/group")
    async def group() -> GroupAnswer | None:
        """The broadcast group, while it can be used again."""
        found = coordinator.state.group
        return GroupAnswer.of(found, coordinator.config) if found else None

    @app.put("/versions/{version}/pin")
    async def pin(version: int) -> Pins:
        """Keep the snapshot, however many newer ones there are."""
        return Pins(pins=await coordinator.pin(version, True))

    @app.delete("/versions/{version}/pin")
    async def unpin(version: int) -> Pins:
        return Pins(pins=await coordinator.pin(version, False))

    @app.post("/versions/{version}/rollback")
    async def roll_back(version: int) -> RollbackAnswer:
        """Ask the trainer to go on from the weights of this version. They become a new version; numbers are never used again."""
        wish = await coordinator.roll_back(version)
        return RollbackAnswer(version=wish.version, step=wish.step)

    @app.post("/members/{replica}/resync")
    async def resync(replica: str) -> Resync:
        """Have a replica pull, load and verify the newest version, whatever it holds; `*`: all of them."""
        version, replicas = await coordinator.resync(replica)
        return Resync(version=version, replicas=replicas)
