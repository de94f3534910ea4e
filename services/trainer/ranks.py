"""The trainer's ranks as one: the leader has all of them do the same at the same time.

The leader (rank 0) runs the service and speaks to the broker. The others wait (follower.py) for its orders, each a method of one
of the models, with its arguments, and answer each order. `RankedPolicy` has the methods of `Policy`, done by all ranks.
Guarantees: an error of one rank is raised at the leader, once, after all have stopped at the same place; a rank that dies or
hangs ends all of them (channel.py). With one rank nothing is sent. tests/trainer/layouts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from services.trainer.algorithms.reductions import Loss, Tokens, merge
from services.trainer.channel import Channel
from services.trainer.hf_folder import save_hf
from services.trainer.layout import LayoutError
from services.trainer.megatron.options import NativeOptionError
from services.trainer.megatron.policy import Policy, Role
from services.trainer.megatron.state import StateMismatch
from services.trainer.megatron.step import NonFiniteError, Scores, tokens_of
from services.trainer.model_folder import ModelFolderError, read_architecture
from services.trainer.sender import Sender
from services.trainer.spread import Spread
from services.trainer.stage import StageAddress, StageServer
from services.trainer.state_files import Written, file_of, write_behind
from services.trainer.tensorfile import DiskFullError, Spec
from services.trainer.weight_copy import Copier
from shared.network import own_address
from shared.sections import OptimizerConfig

TELLABLE: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        NonFiniteError,
        StateMismatch,
        ModelFolderError,
        NativeOptionError,
        LayoutError,
        DiskFullError,
        OSError,
    )
}
"""Errors that one rank may have and that the leader raises by their own type."""

Build = Callable[[Path, Role], Policy]
"""Makes this rank's part of a model from a folder."""


@dataclass(slots=True)
class Ranks:
    """What one rank has: its part of each model, by name, and the way to the other ranks. The leader orders."""

    build: Build
    channel: Channel | None = None
    """None: there is one rank."""
    models: dict[str, Policy] = field(default_factory=dict)
    _walking: Iterator[Any] | None = None
    _saving: Future[Written] | None = None
    _stage: StageServer | None = None
    """Sends the weights of the stage that this rank heads."""

    @property
    def rank(self) -> int:
        return 0 if self.channel is None else self.channel.rank

    def add(self, name: str, folder: Path, role: Role = "actor") -> RankedPolicy:
        """Leader: build a model on all ranks."""
        self.all("look", name, folder=str(folder))  # a host without the folder is named before the others wait for it
        self.all("build", name, folder=str(folder), role=role)
        return RankedPolicy(self, name)

    def all(self, do: str, model: str, **arguments: Any) -> list[Any]:
        """Leader: have all ranks do it; their answers by rank."""
        order = {"do": do, "model": model, **arguments}
        if self.channel is None:
            return [self.run(order)]
        self.finish_walk()
        with self.channel.in_step(*TELLABLE.values()):
            self.channel.order(order)
            return self.take_part(order)

    def walk(self, do: str, model: str, local: Callable[[], Iterator[Any]], **arguments: Any) -> Iterator[Any]:
        """Leader: tensor by tensor from all ranks. Whoever takes them may stop early; the ranks go to the end, or they would
        part."""
        if self.channel is None:
            yield from local()
            return
        self.finish_walk()
        self.channel.order({"do": do, "model": model, **arguments})
        self._walking = local()
        try:
            with self.channel.in_step():
                for item in self._walking:  # noqa: UP028 - `yield from` would end the walk where its taker stops
                    yield item
        finally:
            self.finish_walk()

    def finish_walk(self) -> None:
        walking, self._walking = self._walking, None
        if walking is not None and self.channel is not None:
            with self.channel.in_step(*TELLABLE.values()):
                self.together(lambda: _exhaust(walking))

    def save(self, folder: Path, models: Mapping[str, str]) -> None:
        """Leader: have all ranks copy their share of these models' states (name -> prefix) and write it into a folder that all
        see. Returns when the copies are there; `saved` tells when they are written."""
        self.all("save", "", folder=str(folder), models=dict(models))

    def saved(self) -> dict[str, Written] | None:
        """Leader: the files that the last `save` has written, durable; None while any rank is still at it. Raises what went
        wrong."""
        answers = self.all("saved", "")
        if any(answer is None for answer in answers):
            return None
        return {file_of(rank): answer for rank, answer in enumerate(answers)}

    def close(self) -> None:
        """Leader: let the other ranks go."""
        if self.channel is not None:
            try:
                if not self.channel.lost:
                    self.finish_walk()
            finally:
                self.channel.dismiss()

    def take_part(self, order: dict[str, Any]) -> list[Any]:
        """This rank's part of an order, and everyone's answers."""
        return self.together(lambda: self.run(order))

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """Do this rank's work, and get everyone's results. Errors that can be told are raised when all have answered."""
        assert self.channel is not None
        value, error = None, None
        try:
            with self.channel.watched():
                value = work()
        except tuple(TELLABLE.values()) as problem:
            kind = next(name for name, kind in TELLABLE.items() if isinstance(problem, kind))
            error = [kind, str(problem)]
        answers = self.channel.exchange({"error": error, "value": value})
        for answer in answers:
            if answer["error"] is not None:
                kind, text = answer["error"]
                raise TELLABLE[kind](text)
        return [answer["value"] for answer in answers]

    def run(self, order: dict[str, Any]) -> Any:
        """This rank's part of an order, as it is answered to the leader."""
        arguments = {name: value for name, value in order.items() if name not in ("do", "model")}
        if order["do"] == "look":
            read_architecture(arguments["folder"])
            return None
        if order["do"] == "build":
            self.models[order["model"]] = self.build(Path(arguments["folder"]), arguments["role"])
            return None
        if order["do"] == "save":
            return self._save(Path(arguments["folder"]), arguments["models"])
        if order["do"] == "saved":
            assert self._saving is not None
            return self._saving.result() if self._saving.done() else None
        if order["do"] == "open_stage":
            return self._open_stage(self.models[order["model"]], **arguments)
        if order["do"] == "outgoing":
            return self._copy_out(self.models[order["model"]])
        if order["do"] == "copy_weights":
            return self.models[order["model"]].copy_weights(self.models[arguments["source"]])
        return OPERATIONS[order["do"]](self.models[order["model"]], **arguments)

    def _save(self, folder: Path, models: Mapping[str, str]) -> None:
        staged = [item for name, prefix in models.items() for item in self.models[name].state_tensors(prefix)]
        self._saving = write_behind(folder / file_of(self.rank), staged)

    def _open_stage(self, model: Policy, bucket_mb: int, timeout_s: float) -> list[Any] | None:
        """On the head of a pipeline stage that is not the leader's: where it takes orders for its sender."""
        if self.rank == 0 or model.shards.head_of(self.rank) != self.rank:
            return None
        self._stage = StageServer(Sender(Copier(bucket_mb << 20), timeout_s))
        return [own_address(os.environ["MASTER_ADDR"]), self._stage.port]

    def _copy_out(self, model: Policy) -> None:
        """On other ranks than the leader."""
        if self._stage is None:
            _exhaust(model.stage_tensors())
        else:
            self._stage.sender.copy(model.stage_tensors())


