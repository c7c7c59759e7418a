"""The fields of a job file as a flat table, and a pydantic error in words that name the field and the fix."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from areal_async.base.mistakes import ADD_IT, Mistake, blank_after_colon, value_in_words
from areal_async.config.base import Section
from areal_async.config.job import JobConfig
from areal_async.config.presets import PRESETS
from areal_async.config.trainings import PreferenceSection

JOB_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,47}")  # As `JobConfig.job` has it
_COEFFICIENT, _CLIP = "trainer.objective.kl.coefficient", "trainer.objective.loss_args.clip_"
OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("kl_coef", "kl_coeff", "kl_loss_coef", "init_kl_coef"), _COEFFICIENT),
    "beta": f"{_COEFFICIENT}, or in a preference job preference.beta",
    **dict.fromkeys(("clip_high", "epsilon_high", "clip_ratio_high"), f"{_CLIP}high"),
    **dict.fromkeys(("clip_low", "epsilon_low", "clip_ratio_low"), f"{_CLIP}low"),
    **dict.fromkeys(("clip_range", "cliprange", "clip_ratio", "eps_clip"), f"{_CLIP}low and clip_high"),
    "learning_rate": "trainer.optimizer.lr",
    **dict.fromkeys(("adv_estimator", "advantage_estimator"), "trainer.objective.advantage"),
    **dict.fromkeys(("ppo_mini_batch_size", "mini_batch_size"), "trainer.minibatches, how many a batch has"),
    "ppo_max_token_len_per_gpu": "trainer.micro_batch_tokens",
    **dict.fromkeys(("num_generations", "n", "rollout_n"), "rollout.group_size"),
    **dict.fromkeys(("max_completion_length", "max_response_length"), "rollout.sampling.max_new_tokens"),
    **dict.fromkeys(("max_length", "max_seq_length"), "rollout.max_model_len"),
    **dict.fromkeys(("stop_token_ids", "stop_tokens", "stop_strings"), "rollout.sampling.stop"),
    **dict.fromkeys(("train_batch_size", "per_device_train_batch_size"), "buffer.batch_groups"),
    **dict.fromkeys(("max_steps", "total_training_steps"), "trainer.steps"),
    **dict.fromkeys(("evaluate_every", "eval_steps", "test_freq"), "evaluation.every_steps"),
    **dict.fromkeys(("save_steps", "save_freq"), "checkpoint.every_steps"),
    **dict.fromkeys(("max_grad_norm", "grad_clip"), "trainer.optimizer.clip_grad_norm"),
    **dict.fromkeys(("warmup_ratio", "lr_warmup_steps"), "trainer.optimizer.warmup_steps"),
    **dict.fromkeys(("train_files", "train_file", "dataset"), "tasks.train"),
    **dict.fromkeys(("val_files", "eval_dataset", "held_out"), "tasks.evaluation"),
    **dict.fromkeys(("replicate", "data_parallel_size", "dp_size"), "trainer.parallel.data"),
    **dict.fromkeys(("tensor_model_parallel_size", "tp_size"), "trainer.parallel.tensor"),
    **dict.fromkeys(("pipeline_model_parallel_size", "pp_size"), "trainer.parallel.pipeline"),
    **dict.fromkeys(
        ("ulysses_sequence_parallel_size", "sp_size", "context_parallel_size", "cp_size"),
        "trainer.parallel.sequence",
    ),
    **dict.fromkeys(("expert_model_parallel_size", "ep_size"), "trainer.parallel.expert"),
    "gradient_checkpointing": "trainer.backend_args.recompute",
    "reward_funcs": "reward.name",
    "report_to": "observe.loggers",
    "output_dir": "run_dir",
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "tasks.passes"),
}
"""What other trainers and papers call a field, and what it is called here."""
PREFERENCE_LOSSES = get_args(PreferenceSection.model_fields["loss"].annotation)
UNITS: Mapping[str, Mapping[str, float]] = {
    "_s": {"ms": 1e-3, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400},
    "_bytes": {
        f"{prefix}{unit}": size**power
        for unit, size in (("b", 1000), ("ib", 1024), ("", 1024))
        for power, prefix in enumerate("kmgt", start=1)
    },
    "": {"%": 0.01, "k": 1e3, "m": 1e6},
}
"""End of a field's name -> units that people write after a number, in that of the field."""
SURELY_MEANT = 0.8  # How close a field's name must be to come before the same name in a section below


@dataclass(frozen=True)
class Field:
    """One leaf of the job file. `default` is what JSON would hold; `required` fields have none."""

    path: str
    description: str
    required: bool
    default: Any
    annotation: Any
    info: FieldInfo


