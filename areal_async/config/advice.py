"""Warnings about valid but unwise fields, printed before a job starts, and notes of `validate`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from areal_async.base.mistakes import Mistake
from areal_async.config.base import Section
from areal_async.config.job import JobConfig
from areal_async.config.parts import named_part
from areal_async.config.presets import PRESETS
from areal_async.config.rewardcheck import asked, programs_run
from areal_async.config.trainings import FILE_KINDS

RUNNING_PER_STALENESS = 0.25
"""Number of groups that may run at once, in batches per step of max_staleness. At this limit the worst case
of the sweep drops 5 % of the groups and keeps 71 to 86 % of the throughput. Above it both values become worse
quickly."""
MOST_LR, MOST_TEMPERATURE = 0.01, 2.0
LEAST_OF_A_ROW = 8  # A micro-batch holds at least one eighth of the longest row
MORE_HELD_OUT = 3  # Above this ratio of held-out to training file size, the files are likely swapped
OF_RL = (
    *("rollout.", "buffer.", "reward.", "weights.", "evaluation."),
    *(f"trainer.{name}." for name in ("objective", "reference", "critic", "teacher", "process_reward")),
    *("trainer.self_check.", "trainer.minibatches", "trainer.record_batches"),
)
"""Fields that only an rl job reads. A name with a dot at its end is a section."""
NUMBERS = frozenset({"arithmetic", "gsm8k", "choice", "exact_match", "overlong"})
"""Built-in rewards that return a number without components."""
WITHOUT_STATES = frozenset({"single_turn", "tool_use"})
"""Built-in workflows that name no states (`ctx.anchor`) and reward no single turns."""
EVEN_TOKENS = 16
"""Largest number of new tokens, in one turn, for which all groups take about the same time. No answer then
takes many more passes than another. Measured with 6 tokens: at η = 1 with a whole batch running, the
quickstart dropped none of 32,000 groups."""


def advise(job: JobConfig) -> list[Mistake]:
    """Return every warning about `job`. If a warning is about one of several policies, it has the policy's
    name."""
    return _of_policies(job, _advise)


def explain(job: JobConfig) -> list[Mistake]:
    """Return the notes of `validate` on correct fields that may have less effect than the user expects. As in
    `advise`, a note may have a policy's name."""
    return _of_policies(job, lambda view: [*_clips_do_something(view)] if view.kind == "rl" else [])


def _of_policies(job: JobConfig, told: Callable[[JobConfig], list[Mistake]]) -> list[Mistake]:
    found = {name: told(view) for name, view in job.views.items()}
    common = set.intersection(*map(set, found.values()))
    named = (
        each if each in common else replace(each, field=f"policies.{name}.{each.field}")
        for name, warnings in found.items()
        for each in warnings
    )
    return list(dict.fromkeys(named))


def _advise(job: JobConfig) -> list[Mistake]:
    """Return the warnings about a job with one policy."""
    rules = [_fields_are_of_the_kind, _numbers_are_usual]
    if job.kind == "rl":
        rules += [_groups_finish_within_the_bound, _trainer_is_usual, _programs_unprotected]
        rules += [_kl_has_a_gradient, _models_are_used, _advantage_has_what_it_compares]
        rules += [_switches_do_something]
    return [warning for rule in rules for warning in rule(job)]


