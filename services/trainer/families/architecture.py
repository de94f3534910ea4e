"""The numbers of config.json that shape a decoder, and what reads them with refusals that name file and field. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ModelFolderError(ValueError):
    """The folder cannot be trained from. The text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts."""

    count: int
    top_k: int
    """Experts that work on each token."""
    ffn: int
    normalised: bool
    """The weights of the chosen experts sum up to 1."""
    layers: tuple[bool, ...]
    """Which layers have experts; the others have a dense MLP."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder with rotary positions, RMS norms, grouped queries and SwiGLU."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    tied: bool
    """Output layer shares the embedding's weight."""
    rope_factor: float = 1.0
    """Llama 3's stretching of long wavelengths; 1: none."""
    qkv_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised a head."""
    experts: Experts | None = None

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]


@dataclass(frozen=True, slots=True)
class Fields:
    """config.json. What is missing or not supported is a ModelFolderError that names it."""

    folder: Path
    values: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        if self.values.get(name) is None:
            raise ModelFolderError(f"{self.folder}/config.json: field {name!r} is missing; is the file complete?")
        return self.values[name]

    def get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def require(self, name: str, value: Any) -> None:
        """The field has this value, or is absent."""
        found = self.get(name, value)
        if found != value:
            raise ModelFolderError(
                f"{self.folder}/config.json: {name} is {found!r}; this trainer supports {value!r} only"
            )

    def decoder(self, family: str, **changes: Any) -> Architecture:
        """What all families spell alike; `changes` are the family's own."""
        self.require("hidden_act", "silu")
        heads = int(self["num_attention_heads"])
        theta, factor = self._rope()
        common: dict[str, Any] = {
            "layers": int(self["num_hidden_layers"]),
            "hidden": int(self["hidden_size"]),
            "heads": heads,
            "kv_heads": int(self.get("num_key_value_heads", heads)),
            "head_dim": int(self.get("head_dim", self["hidden_size"] // heads)),
            "ffn": int(self["intermediate_size"]),
            "vocab": int(self["vocab_size"]),
            "max_positions": int(self.get("max_position_embeddings", 32768)),
            "norm_eps": float(self.get("rms_norm_eps", 1e-6)),
            "rope_theta": theta,
            "rope_factor": factor,
            "tied": bool(self.get("tie_word_embeddings", False)),
        }
        return Architecture(family=family, **{**common, **changes})

    def _rope(self) -> tuple[float, float]:
        """(theta, Llama 3's factor). `rope_parameters` is the newer spelling of `rope_theta` and `rope_scaling`."""
        rope = self.get("rope_parameters", None) or self.get("rope_scaling", {})
        kind = rope.get("rope_type", rope.get("type", "default"))
        theta = float(rope.get("rope_theta", self.get("rope_theta", 10000.0)))
        if kind == "default":
            return theta, 1.0
        if kind != "llama3":
            raise ModelFolderError(
                f"{self.folder}/config.json: rope type {kind!r} is not supported; 'default' and 'llama3' are"
            )
        expected = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        for name, value in expected.items():
            if rope.get(name, value) != value:
                raise ModelFolderError(
                    f"{self.folder}/config.json: rope {name} is {rope[name]!r}; Megatron supports {value!r} only"
                )
        return theta, float(rope["factor"])
