"""Selection of the tokens of an answer that training learns.

If the answer is a text, its tokens after the prompt and the end-of-sequence token are learned. Messages are
rendered with the tokenizer's chat template, all at once. The assistant's turns are then found in the result:

- If the template marks them with `{% generation %}`, the marks are used.
- Otherwise the chat is rendered twice: up to the opening of the assistant's turn, and up to the turn's end.
  The difference is the turn. Both texts must be prefixes of the whole chat. Some templates render a turn
  differently if further messages follow, for example without the turn's thoughts. Such templates are refused,
  and the error names a fix.

A turn is learned together with its end token. End tokens are the tokens at which engines end an answer
(`areal_async/models/answers.py`). If several end tokens follow each other, only the first is learned. The end
token may be the first token of the next turn. If the template adds nothing after the last turn, the
end-of-sequence token is used. A chat without any end token is refused, because the model would never learn to
stop."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import compress, groupby
from typing import Any, Literal

from areal_async.base.errors import ArealError
from areal_async.data.examples import Continuation, Message
from areal_async.data.tasks import is_learned
from areal_async.models.answers import end_ids, turn_closing
from areal_async.models.prompts import prompt_ids, text_ids

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatError(ArealError):
    """The assistant's tokens cannot be found in a chat. The message gives the reason and a fix."""


def answer_ids(
    tokenizer: Any,
    answer: Continuation,
    *,
    train_on: Literal["all", "last"] = "all",
    ends: Collection[int] | None = None,
) -> tuple[list[int], list[int]]:
    """Return (token ids [T], mask [T]), up to the last learned token. The mask is 1 for learned tokens.
    `ends` are the ids that end an answer; the default is the tokenizer's ids. Raises `ChatError`."""
    ends = end_ids(tokenizer) if ends is None else ends
    if isinstance(answer.answer, str):
        if tokenizer.eos_token_id is None:
            raise ChatError("the model's tokenizer has no end-of-sequence token, so no answer could end")
        prompt = prompt_ids(tokenizer, answer.prompt)
        if not prompt:
            raise ChatError("its prompt has no tokens")
        own = text_ids(tokenizer, answer.answer, special=False)
        _check_known(tokenizer, own)
        return [*prompt, *own, tokenizer.eos_token_id], [0] * len(prompt) + [1] * (len(own) + 1)
    given = len(answer.prompt)
    chat: list[Message] = [*answer.prompt, *answer.answer]
    spoken = [i for i, message in enumerate(chat) if message["role"] == "assistant" and i >= given]
    turns = [i for i in spoken if is_learned(chat[i])]
    if not turns:
        left = ": all have weight 0" if spoken else ""
        raise ChatError(f"it has no turn of the assistant to learn from{left}")
    turns = turns[-1:] if train_on == "last" else turns
    ids, learned = _turn_ids(tokenizer, chat[: turns[-1] + 1], turns, answer.tools)
    if any(learned):
        ids, learned = _with_ends(tokenizer, ids, learned, frozenset(ends))
    end = max((i for i, one in enumerate(learned) if one), default=0)
    if not end or learned[0]:
        raise ChatError("the template leaves nothing to learn, or nothing before it")
    _check_known(tokenizer, compress(ids, learned))
    return ids[: end + 1], learned[: end + 1]


def _check_known(tokenizer: Any, answer: Iterable[int]) -> None:
    """Raise `ChatError` if an answer has no tokens, or only unknown ones."""
    found = set(answer)
    # For an unknown text, some tokenizers return their padding token, and some return nothing.
    unknown = {tokenizer.unk_token_id, tokenizer.pad_token_id} - {tokenizer.eos_token_id}
    # Some tokenizers put a blank token before each word, even before an unknown word.
    known = found - {*tokenizer.all_special_ids}
    if not found or (unknown & found and not any(map(str.strip, map(tokenizer.decode, sorted(known))))):
        raise ChatError(
            "the model's tokenizer finds nothing that it knows in its answer. Take the row out, or give "
            "another model"
        )


def whole_ids(tokenizer: Any, answer: Continuation) -> list[int]:
    """Return the tokens of prompt and answer in the form that the reward `reward_model` reads. If both are
    texts, they are joined. Messages are rendered with the chat template, as with that reward's `template:
    chat`. Raises `ChatError`."""
    if isinstance(answer.answer, str) and isinstance(answer.prompt, str):
        return text_ids(tokenizer, answer.prompt + answer.answer)
    chat: list[Any] = [*answer.prompt, *answer.answer]
    return text_ids(tokenizer, _render(tokenizer, chat, answer.tools), special=False)


