"""The kinds of whole jobs that several tests look at, each run once for all test processes of a session.

`KINDS` maps a name to a function that writes the job file of that name into a workspace, runs the job to its
end and returns what it observed meanwhile as a JSON value. Tests get the finished, read-only run by
`finished(name)` and assert on it. What a function asserts itself can only be seen while the job runs."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import redis
import torch
from hostile_http import until
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from areal_async.base.events import VARIABLE
from areal_async.base.redis_binary import find_redis_server
from areal_async.cli.quickstart.model import split_problems, write_tasks
from areal_async.trajectory.codec import MAGIC
from areal_async.trajectory.routes import ROUTES_MAGIC
from replay_buffer.attachments import ROUTES as PREFIX
from tests.e2e.conftest import RunningJob, finish, started
from tests.jobs import DUET, Workspace
from tests.processes import processes_of
from tests.scrape import fetch_samples
from tests.waiting import LIMIT_S

TOUGH = {"ready_s": 600, "restarts": 10, "first_pause_s": 0.1}


# --- asynchronous and synchronous ----------------------------------------------------------------------

WORKFLOW = """
async def four_turns(ctx, task):
    reply = await ctx.generate(task.prompt)
    for turn in range(1, 4):
        reply = await ctx.generate(parent=reply.segment, turn=turn)
"""
"""Episodes so long that weights arrive while they are generated."""
SERVICES = ("buffer", "trainer", "reward", "rollout-0")


class PortScan:
    """Sockets of a run's processes by service, over all looks that were taken."""

    def __init__(self, job: RunningJob) -> None:
        self.job = job
        self.listening: dict[str, set[str]] = {}
        self.datagram: dict[str, set[str]] = {}

    def look(self) -> bool:
        """Add the sockets that are open now; return whether a step is trained."""
        supervisor = psutil.Process(self.job.process.pid)
        for process in (supervisor, *supervisor.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                name = next((each for each in SERVICES if each in process.cmdline()), "others")
                for each in process.net_connections("inet"):
                    if each.type != socket.SOCK_STREAM:
                        self.datagram.setdefault(name, set()).add(str(each.laddr))
                    elif each.status == psutil.CONN_LISTEN:
                        self.listening.setdefault(name, set()).add(each.laddr.ip)
        return bool(self.job.steps())


def plain(workspace: Workspace) -> Any:
    """Asynchronous, evaluated, recorded; its sockets are looked at until the first step is trained."""
    (workspace.folder / "workflow.py").write_text(WORKFLOW, encoding="utf-8")
    job_file = workspace.job(
        "plain",
        evaluated=True,
        rollout__max_model_len=192,
        rollout__workflow="workflow.py:four_turns",
        observe={"metrics_port": 0, "event_log": True},
    )
    with started(workspace, "run", job_file) as job:
        scan = PortScan(job)
        job.wait_for(scan.look, "a step")
        job.end()
    found = {"listening": scan.listening, "datagram": scan.datagram}
    return {what: {name: sorted(places) for name, places in each.items()} for what, each in found.items()}


def synchronous(workspace: Workspace) -> None:
    finish(workspace, workspace.job("synchronous", buffer__max_staleness=0))


# --- an agent over the gateway -------------------------------------------------------------------------

AGENT = """
import asyncio
import openai

async def agent(session, task):
    async with openai.AsyncOpenAI(base_url=session.openai_base_url, api_key=session.api_key) as client:
        async def chat(n):
            messages = [{"role": "user", "content": task.prompt}]
            for turn in range(3):
                stream = await client.chat.completions.create(
                    model="gpt", messages=messages, max_tokens=24, stream=True)
                said = "".join([c.choices[0].delta.content or "" async for c in stream])
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "1+1="}]
            return said
        return (await asyncio.gather(chat(0), chat(1)))[0]
"""
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}={% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{% endif %}"
)
AGENT_STEPS = 4