def _numbers_are_usual(job: JobConfig) -> Iterator[Mistake]:
    """Warn of values that are within the bounds but very unusual."""
    optimizer, steps = job.trainer.optimizer, job.trainer.steps
    updates = steps * (job.trainer.minibatches if job.kind == "rl" else 1)
    if optimizer.lr > MOST_LR:
        problem = f"{optimizer.lr:g} is far above what AdamW trains language models with (1e-6 to 1e-3)"
        yield Mistake("trainer.optimizer.lr", problem, "Write a smaller number, such as 1e-6 or 3e-4")
    if optimizer.warmup_steps >= updates > 1:
        problem = f"the rate rises for {optimizer.warmup_steps} updates, and the job has {updates}"
        fix = f"Set it below {updates}, or the rate never reaches trainer.optimizer.lr"
        yield Mistake("trainer.optimizer.warmup_steps", problem, fix)
    train, held_out, every = job.tasks.train, job.tasks.evaluation, job.evaluation.every_steps
    is_asked = job.kind == "rl" and "every_steps" in job.evaluation.model_fields_set
    if held_out is not None and is_asked and every > steps:
        problem = f"the job has {steps} steps, so nothing is evaluated every {every}"
        yield Mistake("evaluation.every_steps", problem, f"Set it to {steps} or less")
    with suppress(OSError):
        is_like = held_out is not None and held_out.suffix == train.suffix
        if held_out and is_like and held_out.stat().st_size > MORE_HELD_OUT * train.stat().st_size:
            problem = f"{held_out.name} is much larger than {train.name}, which is trained on"
            fix = "If they are swapped, give each the other's place; else give fewer held-out tasks"
            yield Mistake("tasks.evaluation", problem, fix)


def _trainer_is_usual(job: JobConfig) -> Iterator[Mistake]:
    """Warn of minibatches of unequal sizes, of tiny micro-batches, and of unusual sampling."""
    groups, minibatches, heat = job.buffer.batch_groups, job.trainer.minibatches, job.rollout.sampling
    if groups % minibatches:
        even = max(each for each in range(1, minibatches) if groups % each == 0)
        sizes = f"{groups // minibatches} or {groups // minibatches + 1}"
        problem = f"{groups} groups make {minibatches} minibatches of {sizes}, and each is one update"
        fix = f"Set it to a divisor of buffer.batch_groups, such as {even}"
        yield Mistake("trainer.minibatches", problem, fix)
    tokens, length = job.trainer.micro_batch_tokens, job.rollout.max_model_len
    if tokens * LEAST_OF_A_ROW < length:
        problem = f"{tokens} is little for rows of up to {length} tokens: each is a pass of its own"
        yield Mistake("trainer.micro_batch_tokens", problem, f"Set it to {length} or more")
    if heat.temperature > MOST_TEMPERATURE:
        problem = f"at {heat.temperature:g} answers are all but random"
        yield Mistake("rollout.sampling.temperature", problem, "Set it to 1, or somewhat above or below")
    if job.buffer.sampling == "priority":
        problem = (
            "`priority` learned more slowly where it was measured: held-out accuracy 0.36 to 0.39 after 40 "
            "steps, and with `fifo` 0.45 to 0.50 (two seeds)"
        )
        fix = "Compare it with fifo on your tasks before you rely on it"
        yield Mistake("buffer.sampling", problem, fix)


def _clips_do_something(job: JobConfig) -> Iterator[Mistake]:
    objective = job.trainer.objective
    chosen = [named_part(job, f"trainer.objective.{kind}") for kind in ("advantage", "loss", "correction")]
    advantage, loss, correction = (part.registry.known(part.name) for part in chosen)
    known = all(hasattr(part, "columns") for part in (advantage, loss, correction))
    updates, bound = job.trainer.minibatches, job.buffer.max_staleness
    if not known or updates > 1 or not loss.clipped:
        return
    prox = loss.proximal(objective, advantage, correction, minibatches=updates, max_staleness=bound)
    if prox in ("recompute", "reuse"):
        problem = (
            "with one update a step the policy is the one that the step starts from: every ratio to it is 1, "
            f"and the bounds of the {objective.loss} loss do nothing"
        )
        fix = (
            "Raise it for more updates from the same samples; or leave it, and the loss is the plain policy "
            f"gradient, with the weights of `{objective.correction}` alone to make up for stale samples"
        )
        yield Mistake("trainer.minibatches", problem, fix)


def _fields_are_of_the_kind(job: JobConfig) -> Iterator[Mistake]:
    """Yield one warning for all fields that have a value although a job of this kind does not read them."""
    others = tuple(f"{kind}." for kind in FILE_KINDS if kind != job.kind)
    idle = others if job.kind == "rl" else (*others, *OF_RL)
    preset = PRESETS.get(job.trainer.objective.preset or "")
    # A preset names each argument of a part, but `_filled_in` yields the whole mapping of arguments.
    filled = {re.sub(r"(?<=_args)\..*", "", field) for field in (preset.fields if preset else {})}
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


