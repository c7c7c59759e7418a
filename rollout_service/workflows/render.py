"""Prompts become ids; and what a call of the engine came back with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import msgspec
import numpy as np
import numpy.typing as npt

from areal_async.prompts import Tokenizer, prompt_ids, prompt_text
from areal_async.trajectory.layout import FinishReason
from rollout_service.workflows.turns import Message

Prompt = str | Sequence[Message] | Sequence[int] | npt.NDArray[np.int32]
Ids = npt.NDArray[np.int32]


def is_chat(prompt: Prompt) -> TypeGuard[Sequence[Message]]:
    """Whether a prompt is chat messages, not text nor ids."""
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], dict)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as ids, and as text."""

    ids: Ids
    text: str


class Renderer:
    """Prompts to ids. A group's samples ask for the same prompt: the last ones are remembered."""

    def __init__(self, tokenizer: Tokenizer, remember: int = 64) -> None:
        self.tokenizer = tokenizer
        self._remember = remember
        self._known: dict[bytes, Rendered] = {}

    def __call__(self, prompt: Prompt) -> Rendered:
        """What begins a path: special tokens that the tokenizer puts first are there."""
        if not isinstance(prompt, str) and not is_chat(prompt):
            return Rendered(np.asarray(prompt, np.int32), "")
        return self._remembered("root", prompt)

    def following(self, text: str) -> Ids:
        """Ids of text that goes on with a path: no special token is put before it."""
        return self._remembered("more", text).ids

    def _remembered(self, kind: str, prompt: Any) -> Rendered:
        key = msgspec.msgpack.encode((kind, prompt))
        if key not in self._known:
            if kind == "root":
                ids, text = prompt_ids(self.tokenizer, prompt), prompt_text(self.tokenizer, prompt)
            else:
                tokenizer: Any = self.tokenizer
                ids, text = tokenizer(prompt, add_special_tokens=False)["input_ids"], prompt
            if len(self._known) >= self._remember:
                del self._known[next(iter(self._known))]
            self._known[key] = Rendered(np.asarray(ids, np.int32), text)
        return self._known[key]

    def special(self, token: int) -> bool:
        """Whether an id is one of the tokenizer's special tokens (an end of turn)."""
        return token in getattr(self.tokenizer, "all_special_ids", ())


@dataclass(frozen=True, slots=True)
class Reply:
    """What one call generated. `segment` is its place in the episode: the `parent` of what follows it."""

    segment: int
    token_ids: Ids
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    finish_reason: FinishReason
    text: str
    """Decoded, without special tokens and without the stop string."""
