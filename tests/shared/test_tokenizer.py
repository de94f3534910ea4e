"""Both ways of reading a tokenizer folder give the same ids and texts, and the quick one does without transformers and torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Raw

from shared.tokenizer import Tokenizer, TokenizerError

TEXTS = ["the quick brown fox", "naïve café – 数学", "a<|im_end|>b", "1+1=2\n\ttab"]


def write(folder: Path, **config: object) -> Path:
    """A byte-level BPE with special tokens, as checkpoints have it."""
    raw = Raw(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(TEXTS * 20, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    raw.add_special_tokens(["<|im_end|>", "<|pad|>"])
    raw.add_tokens([AddedToken("<think>", special=False)])
    raw.enable_truncation(4)  # as some checkpoints do by mistake
    folder.mkdir(exist_ok=True)
    raw.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | config))
    return folder


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[Tokenizer, Tokenizer]:
    """The same tokenizer by the quick way and by transformers."""
    folder = write(tmp_path_factory.mktemp("tokenizer"))
    quick, whole = Tokenizer(folder), Tokenizer(folder)
    assert quick._plain is not None
    whole._plain = None
    return quick, whole


@settings(max_examples=150, deadline=None)
@given(st.text() | st.lists(st.sampled_from(["<|im_end|>", "<think>", " ", "the", "fox ", "数"])).map("".join))
def test_texts_become_the_same_ids_and_ids_the_same_texts(both, text):
    quick, whole = both
    ids = quick.encode_prompt(text)
    assert ids == whole.encode_prompt(text)
    assert quick.encode_completion(text) == whole.encode_completion(text) == [*ids, quick.eos_id]
    assert quick.decode(ids) == whole.decode(ids)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 280)))
def test_any_ids_become_the_same_text(both, ids):
    quick, whole = both
    assert quick.decode(ids) == whole.decode(ids)


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "LlamaTokenizer"},
        {"clean_up_tokenization_spaces": True},
        {"extra_special_tokens": ["<|new|>"]},
        {"bos_token": "<think>"},
    ],
    ids=["another class", "cleans up", "a token of its own", "made special"],
)
def test_what_tokenizer_json_does_not_say_is_left_to_transformers(tmp_path, config):
    assert Tokenizer(write(tmp_path / "one"))._plain is not None
    folder = write(tmp_path / "two", **config)
    from shared.tokenizer import _load_plain

    assert _load_plain(folder) is None


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(TokenizerError, match=r"needs tokenizer\.json"):
        Tokenizer(tmp_path)


def test_a_tokenizer_without_an_end(tmp_path):
    with pytest.raises(TokenizerError, match="names no eos_token"):
        Tokenizer(write(tmp_path, eos_token=None))


def test_chat_messages_go_through_the_template(tmp_path):
    tokenizer = Tokenizer(write(tmp_path, chat_template="{% for m in messages %}[{{ m.content }}]{% endfor %}"))
    assert tokenizer.encode_prompt([{"role": "user", "content": "fox"}]) == tokenizer.encode_prompt("[fox]")
    with pytest.raises(TokenizerError, match="no chat template"):
        Tokenizer(write(tmp_path)).encode_prompt([{"role": "user", "content": "fox"}])


def test_plain_prompts_bring_in_neither_transformers_nor_torch(tmp_path):
    write(tmp_path)
    code = f"from shared.tokenizer import Tokenizer; Tokenizer({str(tmp_path)!r}).encode_prompt('fox'); import sys; "
    code += "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