def agent(workspace: Workspace) -> None:
    """Episodes of an agent that knows nothing but a base URL."""
    (workspace.folder / "chatter.py").write_text(AGENT)
    (workspace.folder / "model" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    rollout = {"workflow": "agent", "workflow_args": {"agent": "chatter.py:agent"}, "max_model_len": 320}
    _, held_out = split_problems(seed=0, n_held_out=64)
    write_tasks(held_out[:4], workspace.folder / "few.jsonl", "few")
    job_file = workspace.job(
        "agent",
        rollout={"group_size": 2, "max_concurrent": 8, "sampling": {"max_new_tokens": 32}} | rollout,
        trainer__steps=AGENT_STEPS,
        tasks={"train": "train.jsonl", "evaluation": "few.jsonl"},
        buffer__batch_groups=3,
        evaluation={"every_steps": 10, "sampling": {"temperature": 0.0, "max_new_tokens": 8}},
    )
    finish(workspace, job_file)


# --- two policies --------------------------------------------------------------------------------------

DUET_STEPS = {"coder": 8, "tester": 20}


def two_policies(workspace: Workspace) -> Any:
    """Both trainers are killed in turn, then the supervisor; the job is resumed."""
    tester = {
        "model": "model",
        "buffer": {"batch_groups": 4, "max_staleness": 2},
        "trainer": {"steps": DUET_STEPS["tester"], "optimizer": {"lr": 3e-3}},
    }
    job_file = workspace.job(
        "two-policies",
        evaluated=True,
        rollout__workflow=DUET,
        policies={"coder": {"model": "model"}, "tester": tester},
        trainer__steps=DUET_STEPS["coder"],
        observe={"metrics_port": 0, "event_log": True},
        supervisor=TOUGH,
    )
    with started(workspace, "run", job_file) as job:
        for number, (policy, other) in enumerate((("coder", "tester"), ("tester", "coder")), 1):
            job.wait_for_steps(1)
            before = job.service(f"trainer-{other}").pid
            job.service(f"trainer-{policy}").kill()
            job.wait_for(lambda n=number: len(job.events("restart")) >= n, "a restart")
            assert job.service(f"trainer-{other}").pid == before
        job.wait_for_steps(1)
        killed = job.record
        os.kill(job.process.pid, signal.SIGKILL)
    with started(workspace, "resume", job_file) as job:
        job.end()
    left = [name for name in ("socket_dir", "shm_dir") if Path(killed[name]).exists()]
    return {"left": [*left, *(process.pid for process in processes_of(killed["run_id"]))]}


# --- weights across hosts ------------------------------------------------------------------------------

NODES = {"rollout-0": "host-1", "rollout-1": "host-2", "evaluator": "host-2"}
CHANNEL_STEPS = 20
GATED = """
import os
import time

from areal_async import advantage

CALLS = []


@advantage(needs_group=2)
def gated(samples):
    CALLS.append(1)
    while len(CALLS) > 12 and not os.path.exists({gate!r}):
        time.sleep(0.02)
    return samples.reward - samples.reward.mean()
"""
"""The last steps wait for a file, so that the job has not ended before its figures were read."""


def sent_bytes(job: RunningJob, source: str) -> float:
    """Bytes sent by all processes of the job that are `source` of chunks, by Prometheus' own targets."""
    targets = job.folder.parent / "prometheus" / f"{job.folder.name}.json"
    if not targets.exists():  # some service has not served yet
        return 0
    listed = json.loads(targets.read_text())
    assert {entry["labels"]["host"] for entry in listed} == {"local", "host-1", "host-2"}
    total = 0.0
    for entry in listed:
        port, labels = int(entry["targets"][0].rpartition(":")[2]), entry["labels"]
        samples = fetch_samples(port, path=labels.get("__metrics_path__", "/metrics"))
        total += sum(
            v for key, v in samples.items() if key.startswith("areal_weights_sent") and source in key
        )
    return total


def peers_sent(job: RunningJob) -> bool:
    """Return whether any worker has sent weights to another. One that restarts is asked again later."""
    with suppress(OSError):
        return sent_bytes(job, "peer") > 0
    return False


def channels(workspace: Workspace) -> None:
    """Workers on hosts of other names than the trainer's; trainer and a receiver die in mid-transfer."""
    gate = workspace.folder / "gate"
    (workspace.folder / "gated.py").write_text(GATED.format(gate=str(gate)))
    job_file = workspace.job(
        "channels",
        evaluated=True,
        rollout__workers=2,
        trainer__steps=CHANNEL_STEPS,
        trainer__objective={"advantage": "gated.py:gated"},
        observe={"metrics_port": 0, "event_log": True, "stall_s": 10},
        supervisor=TOUGH,
        weights={"channel_args": {"patience_s": 1, "give_up_s": 5}},
        placement={"pretend": NODES},
    )
    points = "weights.publisher_sent@17,weights.received@16"
    with started(workspace, "run", job_file, **{VARIABLE: points}) as job:
        job.wait_for(lambda: len(job.steps()) >= 3, "step 3")
        job.wait_for(lambda: peers_sent(job), "a snapshot by way of a peer")
        gate.touch()
        job.end()


# --- own Redis, own reward server ----------------------------------------------------------------------

SERVERS = Path(__file__).parents[2] / "examples" / "reward_servers"
OWN_STEPS = 20
LIMIT_BYTES = 400_000


@contextmanager
def own_redis() -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A Redis whose disk is nearly full, and its socket."""

    def small_files() -> None:  # writing more is an error, not a signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, resource.RLIM_INFINITY))

    place = Path(tempfile.mkdtemp(prefix="own-redis-", dir="/tmp"))  # its socket needs a short path
    options = f"--port 0 --unixsocket {place}/s --dir {place} --appendonly yes".split()
    command = [find_redis_server(), *options, "--save", ""]
    server = subprocess.Popen(command, preexec_fn=small_files, stdout=subprocess.DEVNULL)
    try:
        until((place / "s").exists, "Redis does not start")
        yield server, place / "s"
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def reward_server(*port: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The example server in another language, with none of our code on its path; and its address."""
    node = shutil.which("node")
    assert node is not None
    options: dict[str, Any] = {"env": {"PATH": os.environ["PATH"]}, "cwd": SERVERS}
    command = [node, str(SERVERS / "server.js"), *port]
    with subprocess.Popen(command, stdout=subprocess.PIPE, **options) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().decode().split()[-1]
        finally:
            process.kill()


def own_services(workspace: Workspace) -> Any:
    """The disk of Redis fills up and gets room; then the reward server dies and is started again."""
    from tests.redis_client import documented_rights

    (workspace.folder / "secret").write_text("hunter2\n")
    with own_redis() as (server, path), reward_server() as (grader, url):
        admin = redis.Redis(unix_socket_path=str(path), protocol=2)
        admin.execute_command("ACL", "SETUSER", "front", "on", ">hunter2", *documented_rights("own-services"))
        job_file = workspace.job(
            "own-services",
            trainer__steps=OWN_STEPS,
            buffer__redis=f"unix://front@{path}",
            buffer__redis_login={"password_file": "secret"},
            reward={"name": "remote", "timeout_s": 10, "args": {"urls": [url], "reward": "share_of_ones"}},
            observe={"metrics_port": 0, "event_log": True, "stall_s": 1},
        )
        with started(workspace, "run", job_file) as job:
            job.read_until(r"which waits for Redis: Redis cannot write to its disk")
            # Whatever was under way is done: from here on only room helps.
            stalled_at = len(job.steps())
            room = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, room)
            job.wait_for_steps(1)
            grader.kill()
            grader.wait()
            # What is scored and not yet trained is used up; then the job stands still for want of rewards.
            job.read_until("stalled for .*scored groups")
            with reward_server(url.rpartition(":")[2]):
                job.end()
    return {"stalled_at": stalled_at, "told": job.told}


