"""Qwen3 dense forward on plain torch, over the weights of a Hugging Face folder.

Owns the forward pass; its parameters are `tensors.Tensors`. Guarantees:
* logits and greedy tokens equal those of `transformers` up to rounding (tests/rollout/test_light_model.py);
* a row's result does not depend on the rows beside it, to the last bit on a CPU: callers keep `MIN_ROWS` rows and lengths in
  multiples of `LENGTH_UNIT`, because below and between those the CPU's matrix kernels sum in another order
  (tests/rollout/test_light_engine.py, seeded sampling).

The rotary pairs of q and k are stored interleaved, so that rotation is one complex product; q·k does not change when both
are permuted alike, and `parameters` shows the Hugging Face order.

Shapes: N tokens of all rows, E hidden, H query heads, G key-value heads, S = H + 2G, D head size, V vocabulary
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from services.rollout.engines.light.tensors import Parameter, Tensors
from services.rollout.engines.receiving import DTYPES

MIN_ROWS = 4
LENGTH_UNIT = 16
KNOWN = ("Qwen3ForCausalLM",)
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class ModelError(ValueError):
    """The folder cannot be served. The text names the file or field and what is known."""


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the forward needs of config.json and generation_config.json."""

    architecture: str
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied: bool
    eos_ids: frozenset[int]
    dtype: torch.dtype

    @classmethod
    def read(cls, folder: Path) -> ModelConfig:
        raw = _json(folder / "config.json")
        architectures = raw.get("architectures") or [f"model_type {raw.get('model_type')!r}"]
        if architectures[0] not in KNOWN:
            raise ModelError(
                f"{folder}: the light engine does not know {architectures[0]}; it knows {', '.join(KNOWN)} "
                "(dense); serve other models with engine: sglang"
            )
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        _refuse_variants(folder, raw, rope)
        generation = folder / "generation_config.json"
        eos = (_json(generation) if generation.exists() else {}).get("eos_token_id", raw.get("eos_token_id"))
        dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
        if dtype not in DTYPES:
            raise ModelError(f"{folder / 'config.json'}: dtype {dtype!r} is none of {', '.join(DTYPES)}")
        return cls(
            architecture=architectures[0],
            layers=_number(folder, raw, "num_hidden_layers"),
            hidden=_number(folder, raw, "hidden_size"),
            feed_forward=_number(folder, raw, "intermediate_size"),
            heads=_number(folder, raw, "num_attention_heads"),
            kv_heads=_number(folder, raw, "num_key_value_heads"),
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            vocab=_number(folder, raw, "vocab_size"),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            max_positions=int(raw.get("max_position_embeddings", 32768)),
            tied=bool(raw.get("tie_word_embeddings", False)),
            eos_ids=frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos]),
            dtype=DTYPES[dtype],
        )


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: cannot be read ({error}); a Hugging Face model folder is needed") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return value


def _number(folder: Path, raw: dict[str, Any], key: str) -> int:
    if not isinstance(raw.get(key), int):
        raise ModelError(f"{folder / 'config.json'}: {key} is missing or not a whole number")
    return raw[key]


def _refuse_variants(folder: Path, raw: dict[str, Any], rope: dict[str, Any]) -> None:
    variants = {
        "attention_bias": raw.get("attention_bias", False) is not False,
        "use_sliding_window": raw.get("use_sliding_window", False) is not False,
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "rope_parameters.rope_type": rope.get("rope_type", rope.get("type", "default")) != "default",
        "quantization_config": raw.get("quantization_config") is not None,
    }
    wrong = [name for name, is_wrong in variants.items() if is_wrong]
    if wrong:
        raise ModelError(
            f"{folder / 'config.json'}: {', '.join(wrong)}: only the plain Qwen3 form is known to the light engine "
            "(no biases, no sliding window, silu, default rope, no quantization); serve this model with engine: sglang"
        )


class Cache(Protocol):
    """Where a forward pass leaves keys and values and what it attends to: `kv_cache.Prefill` and `kv_cache.Decode`."""

    def attend(self, layer: int, qkv_NSD: torch.Tensor) -> torch.Tensor:
        """Store the new keys and values; the attention's result [N, H*D]. Heads: queries, then keys, then values."""
        ...


