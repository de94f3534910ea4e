"""The files of snapshots and deltas over HTTP: the routes of the DCS that move bytes. Downloads take Range.

A file that is in the object store (mirror.py) is answered with a redirect there; `?direct=true` asks for the bytes from here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.responses import FileResponse, RedirectResponse, Response
from pydantic import BaseModel

from services.dcs import deltas, snapshots
from services.dcs.coordinator import Coordinator

Wait = Annotated[float, Query(ge=0, le=20)]


class Download(FileResponse):
    """In larger pieces than the 64 KB that Starlette reads at a time, each in a thread."""

    chunk_size = 1 << 20


class FileAnswer(BaseModel):
    name: str
    size: int
    sha256: str


class DeltaAnswer(BaseModel):
    base: int
    version: int
    base_digest: str
    digest: str
    files: list[FileAnswer]
    """Those that differ. The exclusive-or of both, in blocks: services/dcs/deltas.py."""


def add_routes(app: FastAPI, coordinator: Coordinator) -> None:
    root = coordinator.snapshots

    @app.get("/versions/{version}/files")
    async def files(version: int) -> FileResponse:
        """The manifest of its snapshot."""
        return _file(snapshots.folder(root, version), version, snapshots.MANIFEST)

    async def found(folder: Path, version: int, name: str, direct: bool) -> Response:
        mirror = None if direct else coordinator.mirror
        link = await mirror.link(f"{folder.relative_to(root)}/{name}") if mirror else None
        return _file(folder, version, name) if link is None else RedirectResponse(link)

    @app.get("/versions/{version}/files/{name}", response_class=FileResponse)
    async def download(version: int, name: str, direct: bool = False) -> Response:
        """A file of its snapshot; takes Range."""
        return await found(snapshots.folder(root, version), version, name, direct)

    @app.put("/versions/{version}/files/{name}", status_code=204)
    async def upload(version: int, name: str, request: Request) -> None:
        """A file of a snapshot whose publisher shares no disk with the DCS. The manifest comes last and completes it."""
        await coordinator.upload(version, name, request.stream())

    @app.get("/versions/{version}/deltas")
    async def leading_to(version: int, wait_s: Wait = 0.0) -> list[DeltaAnswer]:
        """The deltas that may lead to it, in chains; with `wait_s`, once those that are being made are there."""
        known = await coordinator.deltas.leading_to(version, wait_s)
        return [DeltaAnswer.model_validate(delta, from_attributes=True) for delta in known]

    @app.get("/versions/{version}/deltas/{base}/{name}", response_class=FileResponse)
    async def download_delta(version: int, base: int, name: str, direct: bool = False) -> Response:
        """A file of the delta from version `base`; takes Range."""
        return await found(deltas.folder(root, base, version), version, name, direct)


def _file(folder: Path, version: int, name: str) -> FileResponse:
    path = folder / name
    if not snapshots.FILE_NAME.fullmatch(name) or not path.is_file():
        raise HTTPException(404, f"version {version} has no file {name!r} here; only the newest are kept")
    return Download(path)
