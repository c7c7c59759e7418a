"""Ends of answers, the text of their tokens, and the thoughts in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.models.answers import (
    Detokenizer,
    end_ids,
    end_sources,
    opens_thought,
    spoken,
    turn_end,
)
from reward_service.sdk import RewardInput, load_reward
from tests.unit.rollout.recited import CHATML, byte_tokenizer, ids_of

GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)
HEADERS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SPACED = CHATML.replace("<|im_end|>\n", "\n\n<|im_end|>\n")
NAMES = ("<pad>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|im_start|>")


def tokenizer_of(template: str | None, eos: str = "<|im_end|>", special: tuple[str, ...] = NAMES) -> Any:
    return byte_tokenizer(template, eos=eos, special=special)


def names_of(tokenizer: Any, ids: Any) -> set[str]:
    return {tokenizer.decode([token]) for token in ids}


@pytest.mark.parametrize(
    ("template", "eos", "end"),
    [
        (CHATML, "<|im_end|>", "<|im_end|>"),
        (SPACED, "<|im_end|>", "<|im_end|>"),
        (GEMMA, "<|im_end|>", "<end_of_turn>"),
        (HEADERS, "<|im_end|>", None),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "<|im_end|>", None),
        ("{{ raise_exception('no') }}", "<|im_end|>", None),
        (None, "<|im_end|>", None),
        (GEMMA.replace("<end_of_turn>", "</turn>"), "<|im_end|>", None),
    ],
    ids=["chatml", "spaced", "gemma", "headers", "bare", "raises", "none", "no token"],
)
def test_the_end_of_a_turn_is_read_off_the_template(template, eos, end):
    tokenizer = tokenizer_of(template, eos)
    found = turn_end(tokenizer)
    assert (None if found is None else tokenizer.decode([found])) == end


@pytest.mark.parametrize(
    ("generation", "config", "template", "ends"),
    [
        (None, None, None, {"<|im_end|>"}),
        (None, None, GEMMA, {"<|im_end|>", "<end_of_turn>"}),
        ({"eos_token_id": "<pad>"}, None, CHATML, {"<|im_end|>", "<pad>"}),
        ({"eos_token_id": ["<|user|>", "<pad>"]}, None, HEADERS, {"<|im_end|>", "<|user|>", "<pad>"}),
        (None, {"eos_token_id": "<|user|>"}, None, {"<|im_end|>", "<|user|>"}),
        (None, {"text_config": {"eos_token_id": ["<|user|>"]}}, None, {"<|im_end|>", "<|user|>"}),
        ({"eos_token_id": None}, {"eos_token_id": True}, None, {"<|im_end|>"}),
    ],
)  # fmt: skip
def test_an_answer_ends_with_whatever_any_part_of_the_model_names(
    generation, config, template, ends, tmp_path
):
    tokenizer = tokenizer_of(template)

    def as_ids(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: as_ids(each) for name, each in value.items()}
        if isinstance(value, list):
            return [as_ids(each) for each in value]
        return tokenizer.convert_tokens_to_ids(value) if isinstance(value, str) else value

    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(as_ids(content)))
    assert names_of(tokenizer, end_ids(tokenizer, tmp_path)) == ends
    assert end_sources(tokenizer, tmp_path)["the tokenizer's eos_token"] == {tokenizer.eos_token_id}


@pytest.mark.parametrize(
    "content", ["", "[1]", "{", "null", '{"eos_token_id": {"a": 1}}', '{"eos_token_id": [-1]}']
)
def test_a_file_that_names_no_ids_counts_for_nothing(content: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    tokenizer = tokenizer_of(None)
    assert end_ids(tokenizer, tmp_path) == (tokenizer.eos_token_id,)


@pytest.mark.parametrize("clean", [False, True])
def test_only_ends_and_padding_are_no_text(clean: bool) -> None:
    tokenizer = byte_tokenizer(special=("<think>", "<|im_start|>", "<|user|>"))
    tokenizer.clean_up_tokenization_spaces = clean
    whole = "<think>é</think><|user|> a<|im_end|><|endoftext|>"
    texts = Detokenizer(tokenizer, end_ids(tokenizer))
    ids = ids_of(tokenizer, whole)
    assert texts.text(ids) == "<think>é</think><|user|> a"
    assert texts.text(ids, whole=True) == whole
    assert texts.decode([]) == []
    assert texts.decode([[], ids[-1:]]) == ["", ""]


# --- thoughts ----------------------------------------------------------------------------------------

CASES = [
    ("<think>a</think>b", False, "b"),
    ("b<think>a</think>c", False, "b\nc"),
    ("<think>a</think>b<think>c</think>d", False, "b\nd"),
    ("a</think>b", False, "b"),
    ("a</think>b</think>c", False, "c"),
    ("<think>a</think>b</think>c", False, "c"),
    ("a<think>b</think>c</think>d", False, "d"),
    ("b<think>a", False, "b"),
    ("<think>a", False, ""),
    ("<think>say <think> twice</think>b", False, "b"),
    ("<thinking>a</thinking>b", False, "b"),
    ("[THINK]a[/THINK]b", False, "b"),
    ("<seed:think>a</seed:think>b", False, "b"),
    ("◁think▷a◁/think▷b", False, "b"),
    ("b", False, "b"),
    ("", False, ""),
    ("a</think>b", True, "b"),
    ("a", True, ""),
    ("a</think>b<think>c", True, "b"),
    ("<think>a</think>b", True, "b"),
]


@pytest.mark.parametrize(("text", "opened", "said"), CASES)
def test_what_was_thought_is_not_said(text: str, opened: bool, said: str) -> None:
    assert spoken(text, opened=opened) == said
    prompt = "q<|assistant|><think>\n" if opened else "q<think>x</think>"
    assert opens_thought(prompt) is opened
    assert RewardInput(prompt=prompt, response=text).spoken == said


TAGS = st.lists(st.sampled_from(["<think>", "</think>", "a", "b", "<", "think>"]), max_size=12).map("".join)


@given(TAGS, st.booleans())
def test_thoughts_are_those_of_a_plain_reading(text: str, opened: bool) -> None:
    said, now, thinking = list[str](), "", opened
    at = 0
    while at < len(text):
        if text.startswith("<think>", at):
            if not thinking:
                said, now, thinking = [*said, now], "", True
            at += len("<think>")
        elif text.startswith("</think>", at):
            said = said if thinking else []
            now, thinking = "", False
            at += len("</think>")
        else:
            now += "" if thinking else text[at]
            at += 1
    assert spoken(text, opened=opened) == "\n".join(part for part in [*said, now] if part)


@pytest.mark.parametrize(
    ("reward", "fill", "args"),
    [
        ("math", "{}", {}),
        ("gsm8k", "#### {}", {}),
        ("choice", "The answer is {}", {}),
        ("exact_match", "{}", {"where": "last_line"}),
        ("regex", "{}", {"where": "last_line", "pattern": "[B5]"}),
        ("arithmetic", "= {}", {}),
    ],
)
@pytest.mark.parametrize(
    ("prompt", "response", "value"),
    [
        ("q", "<think>WRONG</think>RIGHT", 1),
        ("q", "<think>RIGHT</think>WRONG", 0),
        ("q", "<think>RIGHT", 0),
        ("q<think>\n", "RIGHT", 0),
        ("q<think>\n", "WRONG</think>RIGHT", 1),
        ("q<think>\n", "RIGHT</think>WRONG", 0),
        ("q<think>\n\n</think>\n\n", "RIGHT", 1),
        ("q", "<think>RIGHT" + "so " * 20_000 + "RIGHT", 0),
    ],
)
def test_no_reward_takes_a_thought_for_an_answer(reward, fill, args, prompt, response, value):
    right, wrong = ("B", "C") if reward == "choice" else ("5", "4")
    said = response.replace("RIGHT", fill.format(right)).replace("WRONG", fill.format(wrong))
    given = RewardInput(prompt=prompt, response=said, ground_truth=right)
    verdict = load_reward(reward)(given, **args)
    assert float(getattr(verdict, "value", verdict)) == value


def test_tags_that_the_prompt_has_opened_are_seen() -> None:
    judge = load_reward("format_tags")
    response = "hm</think><answer>5</answer>"
    assert [judge(RewardInput(prompt=p, response=response)).value for p in ("q", "q<think>\n")] == [0, 1]