@cache
def job_fields() -> dict[str, Field]:
    """Every leaf field of `JobConfig` by its dotted path, in file order."""
    return {field.path: field for field in _walk(JobConfig, "")}


def section_of(path: str) -> type[Section] | None:
    """The model of the section at a dotted path ("" is the whole file); None when it is no section."""
    model: type[Section] = JobConfig
    for name in path.split(".") if path else ():
        if name.isdecimal():
            continue  # of a list of sections
        info = model.model_fields.get(name)
        inner = _section_type(info.annotation) if info is not None else None
        if inner is None:
            return None
        model = inner
    return model


def leaves_of(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a resolved job by their dotted paths, with its values; sections are gone into."""
    for name, value in content.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and section_of(path) is not None:
            yield from leaves_of(value, f"{path}.")
        else:
            yield path, value


def suggest(section: str, key: str) -> str | None:
    """The dotted path that an unknown `key` inside `section` was most likely meant to be; inside a section
    with `args`, which has the arguments of its part, only one of its own fields."""
    model = section_of(section)
    prefix = f"{section}." if section else ""
    if model is not None and "args" in model.model_fields:
        found = difflib.get_close_matches(key, list(model.model_fields), n=1, cutoff=0.65)
        known = OTHER_NAMES.get(key, "").startswith(prefix)
        return OTHER_NAMES[key] if known else prefix + found[0] if found else None
    beside = difflib.get_close_matches(key, list(model.model_fields) if model else [], n=1, cutoff=0.65)
    if key in OTHER_NAMES and not (beside and beside[0].startswith(key)):
        return OTHER_NAMES[key]
    sections = [path.rpartition(".")[0] for path in job_fields()]
    elsewhere = [path for path in dict.fromkeys([*job_fields(), *sections]) if path.rpartition(".")[2] == key]
    below = [path for path in elsewhere if path.startswith(prefix)]
    if beside and not (below and difflib.SequenceMatcher(None, beside[0], key).ratio() < SURELY_MEANT):
        return prefix + beside[0]
    if elsewhere:
        return (below or elsewhere)[0]
    by_last_name = {path.rpartition(".")[2]: path for path in reversed(job_fields())}
    close = difflib.get_close_matches(key, list(by_last_name), n=1, cutoff=0.75)
    return by_last_name[close[0]] if close else None


def _walk(model: type[BaseModel], prefix: str) -> Iterator[Field]:
    """Leaves of a section. Its defaults are those of its type, wherever it stands."""
    for name, info in model.model_fields.items():
        path = prefix + name
        inner = _section_type(info.annotation)
        if inner is not None:
            yield from _walk(inner, f"{path}.")
            continue
        default = info.get_default(call_default_factory=True)
        required = default is PydanticUndefined
        yield Field(
            path, info.description or "", required, None if required else default, info.annotation, info
        )


def _section_type(annotation: Any) -> type[Section] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def numbers_or_words(details: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One entry of `ValidationError.errors()` for a field that is a number or a word, which has two: what is
    wrong with the number, and under `word` what it might be instead."""
    words = {detail["loc"][:-1]: detail["ctx"]["expected"] for detail in details if _in_union(detail)}
    return [
        {**detail, "loc": field, "word": words[field]} if (field := detail["loc"][:-1]) in words else detail
        for detail in details
        if not _in_union(detail)
    ]


def _in_union(detail: Mapping[str, Any]) -> bool:
    """Whether it is about a word that stands beside a number in a field's type."""
    return bool(detail["type"] == "literal_error" and str(detail["loc"][-1]).startswith("literal["))


def explain(detail: Mapping[str, Any], within: str = "") -> Mistake:
    """Return the mistake behind one entry of `ValidationError.errors()`. Only a field whose path begins with
    `within` is suggested."""
    location = [str(part) for part in detail["loc"]]
    field = ".".join(location)
    kind, found = detail["type"], detail.get("input")
    if kind == "missing":
        return Mistake(field, "this field is missing", f"{ADD_IT}. {_about(field)}".rstrip(". "))
    if kind == "extra_forbidden":
        return _unknown(location, found, within)
    if kind == "url":
        return Mistake(field, detail["ctx"]["problem"], detail["ctx"]["fix"])
    if kind == "string_pattern_mismatch":
        fix = _form(field, detail["ctx"]["pattern"])
        return Mistake(field, f"{found!r} does not have the right form", fix)
    if found is None and kind in ("model_type", "model_attributes_type", "dict_type"):
        return Mistake(field, "nothing stands under it", "Remove it, or indent its fields below it")
    if kind == "invalid_key":
        fix = "Write numbers with a point, 4.0e-4; a comma ends the value before it"
        return Mistake(".".join(location[:-1]), f"{found!r} is no name of a field", fix)
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return Mistake(field or "file", f"{found!r} is not a section", _as_section(field, found))
    if field == "kind" and (meant := _kind_of(str(found).lower())):
        return Mistake(field, f"{found!r} is not a choice", f"Did you mean {meant}?")
    if (words := value_in_words(detail)) is not None:
        word = f", or {detail['word']}" if "word" in detail else ""
        if isinstance(found, bool):
            quoted = (
                "" if kind.startswith(("int_", "float_")) else "; a yes, no, on or off needs quotation marks"
            )
            return Mistake(field, f"{str(found).lower()} {words[0]}", words[1] + word + quoted)
        if found is None:
            return Mistake(
                field, f"null {words[0]}", f"{words[1]}{word}, or remove the field for its default"
            )
        return Mistake(field, f"{found!r} {words[0]}", words[1] + word + _in_unit(field, found))
    message = str(detail["msg"]).rstrip(".")
    return Mistake(field, f"{found!r} is refused: {message}", f"Correct it. {_about(field)}".rstrip(". "))


def _in_unit(field: str, found: Any) -> str:
    """The number of the field's unit that was meant by one with a unit, or with a comma, behind a colon."""
    text = str(found).strip().lower()
    if re.fullmatch(r"\d+,\d+(e-?\d+)?", text):
        return f": {text.replace(',', '.')}"
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z%]+)", text)
    units = next(units for end, units in UNITS.items() if field.endswith(end))
    if match is None or match[2] not in units:
        return ""
    return f": {float(match[1]) * units[match[2]]:.12g}"


