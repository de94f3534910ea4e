"""Takes a model's tensors off the device and puts them back, under everybody who refers to them.

It is the storages that are emptied and filled again, not the tensors that are replaced: Megatron's flat buffers, the parameters
that are views of them, the optimiser's references and the gradients' hooks all stay as they are. Guarantees: after `back` every
tensor holds the bytes that it held before `off`. tests/trainer/test_offload.py, on a CPU; it has not been run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


class Offload:
    """What lies in host memory for the time being."""

    def __init__(self) -> None:
        self._kept: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    def off(self, tensors: Iterable[torch.Tensor]) -> int:
        """Copy their storages into host memory and free them. Bytes that were freed."""
        seen = {storage._cdata for storage, _ in self._kept}
        freed = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata in seen or not storage.nbytes():
                continue
            seen.add(storage._cdata)
            whole = _bytes_of(storage)
            host = torch.empty(len(whole), dtype=torch.uint8, pin_memory=whole.is_cuda)
            host.copy_(whole)
            freed += len(whole)
            self._kept.append((storage, host))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for storage, _ in self._kept:
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return freed

    def back(self) -> None:
        """Take the memory again and fill it."""
        for storage, host in self._kept:
            storage.resize_(len(host))
            _bytes_of(storage).copy_(host)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._kept.clear()


def tensors_of(models: Iterable[torch.nn.Module], optimizers: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Everything that lies on the device for good: parameters, gradients, Megatron's buffers, and the optimisers' states."""
    for model in models:
        for parameter in model.parameters():
            yield parameter.data
            for name in ("grad", "main_grad", "main_param"):
                if isinstance(held := getattr(parameter, name, None), torch.Tensor):
                    yield held
        yield from model.buffers() if callable(model.buffers) else ()
        for buffer in _flat_buffers(model):
            for name in ("param_data", "grad_data"):
                if isinstance(held := getattr(buffer, name, None), torch.Tensor):
                    yield held
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter.data
                if parameter.grad is not None:
                    yield parameter.grad
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim())


def _flat_buffers(model: Any) -> list[Any]:
    """Of Megatron's DistributedDataParallel, whose `buffers` is a list of them."""
    found = [getattr(model, name, None) for name in ("buffers", "expert_parallel_buffers")]
    return [buffer for held in found if isinstance(held, list) for buffer in held]


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
