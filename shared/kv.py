"""Small values under names, with revisions and a time to live: a JetStream key-value bucket.

Guarantees: `create` and `update` are compare-and-set, also over a killed broker: a write that is repeated because its answer was
lost is known by the id that the stored value carries (the broker looks at the revision before it looks at ids, so it refuses the
repetition); an expired or deleted key can be created again at once. Reads go to the stream's leader, so a value just written is
seen. The layout is NATS's own (`KV_<bucket>`, `$KV.<bucket>.<key>`), so `nats kv` reads it. tests/shared/test_kv.py.
"""

from __future__ import annotations

import base64
import math
import re
import uuid
from typing import Any

from shared import batch
from shared.errors import ApiError, BucketMissing, Conflict, KeyExists, PublishRefused
from shared.feed import NOT_FOUND
from shared.jetstream import Connection
from shared.publisher import Publisher

KEY = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*")
NAME_IN_USE = 10058
WRONG_LAST_SEQUENCE = {10071, 10164}
NO_MESSAGE = 10037
NS = 1_000_000_000
MAX_BYTES = 64 << 20
WRITE_DEADLINE_S = 60.0
READ_DEADLINE_S = 10.0


class KV:
    """One bucket."""

    def __init__(self, connection: Connection, bucket: str) -> None:
        self._connection, self.bucket = connection, bucket
        self._stream = f"KV_{bucket}"
        self._publisher = Publisher(connection.control)

    @classmethod
    async def open(
        cls, connection: Connection, bucket: str, ttl: bool = False, *, create: bool = True, replicas: int = 1
    ) -> KV:
        """The bucket, created if need be. With `ttl` its keys may have a time to live. `create=False` raises BucketMissing
        where there is none: a newcomer must not invent a run by misspelling it."""
        kv = cls(connection, bucket)
        try:
            if create:
                await connection.api(f"STREAM.CREATE.{kv._stream}", kv._config(ttl, replicas))
            else:
                await connection.api(f"STREAM.INFO.{kv._stream}")
        except ApiError as error:
            if error.err_code in NOT_FOUND:
                raise BucketMissing(bucket) from error
            if error.err_code != NAME_IN_USE:
                raise
        return kv

    def _config(self, ttl: bool, replicas: int) -> dict[str, Any]:
        return {
            "name": self._stream,
            "subjects": [f"$KV.{self.bucket}.>"],
            "storage": "file",
            "discard": "new",
            "retention": "limits",
            "max_msgs_per_subject": 1,
            "max_bytes": MAX_BYTES,
            "num_replicas": replicas,
            "allow_rollup_hdrs": True,
            "allow_direct": True,
            "allow_msg_ttl": ttl,
            "duplicate_window": 120 * NS,
        }

    def _subject(self, key: str) -> str:
        if not KEY.fullmatch(key):
            raise ValueError(f"key {key!r}: use letters, digits, '-', '/', '_', '=' and dots between them")
        return f"$KV.{self.bucket}.{key}"

    async def get(self, key: str) -> tuple[bytes, int] | None:
        """(value, revision), or None."""
        found = await self._stored(key)
        if found is None or b"KV-Operation:" in found[0]:  # nothing, or a delete marker of another client
            return None
        return found[1], found[2]

    async def _stored(self, key: str) -> tuple[bytes, bytes, int] | None:
        """(headers, value, revision) of what lies there."""
        body = {"last_by_subj": self._subject(key)}
        try:
            reply = await self._connection.api(f"STREAM.MSG.GET.{self._stream}", body)
        except ApiError as error:
            if error.err_code == NO_MESSAGE:
                return None
            if error.err_code in NOT_FOUND:
                raise BucketMissing(self.bucket) from error
            raise
        message = reply["message"]
        return (
            base64.b64decode(message.get("hdrs", "")),
            base64.b64decode(message.get("data", "")),
            int(message["seq"]),
        )

    async def values(self, prefix: str) -> dict[str, bytes]:
        """All values below `prefix.`, by key, in few requests however many there are. For looks (see shared/batch.py)."""
        names = [self._subject(key) for key in await self.keys() if key.startswith(f"{prefix}.")]
        found = {}
        for frame in await batch.newest(self._connection, self._stream, names, READ_DEADLINE_S):
            headers = frame.headers or {}
            if "KV-Operation" not in headers:
                found[headers["Nats-Subject"].removeprefix(f"$KV.{self.bucket}.")] = frame.data
        return found

    async def put(self, key: str, value: bytes, ttl_s: float | None = None) -> int:
        """Write, whatever is there. Returns the revision."""
        return await self._write(key, value, ttl_s, {})

    async def create(self, key: str, value: bytes, ttl_s: float | None = None) -> int:
        """Write a key that must not exist. Raises KeyExists."""
        try:
            return await self._write(key, value, ttl_s, {"Nats-Expected-Last-Subject-Sequence": "0"})
        except PublishRefused as error:
            if error.err_code in WRONG_LAST_SEQUENCE:
                raise KeyExists(self.bucket, key) from error
            raise

    async def update(self, key: str, value: bytes, revision: int, ttl_s: float | None = None) -> int:
        """Write a key that must still be at `revision`. Raises Conflict."""
        try:
            return await self._write(key, value, ttl_s, {"Nats-Expected-Last-Subject-Sequence": str(revision)})
        except PublishRefused as error:
            if error.err_code in WRONG_LAST_SEQUENCE:
                raise Conflict(self.bucket, key, revision) from error
            raise

    async def delete(self, key: str) -> None:
        """Remove the key; no marker stays, so that it can be created again at once."""
        await self._connection.api(f"STREAM.PURGE.{self._stream}", {"filter": self._subject(key)})

    async def keys(self) -> list[str]:
        """All keys that have a value, sorted."""
        prefix = f"$KV.{self.bucket}."
        try:
            info = await self._connection.api(f"STREAM.INFO.{self._stream}", {"subjects_filter": f"{prefix}>"})
        except ApiError as error:
            if error.err_code in NOT_FOUND:
                raise BucketMissing(self.bucket) from error
            raise
        return sorted(subject.removeprefix(prefix) for subject in info["state"].get("subjects") or {})

    async def _write(self, key: str, value: bytes, ttl_s: float | None, headers: dict[str, str]) -> int:
        name = uuid.uuid4().hex
        headers = {"Nats-Msg-Id": name, **headers}
        if ttl_s is not None:
            headers["Nats-TTL"] = f"{max(1, math.ceil(ttl_s))}s"  # the broker knows whole seconds only
        try:
            return await self._publisher.publish(self._subject(key), value, headers, WRITE_DEADLINE_S)
        except PublishRefused as error:
            if error.err_code not in WRONG_LAST_SEQUENCE:
                raise
            found = await self._stored(key)
            if found is None or name.encode() not in found[0]:
                raise
            return found[2]  # an earlier try of this very write, whose answer was lost

    def close(self) -> None:
        self._publisher.close()
