"""Changes of a job that make its trainer fit a GPU. Each change is verified by computing the memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from operator import attrgetter
from typing import Any, get_args

from areal_async.config.job import JobConfig
from areal_async.config.registry import BACKENDS
from areal_async.models.files import looks_beyond_tokens
from trainer_service.backends.fsdp.memory import Recompute

MOST_RANKS = 16
"""Largest number of ranks, all on one host."""
FEWEST_TOKENS = 256
"""Smallest micro-batch to suggest, because smaller passes would leave a GPU idle. Rows shorter than half of
the job's length are not suggested either, because that would be another job."""
LORA_RANK = 16
COSTLY = ("trainer.ranks", "trainer.lora", "rollout.max_model_len")
"""Fields that not every user can change, because they need GPUs or train something else."""

Changed = Iterator[tuple[str, JobConfig]]
"""Changes as command-line overrides, each with the changed job, from the smallest to the largest."""
Knob = Callable[[JobConfig], Changed]
MostTokens = Callable[[JobConfig], int]
"""Function that returns the tokens of the longest pass that a job has memory for; 0 for an invalid job."""


def longest_pass(job: JobConfig) -> int:
    """Return the largest number of tokens in one pass. A row that is longer than a micro-batch gets its own
    pass."""
    longest_row = job.rollout.max_model_len if job.kind == "rl" else 0
    return max(job.trainer.micro_batch_tokens, longest_row)


def changes_that_fit(job: JobConfig, most_tokens: MostTokens) -> list[str]:
    """Return the smallest sets of changes that make the job's longest pass fit; empty if none does.

    Each line is sufficient by itself. If every line changes a `COSTLY` field, lines with one more change are
    added."""

    def fewer_tokens(job: JobConfig) -> Changed:
        row = job.rollout.max_model_len if job.kind == "rl" else 0
        if (tokens := most_tokens(job)) >= max(FEWEST_TOKENS, row // 2):
            yield from _lowered(job, tokens)

    def fits(job: JobConfig) -> bool:
        return longest_pass(job) <= most_tokens(job)

    knobs: list[Knob] = [fewer_tokens, *KNOBS]
    found: dict[tuple[Knob, ...], str] = {}
    strongest = job
    for knob in reversed(knobs):
        *_, (_, strongest) = [("", strongest), *knob(strongest)]
    if not fits(strongest):
        return []
    for size in range(1, len(knobs) + 1):
        for chosen in combinations(knobs, size):
            if any(set(fewer) <= set(chosen) for fewer in found):
                continue
            options = [*_applied(job, chosen)]
            if options and fits(options[-1][1]):
                found[chosen] = next(text for text, changed in options if fits(changed))
        if any(not any(field in text for field in COSTLY) for text in found.values()):
            break
    return [*found.values()]


def _applied(job: JobConfig, knobs: Sequence[Knob]) -> Changed:
    """Yield the job with a change by each knob. The first knob is applied last, because tokens depend on all
    other settings."""
    if not knobs:
        yield "", job
        return
    for text, changed in _applied(job, knobs[1:]):
        for first, done in knobs[0](changed):
            yield f"{first} {text}".rstrip(), done


def _lowered(job: JobConfig, tokens: int) -> Changed:
    fields = ["trainer.micro_batch_tokens", *(["rollout.max_model_len"] if job.kind == "rl" else [])]
    larger = [field for field in fields if attrgetter(field)(job) > tokens]
    for field in larger:
        job = _with(job, field, tokens)
    if larger:
        yield " ".join(f"{field}={tokens}" for field in larger), job


def _with(section: Any, field: str, value: Any) -> Any:
    """Return a section or mapping in which the field at a dotted path has another value."""
    name, _, rest = field.partition(".")
    mapping = isinstance(section, Mapping)
    if rest:
        value = _with(section[name] if mapping else getattr(section, name), rest, value)
    return {**section, name: value} if mapping else section.model_copy(update={name: value})


def _after(values: Sequence[Any], value: Any) -> Sequence[Any]:
    return values[values.index(value) + 1 :]


def _argument(job: JobConfig, name: str, *values: Any) -> Sequence[Any]:
    """Return the values of a back-end argument that come after the job's value. The first value is the
    default."""
    known = BACKENDS.arguments_of(job.trainer.backend).model_fields
    return _after(values, job.trainer.backend_args.get(name, values[0])) if name in known else ()


def _sequence(job: JobConfig) -> Sequence[int]:
    """Return larger numbers of ranks that share each row, without more ranks, if the back end supports it."""
    trainer, asked = job.trainer, job.trainer.parallel
    if "sequence" not in getattr(BACKENDS.known(trainer.backend), "axes", ()) or asked.shard is not None:
        return ()
    with suppress(OSError, ValueError):
        if looks_beyond_tokens(json.loads((job.model / "config.json").read_bytes())):
            return ()
    return [size for size in _doubled(asked.sequence) if trainer.ranks % (size * asked.data) == 0]


def _ranks(job: JobConfig) -> Sequence[int]:
    fixed = job.trainer.parallel.shard is not None
    return [] if fixed else [ranks for ranks in _doubled(job.trainer.ranks) if ranks <= MOST_RANKS]


def _doubled(size: int) -> list[int]:
    return [size << times for times in range(1, 17)]


def _knob(field: str, values_of: Callable[[JobConfig], Sequence[Any]]) -> Knob:
    def changed(job: JobConfig) -> Changed:
        for value in values_of(job):
            text = str(value).lower() if isinstance(value, bool) else value
            yield f"{field}={text}", _with(job, field, value)

    return changed


KNOBS: tuple[Knob, ...] = (
    _knob("trainer.backend_args.recompute", lambda job: _argument(job, "recompute", *get_args(Recompute))),
    _knob("trainer.dtype", lambda job: _after(("float32", "bfloat16"), job.trainer.dtype)),
    _knob(
        "trainer.backend_args.offload_optimizer",
        lambda job: _argument(job, "offload_optimizer", False, True),
    ),
    _knob("trainer.parallel.sequence", _sequence),
    _knob(
        "trainer.parallel.data",
        lambda job: [1] if job.trainer.parallel.data != 1 and job.trainer.parallel.shard is None else [],
    ),
    _knob(
        "weights.channel",
        lambda job: ["shm"] if job.kind == "rl" and job.weights.channel == "nccl" else [],
    ),
    _knob("trainer.ranks", _ranks),
    _knob("trainer.lora.rank", lambda job: [] if job.trainer.lora.rank else [LORA_RANK]),
)
