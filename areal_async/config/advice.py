"""Warnings about valid but unwise fields, printed before a job starts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from areal_async.base.mistakes import Mistake
from areal_async.config.base import Section
from areal_async.config.job import JobConfig
from areal_async.config.presets import PRESETS
from areal_async.config.rewardcheck import programs_run
from areal_async.config.trainings import FILE_KINDS

RUNNING_PER_STALENESS = 0.25
"""Largest number of groups that should run at once, divided by `max_staleness * batch_groups`. At this limit,
the worst case measured in `docs/staleness.md` drops 5 % of the groups and keeps 71 to 86 % of the throughput.
Above the limit, both figures get worse quickly."""
OF_RL = (
    *("rollout.", "buffer.", "reward.", "weights.", "evaluation."),
    *(f"trainer.{name}." for name in ("objective", "reference", "critic", "teacher", "process_reward")),
    *("trainer.self_check.", "trainer.minibatches", "trainer.record_batches"),
)
"""Fields that only an rl job reads. A name that ends with a dot is a whole section."""
EVEN_TOKENS = 16
"""Largest `max_new_tokens` of a single turn at which all groups take about the same time, because no answer
needs many more decoding passes than another. Measured with the quickstart and 6 tokens: with η = 1 and a
whole batch in progress, none of 32,000 groups was dropped."""


PEAK_TFLOPS = {"float32": 67, "tf32": 495, "bfloat16": 989}
"""Peak TFLOP/s of an H100 SXM in dense products, from the vendor's data sheet."""


def advise(job: JobConfig) -> list[Mistake]:
    """Return every warning about `job`. If a warning is about only one of several policies, its field begins
    with `policies.NAME`."""
    found = {name: [*_advise(view)] for name, view in job.views.items()}
    common = set.intersection(*map(set, found.values()))
    named = (
        each if each in common else replace(each, field=f"policies.{name}.{each.field}")
        for name, warnings in found.items()
        for each in warnings
    )
    return list(dict.fromkeys(named))


def _advise(job: JobConfig) -> Iterator[Mistake]:
    """Yield the warnings about a job with one policy."""
    yield from _fields_are_of_the_kind(job)
    yield from _float32_on_a_gpu(job)
    if job.kind == "rl":
        yield from _groups_finish_within_the_bound(job)
        yield from _programs_unprotected(job)
        yield from _kl_has_a_gradient(job)


def _fields_are_of_the_kind(job: JobConfig) -> Iterator[Mistake]:
    """Yield one warning that lists the fields with a value that a job of this kind does not read."""
    others = tuple(f"{kind}." for kind in FILE_KINDS if kind != job.kind)
    idle = others if job.kind == "rl" else (*others, *OF_RL)
    preset = PRESETS.get(job.trainer.objective.preset or "", {})
    # A preset names each argument of a part, but `_filled_in` yields the whole mapping of arguments.
    filled = {re.sub(r"(?<=_args)\..*", "", field) for field in preset}
    if found := [field for field in _filled_in(job) if field.startswith(idle) and field not in filled]:
        more = f", nor {', '.join(found[1:])}" if found[1:] else ""
        fix = "set kind" if job.kind == "rl" else f"say in `{job.kind}` what is meant"
        problem = f"a job of kind {job.kind} does not read it{more}"
        yield Mistake(found[0], problem, f"Remove what is not read, or {fix}")


def _filled_in(section: Section, above: str = "") -> Iterator[str]:
    """Yield the dotted fields of a section that differ from their defaults."""
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _filled_in(value, f"{above}{name}.")
        elif value != info.get_default(call_default_factory=True):
            yield above + name


def _float32_on_a_gpu(job: JobConfig) -> Iterator[Mistake]:
    sections = ("trainer", "rollout") if job.kind == "rl" else ("trainer",)
    for name in sections:
        section = getattr(job, name)
        if section.device != "cpu" and section.resolved_dtype == "float32":
            peak = PEAK_TFLOPS["bfloat16"]
            factors = [f"{peak / PEAK_TFLOPS[kind]:.0f} times in {kind}" for kind in ("tf32", "float32")]
            problem = (
                "on a GPU, products are several times slower in float32 than in bfloat16. By the peaks of an "
                f"H100: {', '.join(factors)}. It also takes twice the memory"
            )
            yield Mistake(f"{name}.dtype", problem, "Remove it (auto is bfloat16 on a GPU)")


def _kl_has_a_gradient(job: JobConfig) -> Iterator[Mistake]:
    kl = job.trainer.objective.kl
    if kl.coefficient and kl.place == "loss" and kl.estimator == "k1" and not kl.straight_through:
        problem = (
            "the gradient of `k1` in the loss is 0 on average, whatever the distance: it adds noise alone"
        )
        fix = "Set it to k2 or k3, or kl.straight_through to true, or kl.place to reward"
        yield Mistake("trainer.objective.kl.estimator", problem, fix)


def _programs_unprotected(job: JobConfig) -> Iterator[Mistake]:
    for field in (field for field, isolated in programs_run(job) if not isolated):
        may = "they may do whatever the reward service may do on its machine"
        problem = f"programs that the model writes run without any protection: {may}"
        fix = "Remove it, so that they are isolated (docs/sandbox.md)"
        yield Mistake(f"{field}.sandbox", problem, fix)


def running_groups(job: JobConfig) -> float:
    """Return the number of groups that all workers together run at once."""
    return _engines(job) * job.rollout.max_concurrent / job.rollout.group_size


def _engines(job: JobConfig) -> int:
    return job.rollout.workers * job.rollout.replicas


def _groups_finish_within_the_bound(job: JobConfig) -> Iterator[Mistake]:
    """Warn if so many groups run at once that long groups become too stale before they are finished. There is
    no warning at η = 0, because workers and trainer then take turns. The rule comes from the tables of
    `docs/staleness.md`."""
    eta, batch, running = job.buffer.max_staleness, job.buffer.batch_groups, running_groups(job)
    rollout, most = job.rollout, RUNNING_PER_STALENESS * eta * batch
    is_even = rollout.workflow == "single_turn" and rollout.sampling.max_new_tokens <= EVEN_TOKENS
    if eta == 0 or running <= most or (is_even and running <= eta * batch):
        return
    needed = -(-running // (RUNNING_PER_STALENESS * batch))
    concurrent = int(most * rollout.group_size / _engines(job))
    fix = "Raise"
    if concurrent >= rollout.group_size:
        fix = f"Lower rollout.max_concurrent to {concurrent}, if the engine is no slower for it, or raise"
    problem = (
        f"{eta} is little for {running:.0f} groups running at once (rollout.workers × replicas × "
        f"max_concurrent / group_size), {running / batch:.1f} times buffer.batch_groups = {batch}: when "
        "durations vary, long groups become too old before they are finished, and are dropped or waited for"
    )
    fix = f"{fix} max_staleness to {needed:.0f}, or buffer.batch_groups (docs/staleness.md)"
    yield Mistake("buffer.max_staleness", problem, fix)
