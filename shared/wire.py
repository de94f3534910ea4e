"""The wire format: a record is a dataclass, a message is its msgpack envelope.

    {"schema": "group", "version": 1, "body": {field: value, ...}}

Arrays travel as raw little-endian columns, `[dtype, shape, bytes]` in msgpack's extension type 1: 34 times cheaper to
encode than lists. A message is taken whole or refused whole: every field of the record must be there with its declared
type, no other field may be, and an array's bytes must fill its shape exactly. What is refused says why (`WireError`).

A record opts in with `@schema(name, version)`. `tests/shared/test_wire.py` holds the round trip and the refusals.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import msgpack
import numpy as np

ARRAY_EXT = 1
ARRAY_DTYPES = {"<i4", "<i8", "<f4", "<f8", "|u1"}

T = TypeVar("T")
_by_name: dict[str, tuple[type, int]] = {}
_by_type: dict[type, tuple[str, int]] = {}


class WireError(ValueError):
    """A message that is not what it claims to be. The text names the field and what was wrong with it."""


def schema(name: str, version: int) -> Callable[[type[T]], type[T]]:
    """Register a dataclass as the record `name`, `version`. Raise the version whenever a field changes its meaning."""

    def register(cls: type[T]) -> type[T]:
        if name in _by_name:
            raise ValueError(f"schema {name!r} is registered already")
        _by_name[name] = (cls, version)
        _by_type[cls] = (name, version)
        return cls

    return register


def encode(record: Any) -> bytes:
    """The message of a registered record. Raises WireError if a field does not hold what it declares."""
    known = _by_type.get(type(record))
    if known is None:
        raise WireError(f"{type(record).__name__} is no registered record")
    name, version = known
    body = _dump(record)
    return msgpack.packb({"schema": name, "version": version, "body": body}, default=_pack_array, use_bin_type=True)


def decode(payload: bytes | memoryview, expect: type[T]) -> T:
    """The record in `payload`, which must be an `expect`. Raises WireError; nothing is half-read."""
    record = decode_any(payload)
    if not isinstance(record, expect):
        raise WireError(f"expected a {expect.__name__}, got a {type(record).__name__}")
    return record


def decode_any(payload: bytes | memoryview) -> Any:
    """The record in `payload`, of whatever registered schema it names."""
    try:
        envelope = msgpack.unpackb(payload, ext_hook=_unpack_array, raw=False, strict_map_key=True)
    except WireError:
        raise
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"not a msgpack message: {error}") from error
    if not isinstance(envelope, dict) or set(envelope) != {"schema", "version", "body"}:
        raise WireError("not an envelope: expected exactly the keys schema, version, body")
    known = _by_name.get(envelope["schema"]) if isinstance(envelope["schema"], str) else None
    if known is None:
        raise WireError(f"unknown schema {envelope['schema']!r}: known are {', '.join(sorted(_by_name))}")
    cls, version = known
    if envelope["version"] != version:
        raise WireError(f"schema {envelope['schema']!r} version {envelope['version']!r}: this side speaks {version}")
    return _load(cls, envelope["body"], envelope["schema"])


def _dump(record: Any) -> dict[str, Any]:
    body = {}
    for name, hint in _fields(type(record)):  # type: ignore[arg-type]
        value = getattr(record, name)
        _check(value, hint, f"{type(record).__name__}.{name}", dumping=True)
        body[name] = _dump_value(value)
    return body


def _dump_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dump(value)
    if isinstance(value, list):
        return [_dump_value(item) for item in value]
    if isinstance(value, dict):
        return {key: _dump_value(item) for key, item in value.items()}
    return value


def _load(cls: type, body: Any, path: str) -> Any:
    if not isinstance(body, dict):
        raise WireError(f"{path}: expected a map of fields, got {type(body).__name__}")
    fields = _fields(cls)
    names = {name for name, _ in fields}
    if missing := names - set(body):
        raise WireError(f"{path}: missing {', '.join(sorted(missing))}")
    if extra := set(body) - names:
        raise WireError(f"{path}: unknown {', '.join(sorted(map(str, extra)))}")
    values = {}
    for name, hint in fields:
        value = _load_value(body[name], hint, f"{path}.{name}")
        _check(value, hint, f"{path}.{name}", dumping=False)
        values[name] = value
    try:
        return cls(**values)
    except ValueError as error:  # a record's own __post_init__: lengths that do not match, say
        raise WireError(f"{path}: {error}") from error


def _load_value(value: Any, hint: Any, path: str) -> Any:
    hint = _strip_none(hint)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _load(typing.cast(type, hint), value, path)
    if typing.get_origin(hint) is list and isinstance(value, list):
        (item,) = typing.get_args(hint)
        if dataclasses.is_dataclass(item):
            return [_load_value(one, item, f"{path}[{i}]") for i, one in enumerate(value)]
    return value


def _strip_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        rest = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if len(rest) == 1:
            return rest[0]
    return hint


@cache
def _fields(cls: Any) -> tuple[tuple[str, Any], ...]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return tuple((field.name, hints[field.name]) for field in dataclasses.fields(cls))


def _check(value: Any, hint: Any, path: str, dumping: bool) -> None:
    if not _matches(value, hint):
        what = f"{value.dtype.str} array" if isinstance(value, np.ndarray) else type(value).__name__
        raise WireError(f"{path}: {'cannot send' if dumping else 'got'} {what}, expected {_show(hint)}")


def _show(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _matches(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_matches(value, arg) for arg in typing.get_args(hint))
    if hint is None or hint is type(None):
        return value is None
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if origin is typing.Annotated:  # an array column: Annotated[np.ndarray, "<i4"]
        return isinstance(value, np.ndarray) and value.dtype.str == typing.get_args(hint)[1]
    if origin is list:
        (item,) = typing.get_args(hint)
        return isinstance(value, list) and all(_matches(one, item) for one in value)
    if origin is dict:
        key, item = typing.get_args(hint)
        return isinstance(value, dict) and all(_matches(k, key) and _matches(v, item) for k, v in value.items())
    if hint is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _pack_array(value: Any) -> msgpack.ExtType:
    if not isinstance(value, np.ndarray):
        raise WireError(f"cannot send a {type(value).__name__}: use plain values, lists, maps and arrays")
    if value.dtype.str not in ARRAY_DTYPES:
        raise WireError(f"cannot send an array of {value.dtype.str}: one of {', '.join(sorted(ARRAY_DTYPES))}")
    data = np.ascontiguousarray(value).tobytes()
    return msgpack.ExtType(ARRAY_EXT, msgpack.packb([value.dtype.str, list(value.shape), data], use_bin_type=True))


def _unpack_array(code: int, data: bytes) -> np.ndarray:
    if code != ARRAY_EXT:
        raise WireError(f"unknown msgpack extension {code}")
    try:
        dtype, shape, raw = msgpack.unpackb(data, raw=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"malformed array: {error}") from error
    if dtype not in ARRAY_DTYPES:
        raise WireError(f"array of {dtype!r}: one of {', '.join(sorted(ARRAY_DTYPES))}")
    if not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise WireError(f"array with the shape {shape!r}")
    count = int(np.prod(shape, dtype=np.int64))
    if not isinstance(raw, bytes) or len(raw) != count * np.dtype(dtype).itemsize:
        raise WireError(f"array of {shape} {dtype} with {len(raw)} bytes")
    return np.frombuffer(raw, dtype=dtype).reshape(shape)