def _turn_ids(
    tokenizer: Any, chat: list[Message], turns: Sequence[int], tools: Sequence[Message]
) -> tuple[list[int], list[int]]:
    """Return the tokens of a chat and a mask, which is 1 for tokens of the `turns`."""
    template = tokenizer.chat_template
    if isinstance(template, str) and MARKED.search(template):
        return _marked_ids(tokenizer, chat, turns, tools)
    if not tokenizer.is_fast:
        raise ChatError(
            "the tokenizer does not say where in the text its tokens are. Give the model a fast tokenizer "
            "(tokenizer.json)"
        )
    whole = _render(tokenizer, chat, tools)
    spans = [_span(tokenizer, whole, chat, turn, tools) for turn in turns]
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    learned = [
        int(any(start <= first and last <= end and first < last for start, end in spans))
        for first, last in encoded["offset_mapping"]
    ]
    return list(encoded["input_ids"]), learned


def _with_ends(
    tokenizer: Any, ids: list[int], learned: Sequence[int], ends: frozenset[int]
) -> tuple[list[int], list[int]]:
    """Return the tokens and a mask in which each turn is learned up to the token that ends it. Raises
    `ChatError` if a turn has no such token."""
    ids, learned = [*ids], [*learned]
    starts = [i for i, one in enumerate(learned) if one and (not i or not learned[i - 1])]
    for start in reversed(starts):
        after = next((i for i in range(start, len(ids)) if not learned[i]), len(ids))
        end = next((i for i in range(after - 1, start - 1, -1) if ids[i] in ends), None)
        for i in range((end or start) - 1, start - 1, -1):  # The first of several ends the answer
            if ids[i] in ends:
                end = i
            elif tokenizer.decode([ids[i]]).strip():
                break
        behind = [] if end is None else [one for one in ids[end + 1 : after] if one not in ends]
        if end is not None and not tokenizer.decode(behind).strip():
            learned[end + 1 : after] = [0] * (after - end - 1)  # Blanks after it belong to the template
        elif after < len(ids) and ids[after] in ends:
            learned[after] = 1
        elif after == len(ids) and tokenizer.eos_token_id in ends and turn_closing(tokenizer) == "":
            ids.append(tokenizer.eos_token_id)
            learned.append(1)
        else:
            known = ", ".join(repr(tokenizer.decode([token])) for token in sorted(ends)) or "none"
            raise ChatError(
                "the chat template ends a turn of the assistant with no token that ends an answer (those are "
                f"{known}), so the model would never learn to stop. Let the template end it with one, "
                "or add the token with which it does to eos_token_id in generation_config.json"
            )
    return ids, learned


def _span(
    tokenizer: Any, whole: str, chat: list[Message], turn: int, tools: Sequence[Message]
) -> tuple[int, int]:
    """Return the span of a turn in the text of the chat, as character positions."""
    if turn == 0:
        raise ChatError("it begins with the assistant, whose words follow nothing. Begin it with another's")
    before = _render(tokenizer, chat[:turn], tools, opened=True)
    after = _render(tokenizer, chat[: turn + 1], tools) if turn + 1 < len(chat) else whole
    if not (after.startswith(before) and whole.startswith(after)):
        raise ChatError(
            f"the chat template renders message {turn} differently once others follow it, so its tokens "
            "cannot be told. Train on the last turn alone (sft.train_on: last), or mark what the assistant "
            "says in the template with {% generation %} … {% endgeneration %}, or cut each chat into one "
            "for each of its turns"
        )
    return len(before), len(after)


def _marked_ids(
    tokenizer: Any, chat: list[Message], turns: Sequence[int], tools: Sequence[Message]
) -> tuple[list[int], list[int]]:
    encoded = _render(tokenizer, chat, tools, tokenize=True)
    ids, marks = list(encoded["input_ids"]), list(encoded["assistant_masks"])
    runs = [(one, len(list(same))) for one, same in groupby(marks)]
    spoken = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    if sum(one for one, _ in runs) != len(spoken):
        raise ChatError(
            f"the chat template marks {sum(one for one, _ in runs)} turns with {{% generation %}}, and the "
            f"assistant has {len(spoken)}. Mark all that one turn says, once"
        )
    of_turn, learned = iter(spoken), []
    for one, count in runs:
        learned += [int(bool(one) and next(of_turn) in turns)] * count
    return ids, learned


def _render(
    tokenizer: Any, chat: list[Any], tools: Sequence[Message], *, opened: bool = False, tokenize: bool = False
) -> Any:
    if not tokenizer.chat_template:
        raise ChatError(
            "the model's tokenizer has no chat template, and examples are messages. Add one to the tokenizer "
            "(chat_template.jinja), or give texts"
        )
    how = {"return_dict": True, "return_assistant_tokens_mask": True} if tokenize else {}
    try:
        return tokenizer.apply_chat_template(
            chat, tools=list(tools) or None, tokenize=tokenize, add_generation_prompt=opened, **how
        )
    except Exception as error:  # A template may raise anything
        raise ChatError(f"the chat template fails: {type(error).__name__}: {error!s:.200}") from error
