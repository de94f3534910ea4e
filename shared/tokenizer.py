"""Text to ids and back, by the model folder's own tokenizer: the one place where a prompt is tokenised.

The rollout tokenises a prompt once and everybody after it works with those ids. The supervised phase of the trainer uses the
same functions, so that a prompt looks the same in both. `transformers` is imported on first use only.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared.records import Message


class TokenizerError(ValueError):
    """The folder holds no usable tokenizer, or a prompt cannot be rendered with it."""


class Tokenizer:
    """The tokenizer of a Hugging Face folder."""

    def __init__(self, folder: str | Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise TokenizerError(f"{folder}: no tokenizer there ({error}); it needs tokenizer.json") from error
        if self._tokenizer.eos_token_id is None:
            raise TokenizerError(f"{folder}: the tokenizer names no eos_token; set it in tokenizer_config.json")

    @property
    def eos_id(self) -> int:
        return int(self._tokenizer.eos_token_id)

    def encode_prompt(self, prompt: str | list[Message]) -> list[int]:
        """A string as it stands, without special tokens; chat messages by the chat template, ready for the answer."""
        if isinstance(prompt, str):
            return list(self._tokenizer.encode(prompt, add_special_tokens=False))
        if not self._tokenizer.chat_template:
            raise TokenizerError(
                "the prompt is a list of messages, but the tokenizer has no chat template; use string prompts"
            )
        text = self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_completion(self, completion: str) -> list[int]:
        """An answer that ends: its ids and the end-of-text token."""
        return [*self._tokenizer.encode(completion, add_special_tokens=False), self.eos_id]

    def decode(self, ids: list[int]) -> str:
        """Text for rewards and people, special tokens dropped."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)
