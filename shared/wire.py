"""The wire format: a record is a dataclass; a message is its msgpack envelope, and behind it the raw columns of its arrays.

    b"SLS1" | length of the envelope, 4 bytes little-endian | envelope | column | column | ...
    envelope = {"schema": "group", "version": 1, "body": {field: value, ...}}

In the envelope an array is msgpack's extension type 1 and holds `[dtype, shape]`; its little-endian bytes are the next column, a
column of zeros and ones as bits. Columns begin at multiples of 8 bytes. So an array is copied once on its way out and not at
all on its way in, where it is a read-only view of the message. A message is taken whole or refused whole: every field of the
record must be there with its declared type, no other field may be, and the columns must fill the message exactly. What is refused
says why (`WireError`).

A record opts in with `@schema(name, version)`. `tests/shared/test_wire.py` holds the round trip and the refusals.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgpack
import numpy as np

MAGIC = b"SLS1"
PREFIX = len(MAGIC) + 4
ALIGN = 8
ARRAY_EXT = 1
BITS = "|b1"
"""A column of |u1 that holds nothing but 0 and 1, eight of them a byte."""
ARRAY_DTYPES = {name: np.dtype(name) for name in ("<i4", "<i8", "<f4", "<f8", "|u1")}

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
    columns = _ColumnsOut()
    envelope = {"schema": name, "version": version, "body": _dump(record)}
    head = msgpack.packb(envelope, default=columns.pack, use_bin_type=True)
    parts = [MAGIC, len(head).to_bytes(4, "little"), head]
    if columns.parts:
        parts += [_gap(PREFIX + len(head)), *columns.parts]
    return b"".join(parts)


UNFIT = b""
"""Stands for a message that must not be believed: it decodes as no record."""


def decode(payload: bytes | memoryview, expect: type[T]) -> T:
    """The record in `payload`, which must be an `expect`. Raises WireError; nothing is half-read."""
    record = decode_any(payload)
    if not isinstance(record, expect):
        raise WireError(f"expected a {expect.__name__}, got a {type(record).__name__}")
    return record


def decode_any(payload: bytes | memoryview) -> Any:
    """The record in `payload`, of whatever registered schema it names."""
    end = PREFIX + int.from_bytes(payload[len(MAGIC) : PREFIX], "little")
    if payload[: len(MAGIC)] != MAGIC or len(payload) < end:
        raise WireError(
            f"not a message of this system, or a cut one: {len(payload)} bytes, starting with {bytes(payload[:12])!r}"
        )
    columns = _ColumnsIn(memoryview(payload), end)
    try:
        envelope = msgpack.unpackb(columns.view[PREFIX:end], ext_hook=columns.unpack, raw=False, strict_map_key=True)
    except WireError:
        raise
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"the envelope is not msgpack: {error}") from error
    if columns.at != len(payload):
        raise WireError(f"{len(payload)} bytes, of which envelope and columns fill {columns.at}")
    if not isinstance(envelope, dict) or set(envelope) != {"schema", "version", "body"}:
        raise WireError("not an envelope: expected exactly the keys schema, version, body")
    known = _by_name.get(envelope["schema"]) if isinstance(envelope["schema"], str) else None
    if known is None:
        raise WireError(f"unknown schema {envelope['schema']!r}: known are {', '.join(sorted(_by_name))}")
    cls, version = known
    if envelope["version"] != version:
        raise WireError(f"schema {envelope['schema']!r} version {envelope['version']!r}: this side speaks {version}")
    return _load(cls, envelope["body"], envelope["schema"])


class Field(NamedTuple):
    """What is known about a record's field. Worked out once a class: a group has forty fields, and there are many groups."""

    name: str
    hint: Any
    matches: Callable[[Any], bool]
    record: type | None
    """The record that it holds, or holds a list of."""


def _dump(record: Any) -> dict[str, Any]:
    body = {}
    for field in _fields(type(record)):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        if not field.matches(value):
            raise _mismatch(value, field.hint, f"{type(record).__name__}.{field.name}", "cannot send")
        body[field.name] = value
    return body


def _load(cls: type, body: Any, path: str) -> Any:
    if not isinstance(body, dict):
        raise WireError(f"{path}: expected a map of fields, got {type(body).__name__}")
    names = _names(cls)
    if body.keys() != names:
        if missing := names - set(body):
            raise WireError(f"{path}: missing {', '.join(sorted(missing))}")
        raise WireError(f"{path}: unknown {', '.join(sorted(map(str, set(body) - names)))}")
    values = {}
    for field in _fields(cls):
        value = body[field.name]
        if field.record is not None:
            value = _load_records(value, field.record, f"{path}.{field.name}")
        if not field.matches(value):
            raise _mismatch(value, field.hint, f"{path}.{field.name}", "got")
        values[field.name] = value
    try:
        return cls(**values)
    except ValueError as error:  # a record's own __post_init__: lengths that do not match, say
        raise WireError(f"{path}: {error}") from error


