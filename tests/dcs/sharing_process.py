"""A trainer that has copied the weights of a folder for engines to take, as a process of its own: one JSON line an answer.

    python -m tests.dcs.sharing_process FOLDER DEVICE PREFIX     # first line: what it offers
    unshare                                                       # a line to it; then: the bytes of device memory that it holds

Its own models have left the device by then, as when a trainer sleeps.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from services.dcs.digest import digest
from services.trainer.megatron.offload import Offload
from services.trainer.weight_copy import Copier, Copy

BUCKET_BYTES = 64 << 10


def copy_of(folder: Path, device: str, prefix: str) -> Copy:
    tensors = {name: tensor.to(device, copy=True) for name, tensor in load_file(folder / "model.safetensors").items()}
    numbers = itertools.count()
    on_cpu = device == "cpu"
    copier = Copier(BUCKET_BYTES, (lambda: f"{prefix}{next(numbers)}") if on_cpu else None, None if on_cpu else device)
    copy = copier.copy(tensors.items())
    Offload().off(tensors.values())
    return copy


def held(device: str) -> int:
    return 0 if device == "cpu" else torch.cuda.memory_reserved()


def main(folder: str, device: str, prefix: str) -> None:
    torch.set_num_threads(1)
    copy = copy_of(Path(folder), device, prefix)
    specs = [[spec.name, spec.dtype, spec.shape, spec.sha256] for spec in copy.outline.specs]
    buckets = [{"indices": bucket.indices, "place": bucket.place} for bucket in copy.buckets]
    print(
        json.dumps({"digest": digest(copy.outline.specs), "specs": specs, "buckets": buckets, "held": held(device)}),
        flush=True,
    )
    for _ in sys.stdin:
        copy.unshare()
        print(json.dumps({"held": held(device)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
