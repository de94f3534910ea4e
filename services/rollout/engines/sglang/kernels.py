"""Imported as `sgl_kernel` on a CPU: what SGLang's Python takes from its compiled kernels at import time.

Any name can be imported; calling one raises, and names it. What `torch_native` attention and PyTorch sampling do needs none of
them. It must stay a plain module without parts: SGLang falls back to its own code where a part of it cannot be imported, and
where `hasattr` finds nothing (`fused_qk_norm_cpu`, `fused_qk_norm_rope_cpu`, `convert_weight_packed`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__version__ = "0.4.10+slipstream.cpu"
MASK = 0xFFFFFFFF
BOUND_AT_IMPORT = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_moe_router_cpu",
    "rmsnorm_cpu",
    "fused_dual_residual_rmsnorm_cpu",
    "fused_gdn_gating_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
)
"""Operators that some of SGLang's model files look up while they are imported."""


def missing(name: str) -> Callable[..., Any]:
    def absent(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"sgl_kernel.{name}: SGLang has no build of its kernels for this CPU; use an option without it"
        )

    absent.__name__ = name
    return absent


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)
    return missing(name)


for _name in BOUND_AT_IMPORT:
    setattr(torch.ops.sgl_kernel, _name, missing(_name))
