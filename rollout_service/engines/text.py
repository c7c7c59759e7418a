"""Ids to text, many sequences at once, and where a stop string begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

EXTRA_TOKENS = 8
"""Tokens looked at before the shortest run that can hold a stop string: some decode to no text, or to part
of a character."""


class Detokenizer:
    """Decodes with a Hugging Face tokenizer, leaving special tokens out."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        clean = getattr(tokenizer, "clean_up_tokenization_spaces", False)
        # The fast back end decodes a whole batch in one call; the wrapper around it only adds the clean-up.
        self._backend = None if clean else backend

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        if not sequences:
            return []
        if self._backend is not None:
            return list(self._backend.decode_batch(sequences, skip_special_tokens=True))
        return [self._tokenizer.decode(list(ids), skip_special_tokens=True) for ids in sequences]


def stop_window(stop: Sequence[str]) -> int:
    """How many of the newest tokens must be decoded to see every stop string that the newest one ended.
    A token that decodes to text decodes to at least one byte of it."""
    return max(len(s.encode()) for s in stop) + EXTRA_TOKENS


def has_stop(text: str, stop: Sequence[str]) -> bool:
    return any(s in text for s in stop)


def trim(text: str, stop: Sequence[str]) -> str:
    """`text` up to where its first stop string begins."""
    ends = [at for s in stop if (at := text.find(s)) >= 0]
    return text[: min(ends)] if ends else text
