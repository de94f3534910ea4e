"""What the leader tells the other ranks, and what they answer, as bytes: msgpack with arrays as they lie in memory.

No pickle: ranks on other hosts get data, never code. Spread trip in tests/trainer/test_messages.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import numpy as np

from services.trainer.batches import PackedBatch
from services.trainer.objectives import Objective
from services.trainer.spread import Spread

_ARRAY, _SPREAD, _OBJECTIVE = 1, 2, 3
_FIELDS = tuple(field.name for field in dataclasses.fields(PackedBatch))


def encode(message: Any) -> bytes:
    """Plain values, arrays, a Spread, an Objective."""
    return msgpack.packb(message, default=_default, use_bin_type=True)


def decode(data: bytes | memoryview) -> Any:
    """What `encode` was given; sequences come back as lists."""
    return msgpack.unpackb(data, ext_hook=_hook, raw=False, strict_map_key=False, max_bin_len=1 << 31)


def _default(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        plain = [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
        return msgpack.ExtType(_ARRAY, msgpack.packb(plain, use_bin_type=True))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Spread):
        plain = [[[getattr(batch, name) for name in _FIELDS] for batch in batches] for batches in value.replicas]
        return msgpack.ExtType(_SPREAD, encode(plain))
    if isinstance(value, Objective):
        return msgpack.ExtType(_OBJECTIVE, encode(value.plain()))
    raise TypeError(f"{type(value).__name__} cannot be sent to other ranks")


def _hook(code: int, data: bytes) -> Any:
    if code == _ARRAY:
        kind, shape, content = msgpack.unpackb(data, raw=False)
        return np.frombuffer(content, dtype=np.dtype(kind)).reshape(shape)
    if code == _SPREAD:
        return Spread(tuple(tuple(_batch(plain) for plain in batches) for batches in decode(data)))
    if code == _OBJECTIVE:
        return Objective.of(decode(data))
    raise ValueError(f"unknown kind {code} in a message between ranks")


def _batch(plain: list[Any]) -> PackedBatch:
    fields = dict(zip(_FIELDS, plain, strict=True))
    return PackedBatch(**{**fields, "group_ids": tuple(fields["group_ids"])})
