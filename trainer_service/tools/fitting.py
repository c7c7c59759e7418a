"""Changes of a job that make its trainer fit a GPU, each of them tried by computing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any, get_args

from areal_async.config.job import JobConfig
from areal_async.config.registry import BACKENDS
from areal_async.models.files import looks_beyond_tokens
from trainer_service.backends.fsdp.memory import Recompute

MOST_RANKS = 16
"""All ranks are on one host."""
FEWEST_TOKENS = 256
"""Passes of fewer would leave a GPU idle; rows of less than half a job's length are another job's."""
LORA_RANK = 16
COSTLY = ("trainer.ranks", "trainer.lora", "rollout.max_model_len")
"""Fields that not everybody can change: it takes GPUs, or trains something else."""

Changed = Iterator[tuple[str, JobConfig]]
"""What to change, as overrides of the command line, and the job with it; from the least to the most."""
Knob = Callable[[JobConfig], Changed]
MostTokens = Callable[[JobConfig], int]
"""Tokens of the longest pass that a job has memory for; 0 for a job that cannot be."""


def longest_pass(job: JobConfig) -> int:
    """Most tokens of one pass: a row that is longer than a micro-batch gets one of its own."""
    longest_row = job.rollout.max_model_len if job.kind == "rl" else 0
    return max(job.trainer.micro_batch_tokens, longest_row)


def changes_that_fit(job: JobConfig, most_tokens: MostTokens) -> list[str]:
    """The fewest changes that make the job's longest pass fit, each line enough; empty where none are.

    Where each of these is `COSTLY`, lines of one change more are added."""

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
    """The job with a change by each knob, by the first one last: tokens depend on all else."""
    if not knobs:
        yield "", job
        return
    for text, changed in _applied(job, knobs[1:]):
        for first, done in knobs[0](changed):
            yield f"{first} {text}".rstrip(), done


def _lowered(job: JobConfig, tokens: int) -> Changed:
    trainer, rollout = job.trainer, job.rollout
    texts = []
    if trainer.micro_batch_tokens > tokens:
        texts.append(f"trainer.micro_batch_tokens={tokens}")
        trainer = trainer.model_copy(update={"micro_batch_tokens": tokens})
    if job.kind == "rl" and rollout.max_model_len > tokens:
        texts.append(f"rollout.max_model_len={tokens}")
        rollout = rollout.model_copy(update={"max_model_len": tokens})
    if texts:
        yield " ".join(texts), job.model_copy(update={"trainer": trainer, "rollout": rollout})


def _argument(job: JobConfig, name: str, default: Any, *values: Any) -> Changed:
    """Values of an argument of the back end that come after what the job has."""
    trainer = job.trainer
    if name not in BACKENDS.arguments_of(trainer.backend).model_fields:
        return
    order = [default, *values]
    for value in order[order.index(trainer.backend_args.get(name, default)) + 1 :]:
        text = f"trainer.backend_args.{name}={str(value).lower()}"
        yield text, _with_trainer(job, backend_args={**trainer.backend_args, name: value})


def _with_trainer(job: JobConfig, **changes: Any) -> JobConfig:
    return job.model_copy(update={"trainer": job.trainer.model_copy(update=changes)})


def _recompute(job: JobConfig) -> Changed:
    return _argument(job, "recompute", *get_args(Recompute))


def _low_precision(job: JobConfig) -> Changed:
    if job.trainer.dtype == "float32":
        yield "trainer.dtype=bfloat16", _with_trainer(job, dtype="bfloat16")


def _offload(job: JobConfig) -> Changed:
    return _argument(job, "offload_optimizer", False, True)


def _one_copy(job: JobConfig) -> Changed:
    asked = job.trainer.parallel
    if asked.data != 1 and asked.shard is None:
        yield "trainer.parallel.data=1", _with_trainer(job, parallel=asked.model_copy(update={"data": 1}))


def _shared_rows(job: JobConfig) -> Changed:
    """More ranks of those that there are share each row, where the back end can."""
    trainer, asked = job.trainer, job.trainer.parallel
    if "sequence" not in getattr(BACKENDS.known(trainer.backend), "axes", ()) or asked.shard is not None:
        return
    with suppress(OSError, ValueError):
        if looks_beyond_tokens(json.loads((job.model / "config.json").read_bytes())):
            return
    size = 2 * asked.sequence
    while trainer.ranks % (size * asked.data) == 0:
        changed = asked.model_copy(update={"sequence": size})
        yield f"trainer.parallel.sequence={size}", _with_trainer(job, parallel=changed)
        size *= 2


def _other_channel(job: JobConfig) -> Changed:
    if job.kind == "rl" and job.weights.channel == "nccl":
        weights = job.weights.model_copy(update={"channel": "shm"})
        yield "weights.channel=shm", job.model_copy(update={"weights": weights})


def _more_ranks(job: JobConfig) -> Changed:
    if job.trainer.parallel.shard is not None:
        return
    ranks = 2 * job.trainer.ranks
    while ranks <= MOST_RANKS:
        yield f"trainer.ranks={ranks}", _with_trainer(job, ranks=ranks)
        ranks *= 2


def _adapters(job: JobConfig) -> Changed:
    lora = job.trainer.lora
    if not lora.rank:
        changed = lora.model_copy(update={"rank": LORA_RANK})
        yield f"trainer.lora.rank={LORA_RANK}", _with_trainer(job, lora=changed)


KNOBS: tuple[Knob, ...] = (
    _recompute,
    _low_precision,
    _offload,
    _shared_rows,
    _one_copy,
    _other_channel,
    _more_ranks,
    _adapters,
)
