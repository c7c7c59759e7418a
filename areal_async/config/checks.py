"""Rules between the fields of a job: what each field allows alone and the whole must not hold.

Pure: nothing here looks at files, ports or the machine (see `config/files.py`, `launch/preflight.py`), but
for the size of a mixture, which says how much its routes weigh.
Every rule is a function of the job that yields mistakes; `check_fields` runs them all. The parts that the job
names are asked in `config/parts.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from areal_async.base.mistakes import Mistake
from areal_async.config.devices import trainer_gpus
from areal_async.config.fields import job_fields
from areal_async.config.job import JobConfig, LoraSection
from areal_async.config.parts import part_mistakes
from areal_async.config.presets import PRESETS
from areal_async.config.redis_url import FORMS, RedisUrl, parse_redis_url
from areal_async.config.rewardcheck import reward_mistakes
from areal_async.config.routes import route_bytes
from areal_async.storage.urls import url_of

Rule = Callable[[JobConfig], Iterator[Mistake]]

UNIT_BYTES = 15  # Most bytes that one token takes in a stored episode
EPISODE_BYTES = 1024  # Allowance for the header of a stored episode
LONGEST_INTERVAL = 50  # Most steps between two checkpoints where `checkpoint.every_steps` is `auto`


def check_fields(job: JobConfig) -> list[Mistake]:
    """Every broken rule of `job`, in the order of the file's sections."""
    rules = ANY_KIND + (RL_ONLY if job.kind == "rl" else FILES_ONLY)
    return [mistake for rule in rules for mistake in rule(job)]


def episode_limit_bytes(job: JobConfig) -> int:
    """The most that one stored episode of the job can weigh, with its routes."""
    return job.rollout.max_model_len * (UNIT_BYTES + route_bytes(job)) + EPISODE_BYTES


