"""The task of `async_vs_sync.yaml`: go on writing letters in the order of the alphabet. Plain functions.

    dhcagebf   ->   fgaahhbh...      reward: the share of letters that do not stand before their left neighbour

Letters come in three families of eight, and an answer stays in the family of the prompt's last letter. That letter is the length
prefix of the heavy-tailed model: the family sets the chance that the answer ends after each letter. Models are made so, not
trained: the embedding is one-hot, the output layer a table of neighbours, and the layers begin by adding next to nothing. So
lengths are known, what is learnt (the order inside a family) needs no supervised phase, and a token costs what it costs in any
Qwen3 of this size.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

FAMILIES = ("abcdefgh", "ijklmnop", "qrstuvwx")
SHARES = (0.65, 0.27, 0.08)
"""How often a prompt asks for each family."""
ENDLESS = (0.0, 0.0, 0.0)
HEAVY = (1 / 24, 1 / 96, 1 / 400)
"""Chance of an end after each letter: the family with a twelfth of the prompts gets more than a third of all tokens."""
SPECIALS = ("<|end|>", "<|pad|>", "<|unk|>")
HIDDEN, LAYERS = 192, 3
NEVER = -30.0
PROMPT_LETTERS = 8


def prompts(seed: int, index: int) -> dict[str, str]:
    rng = random.Random(f"{seed}/{index}")
    letters = [rng.choice(string.ascii_lowercase[:24]) for _ in range(PROMPT_LETTERS - 1)]
    family = rng.choices(FAMILIES, SHARES)[0]
    return {"prompt": "".join(letters) + rng.choice(family)}


def reward(prompt: str, completion: str) -> float:
    if not completion:
        return 0.5
    return sum(left <= right for left, right in pairwise(prompt[-1] + completion)) / len(completion)


def build_fixed(path: str, seed: int) -> None:
    """Answers never end by themselves: all have `sampling.max_new_tokens`."""
    _build(path, seed, ENDLESS)


def build_heavy(path: str, seed: int) -> None:
    """Most answers are short, a few very long."""
    _build(path, seed, HEAVY)


def _build(path: str, seed: int, ends: Sequence[float]) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    tokenizer = _tokenizer()
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model: Any = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.05)
            layer.mlp.down_proj.weight.mul_(0.05)
        model.model.embed_tokens.weight.zero_().fill_diagonal_(1.0)
        # The last norm scales a one-hot vector to a length of sqrt(HIDDEN).
        table_VV = torch.full((config.vocab_size, config.vocab_size), NEVER)
        _fill(table_VV, tokenizer, ends)
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, : config.vocab_size] = table_VV.T / HIDDEN**0.5
    Path(path).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _fill(table_VV: Any, tokenizer: Any, ends: Sequence[float]) -> None:
    """[token, next token] log-odds."""
    import math

    for family, end in zip(FAMILIES, ends, strict=True):
        ids = tokenizer.convert_tokens_to_ids(list(family))
        for token in ids:
            table_VV[token, ids] = 0.0
            if end:
                table_VV[token, tokenizer.eos_token_id] = math.log(len(family) * end / (1 - end))


def _tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {text: number for number, text in enumerate((*SPECIALS, *"".join(FAMILIES)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", unk_token="<|unk|>"
    )
