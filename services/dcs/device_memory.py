"""Weights in a GPU's memory that trainer and engines share by CUDA IPC (`dcs.cuda_ipc`): segments.py on a device.

The trainer allocates a `DeviceMemory` for each bucket of a version, writes the tensors into it and shares it; an engine maps it
by its handle (handles.py), copies it on the device, and lets go. What differs from a segment: a mapping does not outlive the
memory, so what an engine verifies and serves must be a copy of its own. Guarantees: what is shared is written; what was taken
does not change any more, whatever becomes of the trainer; closing gives the memory back whether or not anybody mapped it, or died
with it mapped; what cannot be allocated, shared or taken is a SegmentError with a way out. tests/dcs/test_handles.py;
tests/dcs/test_exchange.py shares and takes in two processes where there is a GPU.
"""

from __future__ import annotations

import torch

from services.dcs.handles import Handle, canonical, index_of
from services.dcs.segments import SegmentError

WAY_OUT = "set dcs.cuda_ipc: false, and weights go through shared memory"


class DeviceMemory:
    """A flat piece of memory on this thread's GPU, owned by who created it."""

    def __init__(self, size: int, device: str = "cuda") -> None:
        try:
            self.memory: torch.Tensor | None = torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise SegmentError(
                f"the GPU has too little memory left for a copy of the weights, which dcs.cuda_ipc needs there; {WAY_OUT}"
            ) from error
        self.handle: Handle | None = None

    def write(self, start: int, tensor: torch.Tensor) -> None:
        """Copy a tensor to byte `start`, which has to suit its dtype."""
        assert self.memory is not None
        part = self.memory[start : start + tensor.numel() * tensor.element_size()]
        part.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())

    def share(self) -> None:
        """Have a `handle`. Once, when all is written."""
        assert self.memory is not None
        try:
            shared = self.memory.untyped_storage()._share_cuda_()
            index, memory, size, offset, counter, counter_offset, _, _ = shared
            torch.cuda.synchronize(index)  # so that whoever maps it has no event to wait for
            # Torch keeps what it has shared until one process has mapped it and let it go again. That may never happen, or twice.
            torch.UntypedStorage._release_ipc_counter_cuda(counter, counter_offset)
        except RuntimeError as error:
            raise SegmentError(f"the GPU's memory cannot be shared ({error}); {WAY_OUT}") from error
        self.handle = Handle(_uuid(index), memory, offset, size, counter.decode(), counter_offset)

    def close(self) -> None:
        """Nobody reads it any more. `give_back` hands the memory to other processes."""
        self.memory = self.handle = None


def give_back() -> None:
    """Memory of what was closed, which torch would keep for this process."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def take(handle: Handle, size: int) -> torch.Tensor:
    """A copy, on the same device, of the first `size` bytes of somebody's device memory."""
    if handle.size < size:
        raise SegmentError(f"device handle: has {handle.size} bytes, {size} were announced")
    visible = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    index = index_of(handle.device, visible)
    counter = (handle.counter.encode(), handle.counter_offset)
    try:
        torch.cuda.init()
        storage = torch.UntypedStorage._new_shared_cuda(
            index, handle.memory, handle.size, handle.offset, *counter, b"", False
        )
        taken = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:size].clone()
        torch.cuda.synchronize(index)  # before it is unmapped
        return taken
    except RuntimeError as error:
        raise SegmentError(
            f"device handle: cannot be taken ({error}): its trainer is gone, or CUDA IPC does not work here; {WAY_OUT}"
        ) from error


def _uuid(index: int) -> str:
    return canonical(str(torch.cuda.get_device_properties(index).uuid))
