"""Rules about several fields of a job together. They find values that are each valid but contradict each
other.

This module does not check files, ports or the machine (see `config/files.py`, `launch/preflight.py`). The
only exception is the size of a mixture of experts, which is read from the model's files because it determines
the size of the routes. Each rule is a function of the job that yields mistakes; `check_fields` runs all
rules. The parts of a job have rules of their own (`config/parts.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from areal_async.base.mistakes import Mistake
from areal_async.config.devices import trainer_gpus, width_of
from areal_async.config.job import JobConfig, LoraSection, ShapeSection, job_fields
from areal_async.config.parts import part_mistakes
from areal_async.config.presets import PRESETS
from areal_async.config.redis_url import FORMS, parse_redis_url
from areal_async.config.registry import BACKENDS, ENGINES
from areal_async.config.rewardcheck import reward_mistakes
from areal_async.config.routes import route_bytes
from areal_async.storage.urls import url_of

Rule = Callable[[JobConfig], Iterator[Mistake]]

UNIT_BYTES = 15  # Maximum bytes of one token in a stored episode
EPISODE_BYTES = 1024  # Allowance for the header of a stored episode
LONGEST_INTERVAL = 50  # Maximum steps between two checkpoints if `checkpoint.every_steps` is `auto`


def check_fields(job: JobConfig) -> list[Mistake]:
    """Return every broken rule of `job`."""
    any_kind: tuple[Rule, ...] = (part_mistakes, _redis, _any_kind, _best_checkpoints)
    of_rl: tuple[Rule, ...] = (reward_mistakes, _rollout, _evaluation, _buffer, _group, _trainer)
    any_kind += (_share,) if job.placement.share is not None else ()
    rules = any_kind + (of_rl if job.kind == "rl" else (_file_training,))
    return [mistake for rule in rules for mistake in rule(job)]


def episode_limit_bytes(job: JobConfig) -> int:
    """Return the largest size in bytes of one stored episode of the job, including its routes."""
    return job.rollout.max_model_len * (UNIT_BYTES + route_bytes(job)) + EPISODE_BYTES


def checkpoint_interval(job: JobConfig) -> int:
    """Return the largest number of steps between two checkpoints."""
    every, room = job.checkpoint.every_steps, LONGEST_INTERVAL
    if every == "auto" and job.kind == "rl":
        batch = job.buffer.batch_groups
        heaviest = batch * job.rollout.group_size * episode_limit_bytes(job)
        room = min(job.buffer.max_groups // batch, job.buffer.max_bytes // heaviest) - _beside(job)
    return min(min(LONGEST_INTERVAL, max(1, room)) if every == "auto" else every, job.trainer.steps)


def held_groups(job: JobConfig) -> int:
    """Return the largest number of groups that can be in a state before COMMITTED at one time. Three kinds of
    groups are counted: trained groups that wait for the next checkpoint, the (η + 1)·B outstanding groups
    that admission allows, and groups that are reused across a checkpoint."""
    return (checkpoint_interval(job) + _beside(job)) * job.buffer.batch_groups


def _beside(job: JobConfig) -> int:
    """Return the number of batches in `held_groups` beyond the batches of one checkpoint interval."""
    eta = job.buffer.max_staleness
    return eta + 1 + (eta if job.buffer.max_reuse > 1 else 0)


def _any_kind(job: JobConfig) -> Iterator[Mistake]:
    lora, first = job.trainer.lora, job.observe.metrics_port
    if job.tasks.evaluation is not None and job.tasks.evaluation == job.tasks.train:
        problem = "this is the training file, so the accuracy measured would not be held out"
        yield Mistake("tasks.evaluation", problem, "Give another file, or remove it")
    last = first + job.rollout.workers + sum(view.trainer.ranks for view in job.views.values()) + 3
    fix = "Set it to the first of some free consecutive ports from 1024 up, or to 0 for free ones"
    if 0 < first < 1024:
        yield Mistake("observe.metrics_port", f"ports below 1024 need root, and {first} is one", fix)
    elif first and last > 65_535:
        problem = f"the services need the ports {first} to {last}, but 65535 is the last"
        yield Mistake("observe.metrics_port", problem, fix)
    if not lora.rank and lora != LoraSection():
        problem = "trainer.lora is filled in, but with rank 0 the weights themselves are trained"
        yield Mistake("trainer.lora.rank", problem, "Set it, for example to 16, or remove trainer.lora")
    names = ["trainer", *(f"trainer-{rank}" for rank in range(1, job.trainer.ranks))]
    on = {job.placement.pretend.get(name) for name in names}
    if len(on) > 1 and job.checkpoint.store is None and url_of(job.run_dir) is None:
        problem = "the trainer's ranks are on several hosts, which share no disk for checkpoints"
        fix = "Name a place that all of them reach in checkpoint.store, or have all ranks on one host"
        yield Mistake("placement.pretend", problem, fix)


def _redis(job: JobConfig) -> Iterator[Mistake]:
    buffer, login, tls = job.buffer, job.buffer.redis_login, job.buffer.redis_tls
    if buffer.redis == "embedded":
        for name, section in (("redis_login", login), ("redis_tls", tls)):
            if section != type(section)():
                problem = "the embedded Redis listens on a private socket and has neither users nor TLS"
                yield Mistake(f"buffer.{name}", problem, "Remove it, or set buffer.redis")
        if job.placement.buffer != ShapeSection():
            problem = "a buffer with an embedded Redis runs on the host where the run is started"
            yield Mistake("placement.buffer", problem, "Remove it, or set buffer.redis")
        return
    try:
        url = parse_redis_url(buffer.redis)
    except ValueError as error:
        yield Mistake("buffer.redis", str(error), f"Write {FORMS}")
        return
    where = "buffer.redis_login.password_env or password_file"
    if url.password:
        problem = "the address holds a password, and job files are copied and shown"
        fix = f"Leave the password out, and name the variable or file that holds it in {where}"
        yield Mistake("buffer.redis", problem, fix)
    if login.password_env and login.password_file is not None:
        problem = "the password is given twice"
        yield Mistake("buffer.redis_login.password_env", problem, "Remove it, or password_file")
    if url.username and not (login.password_env or login.password_file or url.password):
        problem = f"the address names the user {url.username!r}, but no password is given"
        yield Mistake("buffer.redis_login", problem, "Set password_env or password_file")
    if not url.tls and tls != type(tls)():
        problem = f"certificates have no effect on a {url.scheme}:// address"
        yield Mistake("buffer.redis_tls", problem, "Write rediss:// in buffer.redis, or remove the section")
    if (tls.cert_file is None) != (tls.key_file is None):
        missing = "key_file" if tls.key_file is None else "cert_file"
        problem = "a client certificate and its key belong together"
        yield Mistake(f"buffer.redis_tls.{missing}", problem, "Give both, or neither")


def _rollout(job: JobConfig) -> Iterator[Mistake]:
    rollout, sampling = job.rollout, job.rollout.sampling
    n, most = rollout.group_size, rollout.max_concurrent
    if n > most:
        problem = f"a worker runs at most {most} episodes at once, but one group has {n} (rollout.group_size)"
        yield Mistake("rollout.max_concurrent", problem, f"Set it to {n} or more")
    if sampling.temperature == 0:
        problem = "greedy sampling gives every episode of a group the same response, so nothing is learned"
        yield Mistake("rollout.sampling.temperature", problem, "Set it above 0, for example 1.0")
    why = "importance ratios would compare the policy with another distribution than the one sampled from"
    for name, value, untouched in (("top_p", sampling.top_p, 1), ("top_k", sampling.top_k, 0)):
        if value != untouched:
            problem = f"training needs {untouched}, not {value}: {why}"
            yield Mistake(f"rollout.sampling.{name}", problem, f"Set it to {untouched}")
    length, asked = rollout.max_model_len, {"rollout": sampling.max_new_tokens}
    if job.tasks.evaluation is not None:
        asked["evaluation"] = job.evaluation.sampling.max_new_tokens or 0
    for section, tokens in asked.items():
        if tokens >= length:
            problem = f"{tokens} leaves no room for a prompt in rollout.max_model_len = {length}"
            fix = f"Set it below {length}, or raise rollout.max_model_len"
            yield Mistake(f"{section}.sampling.max_new_tokens", problem, fix)


def _evaluation(job: JobConfig) -> Iterator[Mistake]:
    evaluation, urls = job.evaluation, job.evaluation.server.urls
    if evaluation.samples > 1 and evaluation.sampling.temperature == 0:
        problem = f"greedy sampling gives the same answer {evaluation.samples} times"
        fix = "Set evaluation.sampling.temperature above 0, or samples to 1"
        yield Mistake("evaluation.samples", problem, fix)
    if shared := sorted(set(urls) & set(job.rollout.server.urls)):
        problem = f"{shared[0]} serves the rollout too, and an engine holds one version"
        yield Mistake("evaluation.server.urls", problem, "Lend the evaluation another one")
    if len(urls) > 1:
        problem = f"the evaluation has one engine, and {len(urls)} are given"
        yield Mistake("evaluation.server.urls", problem, "Give one")


def _buffer(job: JobConfig) -> Iterator[Mistake]:
    buffer, groups, batch = job.buffer, held_groups(job), job.buffer.batch_groups
    room, most = buffer.max_groups // batch - _beside(job), buffer.max_groups * batch // groups
    reuse = f" + max_staleness {buffer.max_staleness} for reuse" if buffer.max_reuse > 1 else ""
    weight = groups * job.rollout.group_size * episode_limit_bytes(job)
    field, fix = "buffer.max_groups", f"Set it to {groups} or more"
    problem = (
        f"{buffer.max_groups} groups cannot hold what one checkpoint interval keeps: "
        f"({checkpoint_interval(job)} steps + max_staleness {buffer.max_staleness} + 1{reuse}) × "
        f"batch_groups {batch} = {groups}"
    )
    if groups > buffer.max_groups:
        if room >= 1:
            fix += f", or checkpoint.every_steps to {room} or less"
        elif most >= 1:  # The batch is too large for any interval
            field, problem = "buffer.batch_groups", f"{batch} is too large: {problem}"
            fix = f"Set it to {most} or less, or buffer.max_groups to {groups} or more"
        yield Mistake(field, problem, fix)
    elif weight > buffer.max_bytes:
        problem = (
            f"{buffer.max_bytes} bytes may not hold one checkpoint interval: {groups} groups of "
            f"{job.rollout.group_size} episodes of {job.rollout.max_model_len} tokens can be {weight}"
        )
        fix = f"Set it to {weight} or more, or lower checkpoint.every_steps or rollout.max_model_len"
        yield Mistake("buffer.max_bytes", problem, fix)
    most = buffer.max_staleness + 1
    if buffer.max_reuse > most:
        steps = f"max_staleness + 1 = {most} steps at most"
        problem = f"a group is young enough for {steps}, not for {buffer.max_reuse}"
        yield Mistake("buffer.max_reuse", problem, f"Set it to {most} or less, or raise buffer.max_staleness")


def _group(job: JobConfig) -> Iterator[Mistake]:
    group, n = job.buffer.group, job.rollout.group_size
    deadline, least = "buffer.group.deadline_s", "buffer.group.min_samples"
    if group.policy != "complete" and group.deadline_s is None:
        problem = f"{group.policy} needs a deadline, and none is given"
        yield Mistake(deadline, problem, "Set it to the seconds to wait for a group")
    if group.policy == "complete" and group.deadline_s is not None:
        problem = "`complete` waits for every sample, so this deadline would do nothing"
        fix = "Remove it, or set buffer.group.policy to deadline_drop or deadline_partial"
        yield Mistake(deadline, problem, fix)
    if group.policy != "deadline_partial" and group.min_samples != 1:
        problem = f"`{group.policy}` never trains a part of a group, so this would do nothing"
        yield Mistake(least, problem, "Remove it, or set buffer.group.policy to deadline_partial")
    if group.policy == "deadline_partial" and group.min_samples > n:
        problem = f"a group has {n} samples (rollout.group_size), so none would ever be enough"
        yield Mistake(least, problem, f"Set it to {n} or less")


def _share(job: JobConfig) -> Iterator[Mistake]:
    """Check a job whose trainer and engine take turns on one device."""
    field, evaluation, rollout, backend = "placement.share", job.evaluation, job.rollout, job.trainer.backend
    if job.kind != "rl" or job.policies:
        what = "has several policies" if job.policies else f"is of kind {job.kind} and has no engine"
        yield Mistake(field, f"one trainer and one engine take turns, and the job {what}", "Remove it")
        return
    counts = {
        name: attrgetter(name)(job) for name in ("trainer.ranks", "rollout.workers", "rollout.replicas")
    }
    for name, count in (counts | {field: width_of(rollout)}).items():
        if count > 1:
            what = name if name != field else "the number of GPUs of an engine"
            problem = f"one trainer and one engine take turns on one device, and {what} is {count}"
            yield Mistake(name, problem, f"Set it to 1, or remove {field}")
    kinds = {device.partition(":")[0] for device in (job.trainer.device, rollout.device)}
    numbers = {device.partition(":")[2] or "0" for device in (job.trainer.device, rollout.device)}
    if len(kinds) > 1 or len(numbers) > 1:
        problem = f"the trainer is on {job.trainer.device} and the engine on {rollout.device}"
        yield Mistake(field, f"nothing is shared: {problem}", "Name one device for both, or remove it")
    if rollout.server.urls:
        problem = "servers that are attached may have other users, so they are not put to sleep"
        yield Mistake("rollout.server.urls", problem, f"Remove it, so that a server is started, or {field}")
    own = {"engine": evaluation.engine != "same", "device": evaluation.device is not None}
    own["server"] = evaluation.server != type(evaluation.server)()
    for name in (name for name, given in own.items() if given):
        problem = "the rollout's engine does the evaluations if it shares its device in time"
        yield Mistake(f"evaluation.{name}", problem, f"Remove it, or {field}")
    parts = {"rollout.engine": ENGINES.known(rollout.engine), "trainer.backend": BACKENDS.known(backend)}
    for name, part in parts.items():
        if part is not None and not getattr(part, "sleeps", False):
            problem = f"{attrgetter(name)(job)} cannot release its memory between two turns"
            yield Mistake(name, problem, f"Use another one, or remove {field}")
    if job.weights.channel == "nccl":
        problem = "NCCL takes only one member from each GPU, and trainer and engine share one"
        yield Mistake("weights.channel", problem, f"Set it to auto, or remove {field}")
    if len({job.placement.pretend.get(name) for name in ("trainer", "rollout-0")}) > 1:
        problem = "trainer and engine are on two hosts, and share no device"
        yield Mistake("placement.pretend", problem, f"Place them on one, or remove {field}")


def _trainer(job: JobConfig) -> Iterator[Mistake]:
    trainer, kl, groups = job.trainer, job.trainer.objective.kl, job.buffer.batch_groups
    if trainer.minibatches > groups:
        batch = f"{groups} groups (buffer.batch_groups)"
        problem = f"{batch} cannot be dealt whole to {trainer.minibatches} minibatches"
        yield Mistake("trainer.minibatches", problem, f"Set it to {groups} or less")
    if kl.target is not None and not kl.coefficient:
        problem, coefficient = "there is no penalty to be adapted: kl.coefficient is 0", "kl.coefficient"
        fix = f"Set {coefficient} to what it begins with, or remove the target"
        yield Mistake("trainer.objective.kl.target", problem, fix)
    if trainer.critic.warmup_steps >= trainer.steps:
        problem = f"the critic alone would be trained in all {trainer.steps} steps (trainer.steps)"
        yield Mistake("trainer.critic.warmup_steps", problem, f"Set it below {trainer.steps}")


def _best_checkpoints(job: JobConfig) -> Iterator[Mistake]:
    field, every, saved = "evaluation.every_steps", job.evaluation.every_steps, job.checkpoint.every_steps
    if job.kind != "rl":
        field, every = f"{job.kind}.evaluate_every", job.training.evaluate_every
    saved = every if saved == "auto" else saved  # Under `auto` each evaluated step is saved
    both = math.lcm(saved, every)
    if job.checkpoint.keep_best and job.tasks.evaluation is None:
        problem = "the best checkpoints are told by held-out accuracy, and the job has no evaluation"
        fix = "Name held-out tasks (tasks.evaluation), or set it to 0"
        yield Mistake("checkpoint.keep_best", problem, fix)
    elif job.checkpoint.keep_best and both >= job.trainer.steps:
        problem = (
            f"no step before the last is both evaluated and in a checkpoint: {field} {every} and "
            f"checkpoint.every_steps {saved} meet every {both} steps, and there are {job.trainer.steps}"
        )
        fix = f"Make checkpoint.every_steps a multiple of {field}, or set it to 0"
        yield Mistake("checkpoint.keep_best", problem, fix)


def _file_training(job: JobConfig) -> Iterator[Mistake]:
    wanted, field = job.training.stop_between, f"{job.kind}.stop_between"
    if wanted is not None and job.tasks.evaluation is None:
        problem = "there is no held-out file to measure the accuracy on"
        yield Mistake(field, problem, "Add tasks.evaluation, or remove it")
    if wanted is not None and wanted[0] > wanted[1]:
        problem = f"no accuracy is at least {wanted[0]} and at most {wanted[1]}"
        yield Mistake(field, problem, "Write the lower limit first, as in [0.35, 0.45]")
    if job.kind == "reward_model" and job.trainer.lora.rank:
        problem = "adapters are trained of language models, and this trains a reward model"
        yield Mistake("trainer.lora.rank", problem, "Set it to 0")
    section = job.preference
    owners = {"label_smoothing": "dpo", "weight_desirable": "kto", "weight_undesirable": "kto"}
    for name, loss in owners.items() if job.kind == "preference" else ():
        if getattr(section, name) != type(section).model_fields[name].default and section.loss != loss:
            problem = f"the loss {section.loss} does not use it, only {loss} does"
            yield Mistake(f"preference.{name}", problem, "Remove it")
    if job.kind == "preference" and section.loss == "kto" and section.batch_size < 2:
        problem = "kto compares each step's prompts with answers of others, so a step needs several"
        yield Mistake("preference.batch_size", problem, "Set it to 2 or more")


# --- several policies ------------------------------------------------------------------------------------


ONE_SPEAKER = frozenset({"single_turn", "multi_turn", "tool_use"})


def policies_mistakes(views: Sequence[JobConfig]) -> Iterator[Mistake]:
    """Yield the broken rules between the policies of a job. `views` has one job for each policy."""
    job, workflow = views[0], views[0].rollout.workflow
    if job.kind != "rl":
        problem = f"`kind: {job.kind}` trains one policy"
        yield Mistake("policies", problem, "Keep one of them, or give each its job")
    for field, url in (("checkpoint.store", job.checkpoint.store), ("run_dir", url_of(job.run_dir))):
        if url is not None:
            problem = "with several policies checkpoints are kept on this machine alone"
            yield Mistake(field, problem, "Remove it, or give a folder")
    if workflow in ONE_SPEAKER:
        problem = f"{workflow} speaks with one policy only, and there are {len(views)}"
        fix = "Write one that asks each, by ctx.generate(…, policy=…), or by the model's name in `agent`"
        yield Mistake("rollout.workflow", problem, fix)
    if any(view.rollout.routes == "replay" for view in views):
        problem = "an episode has room for the routes of one model, and there are several policies"
        yield Mistake("rollout.routes", problem, "Set it to auto or off")
    for field in sorted({field for preset in PRESETS.values() for field in preset}):
        found = {view.policy: attrgetter(field)(view) for view in views} if field in job_fields() else {}
        if not field.startswith("trainer.") and len({*found.values()}) > 1:
            said = ", ".join(f"{value} for {policy}" for policy, value in found.items())
            problem = f"all policies share it, and by their presets it would be {said}"
            fix = "Write it in the job itself, and a preset that goes with it for each"
            yield Mistake(field, problem, fix)
    owners: dict[int, str] = {}
    for view in views:
        others = [owners.setdefault(gpu, view.policy) for gpu in trainer_gpus(view)]
        taken = [
            (g, other) for g, other in zip(trainer_gpus(view), others, strict=True) if other != view.policy
        ]
        for gpu, other in taken[:1]:
            problem = f"cuda:{gpu} is a GPU of the trainer of {other} too"
            fix = "Give the trainers GPUs of their own, by cuda:N"
            yield Mistake(f"policies.{view.policy}.trainer.device", problem, fix)
        if view.rollout.device == "cuda":
            problem = "with several policies it is not told which GPUs are whose"
            yield Mistake(f"policies.{view.policy}.rollout.device", problem, "Write cuda:N")
