"""Qwen3, dense: no biases, queries and keys normalised a head."""

from __future__ import annotations

from services.trainer.families.architecture import Architecture, Fields
from services.trainer.families.entries import ATTENTION, MLP, NORMS, QK_NORM

LAYER = (*NORMS, *ATTENTION, *QK_NORM, *MLP)


def read(fields: Fields) -> Architecture:
    fields.require("attention_bias", False)
    fields.require("use_sliding_window", False)
    return fields.decoder("qwen3", qk_norm=True)
