"""Text to ids and back, by the model folder's own tokenizer: the one place where a prompt is tokenised.

The rollout tokenises a prompt once and everybody after it works with those ids. The supervised phase of the trainer uses the
same functions, so that a prompt looks the same in both. A folder whose tokenizer.json says all that its tokenizer does is read
by `tokenizers` alone: `transformers` brings torch along, seconds and hundreds of megabytes that a rollout worker has no use for.
It is imported for other folders and for chat templates. tests/shared/test_tokenizer.py holds both ways equal.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared.records import Message

PLAIN_CLASSES = {"TokenizersBackend", "PreTrainedTokenizerFast"}
"""Classes of transformers that do what tokenizer.json says and nothing else."""
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(ValueError):
    """The folder holds no usable tokenizer, or a prompt cannot be rendered with it."""


class Tokenizer:
    """The tokenizer of a Hugging Face folder."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._plain = _load_plain(self._folder)
        eos_id = self._plain[1] if self._plain else self._whole.eos_token_id
        if eos_id is None:
            raise TokenizerError(f"{folder}: the tokenizer names no eos_token; set it in tokenizer_config.json")
        self.eos_id = int(eos_id)

    def encode_prompt(self, prompt: str | list[Message]) -> list[int]:
        """A string as it stands, without special tokens; chat messages by the chat template, ready for the answer."""
        if isinstance(prompt, str):
            return self._encode(prompt)
        if not self._whole.chat_template:
            raise TokenizerError(
                "the prompt is a list of messages, but the tokenizer has no chat template; use string prompts"
            )
        return self._encode(self._whole.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False))

    def encode_completion(self, completion: str) -> list[int]:
        """An answer that ends: its ids and the end-of-text token."""
        return [*self._encode(completion), self.eos_id]

    def decode(self, ids: list[int]) -> str:
        """Text for rewards and people, special tokens dropped."""
        if self._plain:
            return str(self._plain[0].decode(ids, skip_special_tokens=True))
        return str(self._whole.decode(ids, skip_special_tokens=True))

    def _encode(self, text: str) -> list[int]:
        if self._plain:
            return list(self._plain[0].encode(text, add_special_tokens=False).ids)
        return list(self._whole.encode(text, add_special_tokens=False))

    @cached_property
    def _whole(self) -> Any:
        """As transformers sees it."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(str(self._folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise TokenizerError(f"{self._folder}: no tokenizer there ({error}); it needs tokenizer.json") from error


def _load_plain(folder: Path) -> tuple[Any, int | None] | None:
    """(tokenizer, id of the end of text) from tokenizer.json, or None if that is not the whole truth about this folder."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        model = json.loads((folder / "tokenizer.json").read_text())
    except (OSError, ValueError):
        return None
    if config.get("tokenizer_class") not in PLAIN_CLASSES or config.get("clean_up_tokenization_spaces", True):
        return None
    added = {token["content"]: bool(token.get("special")) for token in model.get("added_tokens", [])}
    if any(added.get(token) is not special for token, special in _named(config).items()):  # transformers would add them
        return None
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    eos = config.get("eos_token")
    return tokenizer, tokenizer.token_to_id(_content(eos)) if eos else None


def _named(config: dict[str, Any]) -> dict[str, bool]:
    """The added tokens that tokenizer_config.json names, and whether they are special."""
    decoder = (config.get("added_tokens_decoder") or {}).values()
    named = {_content(token): bool(token.get("special")) for token in decoder}
    extra = [*(config.get("extra_special_tokens") or []), *(config.get("additional_special_tokens") or [])]
    return named | {_content(token): True for token in [*(config.get(name) for name in SPECIAL), *extra] if token}


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
