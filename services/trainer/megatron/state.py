"""The state of training as named tensors that depend on no layout of ranks: what a checkpoint holds.

    weights/NAME                         the policy, under Hugging Face names, in full
    master/NAME                          float32 copies, if the policy is bfloat16
    exp_avg/NAME, exp_avg_sq/NAME        Adam's moments; none before the first update
    reference/NAME                       the reference held beside the policy, if there is one
    optimizer/steps                      updates that the moments have seen
    rng/LAYOUT/RANK/WHICH                generators of each rank; another layout draws anew

All under a prefix, so that several models share a file. Each rank gives its share, as pieces of these tensors, and reads back the
pieces that it holds (state_files.py). tests/trainer/test_policy.py has the bit-exact resume, tests/trainer/layouts the change of
layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from services.trainer.families.entries import Entry
from services.trainer.megatron.optimizer import MASTER, MOMENTS, Optimizer
from services.trainer.megatron.sharding import LEADER, Local, Shards
from services.trainer.state_files import StateFiles, key_of, open_state

WEIGHTS, REFERENCE, STEPS, RNG = "weights", "reference", "optimizer/steps", "rng"


class StateMismatch(ValueError):
    """A saved state does not belong to this model."""


@dataclass(frozen=True, slots=True)
class State:
    """What one policy's state is made of on this rank."""

    shards: Shards
    optimizer: Optimizer
    device: torch.device
    reference: dict[str, torch.Tensor] | None
    prefix: str

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's share, copied into host memory. On all ranks at once."""
        for kind, take in self._kinds():
            for piece, part in self.shards.own(take):
                name = f"{self.prefix}{kind}/{piece.name}"
                key = name if piece.whole else key_of(name, piece.dim, piece.start)
                yield key, part.detach().to("cpu", copy=True)
        if dist.get_rank() == LEADER:
            yield f"{self.prefix}{STEPS}", torch.tensor(self.optimizer.steps)
        for name, state in self._generators().items():
            yield f"{self._rng(dist.get_rank())}{name}", state

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Read this rank's part of a saved state. StateMismatch before anything has changed."""
        with open_state(folder) as opened:
            saved = set(opened.names())
            self._check(opened, saved)
            steps = int(opened.whole(f"{self.prefix}{STEPS}"))
            self.optimizer.restore_steps(steps)
            masters = any(name.startswith(f"{self.prefix}{MASTER}/") for name in saved)
            # Saved as bfloat16, to go on as float32: the copies are the better weights.
            self._read_weights(opened, MASTER if masters and not self.optimizer.masters else WEIGHTS)
            if masters and self.optimizer.masters:
                self._read_optimizer(opened, MASTER)
            for moment in MOMENTS if steps else ():
                self._read_optimizer(opened, moment)
            if self.reference is not None:
                for entry in self.shards.entries:
                    for name in self.shards.names_here(entry):
                        self.reference[name].copy_(self._shard(opened, REFERENCE, entry))
            self._restore_generators(opened, saved)

    def _kinds(self) -> list[tuple[str, Local]]:
        """(kind of tensor, how to take a parameter's)."""
        kinds: list[tuple[str, Local]] = [(WEIGHTS, lambda parameter: parameter.detach())]
        optimizer, reference = self.optimizer, self.reference
        for kind in [*([MASTER] if optimizer.masters else []), *(MOMENTS if optimizer.steps else ())]:
            kinds.append((kind, lambda parameter, kind=kind: optimizer.take(parameter, kind)))  # type: ignore[misc]
        if reference is not None:
            names = {parameter: name for name, parameter in self.shards.held.items()}
            kinds.append((REFERENCE, lambda parameter: reference[names[parameter]]))
        return kinds

    def _read_weights(self, opened: StateFiles, source: str) -> None:
        for entry in self.shards.entries:
            if targets := self.shards.here(entry):
                shard = self._shard(opened, source, entry)
                for target in targets:
                    target.copy_(shard)
        if self.optimizer.masters:
            self.optimizer.megatron.reload_model_params()

    def _read_optimizer(self, opened: StateFiles, kind: str) -> None:
        for entry in self.shards.entries:
            if targets := self.shards.here(entry):
                shard = self._shard(opened, kind, entry)
                for target in targets:
                    self.optimizer.put(target, kind, shard)

    def _shard(self, opened: StateFiles, kind: str, entry: Entry) -> torch.Tensor:
        parts = [
            opened.part(f"{self.prefix}{kind}/{piece.name}", piece.dim, piece.start, piece.size)
            for piece in self.shards.pieces(entry)
        ]
        return self.shards.join(entry, parts)

    def _check(self, opened: StateFiles, saved: set[str]) -> None:
        expected = dict(self.shards.names())
        for kind in (WEIGHTS, *([REFERENCE] if self.reference is not None else [])):
            prefix = f"{self.prefix}{kind}/"
            have = {name.removeprefix(prefix) for name in saved if name.startswith(prefix)}
            if not have:
                what = kind if not self.prefix else f"{self.prefix}{kind}"
                raise StateMismatch(
                    f"the saved state holds no {what}: it is of a run with other models; start the run anew"
                )
            if have != expected.keys():
                odd = sorted(have ^ expected.keys())[0]
                raise StateMismatch(f"the saved state belongs to another model: {odd!r} is only in one of them")
            for name, shape in expected.items():
                found = opened.shape(f"{prefix}{name}")
                if found != shape:
                    raise StateMismatch(f"{name}: saved with shape {found}, the model has {shape}")

    # ---- generators

    def _rng(self, rank: int) -> str:
        layout = self.shards.layout
        sizes = (layout.tensor, layout.context, layout.expert, layout.data, layout.pipeline)
        return f"{self.prefix}{RNG}/{'x'.join(map(str, sizes))}/{rank:05d}/"

    def _generators(self) -> dict[str, torch.Tensor]:
        """This rank's generators: torch's own and Megatron's, which dropout draws from under tensor parallelism. They are one
        process's, so only the first model of a file has them."""
        if self.prefix:
            return {}
        states = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.device)
        for name, state in get_cuda_rng_tracker().get_states().items():
            states[f"megatron-{name}"] = state
        return dict(sorted(states.items()))

    def _restore_generators(self, opened: StateFiles, saved: set[str]) -> None:
        prefix = self._rng(dist.get_rank())
        states = {name.removeprefix(prefix): opened.whole(name) for name in saved if name.startswith(prefix)}
        if not states:
            return
        torch.set_rng_state(states["cpu"])
        if self.device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], self.device)
        tracked = {
            name.removeprefix("megatron-"): state for name, state in states.items() if name.startswith("megatron-")
        }
        if tracked:
            get_cuda_rng_tracker().set_states(tracked)
