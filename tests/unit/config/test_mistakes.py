"""Every kind of mistake in a job file is found when it is read, names its field and says the fix."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from areal_async.config.errors import ConfigError
from areal_async.config.load import load_job


class Case(NamedTuple):
    name: str
    overrides: list[str]
    field: str
    says: str
    fix: str
    spoil: Callable[[Path], object] = lambda folder: None


def in_job(old: str, new: str) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        text = (folder / "job.yaml").read_text()
        assert old in text
        (folder / "job.yaml").write_text(text.replace(old, new))

    return spoil


def write(name: str, content: str | bytes) -> Callable[[Path], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def parquet(name: str, **columns: list[object]) -> Callable[[Path], object]:
    return lambda folder: pq.write_table(pa.table(columns), folder / name)


NO_WEIGHTS = "Save it again"
SYNTAX = "job: sums\nmodel: [a\n"
ROW = {"prompt": "1+1=", "reward_model": {"style": "rule"}}

CASES = [
    # --- the file itself
    Case("no such file", [], "file", "no such file", "Check the path", remove("job.yaml")),
    Case("not YAML", [], "file", "line 3, column 1", "Correct the YAML", write("job.yaml", SYNTAX)),
    Case("empty", [], "file", "holds nothing", "job: NAME", write("job.yaml", "")),
    Case("a list", [], "file", "holds a list", "job: NAME", write("job.yaml", "- a\n")),
    Case("not text", [], "file", "not UTF-8", "Give a YAML", write("job.yaml", b"\xff\xfe\x00")),
    Case("a key twice", [], "file", "'job' is given twice", "line", in_job("model:", "job: b\nmodel:")),
    # --- names, types and ranges
    Case("missing field", [], "model", "missing", "Add it", in_job("model: model\n", "")),
    Case(
        "missing nested field", [], "tasks.train", "missing", "Add it", in_job("  train: train.jsonl\n", "")
    ),
    Case("typo", ["buffer.max_stalenes=3"], "buffer.max_stalenes", "no such field", "buffer.max_staleness?"),
    Case("wrong section", ["max_staleness=3"], "max_staleness", "no such field", "buffer.max_staleness?"),
    Case("unknown field", ["reward.colour=red"], "reward.colour", "no such field", "name, args"),
    Case("unknown choice", ["rollout.concurrency=wild"], "rollout.concurrency", "'wild'", "Use 'adaptive'"),
    Case("unknown engine", ["rollout.engine=tpu"], "rollout.engine", "'tpu'", "Use local, sglang, vllm"),
    Case("not a number", ["trainer.steps=many"], "trainer.steps", "'many' is not a whole", "whole number"),
    Case("too small", ["buffer.batch_groups=0"], "buffer.batch_groups", "0 is too small", "at least 1"),
    Case("too large", ["seed=99999999999"], "seed", "too large", "less than 2147483648"),
    Case("not finite", ["trainer.optimizer.lr=.inf"], "trainer.optimizer.lr", "finite", "finite number"),
    Case("job name", ["job='My Job'"], "job", "right form", "lower-case"),
    Case("device", ["trainer.device=gpu"], "trainer.device", "right form", "cuda:N"),
    Case("a value for a section", ["buffer=7"], "buffer", "7 is not a section", "key: value"),
    # --- overrides
    Case("no equals sign", ["buffer.max_staleness"], "buffer.max_staleness", "not key=value", "key=value"),
    Case("through a value", ["job.name=a"], "job.name", "not a section", "Override job"),
    Case("bad YAML value", ["job=[a"], "job", "not YAML", "Quote it"),
    # --- between fields
    Case(
        "uncorrected staleness",
        ["trainer.objective.correction=none"],
        "trainer.objective.correction",
        "stale units as if they were fresh",
        "allow_uncorrected",
    ),
    Case(
        "prox reuse with minibatches",
        ["trainer.objective.prox=reuse", "trainer.minibatches=2"],
        "trainer.objective.prox",
        "trainer.minibatches = 2",
        "recompute",
    ),
    Case(
        "too many minibatches", ["trainer.minibatches=17"], "trainer.minibatches", "16 groups", "16 or less"
    ),
    Case(
        "checkpoint interval",
        ["checkpoint.every_steps=300", "trainer.steps=300"],
        "buffer.max_groups",
        "= 4880",
        "4880 or more, or checkpoint.every_steps to 251 or less",
    ),
    Case(
        "checkpoint interval with reuse",
        ["checkpoint.every_steps=300", "trainer.steps=300", "buffer.max_reuse=2"],
        "buffer.max_groups",
        "+ max_staleness 4 + 1 + max_staleness 4 for reuse) × batch_groups 16 = 4944",
        "4944 or more, or checkpoint.every_steps to 247 or less",
    ),
    Case(
        "reuse beyond age", ["buffer.max_reuse=6"], "buffer.max_reuse", "5 steps at most, not for 6", "to 5"
    ),
    Case(
        "checkpoint bytes", ["buffer.max_bytes=9999999"], "buffer.max_bytes", "880 groups of 8", "or more, or"
    ),
    Case(
        "group too large",
        ["rollout.group_size=9", "rollout.max_concurrent=8"],
        "rollout.max_concurrent",
        "at most 8",
        "9 or more",
    ),
    Case(
        "top_p", ["rollout.sampling.top_p=0.9"], "rollout.sampling.top_p", "importance ratios", "Set it to 1"
    ),
    Case(
        "top_k", ["rollout.sampling.top_k=50"], "rollout.sampling.top_k", "importance ratios", "Set it to 0"
    ),
    Case("greedy", ["rollout.sampling.temperature=0"], "rollout.sampling.temperature", "same", "above 0"),
    Case(
        "too few scores left",
        ["rollout.group_size=4", "reward.min_scored=4", "reward.on_abstain.then=mask"],
        "reward.min_scored",
        "at most 3 scores",
        "3 or less",
    ),
    Case("group of one", ["rollout.group_size=1"], "rollout.group_size", "always zero", "2 or more"),
    Case(
        "no room for a prompt",
        ["rollout.max_model_len=256", "evaluation.sampling.max_new_tokens=8"],
        "rollout.sampling.max_new_tokens",
        "no room for a prompt",
        "below 256",
    ),
    Case("empty stop string", ["rollout.sampling.stop=['']"], "rollout.sampling.stop", "empty", "Remove it"),
    Case("redis scheme", ["buffer.redis=http://a"], "buffer.redis", "not a Redis address", "redis://"),
    Case("redis port", ["buffer.redis='redis://a:x'"], "buffer.redis", "valid port", "redis://"),
    Case("redis hosts", ["buffer.redis='redis://a,b'"], "buffer.redis", "several hosts", "sentinel://"),
    Case(
        "sentinel", ["buffer.redis='sentinel://a:1,b:2'"], "buffer.redis", "does not name the service", "/SE"
    ),
    Case("redis database", ["buffer.redis='redis://a/x'"], "buffer.redis", "not a number", "redis://"),
    Case("redis option", ["buffer.redis='redis://a?ssl=1'"], "buffer.redis", "no parameter ssl", "rediss://"),
    Case(
        "redis secret", ["buffer.redis=redis://u:p4ss@a"], "buffer.redis", "holds a password", "password_env"
    ),
    Case(
        "redis user", ["buffer.redis=redis://u@a"], "buffer.redis_login", "no password is given", "Set pass"
    ),
    Case(
        "two passwords",
        ["buffer.redis=redis://u@a", "buffer.redis_login={password_env: A, password_file: train.jsonl}"],
        "buffer.redis_login.password_env",
        "given twice",
        "Remove it",
    ),
    Case(
        "no such password file",
        ["buffer.redis=redis://u@a", "buffer.redis_login.password_file=nowhere"],
        "buffer.redis_login.password_file",
        "cannot be read",
        "Correct the path",
    ),
    Case(
        "certificates without TLS",
        ["buffer.redis=redis://a", "buffer.redis_tls.check_hostname=false"],
        "buffer.redis_tls",
        "no effect",
        "rediss://",
    ),
    Case(
        "half a client certificate",
        ["buffer.redis=rediss://a", "buffer.redis_tls.cert_file=train.jsonl"],
        "buffer.redis_tls.key_file",
        "belong together",
        "Give both",
    ),
    Case(
        "a login to the embedded redis",
        ["buffer.redis_login.password_env=A"],
        "buffer.redis_login",
        "neither users nor TLS",
        "set buffer.redis",
    ),
    Case(
        "a login to no sentinel",
        ["buffer.redis=redis://a", "buffer.redis_login.sentinel_password_env=A"],
        "buffer.redis_login",
        "names no Sentinels",
        "Remove",
    ),
    # A hash tag of its own would put a job's keys on several shards.
    Case("braces in the job's name", ["job='a{b}'"], "job", "right form", "lower-case"),
    Case("redis socket", ["buffer.redis='unix://'"], "buffer.redis", "no socket", "unix:///PATH"),
    Case(
        "no deadline",
        ["buffer.group.policy=deadline_drop"],
        "buffer.group.deadline_s",
        "deadline_drop needs a deadline",
        "the seconds to wait",
    ),
    Case(
        "idle deadline",
        ["buffer.group.deadline_s=60"],
        "buffer.group.deadline_s",
        "would do nothing",
        "deadline_partial",
    ),
    Case(
        "idle minimum",
        ["buffer.group={policy: deadline_drop, deadline_s: 60, min_samples: 3}"],
        "buffer.group.min_samples",
        "never trains a part",
        "deadline_partial",
    ),
    Case(
        "more samples than there are",
        ["buffer.group={policy: deadline_partial, deadline_s: 60, min_samples: 9}"],
        "buffer.group.min_samples",
        "a group has 8 samples",
        "8 or less",
    ),
    Case(
        "groups cut down to one",
        ["buffer.group={policy: deadline_partial, deadline_s: 60}"],
        "buffer.group.min_samples",
        "cut down to one episode is zero",
        "2 or more",
    ),
    Case(
        "dropped by age before the deadline",
        ["buffer.group={policy: deadline_drop, deadline_s: 60}", "buffer.max_age_s=60"],
        "buffer.max_age_s",
        "not above buffer.group.deadline_s",
        "above 60",
    ),
    Case("sft loss in rl", ["trainer.objective.loss=sft"], "trainer.objective.loss", "ignores", "`kind`"),
    Case("more than one rank", ["trainer.ranks=2"], "trainer.ranks", "one rank", "Set it to 1"),
    Case("privileged port", ["observe.metrics_port=80"], "observe.metrics_port", "need root", "1024"),
    Case(
        "ports past the end",
        ["observe.metrics_port=65000", "rollout.workers=600"],
        "observe.metrics_port",
        "65535 is the last",
        "free",
    ),
    Case("same tasks", ["tasks.evaluation=train.jsonl"], "tasks.evaluation", "held out", "another file"),
    Case(
        "limits the wrong way round",
        ["kind=sft", "sft.stop_between=[0.5, 0.4]"],
        "sft.stop_between",
        "no accuracy",
        "lower limit first",
    ),
    Case(
        "nothing to stop at",
        ["kind=sft", "sft.stop_between=[0.4, 0.5]", "tasks.evaluation=null"],
        "sft.stop_between",
        "no held-out file",
        "tasks.evaluation",
    ),
    # --- files
    Case("no model", ["model=nowhere"], "model", "nowhere does not exist", "hf download"),
    Case("model is a file", ["model=job.yaml"], "model", "is a file", "model directory"),
    Case("no config.json", [], "model", "no config.json", "complete", remove("model/config.json")),
    Case("broken config", [], "model", "readable config.json", "complete", write("model/config.json", "{")),
    Case("no weights", [], "model", "pickled", NO_WEIGHTS, remove("model/model.safetensors")),
    Case("no tokenizer", [], "model", "no tokenizer", "save_pretrained", remove("model/tokenizer.json")),
    Case(
        "not a language model",
        [],
        "model",
        "ViTModel is not a causal",
        "ForCausalLM",
        write("model/config.json", '{"architectures": ["ViTModel"]}'),
    ),
    Case(
        "too long for it", ["rollout.max_model_len=5000"], "rollout.max_model_len", "4096 positions", "4096"
    ),
    Case("no task file", ["tasks.train=x.parquet"], "tasks.train", "does not exist", ".parquet"),
    Case("task folder", ["tasks.train=model"], "tasks.train", "is a folder", ".parquet"),
    Case("task format", ["tasks.train=job.yaml"], "tasks.train", "'.yaml'", ".jsonl"),
    Case("task JSON", [], "tasks.train", "line 1 is not JSON", "", write("train.jsonl", "{x}\n")),
    Case("no tasks", [], "tasks.train", "no rows", "", write("train.jsonl", "\n")),
    Case("no prompt", [], "tasks.train", "`prompt` must be", "", write("train.jsonl", '{"text": "a"}\n')),
    Case("no truth", [], "tasks.train", "`ground_truth`", "", write("train.jsonl", json.dumps(ROW))),
    Case("not parquet", ["tasks.train=a.parquet"], "tasks.train", "not a", "", write("a.parquet", b"PAR0")),
    Case(
        "parquet columns",
        ["tasks.train=b.parquet"],
        "tasks.train",
        "`prompt` must be",
        "",
        parquet("b.parquet", question=["a"]),
    ),
    Case("too few tasks", ["tasks.passes=3"], "tasks.passes", "3 × 100 tasks", "16 or more"),
    Case("unknown reward", ["reward.name=exact"], "reward.name", "no reward 'exact'", "exact_match"),
    Case("no reward file", ["reward.name=nope.py:f"], "reward.name", "cannot be read", "relative to"),
    Case(
        "no reward function",
        ["reward.name=rewards.py:far"],
        "reward.name",
        "defines no 'far'",
        "It defines reward, close",
    ),
    Case(
        "bad reward file",
        ["reward.name=job.yaml.py:f"],
        "reward.name",
        "line 1",
        "Mend the file",
        write("job.yaml.py", "def"),
    ),
    Case("unknown workflow", ["rollout.workflow=chat"], "rollout.workflow", "no workflow", "single_turn"),
    Case(
        "workflow not async",
        ["rollout.workflow=flows.py:shout"],
        "rollout.workflow",
        "coroutine",
        "async def",
    ),
    Case(
        "greedy samples",
        ["evaluation.samples=4"],
        "evaluation.samples",
        "same answer 4 times",
        "temperature above 0",
    ),
    Case(
        "shared server",
        [
            "rollout.engine=sglang",
            "rollout.server.urls=[http://127.0.0.1:1]",
            "evaluation.server.urls=[http://127.0.0.1:1]",
        ],
        "evaluation.server.urls",
        "one version",
        "another",
    ),
    Case(
        "server of a local engine",
        ["evaluation.server.urls=[http://127.0.0.1:1]"],
        "evaluation.server",
        "no server",
        "evaluation.engine",
    ),
    Case("run_dir is a file", ["run_dir=job.yaml"], "run_dir", "is a file", "Give a folder"),
    # --- weights between hosts
    Case("no directory", ["weights.channel=disk"], "weights.directory", "needs a directory", "zmq or shm"),
    Case("idle directory", ["weights.directory=model"], "weights.directory", "do nothing", "Remove it"),
    Case(
        "directory that is none",
        ["weights.channel=disk", "weights.directory=nowhere"],
        "weights.directory",
        "no directory",
        "Make it",
    ),
    Case(
        "memory does not reach",
        ["weights.nodes={rollout-0: b}"],
        "weights.channel",
        "reaches no",
        "zmq or disk",
    ),
    Case("no group", ["weights.channel=nccl"], "weights.channel", "reads the trainer's shared", "sglang"),
    Case(
        "no group of vLLM",
        ["weights.channel=nccl", "rollout.engine=vllm"],
        "weights.channel",
        "only SGLang",
        "Set it to shm",
    ),
    Case(
        "a GPU and a CPU",
        ["weights.channel=nccl", "rollout.engine=sglang", "rollout.device=cuda"],
        "weights.channel",
        "GPUs with GPUs",
        "one kind",
    ),
    Case(
        "one GPU twice",
        ["weights.channel=nccl", "rollout.engine=sglang", "rollout.device=cuda", "trainer.device=cuda:0"],
        "weights.channel",
        "only one member",
        "another GPU",
    ),
    Case(
        "a GPU of the second worker too",
        [
            "weights.channel=nccl",
            "rollout.engine=sglang",
            "rollout.device=cuda",
            "rollout.workers=2",
            "trainer.device=cuda:1",
        ],
        "weights.channel",
        "only one member",
        "another GPU",
    ),
    Case(
        "a group over hosts",
        ["weights.channel=nccl", "rollout.engine=sglang", "weights.nodes={rollout-0: b}"],
        "weights.channel",
        "reaches no",
        "zmq or disk",
    ),
    Case(
        "no address",
        ["weights.channel=zmq", "weights.addresses={b: gpu-7}"],
        "weights.addresses",
        "no address",
        "IP address",
    ),
    Case(
        "any address",
        ["weights.channel=zmq", "weights.addresses={b: 0.0.0.0}"],
        "weights.addresses",
        "no address",
        "IP address",
    ),
    Case(
        "no keys",
        ["weights.channel=zmq", "weights.addresses={b: 10.0.0.7}"],
        "weights.key_file",
        "no keys",
        "weights.keys FILE",
    ),
    Case("keys away", ["weights.key_file=keys"], "weights.key_file", "does not exist", "Correct the path"),
    Case("node id", ["weights.node_id='a/b'"], "weights.node_id", "right form", "Match"),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_mistake_names_its_field_and_the_fix(folder: Path, case: Case) -> None:
    case.spoil(folder)
    with pytest.raises(ConfigError) as caught:
        load_job(folder / "job.yaml", case.overrides)
    found = {mistake.field: mistake for mistake in caught.value.mistakes}
    assert list(found) == [case.field]
    text = str(caught.value)
    assert text.startswith(str(folder / "job.yaml"))
    assert case.field in text
    assert case.says in text
    assert case.fix in text
    assert found[case.field].fix
    assert "\n" not in text, "one mistake is one paragraph"


def test_the_untouched_job_has_no_mistake(folder: Path) -> None:
    assert load_job(folder / "job.yaml").job == "sums"


@pytest.mark.parametrize("field", ["reward.name=rewards.py:close", "rollout.workflow=flows.py:talk"])
def test_code_of_the_user_is_found_but_never_run(folder: Path, field: str) -> None:
    load_job(folder / "job.yaml", [field])  # rewards.py would raise SystemExit


def test_all_mistakes_are_reported_at_once(folder: Path) -> None:
    overrides = [
        "buffer.batch_groups=0",
        "colour=red",
        "rollout.group_size=1",
        "model=nowhere",
        "tasks.train=no.jsonl",
    ]
    with pytest.raises(ConfigError) as caught:
        load_job(folder / "job.yaml", overrides)
    fields = {mistake.field for mistake in caught.value.mistakes}
    assert fields == {"buffer.batch_groups", "colour", "rollout.group_size", "model", "tasks.train"}
    assert "5 mistakes" in str(caught.value)


def test_a_mistake_that_rests_on_a_broken_field_is_not_reported(folder: Path) -> None:
    """With batch_groups unknown, the rule about minibatches would speak about its default."""
    with pytest.raises(ConfigError) as caught:
        load_job(folder / "job.yaml", ["buffer.batch_groups=0", "trainer.minibatches=99"])
    assert [mistake.field for mistake in caught.value.mistakes] == ["buffer.batch_groups"]
