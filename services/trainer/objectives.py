"""Losses by name, so that every rank makes the same of them: what `forward_backward` is given by the service."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from pydantic import TypeAdapter

from services.trainer.algorithms import policy_loss
from services.trainer.algorithms.dpo import dpo
from services.trainer.algorithms.ppo import critic
from services.trainer.algorithms.reductions import Loss, Tokens
from services.trainer.algorithms.sft import sft
from shared.algorithms import AlgorithmConfig

_FUNCTIONS: dict[str, Callable[..., Any]] = {"sft": sft, "dpo": dpo, "critic": critic}
_ALGORITHM: TypeAdapter[Any] = TypeAdapter(AlgorithmConfig)


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss that can be sent.

    policy: of `algorithm`. sft: the cross-entropy of demonstrations. dpo: of preference pairs. critic: of values.
    """

    name: Literal["policy", "sft", "dpo", "critic"]
    algorithm: Any = None
    """The `algorithm` of the run file, for `policy`."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """For `policy` what `algorithms.first_pass` found for this update, otherwise the loss function's own keywords."""
    _loss: Loss = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.name == "policy":
            loss = policy_loss(self.algorithm, self.constants)
        else:
            loss = partial(_FUNCTIONS[self.name], **self.constants)
        object.__setattr__(self, "_loss", loss)

    def __call__(self, tokens: Tokens, /) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self._loss(tokens)

    def plain(self) -> dict[str, Any]:
        """As msgpack can hold it."""
        algorithm = None if self.algorithm is None else self.algorithm.model_dump(mode="json")
        return {"name": self.name, "algorithm": algorithm, "constants": dict(self.constants)}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Objective:
        algorithm = plain["algorithm"]
        return cls(
            plain["name"], None if algorithm is None else _ALGORITHM.validate_python(algorithm), plain["constants"]
        )


SFT = Objective("sft")
