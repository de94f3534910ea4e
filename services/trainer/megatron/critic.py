"""The critic: the policy's architecture with one number a token in place of a vocabulary, and an optimiser of its own.

T tokens of a packed micro-batch, N tokens whose value is wanted, H hidden size.

A token's value is read from the same hidden state that predicts it, so it is the value of the state the token is drawn in. The
head starts at zero: at first every value is 0, and GAE is the plain return. Everything else (packing, sums of gradients,
clipping, bit-exact restoring) is the policy's. `tests/trainer/test_roles.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from services.trainer.megatron.model import PackedLayout, PolicyModel, Scores, build_model
from services.trainer.megatron.policy import Policy
from services.trainer.megatron.weights import load_hf
from services.trainer.model_folder import Architecture

HEAD = "value_head."


class ValueModel(PolicyModel):
    """GPTModel whose forward pass gives values where a policy's gives log-probabilities."""

    def add_head(self) -> None:
        self.value_head = torch.nn.Linear(self.config.hidden_size, 1, dtype=self.config.params_dtype)
        torch.nn.init.zeros_(self.value_head.weight)
        torch.nn.init.zeros_(self.value_head.bias)

    def forward(  # type: ignore[override]
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        layout: PackedLayout,
        rows_N: torch.Tensor,
        targets_N: torch.Tensor,
        temperature: float = 1.0,
        others_NK: torch.Tensor | None = None,
    ) -> Scores:
        """(value [N], zeros [N]) of the states at `rows_N`, in float32."""
        hidden_T1H = GPTModel.forward(self, ids_T[None], positions_T[None], None, packed_seq_params=layout)
        values_N = self.value_head(hidden_T1H.index_select(0, rows_N).squeeze(1)).squeeze(-1).float()
        return values_N, torch.zeros_like(values_N)


class Critic(Policy):
    """`Critic.create` as `Policy.create`; `logprobs` gives values. `set_weights` takes over a policy's body."""

    @staticmethod
    def build(architecture: Architecture, config: TransformerConfig) -> PolicyModel:
        model = build_model(architecture, config, kind=ValueModel)
        assert isinstance(model, ValueModel)
        model.add_head()
        return model

    def load_weights(self, folder: Path) -> None:
        load_hf(_Body(self.model), folder, self.architecture)  # the head is in no folder

    @torch.no_grad()
    def set_weights(self, policy: Policy) -> None:
        """Take over the weights of a policy of the same architecture, all but the head."""
        own = dict(self.model.named_parameters())
        for name, parameter in policy.model.named_parameters():
            own[name].copy_(parameter)
        self._optimizer.reload_model_params()


class _Body(torch.nn.Module):
    """The model as a folder knows it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._inside = [model]

    def named_parameters(self, *args: object, **kwargs: object) -> Iterator[tuple[str, torch.nn.Parameter]]:  # type: ignore[override]
        return ((name, tensor) for name, tensor in self._inside[0].named_parameters() if not name.startswith(HEAD))