def checkpoint_interval(job: JobConfig) -> int:
    """The most steps between two checkpoints."""
    every = job.checkpoint.every_steps
    if every == "auto" and job.kind != "rl":
        return min(LONGEST_INTERVAL, job.trainer.steps)
    if every == "auto":
        batch = job.buffer.batch_groups
        heaviest = batch * job.rollout.group_size * episode_limit_bytes(job)
        room = min(job.buffer.max_groups // batch, job.buffer.max_bytes // heaviest)
        return min(LONGEST_INTERVAL, max(1, room - _beside_the_interval(job)), job.trainer.steps)
    return min(every, job.trainer.steps)


def held_groups(job: JobConfig) -> int:
    """The most groups before COMMITTED at once: what waits for the next checkpoint, what admission lets be
    outstanding, (η + 1)·B, and with reuse what was trained before the last checkpoint and again after it."""
    return (checkpoint_interval(job) + _beside_the_interval(job)) * job.buffer.batch_groups


def _beside_the_interval(job: JobConfig) -> int:
    """Steps' worth of groups held beside those of one checkpoint interval."""
    eta = job.buffer.max_staleness
    return eta + 1 + (eta if job.buffer.max_reuse > 1 else 0)


def _sampling_is_the_policy(job: JobConfig) -> Iterator[Mistake]:
    sampling = job.rollout.sampling
    why = "importance ratios would compare the policy with another distribution than the one sampled from"
    if sampling.temperature == 0:
        problem = "greedy sampling gives every episode of a group the same response, so nothing is learned"
        yield Mistake("rollout.sampling.temperature", problem, "Set it above 0, for example 1.0")
    if sampling.top_p != 1:
        yield Mistake(
            "rollout.sampling.top_p", f"training needs 1, not {sampling.top_p}: {why}", "Set it to 1"
        )
    if sampling.top_k != 0:
        yield Mistake(
            "rollout.sampling.top_k", f"training needs 0, not {sampling.top_k}: {why}", "Set it to 0"
        )


def _workers_are_within_their_limits(job: JobConfig) -> Iterator[Mistake]:
    rollout, limits = job.rollout, job.rollout.autoscale
    if not limits.max:
        return
    if limits.min > limits.max:
        problem = f"{limits.min} is more than rollout.autoscale.max = {limits.max}"
        yield Mistake("rollout.autoscale.min", problem, "Lower it, or raise max", ("rollout.autoscale.max",))
    elif not limits.min <= rollout.workers <= limits.max:
        yield Mistake(
            "rollout.workers",
            f"{rollout.workers} is not within rollout.autoscale, {limits.min} to {limits.max}",
            "Set it to a number of workers to begin with within the limits, or change these",
            ("rollout.autoscale.min", "rollout.autoscale.max"),
        )
    if 0 < len(rollout.server.urls) < (needed := limits.max * rollout.replicas):
        yield Mistake(
            "rollout.autoscale.max",
            f"{limits.max} workers with {rollout.replicas} replicas need {needed} servers, and "
            f"rollout.server.urls has {len(rollout.server.urls)}",
            "Lower it, or give more",
            ("rollout.server.urls", "rollout.replicas"),
        )


def _a_group_fits_a_worker(job: JobConfig) -> Iterator[Mistake]:
    n, limit = job.rollout.group_size, job.rollout.max_concurrent
    if n > limit:
        problem = (
            f"a worker runs at most {limit} episodes at once, but one group has {n} (rollout.group_size)"
        )
        yield Mistake("rollout.max_concurrent", problem, f"Set it to {n} or more", ("rollout.group_size",))


def _response_fits_the_model(job: JobConfig) -> Iterator[Mistake]:
    length = job.rollout.max_model_len
    asked = {"rollout": job.rollout.sampling.max_new_tokens}
    if job.tasks.evaluation is not None and job.evaluation.sampling.max_new_tokens is not None:
        asked["evaluation"] = job.evaluation.sampling.max_new_tokens
    for section, max_new_tokens in asked.items():
        if max_new_tokens >= length:
            yield Mistake(
                f"{section}.sampling.max_new_tokens",
                f"{max_new_tokens} leaves no room for a prompt in rollout.max_model_len = {length}",
                f"Set it below {length}, or raise rollout.max_model_len",
                ("rollout.max_model_len",),
            )


def _redis_url(job: JobConfig) -> Iterator[Mistake]:
    buffer = job.buffer
    if buffer.redis == "embedded":
        for name, section in (("redis_login", buffer.redis_login), ("redis_tls", buffer.redis_tls)):
            if section != type(section)():
                problem = "the embedded Redis listens on a private socket and has neither users nor TLS"
                yield Mistake(f"buffer.{name}", problem, "Remove it, or set buffer.redis", ("buffer.redis",))
        return
    try:
        url = parse_redis_url(buffer.redis)
    except ValueError as error:
        yield Mistake("buffer.redis", str(error), f"Write {FORMS}")
        return
    if url.password:
        yield Mistake(
            "buffer.redis",
            "the address holds a password, and job files are copied and shown",
            "Leave the password out, and name the variable or file that holds it in "
            "buffer.redis_login.password_env or password_file",
        )
    yield from _redis_login(job, url)
    yield from _redis_tls(job, url)


def _redis_login(job: JobConfig, url: RedisUrl) -> Iterator[Mistake]:
    login = job.buffer.redis_login
    if login.password_env and login.password_file is not None:
        problem = "the password is given twice"
        yield Mistake("buffer.redis_login.password_env", problem, "Remove it, or password_file")
    if url.username and not (login.password_env or login.password_file or url.password):
        yield Mistake(
            "buffer.redis_login",
            f"the address names the user {url.username!r}, but no password is given",
            "Set password_env or password_file",
            ("buffer.redis",),
        )


def _redis_tls(job: JobConfig, url: RedisUrl) -> Iterator[Mistake]:
    tls = job.buffer.redis_tls
    if not url.tls and tls != type(tls)():
        problem = f"certificates have no effect on a {url.scheme}:// address"
        fix = "Write rediss:// in buffer.redis, or remove the section"
        yield Mistake("buffer.redis_tls", problem, fix, ("buffer.redis",))
    if (tls.cert_file is None) != (tls.key_file is None):
        missing = "key_file" if tls.key_file is None else "cert_file"
        problem = "a client certificate and its key belong together"
        yield Mistake(f"buffer.redis_tls.{missing}", problem, "Give both, or neither")


def _checkpoint_interval_fits(job: JobConfig) -> Iterator[Mistake]:
    groups, batch = held_groups(job), job.buffer.batch_groups
    room = job.buffer.max_groups // batch - _beside_the_interval(job)
    involved: tuple[str, ...] = (
        "checkpoint.every_steps",
        "buffer.batch_groups",
        "buffer.max_staleness",
        "trainer.steps",
    )
    reuse = ""
    if job.buffer.max_reuse > 1:
        involved += ("buffer.max_reuse",)
        reuse = f" + max_staleness {job.buffer.max_staleness} for reuse"
    if groups > job.buffer.max_groups:
        kept = (
            f"{job.buffer.max_groups} groups cannot hold what one checkpoint interval keeps: "
            f"({checkpoint_interval(job)} steps + max_staleness "
            f"{job.buffer.max_staleness} + 1{reuse}) × batch_groups {batch} = {groups}"
        )
        most = job.buffer.max_groups * batch // groups
        if room >= 1:
            fix = f"Set it to {groups} or more, or checkpoint.every_steps to {room} or less"
            yield Mistake("buffer.max_groups", kept, fix, involved)
        elif most >= 1:  # the batch is too large for any interval
            fix = f"Set it to {most} or less, or buffer.max_groups to {groups} or more"
            yield Mistake("buffer.batch_groups", f"{batch} is too large: {kept}", fix, involved)
        else:
            yield Mistake("buffer.max_groups", kept, f"Set it to {groups} or more", involved)
        return
    weight = groups * job.rollout.group_size * episode_limit_bytes(job)
    if weight > job.buffer.max_bytes:
        yield Mistake(
            "buffer.max_bytes",
            f"{job.buffer.max_bytes} bytes may not hold one checkpoint interval: {groups} groups of "
            f"{job.rollout.group_size} episodes of {job.rollout.max_model_len} tokens can be {weight}",
            f"Set it to {weight} or more, or lower checkpoint.every_steps or rollout.max_model_len",
            (*involved, "rollout.group_size", "rollout.max_model_len", "buffer.max_groups"),
        )


def _best_can_be_told(job: JobConfig) -> Iterator[Mistake]:
    if not job.checkpoint.keep_best:
        return
    if job.tasks.evaluation is None:
        yield Mistake(
            "checkpoint.keep_best",
            "the best checkpoints are told by held-out accuracy, and the job has no evaluation",
            "Name held-out tasks (tasks.evaluation), or set it to 0",
        )
        return
    field, every = "evaluation.every_steps", job.evaluation.every_steps
    if job.kind != "rl":
        field, every = f"{job.kind}.evaluate_every", job.training.evaluate_every
    saved = job.checkpoint.every_steps
    if saved == "auto":
        saved = every  # what is evaluated is saved
    if (both := math.lcm(saved, every)) >= job.trainer.steps:
        yield Mistake(
            "checkpoint.keep_best",
            f"no step before the last is both evaluated and in a checkpoint: {field} {every} and "
            f"checkpoint.every_steps {saved} meet every {both} steps, and there are "
            f"{job.trainer.steps}",
            f"Make checkpoint.every_steps a multiple of {field}, or set it to 0",
            (field, "checkpoint.every_steps", "trainer.steps"),
        )


def _adapters_have_a_rank(job: JobConfig) -> Iterator[Mistake]:
    if not job.trainer.lora.rank and job.trainer.lora != LoraSection():
        problem = "trainer.lora is filled in, but with rank 0 the weights themselves are trained"
        yield Mistake("trainer.lora.rank", problem, "Set it, for example to 16, or remove trainer.lora")


def _reuse_is_possible(job: JobConfig) -> Iterator[Mistake]:
    most = job.buffer.max_staleness + 1
    if job.buffer.max_reuse > most:
        yield Mistake(
            "buffer.max_reuse",
            f"a group is young enough for max_staleness + 1 = {most} steps at most, not for "
            f"{job.buffer.max_reuse}",
            f"Set it to {most} or less, or raise buffer.max_staleness",
            ("buffer.max_staleness",),
        )


def _group_policy_is_whole(job: JobConfig) -> Iterator[Mistake]:
    group, n = job.buffer.group, job.rollout.group_size
    policy = ("buffer.group.policy",)
    if group.policy != "complete" and group.deadline_s is None:
        problem = f"{group.policy} needs a deadline, and none is given"
        yield Mistake("buffer.group.deadline_s", problem, "Set it to the seconds to wait for a group", policy)
    if group.policy == "complete" and group.deadline_s is not None:
        problem = "`complete` waits for every sample, so this deadline would do nothing"
        fix = "Remove it, or set buffer.group.policy to deadline_drop or deadline_partial"
        yield Mistake("buffer.group.deadline_s", problem, fix, policy)
    if group.policy != "deadline_partial":
        if group.min_samples != 1:
            problem = f"`{group.policy}` never trains a part of a group, so this would do nothing"
            fix = "Remove it, or set buffer.group.policy to deadline_partial"
            yield Mistake("buffer.group.min_samples", problem, fix, policy)
        return
    if group.min_samples > n:
        problem = f"a group has {n} samples (rollout.group_size), so none would ever be enough"
        fix = f"Set it to {n} or less"
        yield Mistake("buffer.group.min_samples", problem, fix, (*policy, "rollout.group_size"))


def _penalty_and_warm_up_have_an_effect(job: JobConfig) -> Iterator[Mistake]:
    kl, critic, steps = job.trainer.objective.kl, job.trainer.critic, job.trainer.steps
    if kl.target is not None and not kl.coefficient:
        yield Mistake(
            "trainer.objective.kl.target",
            "there is no penalty to be adapted: kl.coefficient is 0",
            "Set kl.coefficient to what it begins with, or remove the target",
            ("trainer.objective.kl.coefficient",),
        )
    if critic.warmup_steps >= steps:
        yield Mistake(
            "trainer.critic.warmup_steps",
            f"the critic alone would be trained in all {steps} steps (trainer.steps)",
            f"Set it below {steps}",
            ("trainer.steps",),
        )


def _minibatches_hold_groups(job: JobConfig) -> Iterator[Mistake]:
    minibatches, groups = job.trainer.minibatches, job.buffer.batch_groups
    if minibatches > groups:
        yield Mistake(
            "trainer.minibatches",
            f"{groups} groups (buffer.batch_groups) cannot be dealt whole to {minibatches} minibatches",
            f"Set it to {groups} or less",
            ("buffer.batch_groups",),
        )


def _held_out_is_held_out(job: JobConfig) -> Iterator[Mistake]:
    if job.tasks.evaluation is not None and job.tasks.evaluation == job.tasks.train:
        problem = "this is the training file, so the accuracy measured would not be held out"
        yield Mistake("tasks.evaluation", problem, "Give another file, or remove it", ("tasks.train",))


def _ports_are_usable(job: JobConfig) -> Iterator[Mistake]:
    first = job.observe.metrics_port
    ranks = sum(view.trainer.ranks for view in job.views.values())
    last = first + job.rollout.workers + ranks + 3
    fix = "Set it to the first of some free consecutive ports from 1024 up, or to 0 for free ones"
    if 0 < first < 1024:
        yield Mistake("observe.metrics_port", f"ports below 1024 need root, and {first} is one", fix)
    elif first and last > 65_535:
        problem = f"the services need the ports {first} to {last}, but 65535 is the last"
        yield Mistake("observe.metrics_port", problem, fix, ("rollout.workers", "trainer.ranks"))


def _stop_accuracy_is_measured(job: JobConfig) -> Iterator[Mistake]:
    wanted, field = job.training.stop_between, f"{job.kind}.stop_between"
    if wanted is not None and job.tasks.evaluation is None:
        problem = "there is no held-out file to measure the accuracy on"
        yield Mistake(field, problem, "Add tasks.evaluation, or remove it", ("tasks.evaluation",))
    if wanted is not None and wanted[0] > wanted[1]:
        problem = f"no accuracy is at least {wanted[0]} and at most {wanted[1]}"
        yield Mistake(field, problem, "Write the lower limit first, as in [0.35, 0.45]")


def _reward_models_are_whole(job: JobConfig) -> Iterator[Mistake]:
    if job.kind == "reward_model" and job.trainer.lora.rank:
        problem = "adapters are trained of language models, and this trains a reward model"
        yield Mistake("trainer.lora.rank", problem, "Set it to 0", ("kind",))


def _preference_loss_is_whole(job: JobConfig) -> Iterator[Mistake]:
    section, plain = job.preference, type(job.preference)()
    if job.kind != "preference":
        return
    owners = {"label_smoothing": "dpo", "weight_desirable": "kto", "weight_undesirable": "kto"}
    for name, loss in owners.items():
        if getattr(section, name) != getattr(plain, name) and section.loss != loss:
            problem = f"the loss {section.loss} does not use it, only {loss} does"
            yield Mistake(f"preference.{name}", problem, "Remove it", ("preference.loss",))
    if section.loss == "kto" and section.batch_size < 2:
        problem = "kto compares each step's prompts with answers of others, so a step needs several"
        yield Mistake("preference.batch_size", problem, "Set it to 2 or more", ("preference.loss",))


def _evaluation_engine_is_its_own(job: JobConfig) -> Iterator[Mistake]:
    evaluation, rollout = job.evaluation, job.rollout
    if evaluation.samples > 1 and evaluation.sampling.temperature == 0:
        yield Mistake(
            "evaluation.samples",
            f"greedy sampling gives the same answer {evaluation.samples} times",
            "Set evaluation.sampling.temperature above 0, or samples to 1",
            ("evaluation.sampling.temperature",),
        )
    shared = sorted(set(evaluation.server.urls) & set(rollout.server.urls))
    if shared:
        problem = f"{shared[0]} serves the rollout too, and an engine holds one version"
        yield Mistake(
            "evaluation.server.urls", problem, "Lend the evaluation another one", ("rollout.server.urls",)
        )
    if len(evaluation.server.urls) > 1:
        problem = f"the evaluation has one engine, and {len(evaluation.server.urls)} are given"
        yield Mistake("evaluation.server.urls", problem, "Give one")


def _ranks_share_a_place_for_checkpoints(job: JobConfig) -> Iterator[Mistake]:
    names = ["trainer", *(f"trainer-{rank}" for rank in range(1, job.trainer.ranks))]
    on = {job.placement.pretend.get(name) for name in names}
    if len(on) > 1 and job.checkpoint.store is None and url_of(job.run_dir) is None:
        problem = "the trainer's ranks are on several hosts, which share no disk for checkpoints"
        fix = "Name a place that all of them reach in checkpoint.store, or have all ranks on one host"
        yield Mistake("placement.pretend", problem, fix, ("checkpoint.store",))


ANY_KIND: tuple[Rule, ...] = (
    part_mistakes,
    _redis_url,
    _held_out_is_held_out,
    _ports_are_usable,
    _best_can_be_told,
    _adapters_have_a_rank,
    _ranks_share_a_place_for_checkpoints,
)
FILES_ONLY: tuple[Rule, ...] = (
    _stop_accuracy_is_measured,
    _preference_loss_is_whole,
    _reward_models_are_whole,
)
RL_ONLY: tuple[Rule, ...] = (
    reward_mistakes,
    _workers_are_within_their_limits,
    _a_group_fits_a_worker,
    _sampling_is_the_policy,
    _response_fits_the_model,
    _checkpoint_interval_fits,
    _reuse_is_possible,
    _group_policy_is_whole,
    _minibatches_hold_groups,
    _penalty_and_warm_up_have_an_effect,
    _evaluation_engine_is_its_own,
)


# --- several policies ------------------------------------------------------------------------------------


ONE_SPEAKER = frozenset({"single_turn", "multi_turn", "tool_use"})


def policies_mistakes(views: Sequence[JobConfig]) -> Iterator[Mistake]:
    """Broken rules between the policies of a job; `views` are its jobs of one policy each."""
    if views[0].kind != "rl":
        problem = f"`kind: {views[0].kind}` trains one policy"
        yield Mistake("policies", problem, "Keep one of them, or give each its job")
    for field, url in (
        ("checkpoint.store", views[0].checkpoint.store),
        ("run_dir", url_of(views[0].run_dir)),
    ):
        if url is not None:
            problem = "with several policies checkpoints are kept on this machine alone"
            yield Mistake(field, problem, "Remove it, or give a folder")
    workflow = views[0].rollout.workflow
    if workflow in ONE_SPEAKER:
        yield Mistake(
            "rollout.workflow",
            f"{workflow} speaks with one policy only, and there are {len(views)}",
            "Write one that asks each, by ctx.generate(…, policy=…), or by the model's name in `agent`",
        )
    for field in sorted({field for preset in PRESETS.values() for field in preset.fields}):
        found = {view.policy: attrgetter(field)(view) for view in views} if field in job_fields() else {}
        if not field.startswith("trainer.") and len({*found.values()}) > 1:
            said = ", ".join(f"{value} for {policy}" for policy, value in found.items())
            problem = f"all policies share it, and by their presets it would be {said}"
            yield Mistake(
                field, problem, "Write it in the job itself, and a preset that goes with it for each"
            )
    owners: dict[int, str] = {}
    for view in views:
        if view.rollout.routes == "replay":
            problem = "an episode has room for the routes of one model, and there are several policies"
            yield Mistake("rollout.routes", problem, "Set it to auto or off")
            break
    for view in views:
        for gpu in trainer_gpus(view):
            if (other := owners.setdefault(gpu, view.policy)) != view.policy:
                yield Mistake(
                    f"policies.{view.policy}.trainer.device",
                    f"cuda:{gpu} is a GPU of the trainer of {other} too",
                    "Give the trainers GPUs of their own, by cuda:N",
                )
                break
        if view.rollout.device == "cuda":
            yield Mistake(
                f"policies.{view.policy}.rollout.device",
                "with several policies it is not told which GPUs are whose",
                "Write cuda:N",
            )
