"""Token ids of a task's prompt, by one rule for training, generation and evaluation.

A text is tokenized unchanged. A list of chat messages is rendered with the tokenizer's chat template, with
the assistant's turn opened. If the tokenizer has no template, the contents are joined by newlines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

FAST_TOKENIZERS = "transformers.tokenization_utils_tokenizers"
"""Module that defines the standard encoding of a fast tokenizer. If a class overrides the encoding, its
method is in another module."""


class Tokenizer(Protocol):
    """The members of a Hugging Face tokenizer that this project uses."""

    chat_template: Any

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Any: ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...


T = TypeVar("T", bound=Tokenizer)


def with_template_args(tokenizer: T, arguments: Mapping[str, Any]) -> T:
    """Set arguments of the tokenizer's chat template for all calls, and return the tokenizer. `arguments` is
    a job's `rollout.template_args`. Arguments of a call take precedence."""
    if arguments:
        setattr(tokenizer, "apply_chat_template", partial(tokenizer.apply_chat_template, **arguments))  # noqa: B010
    return tokenizer


def prompt_text(
    tokenizer: Tokenizer,
    prompt: str | Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    opened: bool = True,
) -> str:
    """Return the text of `prompt` that the model receives, before tokenization. `tools` are schemas for the
    chat template. The template opens the assistant's turn unless `opened` is false."""
    if not isinstance(prompt, str) and tokenizer.chat_template:
        given, schemas = [dict(message) for message in prompt], [dict(tool) for tool in tools]
        how = {"tokenize": False, "add_generation_prompt": opened}
        return str(tokenizer.apply_chat_template(given, tools=schemas or None, **how))
    return message_texts(prompt)


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
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    encode = getattr(type(tokenizer), "_encode_plus", None)
    plain = getattr(encode, "__module__", "") == FAST_TOKENIZERS and not tokenizer.split_special_tokens  # type: ignore[attr-defined]
    if plain and backend.truncation is backend.padding is None and not backend.encode_special_tokens:
        ids: list[int] = backend.encode(text, add_special_tokens=special).ids
        return ids
    return list((tokenizer(text) if special else tokenizer(text, add_special_tokens=False))["input_ids"])


def prompt_ids(
    tokenizer: Tokenizer, prompt: str | Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> list[int]:
    """Return the token ids of `prompt`, including the special tokens that the tokenizer adds. `tools` are
    schemas for the chat template."""
    if not isinstance(prompt, str) and tokenizer.chat_template:
        encoded = tokenizer.apply_chat_template(
            list(prompt),
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            tools=[dict(tool) for tool in tools] or None,
        )
        return list(encoded["input_ids"])
    return text_ids(tokenizer, prompt_text(tokenizer, prompt))
