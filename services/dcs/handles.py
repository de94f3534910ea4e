"""How a piece of a GPU's memory is told to another process of this host, so that it can map it (CUDA IPC). Pure: no torch.

A handle travels as plain fields, never as a pickle, and names its device by UUID, because an index means another GPU to a process
with another CUDA_VISIBLE_DEVICES. Guarantee: whatever `Handle.fields` would not have made, `Handle.read` refuses before anything
is mapped. Made and mapped by device_memory.py. tests/dcs/test_handles.py.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from services.dcs.segments import SegmentError

Fields = dict[str, str | int]
Place = str | Fields
"""Where a bucket lies that engines are to take: the name of a segment (segments.py), or the fields of a handle."""

UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
COUNTER = re.compile(r"/[-_.A-Za-z0-9]{1,200}")
LARGEST = 1 << 62
LONGEST_MEMORY = 4096


@dataclass(frozen=True, slots=True)
class Handle:
    """`size` bytes that begin at `offset` of an allocation. Raises SegmentError for what cannot be one."""

    device: str
    """The GPU's UUID, in lower case and without `GPU-`."""
    memory: bytes
    """What the driver calls the allocation; torch chooses its form and length."""
    offset: int
    size: int
    counter: str
    """Torch's shared memory with the counters of those who have mapped something, and which of them is this one's."""
    counter_offset: int

    def __post_init__(self) -> None:
        _need(UUID.fullmatch(self.device), "device", self.device, "no UUID of a GPU")
        _need(
            0 < len(self.memory) <= LONGEST_MEMORY, "memory", f"{len(self.memory)} bytes", "no handle of an allocation"
        )
        _need(0 < self.size < LARGEST, "size", self.size, "no size")
        _need(COUNTER.fullmatch(self.counter), "counter", self.counter, "no name of shared memory")
        for name in ("offset", "counter_offset"):
            _need(0 <= getattr(self, name) < LARGEST, name, getattr(self, name), "no offset")

    def fields(self) -> Fields:
        """As it travels."""
        return {
            "device": self.device,
            "memory": base64.b64encode(self.memory).decode(),
            "offset": self.offset,
            "size": self.size,
            "counter": self.counter,
            "counter_offset": self.counter_offset,
        }

    @classmethod
    def read(cls, told: Any) -> Self:
        """From its fields. Raises SegmentError, which names the one that is wrong."""
        kinds = {field.name: int if field.type == "int" else str for field in fields(cls)}
        if not isinstance(told, dict) or set(told) != set(kinds):
            raise SegmentError(f"device handle: expected the fields {', '.join(kinds)}")
        for name, kind in kinds.items():
            _need(type(told[name]) is kind, name, told[name], f"not {kind.__name__}")
        try:
            memory = base64.b64decode(told["memory"], validate=True)
        except (binascii.Error, ValueError) as error:
            raise SegmentError(f"device handle: memory: no base64 ({error})") from error
        handle = cls(**told | {"memory": memory})
        _need(handle.fields() == told, "memory", told["memory"], "no base64 of ours")
        return handle


def canonical(uuid: str) -> str:
    """As handles write it, whoever tells it."""
    return uuid.lower().removeprefix("gpu-")


def index_of(device: str, visible: Sequence[str]) -> int:
    """Which of a process's GPUs, whose UUIDs are `visible` in their order, a handle means. Raises SegmentError."""
    known = [canonical(uuid) for uuid in visible]
    if device not in known:
        raise SegmentError(
            f"device handle: GPU {device} is not visible to this process ({', '.join(known) or 'none is'})"
        )
    return known.index(device)


def _need(fits: object, name: str, value: object, problem: str) -> None:
    if not fits:
        raise SegmentError(f"device handle: {name}: {value!r}: {problem}")
