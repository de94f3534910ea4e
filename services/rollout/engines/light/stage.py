"""The weights of an open update, built up beside the live ones.

What arrives is hashed and written into a second set of parameters in a thread of its own, while the next bucket is on its way;
a switch is then one assignment, however large the model is, and the set that was live is filled by the next update. Buckets are
used again as soon as they are written, because memory that is touched for the first time costs more than the copy. The price is
a second copy of the weights. Held by tests/rollout/test_light_updates.py; benchmarks/weight_sync.py measures it.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from services.dcs.digest import TensorSpec
from services.rollout.engines.light.tensors import Tensors
from services.rollout.engines.receiving import spec_of
from shared.niceness import give_way

KEPT_BUCKETS = 8
"""So many may wait to be hashed and written; receiving waits for the oldest then."""


@dataclass(slots=True)
class Stage:
    """One update. `specs` tells what was staged, once it is written."""

    tensors: Tensors
    version: str | None = None
    writing: list[Future[None]] = field(default_factory=list)
    specs: dict[str, TensorSpec] = field(default_factory=dict)

    def settle(self) -> None:
        """Until all that was staged is written. Raises what went wrong with it."""
        writing, self.writing = self.writing, []
        for job in writing:
            job.result()

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

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def open(self, live: Tensors, device: torch.device) -> Stage:
        spare, self._spare = self._spare, None
        return Stage(spare or live.beside(device))

    def put(self, stage: Stage, tensors: dict[str, torch.Tensor], bucket: torch.Tensor | None = None) -> None:
        """Stage `tensors`; if they lie in a `bucket`, that can be had again afterwards."""

        def write() -> None:
            for name, tensor in tensors.items():
                stage.write(name, tensor)
            if bucket is not None and len(self._buckets) < KEPT_BUCKETS:
                self._buckets.append(bucket)

        if len(stage.writing) >= KEPT_BUCKETS:
            stage.writing.pop(0).result()
        stage.writing.append(self._thread.submit(write))

    def bucket(self, size: int, device: torch.device) -> torch.Tensor:
        """Flat memory for a transfer."""
        for number, bucket in enumerate(self._buckets):
            if len(bucket) >= size and bucket.device.type == device.type:
                return self._buckets.pop(number)[:size]
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