class RankedPolicy:
    """A model on all ranks, as the leader works with it."""

    def __init__(self, ranks: Ranks, name: str) -> None:
        self.ranks, self.name = ranks, name
        self.local = ranks.models[name]
        self.layout, self.architecture, self.folder = self.local.layout, self.local.architecture, self.local.folder
        self._by_stage = False

    @classmethod
    def alone(cls, policy: Policy, build: Build | None = None) -> RankedPolicy:
        """The policy of a single rank."""

        def unused(_folder: Path, _role: Role) -> Policy:
            raise RuntimeError("this policy came without a way to build others")

        return cls(Ranks(build or unused, models={"policy": policy}), "policy")

    def forward_backward(self, spread: Spread, loss: Loss, temperature: float = 1.0) -> dict[str, float]:
        """Add the gradients of these micro-batches to the sums; their summed metrics."""
        answers = self._all("forward_backward", spread=spread, loss=loss, temperature=temperature)
        return merge(answer for answer in answers if answer is not None)

    def score(self, spread: Spread, temperature: float = 1.0, top: int = 0, by_reference: bool = False) -> list[Scores]:
        """Scores of each of `spread.batches`, without gradients, in host memory."""
        answers = self._all("score", spread=spread, temperature=temperature, top=top, by_reference=by_reference)
        by_replica = dict(answer for answer in answers if answer is not None)
        return [
            Scores(*(torch.tensor(column) for column in columns))
            for replica in sorted(by_replica)
            for columns in by_replica[replica]
        ]

    def observe(self, spread: Spread, temperature: float = 1.0) -> list[Tokens]:
        """What a loss would see of each of `spread.batches` now, without gradients: for `algorithms.first_pass`."""
        return [
            tokens_of(batch, scores.logprobs_N[:, None], scores.entropy_N)
            for batch, scores in zip(spread.batches, self.score(spread, temperature), strict=True)
        ]

    def update(self, denominator: float, lr: float) -> dict[str, float]:
        """As `Policy.update`."""
        return self._all("update", denominator=denominator, lr=lr)[0]

    def discard(self) -> None:
        """Clear the summed gradients."""
        self._all("discard")

    def reset_optimizer(self, options: OptimizerConfig) -> None:
        """Start a new AdamW with these settings and empty moments."""
        self._all("reset_optimizer", options=options.model_dump(mode="json"))

    def load_hf(self, folder: str | Path) -> None:
        """Replace the weights by those of a folder that every rank can read."""
        self._all("load_hf", folder=str(folder))

    def copy_weights(self, other: RankedPolicy) -> None:
        """Take over the weights of another model of the same ranks and architecture, all but the head where heads differ."""
        self._all("copy_weights", source=other.name)

    def hold_reference(self, folder: str | Path | None = None) -> None:
        """As `Policy.hold_reference`."""
        self._all("hold_reference", folder=None if folder is None else str(folder))

    def restore(self, folder: str | Path, prefix: str = "") -> None:
        """Restore a saved state that every rank can read."""
        self._all("restore", folder=str(folder), prefix=prefix)

    def sleep(self) -> None:
        """Take all models of these ranks off the device (placement: colocate)."""
        for name in self.ranks.models:
            self.ranks.all("sleep", name)

    def wake(self) -> None:
        """Put them back."""
        for name in self.ranks.models:
            self.ranks.all("wake", name)

    def hf_specs(self) -> list[Spec]:
        return self.local.hf_specs()

    def hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor), one at a time. May share memory with the model: copy before the next update."""
        return self.ranks.walk("hf_tensors", self.name, self.local.hf_tensors)

    def open_stages(self, bucket_mb: int, timeout_s: float) -> list[StageAddress]:
        """From now on the head of each further pipeline stage sends the weights of that stage: where they take orders for it."""
        answers = self._all("open_stage", bucket_mb=bucket_mb, timeout_s=timeout_s)
        self._by_stage = True
        return [StageAddress(rank, *answer) for rank, answer in enumerate(answers) if answer is not None]

    def outgoing(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What this process sends of the weights, as `hf_tensors`: all of it, or its own stage while the others are copied by the
        heads of theirs."""
        if not self._by_stage:
            return self.hf_tensors()
        return self.ranks.walk("outgoing", self.name, self.local.stage_tensors)

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, summed gradient), before `update`."""
        return self.ranks.walk("gradients", self.name, self.local.gradients)

    def save_hf(self, target: str | Path) -> dict[str, str]:
        """Write the weights as a model folder; sha256 by file name."""
        return save_hf(self.hf_specs(), self.hf_tensors(), self.folder, target)

    def close(self) -> None:
        """Let the other ranks go."""
        self.ranks.close()

    def _all(self, do: str, **arguments: Any) -> list[Any]:
        return self.ranks.all(do, self.name, **arguments)


def _forward_backward(model: Policy, spread: Spread, loss: Loss, temperature: float) -> dict[str, float] | None:
    sums = model.forward_backward(spread, loss, temperature)
    return sums if model.reports else None


def _score(
    model: Policy, spread: Spread, temperature: float, top: int, by_reference: bool
) -> tuple[int, list[Any]] | None:
    scores = model.score(spread, temperature, top, by_reference)
    if not model.reports:
        return None
    own = spread.replicas[model.replica]
    real = [found for found, batch in zip(scores, own, strict=True) if batch.group_ids]
    names = ("logprobs_N", "entropy_N", "top_ids_NK", "top_logprobs_NK")
    return model.replica, [[getattr(found, name).cpu().numpy() for name in names] for found in real]


def _exhaust(tensors: Iterator[Any]) -> None:
    for _ in tensors:
        pass


OPERATIONS: dict[str, Callable[..., Any]] = {
    "forward_backward": _forward_backward,
    "score": _score,
    "update": lambda model, denominator, lr: model.update(denominator, lr),
    "discard": lambda model: model.discard(),
    "reset_optimizer": lambda model, options: model.reset_optimizer(OptimizerConfig.model_validate(options)),
    "load_hf": lambda model, folder: model.load_hf(folder),
    "hold_reference": lambda model, folder: model.hold_reference(folder),
    "sleep": lambda model: model.sleep(),
    "wake": lambda model: model.wake(),
    "restore": lambda model, folder, prefix: model.restore(folder, prefix),
    "hf_tensors": lambda model: _exhaust(model.hf_tensors()),
    "gradients": lambda model: _exhaust(model.gradients()),
}
"""What the leader may order, by the name of the method of `Policy`."""
