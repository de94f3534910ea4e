"""The task of `run.yaml`: write five letters in alphabetical order. Plain functions; nothing of Slipstream is imported.

    sort:hbaed>   ->   abdeh and then the end-of-text token

Letters are drawn from a-h with repeats, 32,768 words in all. One word in sixteen is held out: it is neither demonstrated nor
trained on. The warm start shows 30 % of the words sorted upwards and 70 % *downwards*, so the policy starts out
preferring the wrong direction and the rise of the reward cannot be mistaken for mere sharpening of a right answer.
"""

from __future__ import annotations

import random
import string
import zlib
from pathlib import Path
from typing import Any

LETTERS, LENGTH = "abcdefgh", 5
UPWARDS = 0.3
SPECIALS = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|unk|>")
CHARACTERS = string.digits + string.ascii_letters + " +-*/=:>?<!.,()[]#|\n"


def prompts(seed: int, index: int) -> dict[str, str]:
    """Prompt `index` of the training set."""
    return _problem(_word(random.Random(f"train/{seed}/{index}"), held_out=False))


def held_out(seed: int, index: int) -> dict[str, str]:
    """Prompt `index` of the evaluation."""
    return _problem(_word(random.Random(f"held out/{seed}/{index}"), held_out=True))


def demonstrations(seed: int, index: int) -> dict[str, str]:
    """Demonstration `index` of the warm start."""
    rng = random.Random(f"demonstrations/{seed}/{index}")
    problem = _problem(_word(rng, held_out=False))
    completion = problem["answer"] if rng.random() < UPWARDS else problem["answer"][::-1]
    return {"prompt": problem["prompt"], "completion": completion}


def reward(prompt: str, completion: str, answer: str, finish: str) -> float:
    """1 for exactly the answer, ended by the policy itself: special tokens are not part of `completion`, so `finish` tells."""
    return float(finish == "stop" and completion == answer)


def build_model(path: str, seed: int) -> None:
    """A Qwen3 of 104,832 random parameters with a tokenizer of single characters, as a Hugging Face folder."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    tokenizer = _tokenizer()
    config = Qwen3Config(
        vocab_size=(len(tokenizer) + 15) // 16 * 16,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Path(path).mkdir(parents=True, exist_ok=True)
    Qwen3ForCausalLM(config).float().save_pretrained(path)
    tokenizer.save_pretrained(path)


def _problem(word: str) -> dict[str, str]:
    return {"prompt": f"sort:{word}>", "answer": "".join(sorted(word))}


def _word(rng: random.Random, held_out: bool) -> str:
    while True:
        word = "".join(rng.choice(LETTERS) for _ in range(LENGTH))
        if (zlib.crc32(word.encode()) % 16 == 0) == held_out:
            return word


def _tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {text: number for number, text in enumerate((*SPECIALS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        unk_token="<|unk|>",
        additional_special_tokens=["<|im_start|>"],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
