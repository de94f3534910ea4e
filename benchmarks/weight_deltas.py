"""The part of benchmarks/weight_sync.py about deltas: their size between consecutive versions of a real run, and their speed.

The run is the example with bfloat16 weights, through the whole system, at the learning rates of post-training; every version
is pulled as a late replica would, by the delta from the one before, and is bit-equal or the benchmark fails. How many weights
change in an update depends on the learning rate: a bfloat16 number moves only when its master copy has moved by half a step of
its 8 bits. Speed is taken on random weights of which one in a hundred is the next number that bfloat16 has.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch

from services.dcs import deltas, pulling, snapshots
from services.dcs.deltas import Delta
from services.dcs.snapshots import Manifest
from services.trainer.snapshot_files import NewSnapshot, write_shards
from services.trainer.weight_copy import Copier

EXAMPLE = Path(__file__).parents[1] / "examples/sort_letters/run.yaml"
STEPS = 6
RATES = (1e-6, 1e-5)
"""The default of the run file, and a high one."""
DEADLINE_S = 300.0
CHANGED = 0.01


class Folder:
    """The snapshots of a run, as the DCS would send them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    async def manifest(self, version: int) -> Manifest:
        found = snapshots.read(self.root, version)
        assert found is not None
        return found

    async def deltas(self, version: int) -> list[Delta]:
        return deltas.known(self.root)

    async def download(self, version: int, name: str, into: Path, size: int) -> None:
        shutil.copyfile(snapshots.folder(self.root, version) / name, into)

    async def download_delta(self, delta: Delta, name: str, into: Path, size: int) -> None:
        shutil.copyfile(deltas.folder(self.root, delta.base, delta.version) / name, into)


def of_a_run(folder: Path) -> dict[str, float]:
    """Bytes of a delta over those of the snapshot, by learning rate."""
    results: dict[str, float] = {}
    for rate in RATES:
        place = folder / f"{rate:g}"
        sets = {
            "steps": STEPS,
            "workdir": place / "work",
            "model.path": place / "model",
            "model.dtype": "bfloat16",
            "trainer.optimizer.lr": rate,
            "trainer.optimizer.schedule": "constant",
            "eval.prompts": "null",
            "rollout.replicas": 1,
            "dcs.keep_snapshots": STEPS + 4,
            "dcs.keep_deltas": STEPS + 4,
        }
        command = [sys.executable, "-m", "services.controller.cli", "up", str(EXAMPLE)]
        for name, value in sets.items():
            command += ["--set", f"{name}={value}"]
        place.mkdir(parents=True)
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=DEADLINE_S)
        if done.returncode:
            raise SystemExit(f"the run failed: {done.stdout[-2000:]} {done.stderr[-2000:]}")
        ratios = asyncio.run(_ratios(place / "work" / "snapshots", place / "cache"))
        if not any(ratios):
            raise SystemExit("the run changed no weight: without rewards that differ there is nothing to measure")
        print(
            f"deltas of {len(ratios)} updates at lr {rate:g}: {median(ratios):.4f} of the snapshot, bit-equal",
            flush=True,
        )
        results[f"delta_bytes_ratio_lr_{rate:g}"] = round(median(ratios), 4)
    return {"delta_bytes_ratio": results[f"delta_bytes_ratio_lr_{RATES[0]:g}"], **results}


async def _ratios(root: Path, cache: Path) -> list[float]:
    """Of every delta of a run; each version is pulled by it and verified."""
    source, versions = Folder(root), snapshots.versions(root)
    await pulling.pull(source, versions[0], cache)
    ratios = []
    for version in versions[1:]:
        pulled = await pulling.pull(source, version, cache)
        if pulled.how != "delta":  # not worth making
            ratios.append(1.0)
            continue
        ratios.append(pulled.nbytes / sum(entry.size for entry in pulled.manifest.files))
    return ratios


def speed(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    """Seconds to make and to apply a delta of `tensors`."""
    model, root = folder / "model", folder / "deltas"

    def write(version: int) -> Manifest:
        copy = Copier(64 << 20).copy(tensors.items())
        new = NewSnapshot(root, [copy.outline], version=version, step=version, owner="bench")
        return new.complete(model, write_shards(copy, new.folder, new.shards[0]))

    before = write(1)
    for tensor in tensors.values():
        tensor.view(torch.int16).add_((torch.rand(tensor.shape) < CHANGED).to(torch.int16))
    after = write(2)
    started = time.monotonic()
    delta = deltas.make(root, before, after)
    made = time.monotonic() - started
    assert delta is not None
    started = time.monotonic()
    for entry in delta.files:
        patch = deltas.folder(root, 1, 2) / entry.name
        result = deltas.apply(snapshots.folder(root, 1) / entry.name, [patch], folder / "result")
        wanted = next(file for file in after.files if file.name == entry.name)
        if result != (wanted.size, wanted.sha256):
            raise SystemExit("a delta did not give the same bytes")
    applied = time.monotonic() - started
    full = sum(entry.size for entry in after.files)
    print(
        f"delta of {full / 1e9:.2f} GB with {CHANGED:.0%} changed: {delta.size / full:.3f} of it; made in {made:.2f} s, "
        f"applied and verified in {applied:.2f} s"
    )
    return {
        "delta_made_s": round(made, 3),
        "delta_applied_s": round(applied, 3),
        "delta_bytes_ratio_1_percent": round(delta.size / full, 4),
    }
