"""SGLang's model as the target of weight updates (updates.py). Lives in each scheduler process, one a tensor-parallel rank.

Guarantees: a switch happens between two steps of the scheduler, in its own thread; it is refused, with the old weights in place,
if the cache of the old ones could not be emptied; what was loaded is compared bit for bit with what was verified, because SGLang
answers success also for a tensor that it left out, and if it differs the engine dies rather than serve it (`LoadedOtherWeights`).
tests/contract/test_updates.py runs it in the real server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file

from services.dcs.digest import TensorSpec
from services.rollout.engines.receiving import UpdateError
from services.rollout.engines.sglang.updates import specs_of
from services.rollout.engines.sglang.views import Unsupported, View, views
from services.rollout.engines.update_routes import Mode

InScheduler = Callable[[Callable[[], Any]], Awaitable[Any]]


class LoadedOtherWeights(RuntimeError):
    """The model holds something else than was loaded into it. Nothing may be sampled from it."""


class SglangTarget:
    """`manager`: SGLang's SchedulerWeightUpdaterManager; `in_scheduler` runs a function between two steps, on all ranks."""

    stage = torch.device("cpu")

    def __init__(self, manager: Any, in_scheduler: InScheduler) -> None:
        self._manager, self._in_scheduler = manager, in_scheduler
        self._scheduler, self._runner = manager.scheduler, manager.tp_worker.model_runner
        self.device = torch.device(self._runner.device)
        self._ranks = manager.tp_cpu_group
        self.rank = dist.get_rank(self._ranks)
        try:
            self._views: dict[str, View] = views(self._runner.model)
        except Unsupported as error:
            raise UpdateError(f"updates by tensors are not possible with this model: {error}") from error

    def check(self, name: str, shape: tuple[int, ...]) -> str | None:
        known = self._views.get(name)
        if known is None:
            return f"{name}: the model has no such parameter (names are those of the Hugging Face folder)"
        if tuple(shape) != known.shape:
            return f"{name}: shape {list(shape)}, the model has {list(known.shape)}"
        return None

    def read(self, folder: Path) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                found |= load_file(path)
            except (OSError, SafetensorError) as error:
                raise UpdateError(f"{path}: cannot be read ({error})") from error
        if "lm_head.weight" not in self._views:
            found.pop("lm_head.weight", None)  # some folders store the shared matrix twice
        problems = [why for name, tensor in found.items() if (why := self.check(name, tuple(tensor.shape)))]
        problems += [f"{name}: missing" for name in self._views if name not in found]
        if problems:
            raise UpdateError(f"{folder}: the weights do not fit the model: {'; '.join(problems[:5])}")
        return found

    async def switch(self, tensors: dict[str, torch.Tensor], version: str | None, mode: Mode | None) -> int:
        return int(await self._in_scheduler(lambda: self._switch(tensors, version, mode)))

    async def live(self) -> list[TensorSpec]:
        return list(
            await self._in_scheduler(lambda: specs_of({name: self._whole(v) for name, v in self._views.items()}))
        )

    # ---- in the scheduler's thread

    def _switch(self, tensors: dict[str, torch.Tensor], version: str | None, mode: Mode | None) -> int:
        scheduler = self._scheduler
        paused, met = scheduler._engine_paused, len(scheduler.running_batch.reqs)
        keep = mode == "in_place" or (mode is None and paused and met > 0)
        if keep:
            self._allow_in_place()
        else:
            self._retract(paused)
        self._load(tensors)
        scheduler.record_weight_version_change(new_version=version)
        if not keep and not scheduler.flush_cache(empty_cache=False):
            raise LoadedOtherWeights("the cache of the old weights could not be emptied")
        if not paused:
            self._resume()
        return met

    def _allow_in_place(self) -> None:
        if not self._scheduler.server_args.disable_radix_cache:
            raise UpdateError(
                "mode: in_place needs --disable-radix-cache, else a cache of the old weights would serve the new ones"
            )

    def _retract(self, paused: bool) -> None:
        """Running requests go back to the queue. Raises UpdateError, with nothing changed, if something still holds cache."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        if not self._scheduler.is_fully_idle(ignore_waiting=True):
            if not paused:
                self._resume()
            raise UpdateError("the scheduler holds requests that cannot be sent back to the queue; try again")

    def _resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        updater = self._runner.weight_updater
        updater.begin_weight_update()
        loaded, message = updater.load_weights_from_distributed(
            [(name, tensor.to(self.device)) for name, tensor in tensors.items()]
        )
        updater.end_weight_update(run_post_load=False)
        if not loaded:
            raise LoadedOtherWeights(message)
        if wrong := [name for name, tensor in tensors.items() if not self._views[name].holds(tensor)]:
            raise LoadedOtherWeights(f"{len(wrong)} tensors were not taken over as they were given, {wrong[0]} first")

    def _whole(self, view: View) -> torch.Tensor:
        """The tensor of all ranks."""
        mine = view.here().cpu().contiguous()
        if not view.sharded:
            return mine
        parts: list[Any] = [None] * dist.get_world_size(self._ranks)
        dist.all_gather_object(parts, (view.offset, mine), group=self._ranks)
        whole = mine.new_empty(view.shape)
        for offset, part in parts:
            whole.narrow(view.dim, offset, part.shape[view.dim]).copy_(part)
        return whole