def _kl_has_a_gradient(job: JobConfig) -> Iterator[Mistake]:
    kl = job.trainer.objective.kl
    if kl.coefficient and kl.place == "loss" and kl.estimator == "k1" and not kl.straight_through:
        problem = (
            "the gradient of `k1` in the loss is 0 on average, whatever the distance: it adds noise alone"
        )
        fix = "Set it to k2 or k3, or kl.straight_through to true, or kl.place to reward"
        yield Mistake("trainer.objective.kl.estimator", problem, fix)


def _models_are_used(job: JobConfig) -> Iterator[Mistake]:
    """Warn of a model with a column that no part of the objective reads. If a part is in a user's file, the
    columns that it reads are unknown, so there is no warning."""
    trainer = job.trainer
    parts = [named_part(job, f"trainer.objective.{kind}") for kind in ("advantage", "loss", "correction")]
    columns = {name for part in parts for name in getattr(part.registry.known(part.name), "columns", ())}
    if trainer.objective.kl.coefficient:
        columns.add("ref")
    used = {"reference": "ref", "critic": "value", "teacher": "teacher", "process_reward": "process"}
    for name, column in used.items() if not any(part.is_own for part in parts) else ():
        section = getattr(trainer, name)
        if column not in columns and section != type(section)():
            problem = "it is filled in, and the objective needs none: it does nothing"
            yield Mistake(f"trainer.{name}", problem, "Remove it")


def _advantage_has_what_it_compares(job: JobConfig) -> Iterator[Mistake]:
    name, workflow = job.trainer.objective.advantage, job.rollout.workflow
    rewards = {section.name for _, section in asked(job.reward)}
    lacking = {
        "gigpo": "states that come back, and {} names none (ctx.anchor): without them it is dr_grpo",
        "marti": "turns by their own rewards, and {} gives turns none",
    }
    if name == "gdpo" and rewards <= NUMBERS:
        them = ", ".join(sorted(rewards))
        problem = (
            f"gdpo compares the components of rewards, and {them} has none: the first step would end the job"
        )
        fix = "Make the reward of several with `weighted` (docs/rewards.md#use-built-in-rewards), or use grpo"
        yield Mistake("trainer.objective.advantage", problem, fix)
    if name in lacking and workflow in WITHOUT_STATES:
        page = "docs/agents.md#play-an-environment"
        fix = f"Use the workflow multi_turn ({page}) or one of your own, or the advantage grpo"
        problem = f"{name} compares {lacking[name].format(workflow)}"
        yield Mistake("trainer.objective.advantage", problem, fix)


def _switches_do_something(job: JobConfig) -> Iterator[Mistake]:
    objective, critic, own = job.trainer.objective, job.trainer.critic, "trainer.objective."
    arguments, kl = objective.advantage_args, objective.kl
    pairs = arguments.get("loss", "dpo") if objective.advantage == "dpo" else "dpo"
    by_turn = objective.group_by in ("task_agent_turn", "task_turn")
    for field, is_idle, because in (
        (f"{own}advantage_args.label_smoothing", pairs != "dpo" and "label_smoothing" in arguments, pairs),
        (f"{own}turn_discount", not by_turn and objective.turn_discount != 1, objective.group_by),
        (f"{own}kl.straight_through", kl.place == "reward" and kl.straight_through, kl.place),
        ("trainer.critic.model", critic.kind == "head" and critic.model is not None, critic.kind),
    ):
        if is_idle:
            yield Mistake(field, f"with `{because}` it does nothing", "Remove it")
    if critic.kind == "head" and critic.warmup_steps:
        problem = "a head shares its layers with the policy, which its loss changes while nothing else does"
        yield Mistake("trainer.critic.warmup_steps", problem, "Leave the warm-up out, or set kind to model")


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
    """Warn if so many groups run at once that younger groups overtake them before they are finished. At η = 0
    there is no warning, because workers and trainer take turns. The rule comes from the tables of
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
