"""Token ids of a task's prompt: one rule for training, generation and evaluation.

Text is tokenised as it is. A list of chat messages goes through the tokenizer's chat template with the
assistant's turn opened; a tokenizer without a template gets the contents joined by newlines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

FAST_TOKENIZERS = "transformers.tokenization_utils_tokenizers"
"""The module whose encoding a fast tokenizer has, unless its class has another."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    chat_template: Any

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Any: ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...


T = TypeVar("T", bound=Tokenizer)


def with_template_args(tokenizer: T, arguments: Mapping[str, Any]) -> T:
    """Make the chat template of the tokenizer take `arguments` (a job's `rollout.template_args`) in each
    call, and return it. Arguments of a call take precedence."""
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
    """Return the text that the model is given for `prompt`, before tokenisation. `tools` are schemas for the
    chat template, which opens the assistant's turn unless `opened` is false."""
    if not isinstance(prompt, str) and tokenizer.chat_template:
        given, schemas = [dict(message) for message in prompt], [dict(tool) for tool in tools]
        how = {"tokenize": False, "add_generation_prompt": opened}
        return str(tokenizer.apply_chat_template(given, tools=schemas or None, **how))
    return message_texts(prompt)


def message_texts(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a prompt without a template: the text, or the contents of the messages, joined by newlines."""
    return prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)


def text_ids(tokenizer: Tokenizer, text: str, *, special: bool = True) -> list[int]:
    """Return the token ids of `text`; with `special` including those that the tokenizer itself adds.

    A fast tokenizer's back end is asked directly, unless its class has an encoding of its own or somebody has
    set it to pad or cut: the wrapper takes ten times as long as a short prompt's tokenisation."""
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
    """Return the token ids of `prompt`, with the special tokens that the tokenizer itself adds. `tools` are
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