class Qwen3:
    """The model: `hidden` runs all layers over new tokens, `logits` the head over chosen rows."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self.live = Tensors(config, device, dtype)
        """What it computes with. May be exchanged between two steps."""
        self._rotations = _rotations(config, device)
        self._eps = torch.full((1,), config.norm_eps, device=device)

    def let_go(self) -> None:
        """Give the weights' memory back; only shapes stay, until other weights are put in `live`."""
        self.live = self.live.beside(torch.device("meta"))

    @property
    def parameters(self) -> dict[str, Parameter]:
        return self.live.parameters

    def check(self, name: str, shape: tuple[int, ...]) -> str | None:
        """Why a tensor cannot be loaded under this name, or None."""
        known = self.parameters.get(name)
        if known is None:
            return f"{name}: the model has no such parameter (names are those of the Hugging Face folder)"
        if tuple(shape) != known.shape:
            return f"{name}: shape {list(shape)}, the model has {list(known.shape)}"
        return None

    @torch.inference_mode()
    def hidden(self, ids_N: torch.Tensor, positions_N: torch.Tensor, cache: Cache) -> torch.Tensor:
        """The last layer's states [N, E] of new tokens; their keys and values go to the cache."""
        c, live = self.config, self.live
        rotation_N1C = self._rotations.index_select(0, positions_N).unsqueeze(1)
        x_NE = live.embed.index_select(0, ids_N)
        for index, layer in enumerate(live.layers):
            h_NE = self._norm(x_NE, layer.input_norm)
            qkv_NSD = torch.mm(h_NE, layer.qkv).view(-1, c.heads + 2 * c.kv_heads, c.head_dim)
            self._rotate(qkv_NSD[:, : c.heads + c.kv_heads], layer.qk_norm, rotation_N1C)
            x_NE.addmm_(cache.attend(index, qkv_NSD), layer.out)
            h_NE = self._norm(x_NE, layer.post_norm)
            gate, up = torch.mm(h_NE, layer.gate_up).split(c.feed_forward, -1)
            x_NE.addmm_(F.silu(gate).mul_(up), layer.down)
        return x_NE

    @torch.inference_mode()
    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] in float32. Pads to MIN_ROWS rows for the matrix product."""
        rows = hidden_NE.shape[0]
        if rows < MIN_ROWS:
            hidden_NE = F.pad(hidden_NE, (0, 0, 0, MIN_ROWS - rows))
        live = self.live
        return F.linear(self._norm(hidden_NE, live.final_norm), live.head)[:rows].float()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last axis."""
        if x.is_cuda:
            return F.rms_norm(x, x.shape[-1:], weight, self.config.norm_eps)
        wide = x.float()
        return (wide * self._scale(wide)).to(x.dtype).mul_(weight)

    def _scale(self, x: torch.Tensor) -> torch.Tensor:
        """1 / root mean square. Half the time of `F.rms_norm` on a CPU, which runs a chain of small kernels there."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.addcmul(self._eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()

    def _rotate(self, qk: torch.Tensor, weight: torch.Tensor, rotation_N1C: torch.Tensor) -> None:
        """Normalise and rotate queries and keys in place, in float32."""
        wide = qk.float()
        if wide is not qk:
            wide = (wide * self._scale(wide)).to(qk.dtype).mul_(weight).float()
        else:
            wide.mul_(self._scale(wide)).mul_(weight)
        torch.view_as_complex(wide.view(*wide.shape[:-1], -1, 2)).mul_(rotation_N1C)
        if wide is not qk:
            qk.copy_(wide)


def _rotations(config: ModelConfig, device: torch.device) -> torch.Tensor:
    """e^(i * position * frequency), [positions, D/2], computed in float32 as transformers does."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequency = 1.0 / (config.rope_theta**exponent)
    # Padding may reach beyond the last position.
    positions = torch.arange(round_up(config.max_positions, LENGTH_UNIT))
    angle = torch.outer(positions.float(), frequency)
    return torch.polar(torch.ones_like(angle), angle).to(device)


def load(folder: Path, device: torch.device, dtype: torch.dtype | None = None) -> Qwen3:
    """The model in `folder`. `dtype` None takes the folder's own. Raises ModelError."""
    config = ModelConfig.read(folder)
    model = Qwen3(config, device, dtype or config.dtype)
    for name, tensor in read_tensors(folder, model):
        model.parameters[name].write(tensor)
    return model


def read_tensors(folder: Path, model: Qwen3) -> list[tuple[str, torch.Tensor]]:
    """All tensors of a Hugging Face folder, checked against the model: every parameter is there, and none that it lacks."""
    found: dict[str, torch.Tensor] = {}
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as tensors:
                found.update((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118 - a safetensors file is no mapping
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}: cannot be read ({error})") from error
    if model.config.tied:
        found.pop("lm_head.weight", None)  # some folders store the shared matrix twice
    problems = [why for name, tensor in found.items() if (why := model.check(name, tuple(tensor.shape)))]
    problems += [f"{name}: missing" for name in model.parameters if name not in found]
    if problems:
        raise ModelError(f"{folder}: the weights do not fit config.json: {'; '.join(problems[:5])}")
    return list(found.items())


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX_FILE).exists():
        return [folder / name for name in sorted(set(_json(folder / INDEX_FILE)["weight_map"].values()))]
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    raise ModelError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}; save the model as safetensors")
