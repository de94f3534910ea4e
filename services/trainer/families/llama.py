"""Llama 2 and 3 and what is built alike, such as SmolLM2: no biases, nothing normalised but the layers' inputs."""

from __future__ import annotations

from services.trainer.families.architecture import Architecture, Fields
from services.trainer.families.entries import ATTENTION, MLP, NORMS

LAYER = (*NORMS, *ATTENTION, *MLP)


def read(fields: Fields) -> Architecture:
    fields.require("attention_bias", False)
    fields.require("mlp_bias", False)
    return fields.decoder("llama")
