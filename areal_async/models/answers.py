"""Answers of a model: the ids that end an answer, its text, and its thoughts.

- An answer ends with any of these ids: the ids in the generation config and the config, the tokenizer's
  end-of-sequence token, and the chat template's end-of-turn token. All services get these ids from `end_ids`.
- The text of an answer contains the model's special tokens, such as `<think>`. Only end tokens and padding
  are removed.
- Thoughts (reasoning such as `<think>…</think>`) are not part of the spoken text. Tools, rewards and the
  gateway read an answer through `spoken_parts`.

This module needs neither torch nor transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from areal_async.models.prompts import text_ids

GENERATION_CONFIG, CONFIG = "generation_config.json", "config.json"
TOKENIZER, TEMPLATE = "the tokenizer's eos_token", "the chat template"
PROBE = "areal-turn-7f3a"  # No template changes this text, so it marks an answer in a rendered chat


# --- ends of an answer -------------------------------------------------------------------------------


def end_ids(tokenizer: Any, folder: Path | None = None) -> tuple[int, ...]:
    """Return the ids that end an answer, in order. `folder` is the model's folder; without it, the model's
    files are ignored. If the result is empty, an answer ends only at a stop text or at its length limit."""
    return tuple(sorted(set().union(*end_sources(tokenizer, folder).values())))


def end_sources(tokenizer: Any, folder: Path | None = None) -> dict[str, frozenset[int]]:
    """Return the ids that end an answer, by the file or part of the model that names them. A missing part has
    an empty set."""
    files = {name: _ids_in(folder / name) for name in (GENERATION_CONFIG, CONFIG)} if folder else {}
    eos, end = getattr(tokenizer, "eos_token_id", None), turn_end(tokenizer)
    return files | {TOKENIZER: _ids_of(eos), TEMPLATE: _ids_of(end)}


def turn_closing(tokenizer: Any) -> str | None:
    """Return the text that the chat template adds after an assistant's message. Return None if there is no
    template or it does not render such a chat."""
    if not tokenizer.chat_template:
        return None
    chat = [{"role": "user", "content": "."}, {"role": "assistant", "content": PROBE}]
    try:
        shown = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=False))
    except Exception:  # A template may raise anything
        return None
    _, found, closing = shown.rpartition(PROBE)
    return closing if found else None


def turn_end(tokenizer: Any) -> int | None:
    """Return the token with which the chat template ends an assistant's turn. Return None if there is no such
    token, or if the turn ends with ordinary characters, which also occur inside answers."""
    closing = (turn_closing(tokenizer) or "").lstrip()
    ids = text_ids(tokenizer, closing, special=False) if closing else []
    first = next((token for token in ids if tokenizer.decode([token]).strip()), None)
    marks = {*getattr(tokenizer, "all_special_ids", ()), *getattr(tokenizer, "added_tokens_decoder", ())}
    return first if first in marks else None


def _ids_in(path: Path) -> frozenset[int]:
    try:
        found = json.loads(path.read_bytes())
        inner = found.get("text_config") or {}
        return _ids_of(found.get("eos_token_id")) | _ids_of(inner.get("eos_token_id"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return frozenset()


def _ids_of(value: object) -> frozenset[int]:
    values = value if isinstance(value, list | tuple) else [value]
    return frozenset(one for one in values if isinstance(one, int) and not isinstance(one, bool) and one >= 0)


# --- the text of an answer ---------------------------------------------------------------------------


class Detokenizer:
    """Decoder of answers with a Hugging Face tokenizer. It removes padding and the tokens in `ends`."""

    def __init__(self, tokenizer: Any, ends: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._left_out = {*ends, *_ids_of(getattr(tokenizer, "pad_token_id", None))}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        clean = getattr(tokenizer, "clean_up_tokenization_spaces", False)
        # The fast back end decodes a whole batch in one call. The wrapper around it only adds the clean-up.
        self._backend = None if clean else backend

    def decode(self, sequences: Sequence[Sequence[int]], *, whole: bool = False) -> list[str]:
        """Return the text of each sequence. With `whole`, end tokens and padding are included."""
        if not sequences:
            return []
        if not whole:
            sequences = [[token for token in ids if token not in self._left_out] for ids in sequences]
        if self._backend is not None:
            return list(self._backend.decode_batch(sequences, skip_special_tokens=False))
        how = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
        return [str(self._tokenizer.decode(list(ids), **how)) for ids in sequences]

    def text(self, ids: Sequence[int], *, whole: bool = False) -> str:
        return self.decode([ids], whole=whole)[0]


# --- thoughts and spoken parts -----------------------------------------------------------------------

THOUGHTS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
)
"""Tags around thoughts, by model family."""
_OPENING = tuple(opening for opening, _ in THOUGHTS)
_CLOSING = frozenset(closing for _, closing in THOUGHTS)
_TAGS = "|".join(re.escape(tag) for pair in THOUGHTS for tag in pair)
Span = tuple[int, int]


def opens_thought(prompt: str) -> bool:
    """Return whether a prompt ends with the opening tag of a thought, so that the answer begins inside a
    thought."""
    return prompt[-256:].rstrip().endswith(_OPENING)


def spoken(text: str, *, opened: bool = False) -> str:
    """Return an answer without its thoughts. The remaining parts are joined by newlines. See
    `spoken_parts`."""
    return "\n".join(text[start:end] for start, end in spoken_parts(text, opened=opened) if end > start)


def spoken_parts(
    text: str,
    *,
    opened: bool = False,
    marks: Sequence[str] = (),
    skip: Callable[[int, int], int] | None = None,
) -> list[Span]:
    """Return the parts of an answer outside its thoughts, in order. `opened` means that the prompt opened a
    thought.

    A thought ends at the first closing tag, or at the end of the text if there is none. A closing tag without
    an opening tag ends a thought that began with the text.

    With `marks` and `skip`, a caller can ignore tags inside a tool call: if one of the texts `marks` occurs
    outside of thoughts, `skip` gets its position and the start of the part, and returns the position at which
    the search for tags continues. The run time is linear in the length of the text."""
    pattern = re.compile("|".join((_TAGS, *map(re.escape, marks))))
    parts: list[Span] = []
    begin, at = None if opened else 0, 0
    while (found := pattern.search(text, at)) is not None:
        at, tag = found.end(), found[0]
        if tag in _CLOSING:
            if begin is not None:
                parts.clear()
            begin = at
        elif begin is None:
            continue
        elif tag in _OPENING:
            parts.append((begin, found.start()))
            begin = None
        elif skip is not None:
            at = max(at, skip(found.start(), begin))
    if begin is not None:
        parts.append((begin, len(text)))
    return parts
