"""Token ids of a task's prompt, by one rule for training, generation and evaluation.

A text is tokenized unchanged. A list of chat messages is rendered with the tokenizer's chat template, with
the assistant's turn opened. If the tokenizer has no template, the contents are joined by newlines.

A text of a task, a user, a tool or a model may contain the characters of an image's mark, such as
`<|image_pad|>`. For a model that reads images, only the chat template writes marks (`with_plain_marks`):
`broken` puts `BREAK` into such characters before the template sees them, and tokenizing splits the rendering
there and drops it. The characters thus become ordinary tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

FAST_TOKENIZERS = "transformers.tokenization_utils_tokenizers"
"""Module that defines the standard encoding of a fast tokenizer. If a class overrides the encoding, its
method is in another module."""

BREAK = "\ufdd0"
"""Character inside characters that are no mark. Unicode reserves it for such internal uses."""
MARK_NAMES = re.compile("image|img|vision|video|audio|media|patch", re.IGNORECASE)
"""Parts of the names of special tokens for images, videos and sounds."""


class Tokenizer(Protocol):
    """The members of a Hugging Face tokenizer that this project uses."""

    chat_template: Any

    def get_added_vocab(self) -> dict[str, int]: ...

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Any: ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...


T = TypeVar("T", bound=Tokenizer)


def with_template_args(tokenizer: T, arguments: Mapping[str, Any]) -> T:
    """Set arguments of the tokenizer's chat template for all calls, and return the tokenizer. `arguments` is
    a job's `rollout.template_args`. Arguments of a call take precedence."""
    if arguments:
        setattr(tokenizer, "apply_chat_template", partial(tokenizer.apply_chat_template, **arguments))  # noqa: B010
    return tokenizer


def with_plain_marks(tokenizer: T) -> T:
    """Have `broken` find the tokenizer's marks of images, videos and sounds in texts. Return the tokenizer.
    Only tokenizers of models that read images need this."""
    found = sorted(filter(MARK_NAMES.search, tokenizer.get_added_vocab()), key=len, reverse=True)
    if found:
        setattr(tokenizer, "plain_marks", re.compile("|".join(map(re.escape, found))))  # noqa: B010
    return tokenizer


def broken(tokenizer: Tokenizer, value: Any) -> Any:
    """Return texts, or messages and other values with texts, with `BREAK` in each mark."""
    marks: re.Pattern[str] | None = getattr(tokenizer, "plain_marks", None)
    return value if marks is None else _broken(marks, value)


def _broken(marks: re.Pattern[str], value: Any) -> Any:
    if isinstance(value, str):
        return marks.sub(lambda found: found[0][0] + BREAK + found[0][1:], value)
    if isinstance(value, Mapping):
        return {_broken(marks, name): _broken(marks, each) for name, each in value.items()}
    if not isinstance(value, list | tuple):
        return value
    made = [_broken(marks, each) for each in value]
    texts = [each for each in made if isinstance(each, dict) and isinstance(each.get("text"), str)]
    if marks.search("".join(each["text"] for each in texts)):  # a mark in two parts of a message
        for each in texts:
            each["text"] += BREAK
    return made if isinstance(value, list) else tuple(made)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """Return the parts of a text that are tokenized one by one. Without a mark, it is the whole text."""
    return [text] if getattr(tokenizer, "plain_marks", None) is None else text.split(BREAK)


def prompt_text(
    tokenizer: Tokenizer,
    prompt: str | Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    opened: bool = True,
) -> str:
    """Return the text of `prompt` that the model receives, before tokenization. `tools` are schemas for the
    chat template. The template opens the assistant's turn unless `opened` is false. Marks in texts are
    broken."""
    if not isinstance(prompt, str) and tokenizer.chat_template:
        given = broken(tokenizer, [dict(message) for message in prompt])
        schemas = broken(tokenizer, [dict(tool) for tool in tools])
        how = {"tokenize": False, "add_generation_prompt": opened}
        return str(tokenizer.apply_chat_template(given, tools=schemas or None, **how))
    return str(broken(tokenizer, message_texts(prompt)))


def message_texts(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a prompt without a template. It is the text, or the contents of the messages, joined by
    newlines."""
    return prompt if isinstance(prompt, str) else "\n".join(map(content_text, prompt))


def content_text(message: Mapping[str, Any]) -> str:
    """Return the content of a message without its images."""
    content = message["content"]
    if not isinstance(content, list):
        return str(content)
    return "".join(part["text"] for part in content if part["type"] == "text")


def text_ids(tokenizer: Tokenizer, text: str, *, special: bool = True) -> list[int]:
    """Return the token ids of `text`. With `special`, they include the tokens that the tokenizer adds.

    A fast tokenizer's back end is called directly, because the wrapper takes ten times as long for a short
    prompt. The wrapper is used only if the tokenizer's class has its own encoding, or if the tokenizer is set
    to pad, to truncate or to split special tokens."""
    first, *others = pieces(tokenizer, text)
    ids = _piece_ids(tokenizer, first, special)
    for piece in others:
        ids += _piece_ids(tokenizer, piece, special=False)
    return ids


def _piece_ids(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    encode = getattr(type(tokenizer), "_encode_plus", None)
    plain = getattr(encode, "__module__", "") == FAST_TOKENIZERS and not tokenizer.split_special_tokens  # type: ignore[attr-defined]
    if plain and backend.truncation is backend.padding is None and not backend.encode_special_tokens:
        ids: list[int] = backend.encode(text, add_special_tokens=special).ids
        return ids
    return list((tokenizer(text) if special else tokenizer(text, add_special_tokens=False))["input_ids"])


def prompt_ids(
    tokenizer: Tokenizer, prompt: str | Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> list[int]:
    """Return the token ids of `prompt`, including the special tokens that the tokenizer adds. `tools` are
    schemas for the chat template."""
    whole = isinstance(prompt, str) or not tokenizer.chat_template  # a template writes special tokens itself
    return text_ids(tokenizer, prompt_text(tokenizer, prompt, tools), special=whole)