# --- a mixture of experts that dies and is resumed -----------------------------------------------------

SURVIVOR_STEPS = 28


def write_mixture(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        max_position_embeddings=320,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def survivor(workspace: Workspace) -> Any:
    """The buffer is killed once; the worker is killed twice, which ends the job; it is resumed."""
    write_mixture(workspace.folder / "model")
    job_file = workspace.job(
        "survivor",
        trainer__steps=SURVIVOR_STEPS,
        checkpoint={"every_steps": 6, "keep": 2},
        observe={"metrics_port": 0, "event_log": True, "stall_s": 3},
        supervisor=TOUGH | {"restarts": 1},
    )
    with started(workspace, "run", job_file) as job:
        job.wait_for_steps(2)
        held = job.folder / "buffer" / "episodes"
        job.wait_for(lambda: any(held.glob(f"{PREFIX}*")), "a file of routes")
        # Redis has written down whatever it received.
        redis_has = b"".join(path.read_bytes() for path in held.parent.rglob("*.aof"))
        job.service("buffer").kill()
        job.wait_for_steps(2)
        job.service("rollout-0").kill()
        job.read_until("rollout-0 was killed by SIGKILL; it is started again")
        job.wait_for_steps(6)
        job.service("rollout-0").kill()
        job.end(status=1)
        told = job.told
    with started(workspace, "resume", job_file) as job:
        job.end()
    with started(workspace, "resume", job_file) as again:
        assert "is finished" in again.read_all()
        assert again.process.wait(LIMIT_S) == 2
    return {
        "told": told,
        "episodes_in_redis": MAGIC in redis_has,
        "routes_in_redis": ROUTES_MAGIC in redis_has,
    }


KINDS: Mapping[str, Callable[[Workspace], Any]] = {
    "plain": plain,
    "synchronous": synchronous,
    "agent": agent,
    "two-policies": two_policies,
    "channels": channels,
    "own-services": own_services,
    "survivor": survivor,
}