def _load_records(value: Any, record: type, path: str) -> Any:
    if isinstance(value, dict):
        return _load(record, value, path)
    if isinstance(value, list):
        return [_load(record, one, f"{path}[{i}]") for i, one in enumerate(value)]
    return value


@cache
def _fields(cls: type) -> tuple[Field, ...]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return tuple(
        Field(field.name, hints[field.name], _matcher(hints[field.name]), _record_in(hints[field.name]))
        for field in dataclasses.fields(cls)
    )


@cache
def _names(cls: type) -> frozenset[str]:
    return frozenset(field.name for field in _fields(cls))


def _record_in(hint: Any) -> type | None:
    if typing.get_origin(hint) in (types.UnionType, typing.Union, list):
        found = [record for arg in typing.get_args(hint) if (record := _record_in(arg)) is not None]
        return found[0] if len(found) == 1 else None
    return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None


def _mismatch(value: Any, hint: Any, path: str, what: str) -> WireError:
    found = f"{value.dtype.str} array" if isinstance(value, np.ndarray) else type(value).__name__
    return WireError(f"{path}: {what} {found}, expected {hint.__name__ if isinstance(hint, type) else hint}")


def _matcher(hint: Any) -> Callable[[Any], bool]:
    """The check of a declared type, as a function of the value."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: True
    if hint is None or hint is type(None):
        return lambda value: value is None
    if hint is float:
        return lambda value: isinstance(value, float | int) and not isinstance(value, bool)
    if hint is int:
        return lambda value: isinstance(value, int) and not isinstance(value, bool)
    if origin in (types.UnionType, typing.Union):
        choices = [_matcher(arg) for arg in args]
        return lambda value: any(matches(value) for matches in choices)
    if origin is typing.Literal:
        return lambda value: value in args
    if origin is typing.Annotated:  # an array column: Annotated[np.ndarray, "<i4"]
        return lambda value: isinstance(value, np.ndarray) and value.dtype.str == args[1]
    if origin is list:
        item = _matcher(args[0])
        return lambda value: isinstance(value, list) and all(map(item, value))
    if origin is dict:
        key, item = _matcher(args[0]), _matcher(args[1])
        return lambda value: isinstance(value, dict) and all(map(key, value)) and all(map(item, value.values()))
    return lambda value: isinstance(value, hint)


def _gap(at: int) -> bytes:
    """What lies between this position and the next column."""
    return bytes(-at % ALIGN)


class _ColumnsOut:
    """The arrays of a message that is written, in the order in which its envelope names them."""

    def __init__(self) -> None:
        self.parts: list[bytes | np.ndarray] = []
        self._gap = b""

    def pack(self, value: Any) -> Any:
        """What msgpack does not know by itself: records inside records, and arrays."""
        if isinstance(value, np.ndarray):
            return msgpack.ExtType(ARRAY_EXT, msgpack.packb((self._add(value), value.shape)))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _dump(value)
        raise WireError(f"cannot send a {type(value).__name__}: use plain values, lists, maps and arrays")

    def _add(self, array: np.ndarray) -> str:
        dtype = array.dtype.str
        if dtype not in ARRAY_DTYPES:
            raise WireError(f"cannot send an array of {dtype}: one of {', '.join(sorted(ARRAY_DTYPES))}")
        if (
            dtype == "|u1" and array.size and array.max() <= 1
        ):  # masks are a tenth of a group's bytes, and all are 0 or 1
            dtype, array = BITS, np.packbits(array)
        if array.size:
            self.parts += [self._gap, np.ascontiguousarray(array)]
            self._gap = _gap(array.nbytes)
        return dtype


class _ColumnsIn:
    """The arrays of a message that is read. `at` is where what has been read ends."""

    def __init__(self, view: memoryview, at: int) -> None:
        self.view, self.at = view, at

    def unpack(self, code: int, data: bytes) -> np.ndarray:
        if code != ARRAY_EXT:
            raise WireError(f"unknown msgpack extension {code}")
        try:
            dtype, shape = msgpack.unpackb(data, raw=False)
        except (TypeError, ValueError, msgpack.UnpackException) as error:
            raise WireError(f"malformed array: {error}") from error
        if dtype != BITS and (not isinstance(dtype, str) or dtype not in ARRAY_DTYPES):
            raise WireError(f"array of {dtype!r}: one of {', '.join(sorted(ARRAY_DTYPES))}")
        if not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise WireError(f"array with the shape {shape!r}")
        count = math.prod(shape)
        size = (count + 7) // 8 if dtype == BITS else count * ARRAY_DTYPES[dtype].itemsize
        raw = self._take(size)
        if len(raw) != size:
            raise WireError(f"array of {shape} {dtype} with {len(raw)} bytes")
        flat = np.frombuffer(raw, ARRAY_DTYPES["|u1" if dtype == BITS else dtype])
        array = np.unpackbits(flat, count=count) if dtype == BITS else flat
        return array if len(shape) == 1 else array.reshape(shape)

    def _take(self, size: int) -> memoryview:
        if not size:
            return memoryview(b"")
        start = self.at + -self.at % ALIGN
        self.at = start + size
        return self.view[start : self.at]
