"""The weights of an open update, built up beside the live ones.

What arrives is hashed and written into a second set of parameters in a thread of its own, while the next bucket is on its way;
a switch is then one assignment, however large the model is, and the set that was live is filled by the next update. Where cores
are few, hashing would only slow the transfer down, and with it everybody who is in it: it begins when the last bucket is there.
Buckets are used again as soon as they are written, and by the next update, because memory that is touched for the first time
costs more than the copy. The price is a second copy of the weights, and up to KEPT_BYTES of buckets.
Held by tests/rollout/test_light_stage.py and test_light_updates.py; benchmarks/weight_sync.py measures it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from services.dcs.digest import TensorSpec
from services.rollout.engines.light.tensors import Tensors
from services.rollout.engines.receiving import spec_of
from shared.niceness import give_way

KEPT_BYTES = 2 << 30
"""So much may wait to be hashed and written, in buckets; receiving waits for the oldest then."""
FEW_CORES = (os.cpu_count() or 1) < 4
"""A sender and a receiver have none to spare."""


@dataclass(slots=True)
class Stage:
    """One update. `specs` tells what was staged, once it is written."""

    tensors: Tensors
    version: str | None = None
    writing: list[tuple[Future[None], int]] = field(default_factory=list)
    """What waits to be written, and how many bytes of bucket that keeps."""
    specs: dict[str, TensorSpec] = field(default_factory=dict)

    def settle(self) -> None:
        """Until all that was staged is written. Raises what went wrong with it."""
        writing, self.writing = self.writing, []
        for job, _ in writing:
            job.result()

    def settle_oldest(self) -> None:
        self.writing.pop(0)[0].result()

    def waiting(self) -> int:
        """Bytes of buckets that are not free yet."""
        return sum(nbytes for job, nbytes in self.writing if not job.done())

    def write(self, name: str, tensor: torch.Tensor) -> None:
        spec = spec_of(name, tensor)
        self.tensors.parameters[name].write(tensor)
        self.specs[name] = spec


class Stager:
    """Makes stages, one at a time, and owns their memory. Its methods are called in one thread."""

    def __init__(self) -> None:
        self._spare: Tensors | None = None
        self._buckets: list[torch.Tensor] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stage", initializer=give_way)
        self._may_write = threading.Event()
        self._may_write.set()

    def close(self) -> None:
        self._may_write.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def open(self, live: Tensors, device: torch.device) -> Stage:
        spare, self._spare = self._spare, None
        return Stage(spare or live.beside(device))

    def put(self, stage: Stage, tensors: dict[str, torch.Tensor], bucket: torch.Tensor | None = None) -> None:
        """Stage `tensors`; if they lie in a `bucket`, that can be had again afterwards."""
        nbytes = 0 if bucket is None else len(bucket)

        def write() -> None:
            self._may_write.wait()
            for name, tensor in tensors.items():
                stage.write(name, tensor)
            if bucket is not None and sum(map(len, self._buckets)) + nbytes <= KEPT_BYTES:
                self._buckets.append(bucket)

        while stage.waiting() + nbytes > KEPT_BYTES and stage.writing:
            self._may_write.set()
            stage.settle_oldest()
        stage.writing.append((self._thread.submit(write), nbytes))

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """While a transfer is under way."""
        if FEW_CORES:
            self._may_write.clear()
        try:
            yield
        finally:
            self._may_write.set()

    def bucket(self, size: int, device: torch.device) -> torch.Tensor:
        """Flat memory for a transfer: the smallest that is free and large enough."""
        free = [
            (len(bucket), number)
            for number, bucket in enumerate(self._buckets)
            if len(bucket) >= size and bucket.device.type == device.type
        ]
        if free:
            return self._buckets.pop(min(free)[1])[:size]
        self._buckets.clear()  # of another size: a larger model's, or the last one of an update
        return torch.empty(size, dtype=torch.uint8, device=device)

    def give_back(self, tensors: Tensors) -> None:
        """Of a stage that was dropped, or what was live until now."""
        if not tensors.hollow:
            self._spare = tensors

    def let_go(self) -> None:
        """Keep no memory for the next update."""
        self._spare = None
        self._buckets.clear()
