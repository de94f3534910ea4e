"""The parameters of the light engine's model, fused as the matrix products want them, under their Hugging Face names.

One `Tensors` is what the model computes with; a second one, filled beside it, becomes the model's in one assignment: that is how
weights are switched. Every parameter can be read and written under its Hugging Face name and in its shape, whatever the fused
layout is. The rotary pairs of q and k are stored interleaved (model.py). tests/rollout/test_light_model.py.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from services.rollout.engines.light.model import ModelConfig


@dataclass(slots=True)
class Layer:
    """Matrices are transposed views, so that a step need not make them."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qk_norm: torch.Tensor
    out: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class Parameter:
    """A live parameter under its Hugging Face name: `view` shows it in the fused storage, perhaps with more dimensions."""

    view: torch.Tensor
    shape: tuple[int, ...]
    repeated: bool = False
    """The view's first axis repeats the same values (a norm that all heads share)."""

    @torch.inference_mode()
    def write(self, tensor: torch.Tensor) -> None:
        self.view.copy_(tensor.reshape(self.view.shape[1:] if self.repeated else self.view.shape))

    @torch.inference_mode()
    def read(self) -> torch.Tensor:
        """A copy in the Hugging Face shape."""
        return (self.view[0] if self.repeated else self.view).reshape(self.shape).clone()


class Tensors:
    """All parameters of a model, not yet filled."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self.parameters: dict[str, Parameter] = {}
        c = config
        self.embed = self._add("model.embed_tokens.weight", (c.vocab, c.hidden))
        self.layers = [self._layer(i) for i in range(c.layers)]
        self.final_norm = self._add("model.norm.weight", (c.hidden,))
        self.head = self.embed if c.tied else self._add("lm_head.weight", (c.vocab, c.hidden))

    def _add(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._empty(*shape)
        self.parameters[name] = Parameter(tensor, shape)
        return tensor

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def _layer(self, index: int) -> Layer:
        c, prefix = self.config, f"model.layers.{index}."
        half, q, kv = c.head_dim // 2, c.heads * c.head_dim, c.kv_heads * c.head_dim
        qkv = self._empty(q + 2 * kv, c.hidden)
        qk_norm = self._empty(c.heads + c.kv_heads, c.head_dim)
        gate_up = self._empty(2 * c.feed_forward, c.hidden)
        query = qkv[:q].view(c.heads, half, 2, c.hidden).transpose(1, 2)
        key = qkv[q : q + kv].view(c.kv_heads, half, 2, c.hidden).transpose(1, 2)
        norms = qk_norm.view(-1, half, 2).transpose(1, 2)
        self.parameters |= {
            prefix + "self_attn.q_proj.weight": Parameter(query, (q, c.hidden)),
            prefix + "self_attn.k_proj.weight": Parameter(key, (kv, c.hidden)),
            prefix + "self_attn.v_proj.weight": Parameter(qkv[q + kv :], (kv, c.hidden)),
            prefix + "self_attn.q_norm.weight": Parameter(norms[: c.heads], (c.head_dim,), repeated=True),
            prefix + "self_attn.k_norm.weight": Parameter(norms[c.heads :], (c.head_dim,), repeated=True),
            prefix + "mlp.gate_proj.weight": Parameter(gate_up[: c.feed_forward], (c.feed_forward, c.hidden)),
            prefix + "mlp.up_proj.weight": Parameter(gate_up[c.feed_forward :], (c.feed_forward, c.hidden)),
        }
        return Layer(
            input_norm=self._add(prefix + "input_layernorm.weight", (c.hidden,)),
            qkv=qkv.t(),
            qk_norm=qk_norm,
            out=self._add(prefix + "self_attn.o_proj.weight", (c.hidden, q)).t(),
            post_norm=self._add(prefix + "post_attention_layernorm.weight", (c.hidden,)),
            gate_up=gate_up.t(),
            down=self._add(prefix + "mlp.down_proj.weight", (c.hidden, c.feed_forward)).t(),
        )

    def beside(self, device: torch.device) -> Tensors:
        """Another one of the same shapes, not filled. On the device `meta` it has no memory at all."""
        return Tensors(self.config, device, self.dtype)

    @property
    def hollow(self) -> bool:
        """There are shapes only, and no memory."""
        return self.device.type == "meta"

    @torch.inference_mode()
    def fill_up(self, source: Tensors, present: Container[str]) -> None:
        """Take from `source` every parameter that is not `present`."""
        for name, parameter in self.parameters.items():
            if name not in present:
                parameter.view.copy_(source.parameters[name].view)
