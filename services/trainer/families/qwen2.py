"""Qwen2 and Qwen2.5, dense: biases on queries, keys and values."""

from __future__ import annotations

from services.trainer.families.architecture import Architecture, Fields
from services.trainer.families.entries import ATTENTION, MLP, NORMS, QKV_BIAS

LAYER = (*NORMS, *ATTENTION, *QKV_BIAS, *MLP)


def read(fields: Fields) -> Architecture:
    fields.require("use_sliding_window", False)
    return fields.decoder("qwen2", qkv_bias=True)