def _kind_of(name: str) -> str | None:
    """What to write for the name of an algorithm as `kind`; None where it is none."""
    if name in PREFERENCE_LOSSES:
        return f"kind: preference with preference.loss: {name}"
    return f"kind: rl with trainer.objective.preset: {name}" if name in PRESETS else None


def _unknown(location: list[str], found: Any, within: str) -> Mistake:
    field, section, key = ".".join(location), ".".join(location[:-1]), location[-1]
    if key == "trust_remote_code":
        problem = "code that comes with a model is never run: it would have the rights of the job"
        return Mistake(field, problem, "Remove it, and give a model that transformers itself knows")
    if (fix := blank_after_colon(key)) is not None:
        return Mistake(field, "there is no such field", fix)
    suggestion = suggest(section, key)
    if suggestion is not None and isinstance(found, dict) and len(found) == 1:
        inner, below = str(next(iter(found))), section_of(suggestion)
        if below is not None:
            known = f"{suggestion}.{inner}" if inner in below.model_fields else suggest(suggestion, inner)
            suggestion = known or suggestion
    if suggestion is None and (names := [*dict.fromkeys(_other_names(found))]):
        # A section of another trainer
        suggestion = ", ".join(names)
    if suggestion is not None and suggestion.startswith(within):
        return Mistake(field, "there is no such field", f"Did you mean {suggestion}?")
    model = section_of(section)
    known = ", ".join(model.model_fields) if model is not None else ""
    if model is not None and "args" in model.model_fields:
        fix = f"Write {section}.args.{key} if the part takes it; the fields here are {known}"
        return Mistake(field, "there is no such field", fix)
    return Mistake(field, "there is no such field", f"Remove it; the fields here are {known}")


def _other_names(found: Any) -> Iterator[str]:
    """Our names for the fields of other trainers in a section of theirs."""
    for name, inner in found.items() if isinstance(found, dict) else ():
        if isinstance(inner, dict):
            yield from _other_names(inner)
        elif name in OTHER_NAMES:
            yield f"{OTHER_NAMES[name]} for {name}"


def _as_section(field: str, found: Any) -> str:
    """How to write the section `field`, as which `found` was given: most likely its first field was meant."""
    key = field.rpartition(".")[2]
    if not key or key.isdigit():
        return "Give indented `key: value` lines under it"
    model = section_of(field)
    name, inner = "name", "value"
    if model is not None:
        name, info = next(iter(model.model_fields.items()))
        inner = str(found) if type(found) is info.annotation else "..."
    mapping = f"{{{name}: {inner}}}"
    return f"Write `{key}: {mapping}` in the file, or `'{field}={mapping}'` on the command line"


def _form(field: str, pattern: str) -> str:
    if field == "job":
        return "Use at most 48 lower-case letters, digits, - and _, starting with a letter or digit"
    if field.endswith("device"):
        return "Use cpu, cuda or cuda:N"
    return f"Match {pattern}"


def _about(field: str) -> str:
    known = job_fields().get(field)
    return " ".join(known.description.split()) if known is not None else ""
