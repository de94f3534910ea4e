"""Handles of device memory: as plain fields they arrive as they were, nothing else passes, and without a GPU none is mapped."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.dcs import device_memory
from services.dcs.device_memory import DeviceMemory
from services.dcs.handles import LARGEST, LONGEST_MEMORY, Handle, canonical, index_of
from services.dcs.segments import SegmentError
from services.trainer.build import device_of
from services.trainer.weight_copy import Copier, manifest_of
from shared.config import ConfigError
from shared.records import Announcement
from shared.wire import decode, encode
from tests.dcs.conftest import weights
from tests.shared.runs import make_config

HANDLE = Handle("ab12ab12-0000-1111-2222-0123456789ab", b"\x00\xff" * 33, 512, 1 << 20, "/torch_77_1", 3)
GPUS = ["GPU-AB12AB12-0000-1111-2222-0123456789AB", "00000000-0000-0000-0000-000000000001"]
sizes = st.integers(0, LARGEST - 1)
handles = st.builds(
    Handle,
    st.uuids().map(str),
    st.binary(min_size=1, max_size=LONGEST_MEMORY),
    sizes,
    st.integers(1, LARGEST - 1),
    st.from_regex(r"/[-_.A-Za-z0-9]{1,20}", fullmatch=True),
    sizes,
)
plain = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=80) | st.lists(st.integers(), max_size=2)
)


@given(handles)
def test_it_arrives_as_it_was(handle: Handle) -> None:
    assert Handle.read(json.loads(json.dumps(handle.fields()))) == handle
    shared = {"host": "here", "segments": [handle.fields()]}
    told = Announcement(1, 0, [], [], [], [], "d", None, [[0]], "", "test", time.time(), shared=shared)
    assert decode(encode(told), Announcement).shared == shared


@given(st.sampled_from(sorted(HANDLE.fields())), plain)
def test_another_value_is_another_handle_or_refused(name: str, value: Any) -> None:
    told = HANDLE.fields() | {name: value}
    problem = ""
    try:
        assert Handle.read(told).fields() == told
    except SegmentError as error:
        problem = str(error)
    assert problem == "" or problem.startswith(f"device handle: {name}: ")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device": "GPU-0"}, "device: 'GPU-0': no UUID of a GPU"),
        ({"memory": "???"}, "memory: no base64"),
        ({"memory": "é"}, "memory: no base64"),
        ({"memory": "QR=="}, "memory: 'QR==': no base64 of ours"),
        ({"memory": ""}, "memory: '0 bytes': no handle of an allocation"),
        ({"size": 0}, "size: 0: no size"),
        ({"size": True}, "size: True: not int"),
        ({"offset": -1}, "offset: -1: no offset"),
        ({"counter": "/../etc/passwd"}, "counter: .*: no name of shared memory"),
        ({"counter": 7}, "counter: 7: not str"),
        ({"counter_offset": 1 << 64}, "counter_offset: .*: no offset"),
        ({"more": 1}, "expected the fields device, memory, offset, size, counter, counter_offset"),
    ],
)
def test_what_is_wrong_with_it_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SegmentError, match=f"device handle: {said}"):
        Handle.read(HANDLE.fields() | changes)


@pytest.mark.parametrize("told", [None, "slipstream-a", [], {}, {"device": "x"}])
def test_something_else_is_no_handle(told: Any) -> None:
    with pytest.raises(SegmentError, match="expected the fields"):
        Handle.read(told)


def test_a_gpu_is_found_by_its_uuid_whatever_its_number() -> None:
    assert index_of(HANDLE.device, GPUS) == 0
    assert index_of(HANDLE.device, GPUS[::-1]) == 1
    assert index_of(canonical(GPUS[1]), GPUS) == 1
    with pytest.raises(SegmentError, match=f"GPU {HANDLE.device} is not visible to this process .{GPUS[1]}"):
        index_of(HANDLE.device, GPUS[1:])
    with pytest.raises(SegmentError, match="none is"):
        index_of(HANDLE.device, [])


def test_more_than_there_is_is_not_taken() -> None:
    with pytest.raises(SegmentError, match="has 1048576 bytes, 1048577 were announced"):
        device_memory.take(HANDLE, HANDLE.size + 1)


def test_from_a_gpu_that_is_not_here_nothing_is_taken() -> None:
    with pytest.raises(SegmentError, match=f"GPU {HANDLE.device} is not visible to this process"):
        device_memory.take(HANDLE, HANDLE.size)


def test_without_a_gpu_the_trainer_says_so_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config("x", placement="colocate", dcs={"cuda_ipc": True})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="dcs.cuda_ipc: true, but torch sees no GPU here; set it to false"):
        device_of(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of(config) == "cuda"


def test_memory_that_cannot_be_shared_is_an_error_with_a_way_out() -> None:
    memory = DeviceMemory(100, "cpu")
    with pytest.raises(SegmentError, match="cannot be shared .*; set dcs.cuda_ipc: false"):
        memory.share()


def test_a_copy_that_cannot_be_shared_keeps_no_device_memory() -> None:
    made: list[DeviceMemory] = []

    class Counted(DeviceMemory):
        def __init__(self, size: int, device: str) -> None:
            super().__init__(size, device)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.trainer.weight_copy.DeviceMemory", Counted)
        with pytest.raises(SegmentError, match="cannot be shared"):
            Copier(1 << 10, device="cpu").copy(weights(3.0).items())
    assert len(made) > 1
    assert all(memory.memory is None for memory in made)


def test_a_copy_is_twice_there_until_it_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What engines would map is what was hashed, and what the snapshot is written from stays."""

    def share(memory: DeviceMemory) -> None:
        memory.handle = HANDLE

    monkeypatch.setattr(DeviceMemory, "share", share)
    copier = Copier(1 << 10, device="cpu")
    copy, plain = copier.copy(weights(3.0).items()), Copier(1 << 10).copy(weights(3.0).items())
    assert manifest_of([copy.outline], 1, 0) == manifest_of([plain.outline], 1, 0)
    for bucket in copy.buckets:
        assert bucket.place == HANDLE.fields()
        assert bucket.on_device is not None
        assert bucket.on_device.memory is not None
        assert torch.equal(bucket.on_device.memory[: bucket.used], bucket.data)
    copy.unshare()
    for mine, other in zip(copy.buckets, plain.buckets, strict=True):
        assert mine.on_device is not None
        assert mine.on_device.memory is None
        assert torch.equal(mine.data, other.data)
    buffers = {bucket.buffer.data_ptr() for bucket in copy.buckets}
    assert {bucket.buffer.data_ptr() for bucket in copier.copy(weights(4.0).items()).buckets} == buffers, "used again"
