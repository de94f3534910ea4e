"""Payloads above the broker's message limit: cut into parts, kept in a stream under their own hash.

Guarantees: a blob is stored once per content; it is read back whole, with its sha256 checked, or the read raises `BlobMissing`
or `BlobCorrupt`. Two streams, because they must forget differently: what a work queue's message refers to stays until that
message is acked (a full stream makes publishers wait), what a log's message refers to goes when room is needed, like the log.

A publisher that dies between the blob and its message leaves a blob behind that nobody refers to; ORPHAN_DAYS ends it.
tests/shared/test_blobs.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid

from shared.channel import status_of
from shared.errors import BlobCorrupt, BlobMissing
from shared.jetstream import Connection
from shared.publisher import Publisher
from shared.records import BlobRef
from shared.streams import SPECS
from shared.subjects import Subjects

PART_BYTES = 512 << 10
PARTS_AT_ONCE = 8
ORPHAN_DAYS = 30
HASH_IN_THREAD_BYTES = 256 << 10
"""Above this hashing is not left to the event loop."""
PART_DEADLINE_S = 30.0
READ_TRIES = 3
READ_PAUSE_S = 0.2


def parts_of(size: int) -> int:
    """How many parts a payload of `size` bytes has. An empty one has one."""
    return max(1, -(-size // PART_BYTES))


def cut(payload: bytes) -> list[bytes]:
    return [payload[i * PART_BYTES : (i + 1) * PART_BYTES] for i in range(parts_of(len(payload)))]


async def sha256(payload: bytes) -> str:
    if len(payload) <= HASH_IN_THREAD_BYTES:
        return hashlib.sha256(payload).hexdigest()
    return (await asyncio.to_thread(hashlib.sha256, payload)).hexdigest()


class Blobs:
    """The blob streams of one run. `stream` says whose message refers to the blob: one of subjects.STREAMS."""

    def __init__(self, connection: Connection, publisher: Publisher, subjects: Subjects) -> None:
        self._connection, self._publisher, self._subjects = connection, publisher, subjects
        self._parallel = asyncio.Semaphore(PARTS_AT_ONCE)

    async def put(self, stream: str, payload: bytes, deadline_s: float) -> tuple[BlobRef, bool]:
        """Store a payload. Returns its reference, and whether it was stored now (False: it was there)."""
        ref = BlobRef(await sha256(payload), len(payload), parts_of(len(payload)))
        if await self._stored_parts(stream, ref.sha256) == ref.parts:
            return ref, False
        headers = {} if self._is_log(stream) else {"Nats-TTL": f"{ORPHAN_DAYS * 24}h"}
        entries = []
        for i, part in enumerate(cut(payload)):
            # The id must be new: within the duplicate window the broker would take a blob that was removed for a repetition.
            part_headers = {"Nats-Msg-Id": uuid.uuid4().hex, **headers}
            subject = self._subject(stream, ref.sha256, i)
            lane = self._stream(stream)
            entries.append(await self._publisher.submit(subject, part, part_headers, deadline_s, lane_of=lane))
        await self._publisher.wait_all(entries)
        return ref, True

    async def get(self, stream: str, ref: BlobRef) -> bytes:
        """The payload behind a reference."""
        parts = await asyncio.gather(*(self._part(stream, ref, i) for i in range(ref.parts)))
        payload = b"".join(parts)
        found = await sha256(payload)
        if found != ref.sha256:
            raise BlobCorrupt(ref.sha256, found)
        return payload

    async def delete(self, stream: str, ref: BlobRef) -> None:
        """Remove a blob that no message refers to any more."""
        body = {"filter": self._subject(stream, ref.sha256, "*")}
        await self._connection.api(f"STREAM.PURGE.{self._stream(stream)}", body)

    async def _part(self, stream: str, ref: BlobRef, part: int) -> bytes:
        subject = f"$JS.API.DIRECT.GET.{self._stream(stream)}.{self._subject(stream, ref.sha256, part)}"
        async with self._parallel:
            for attempt in range(READ_TRIES):
                if attempt:
                    await asyncio.sleep(READ_PAUSE_S)  # a replica that answers may lag behind the one that stored it
                frame = await self._connection.bulk.request(subject, b"", PART_DEADLINE_S)
                if status_of(frame) is None:
                    return frame.data
        raise BlobMissing(ref.sha256, part, ref.parts)

    async def _stored_parts(self, stream: str, sha: str) -> int:
        body = {"subjects_filter": self._subject(stream, sha, "*")}
        info = await self._connection.api(f"STREAM.INFO.{self._stream(stream)}", body)
        return len(info["state"].get("subjects") or {})

    def _is_log(self, stream: str) -> bool:
        return SPECS[stream].retention == "limits"

    def _stream(self, stream: str) -> str:
        return self._subjects.stream("archive" if self._is_log(stream) else "blobs")

    def _subject(self, stream: str, sha: str, part: int | str) -> str:
        return self._subjects.archived(sha, part) if self._is_log(stream) else self._subjects.blob(sha, part)
