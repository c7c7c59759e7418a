"""Verifiers of form: `json_schema` (by the library jsonschema), and `instructions`, those of IFEval (Zhou et
al., 2023) that can be checked by a rule.

The schema is the argument, or the ground truth (an object, or its text). References to other documents are
not fetched: they make the task an error. JSON is read strictly: no `NaN`, no infinities, no name twice in one
object, nothing behind it. An answer that takes longer to check than `BUDGET_S` is wrong.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import regex
from pydantic import Field, field_validator

from areal_async.config.base import Section
from reward_service.sdk import Abstain, RewardInput, Score
from reward_service.verifiers import TooCostly, verifier, within
from reward_service.verifiers.answers import after_thinking, answer_of

OPENING = re.compile(r"```(?:json|JSON)?[ \t]*\n")
LONGEST = 1 << 20
BUDGET_S = 2.0


class JsonSchemaArguments(Section):
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    """The schema; by default the ground truth is."""
    where: Literal["whole", "fenced", "tag", "any"] = "any"
    """The whole response, its last fenced block or its last `<answer>`; `any`: tag, block, else whole."""

    @field_validator("schema_")
    @classmethod
    def _is_a_schema(cls, schema: dict[str, Any] | bool | None) -> dict[str, Any] | bool | None:
        if schema is not None:
            _validator(json.dumps(schema, sort_keys=True))
        return schema


def _prepare(_: JsonSchemaArguments) -> None:
    _validator("true")


@verifier(JsonSchemaArguments, prepare=_prepare)
def json_schema(given: RewardInput, arguments: JsonSchemaArguments) -> Score | Abstain:
    """1 for JSON that the schema allows, else 0. Component `json`: 1 when it was JSON at all. Component
    `too_costly`: 1, and there only when so, for an answer that took too long to check. Raises ValueError for
    a ground truth that is no schema."""
    schema = arguments.schema_
    if schema is None:
        schema = _schema(given.ground_truth)
        if schema is None:
            return Abstain("the task has no schema, and reward.args.schema gives none")
    text = _found(given.response, arguments.where)
    if text is None:
        return Score(0.0, {"json": 0.0})
    try:
        value = strict_json(text)
    except ValueError:
        return Score(0.0, {"json": 0.0})
    validator = _validator(json.dumps(schema, sort_keys=True))
    try:
        valid = within(BUDGET_S, lambda: validator.is_valid(value))
    except (TooCostly, TimeoutError):
        return Score(0.0, {"json": 1.0, "too_costly": 1.0})
    except RecursionError:
        # Nested deeper than the validator can go: the answer's doing, or that of a schema that names itself.
        valid = False
    return Score(float(valid), {"json": 1.0})


def strict_json(text: str) -> Any:
    """What the text means. Raises ValueError for all but one JSON document of moderate size and depth."""
    if len(text) > LONGEST:
        raise ValueError(f"longer than {LONGEST} characters")
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_named_once)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _found(response: str, where: str) -> str | None:
    block = fenced(after_thinking(response))
    tagged = answer_of(response, "tag")
    match where:
        case "whole":
            return response.strip()
        case "fenced":
            return block
        case "tag":
            return tagged
        case _:
            return tagged or (block if block is not None else answer_of(response, "whole"))


def fenced(text: str) -> str | None:
    """What the last fenced block holds that is closed; None without one."""
    found, position = None, 0
    while (opening := OPENING.search(text, position)) is not None:
        end = text.find("```", opening.end())
        if end < 0:
            break
        found, position = text[opening.end() : end].strip(), end + 3
    return found


def _schema(truth: Any) -> dict[str, Any] | bool | None:
    if isinstance(truth, str):
        try:
            truth = strict_json(truth)
        except ValueError as error:
            raise ValueError(f"the ground truth is not the JSON of a schema: {error}") from None
    if truth is not None and not isinstance(truth, dict | bool):
        raise ValueError("the ground truth must be a schema: an object, or its text")
    return truth


@functools.lru_cache(maxsize=64)
def _validator(schema_text: str) -> Any:
    import jsonschema
    from jsonschema.validators import extend, validator_for
    from referencing.jsonschema import EMPTY_REGISTRY

    schema = json.loads(schema_text)
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"this is not a valid JSON schema: {error.message:.200}") from None
    return extend(kind, {"pattern": _pattern})(schema, registry=EMPTY_REGISTRY)


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    """The keyword `pattern`, with a limit for patterns that go back over a text again and again."""
    from jsonschema import ValidationError

    if validator.is_type(instance, "string") and not regex.search(pattern, instance, timeout=BUDGET_S):
        yield ValidationError(f"{instance!r:.80} does not match {pattern!r:.80}")


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) < len(pairs):
        raise ValueError("a name is given twice in one object")
    return named


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# --- instructions on the form of a response ----------------------------------------------------------


LONGEST_RESPONSE = 200_000
"""Characters; a longer response follows nothing."""


class InstructionsArguments(Section):
    rules: tuple[dict[str, Any], ...] = ()
    """Instructions for every task, each `{id, …}`; the task's own come on top."""
    partial: bool = False
    """Whether the score is the share of the instructions that were followed."""

    @field_validator("rules")
    @classmethod
    def _have_names(cls, rules: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        if not all(isinstance(rule.get("id"), str) for rule in rules):
            raise ValueError("each rule needs an `id`, for example `length_constraints:number_words`")
        return rules


@verifier(InstructionsArguments)
def instructions(given: RewardInput, arguments: InstructionsArguments) -> Score | Abstain:
    """1 when every instruction is followed, else 0; with `partial` the share of those followed. Component
    `followed`: that share. Thinking is left out of the response.

    Raises ValueError for instructions that are not known."""
    asked: list[tuple[str, Mapping[str, Any]]] = [
        (rule["id"], {k: v for k, v in rule.items() if k != "id"}) for rule in arguments.rules
    ]
    asked += _of_task(given)
    if not asked:
        return Abstain("the task has no instructions, and reward.args.rules gives none")
    text = after_thinking(given.response).strip()
    if len(text) > LONGEST_RESPONSE:
        text = ""
    share = sum(follows(text, name, values) for name, values in asked) / len(asked)
    return Score(share if arguments.partial else float(share == 1), {"followed": share})


def _of_task(given: RewardInput) -> list[tuple[str, Mapping[str, Any]]]:
    truth = given.ground_truth
    if isinstance(truth, str) and truth.lstrip().startswith("{"):
        truth = json.loads(truth)
    for source in (truth, given.extra_info):
        if not isinstance(source, Mapping):
            continue
        names = source.get("instruction_id_list", source.get("instruction_id"))
        if names is None:
            continue
        arguments = source.get("kwargs") or [{}] * len(names)
        if not isinstance(names, list) or len(names) != len(arguments):
            raise ValueError("instruction_id_list and kwargs must be lists of the same length")
        return [(str(name), dict(given or {})) for name, given in zip(names, arguments, strict=True)]
    return []


Check = Callable[..., bool]
"""Says whether a response follows, given the instruction's arguments by name."""

WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
SENTENCE_END = re.compile(r"[.!?]+")
# What begins a line is looked for on that line: a pattern that may start on any of many blank lines before it
# would go through them again from each.
BULLET = re.compile(r"^[^\S\n]*(?:\*(?!\*)|-)[^\S\n]+[^\s]", re.MULTILINE)
HIGHLIGHT = re.compile(r"\*\*([^\n*]+)\*\*|(?<!\*)\*([^\n*]+)\*(?!\*)")
ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def compared(count: int, relation: str | None, number: int) -> bool:
    """`at least` (as when left out) or `less than`. Raises ValueError for another relation."""
    match relation:
        case "at least" | None:
            return count >= number
        case "less than":
            return count < number
        case "at most":
            return count <= number
        case "exactly":
            return count == number
    raise ValueError(f"the relation {relation!r} is none of: at least, at most, less than, exactly")


def contains(text: str, word: str) -> bool:
    return count_of(text, word) > 0


def count_of(text: str, word: str) -> int:
    """How often a word or phrase stands in the text by itself, without case."""
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _existence(text: str, keywords: Sequence[str]) -> bool:
    return all(contains(text, word) for word in keywords)


def _forbidden(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(contains(text, word) for word in forbidden_words)


def _frequency(text: str, keyword: str, frequency: int, relation: str | None = None) -> bool:
    return compared(count_of(text, keyword), relation, frequency)


def _letters(text: str, letter: str, let_frequency: int, let_relation: str | None = None) -> bool:
    return compared(text.lower().count(letter.lower()), let_relation, let_frequency)


def _words(text: str, num_words: int, relation: str | None = None) -> bool:
    return compared(len(WORD.findall(text)), relation, num_words)


def _sentences(text: str, num_sentences: int, relation: str | None = None) -> bool:
    return compared(sum(map(bool, map(WORD.search, SENTENCE_END.split(text)))), relation, num_sentences)


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    """Parted by `***` on a line, as the instruction says."""
    return len([part for part in re.split(r"\s?\*\*\*\s?", text) if part.strip()]) == num_paragraphs


def _nth_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs are parted by blank lines; the n-th, counted from 1, begins with the word."""
    parts = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    first = WORD.search(parts[nth_paragraph - 1])
    return first is not None and first[0].lower() == first_word.lower()


def _placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]\n]+\]", text)) >= num_placeholders


def _postscript(text: str, postscript_marker: str = "P.S.") -> bool:
    marker = re.escape(postscript_marker).replace(r"\.", r"\.\s?")
    return re.search(rf"^[^\S\n]*{marker}", text, re.IGNORECASE | re.MULTILINE) is not None


def _bullets(text: str, num_bullets: int) -> bool:
    return len(BULLET.findall(text)) == num_bullets


def _constrained(text: str) -> bool:
    return any(answer in text for answer in ANSWERS)


def _highlights(text: str, num_highlights: int) -> bool:
    return sum(bool("".join(found).strip()) for found in HIGHLIGHT.findall(text)) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    marks = re.findall(rf"^[^\w\n]*{re.escape(section_spliter)}\s+\w", text, re.IGNORECASE | re.MULTILINE)
    return len(marks) >= num_sections


def _json(text: str) -> bool:
    inner = text.strip()
    if inner.startswith("```"):
        inner = inner[3:]
        inner = inner[4:] if inner[:4].lower() == "json" else inner
    try:
        strict_json(inner.removesuffix("```"))
    except ValueError:
        return False
    return True


def _title(text: str) -> bool:
    return any(inner.strip("<> ") for inner in re.findall(r"<<[^\n<>]+>>", text))


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def _repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _ends_with(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == '"' and text[-1] == '"'


def _capital_words(text: str, capital_frequency: int, capital_relation: str | None = None) -> bool:
    capitals = [word for word in WORD.findall(text) if word.isupper()]
    return compared(len(capitals), capital_relation, capital_frequency)


CHECKS: dict[str, Check] = {
    "keywords:existence": _existence,
    "keywords:forbidden_words": _forbidden,
    "keywords:frequency": _frequency,
    "keywords:letter_frequency": _letters,
    "length_constraints:number_words": _words,
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat_prompt,
    "startend:end_checker": _ends_with,
    "startend:quotation": _quoted,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": lambda text: text.isupper(),
    "change_case:english_lowercase": lambda text: text.islower(),
    "punctuation:no_comma": lambda text: "," not in text,
}


def follows(text: str, instruction: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a response follows an instruction. An empty one follows none.

    Raises ValueError for an instruction or arguments that are not known: the task is wrong."""
    if instruction not in CHECKS:
        raise ValueError(f"the instruction {instruction!r} is not known; there are {', '.join(CHECKS)}")
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        return bool(text.strip()) and CHECKS[instruction](text, **given)
    except TypeError as error:
        raise ValueError(f"the instruction {instruction!r} cannot take {given}: {error}") from None
