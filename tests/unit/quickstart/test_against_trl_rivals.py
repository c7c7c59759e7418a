"""Rivals of `benchmarks/against_trl.py`: the plain loop, and the stand-ins of TRL's asynchronous trainer."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import against_trl
import numpy as np
import pytest
import torch
from against_trl_async import tree_attention
from against_trl_generator import Policy, SharedWeights, advantages_of, orders
from against_trl_long import EPISODES, GROUPS, LENGTH, long_config, long_job
from against_trl_report import least_of, tables
from against_trl_runs import RIVALS, own_mathematics, per_step
from metered import SHORT, CpuMeter, Run, Setting
from peft import LoraConfig, get_peft_model
from plain_loop import PlainLoop
from transformers import AutoModelForCausalLM

from areal_async.config.job import JobConfig
from areal_async.config.load import dump_job
from areal_async.rpc.messages import Batch, BatchGroup
from areal_async.trajectory import Call, EpisodeBuilder, pack
from areal_async.weights.pieces import whole_tensors
from rollout_service.process import sampling_of
from tests.unit.quickstart.conftest import CURVE, row_of
from tests.unit.trainer.conftest import entry_of
from trainer_service.loop.learner import Learner, load_backend
from trainer_service.ranks import join_ranks

SETTING = Setting(Path("job.yaml"), Path("work"), steps=6, every_steps=3, warmup_steps=1)


@pytest.fixture
def small(chats: JobConfig) -> JobConfig:
    """The job of `chats` with small groups and without adapters."""
    told = chats.model_dump()
    told["rollout"] |= {"group_size": 4, "max_concurrent": 12, "max_model_len": 64}
    told["buffer"] |= {"batch_groups": 3}
    told["trainer"] |= {"lora": {"rank": 0}, "steps": 4}
    return JobConfig.model_validate(told)


def test_the_update_of_the_plain_loop_is_that_of_the_service(small: JobConfig) -> None:
    loop = PlainLoop(small)
    answers, _ = loop.sample(0)
    assert [answer.group for answer in answers] == [0] * 4 + [1] * 4 + [2] * 4
    rewards = [float(index % 3) for index in range(len(answers))]
    groups, blobs = [], {}
    for number in range(3):
        entries = []
        for index, answer in enumerate(answers):
            if answer.group == number:
                builder = EpisodeBuilder(small.job, f"t:{number}:0", f"t:{number}:0#0", index)
                root = builder.prompt(answer.prompt)
                call = Call(sampling=sampling_of(small.rollout.sampling))
                found = answer.result
                builder.sampled(found.token_ids, found.logprobs, found.versions, parent=root, call=call)
                episode = builder.build()
                blobs[episode.episode_id] = memoryview(pack(episode))
                entries.append(entry_of(episode, rewards[index]))
        groups.append(BatchGroup(f"t:{number}:0#0", f"t:{number}:0", "test", entries))
    torch.manual_seed(small.seed)
    backend = load_backend(small, join_ranks(0, 1))
    learner = Learner(small, join_ranks(0, 1), backend)
    batch = Batch(policy="policy", epoch=1, step=0, max_staleness=small.buffer.max_staleness, groups=groups)
    theirs = learner.train(batch, learner.plan(batch, 0), blobs)
    before = {name: tensor.clone() for name, tensor in loop.weights().items()}
    ours = loop.train(0, answers, rewards)
    assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
    assert ours.grad_norm > 0
    assert ours.packed_tokens == theirs.packed_tokens
    after = whole_tensors(backend.export("policy"))
    for name, tensor in loop.weights().items():
        torch.testing.assert_close(tensor, after[name])
    assert any(not torch.equal(tensor, before[name]) for name, tensor in loop.weights().items())


def test_the_plain_loop_samples_from_the_weights_that_it_trained(small: JobConfig) -> None:
    loop = PlainLoop(small)
    answers, _ = loop.sample(0)
    loop.train(0, answers, [float(index % 3) for index in range(len(answers))])
    answers, _ = loop.sample(1)
    model = AutoModelForCausalLM.from_pretrained(small.model, dtype=torch.float32)
    model.load_state_dict(loop.weights(), strict=False)
    model.tie_weights()
    for prompt, result in ((answer.prompt, answer.result) for answer in answers):
        logps = logprobs_of(model, prompt.tolist(), result.token_ids.tolist())
        np.testing.assert_allclose(result.logprobs, logps, atol=1e-4)
        assert set(result.versions.tolist()) == {1}
    wall_s, core_s = loop.spent["trainer"]
    assert wall_s > 0 < core_s
    assert loop.spent["engine"][0] > 0


def logprobs_of(model: Any, prompt: list[int], answer: list[int], temperature: float = 1.0) -> np.ndarray:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    found = torch.log_softmax(logits / temperature, -1)
    return found.gather(1, torch.tensor(answer)[:, None])[:, 0].numpy()


def test_the_asynchronous_trainer_is_given_the_job(chats: JobConfig) -> None:
    run = Run("trl-async", 3, 2e-4)
    chosen = {"threads": 1, "generate_threads": 2, "batch": 8}
    job = chats.model_copy(update={"buffer": chats.buffer.model_copy(update={"batch_groups": 2})})
    theirs = RIVALS["trl-async"].settings(SETTING, job, run, chosen)
    sync = RIVALS["trl"].settings(SETTING, job, run, chosen)
    assert theirs.pop("generate_threads") == 2
    config, of_sync = theirs.pop("config"), sync.pop("config")
    assert theirs == sync
    assert config.pop("max_staleness") == 2
    assert config == {name: of_sync[name] for name in config}
    episodes = config["per_device_train_batch_size"] * config["gradient_accumulation_steps"]
    assert episodes == job.buffer.batch_groups * job.rollout.group_size
    assert config["max_completion_length"] == job.rollout.sampling.max_new_tokens
    # These are the only losses that it has.
    assert (of_sync["loss_type"], of_sync["scale_rewards"], of_sync["beta"]) == ("dapo", "group", 0.0)


@pytest.mark.parametrize("heads", [4, 2])
def test_attention_over_a_packed_tree_is_that_of_each_sample(heads: int) -> None:
    """Two samples share three tokens; another sample shares nothing."""
    torch.manual_seed(0)
    tokens, width = 12, 8
    q, k, v = (torch.randn(1, n, tokens, width, requires_grad=True) for n in (4, heads, heads))
    segments = [range(0, 3), range(3, 5), range(5, 9), range(9, 12)]
    paths = [[*segments[0]], [*segments[0], *segments[1]], [*segments[0], *segments[2]], [*segments[3]]]
    bounds = [
        torch.tensor([0, *np.cumsum([len(each) for each in parts])], dtype=torch.int32)
        for parts in (segments, paths)
    ]
    given = {
        "tree_kv_index": torch.tensor([place for path in paths for place in path]),
        "tree_cu_seqlens_q": bounds[0],
        "tree_cu_seqlens_k": bounds[1],
        "tree_max_seqlen_q": 4,
        "tree_max_seqlen_k": 7,
        "scaling": 0.3,
    }
    out, _ = tree_attention(None, q, k, v, None, **given)
    assert out.shape == (1, tokens, 4, width)
    for path in paths:
        at = torch.tensor(path)
        parts = [each[:, :, at] for each in (q, k, v)]
        wanted = torch.nn.functional.scaled_dot_product_attention(
            *parts, is_causal=True, scale=0.3, enable_gqa=heads != 4
        )
        torch.testing.assert_close(out[:, at], wanted.transpose(1, 2))
    out.square().sum().backward()
    assert k.grad is not None
    assert k.grad.abs().sum(-1).min() > 0


def test_the_generator_reports_the_log_probs_of_what_it_sampled(chats: JobConfig) -> None:
    """With prompts of several lengths, and answers that end early and leave the batch."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(chats.model, dtype=torch.float32).eval()
    prompts = [[5, 6, 7, 8, 9], [10], [4, 12, 11]]
    ends = set(range(0, len(model.get_input_embeddings().weight), 4))
    answers = Policy(model, 1.0).sample(prompts, 6, 8, 0.7, ends, 0)
    assert len(answers) == 18
    lengths = {len(ids) for ids, _ in answers}
    assert len(lengths) > 2
    for index, (ids, logps) in enumerate(answers):
        assert not ends & set(ids[:-1])
        assert len(ids) == 8 or ids[-1] in ends
        np.testing.assert_allclose(logps, logprobs_of(model, prompts[index // 6], ids, 0.7), atol=1e-4)
    assert len({tuple(ids) for ids, _ in answers}) > 9


def test_the_generator_merges_adapters(chats: JobConfig) -> None:
    base = AutoModelForCausalLM.from_pretrained(chats.model, dtype=torch.float32)
    policy = Policy(AutoModelForCausalLM.from_pretrained(chats.model, dtype=torch.float32), 3.0)
    lora = LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM")
    trained = get_peft_model(base, lora)
    for _ in range(2):  # the second is not added to the first
        adapters = {name: value for name, value in trained.named_parameters() if value.requires_grad}
        for value in adapters.values():
            torch.nn.init.normal_(value)
        policy.load(adapters)
    for name, value in trained.merge_and_unload().named_parameters():
        torch.testing.assert_close(policy.model.get_parameter(name), value)


def test_shared_weights_are_those_of_the_newest_version(tmp_path: Path) -> None:
    shapes, version = {"a": (2, 3), "b": (4,)}, argparse.Namespace(value=0)
    writer, reader = (SharedWeights(tmp_path / "weights", version, shapes) for _ in range(2))
    for number in (1, 2, 3):
        writer.publish(number, [torch.full((2, 3), float(number)), torch.arange(4.0)])
        newest, tensors = reader.newest()
        assert newest == number
        assert torch.equal(tensors["a"], torch.full((2, 3), float(number)))
        assert torch.equal(tensors["b"], torch.arange(4.0))


def test_every_prompt_comes_once_in_a_pass_and_advantages_have_no_mean() -> None:
    order = orders(5, seed=1)
    passes = [[next(order) for _ in range(5)] for _ in range(3)]
    assert [sorted(each) for each in passes] == [[0, 1, 2, 3, 4]] * 3
    assert len({tuple(each) for each in passes}) > 1
    np.testing.assert_allclose(advantages_of([1.0, 0.0, 0.0, 1.0]), [1, -1, -1, 1], atol=1e-6)
    np.testing.assert_allclose(advantages_of([1.0, 1.0]), [0, 0])


SHARES = """
import mmap, os, sys
held = mmap.mmap(-1, 64 << 20)
held.write(b"x" * (64 << 20))
if os.fork() == 0:
    sum(held[i] for i in range(0, 64 << 20, 4096))
    print("ready", flush=True)
sys.stdin.read()
"""
# The kernel counts in ticks, and leaves out parts of them.
BURNS = """
import subprocess, sys
burn = "import time\\nwhile time.process_time() < 0.6: pass"
subprocess.run([sys.executable, "-c", burn], check=True)
print("ready", flush=True)
sys.stdin.read()
"""


def sampled(program: str) -> CpuMeter:
    """Return a meter that has sampled once, when the program said that it is ready."""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        meter = CpuMeter(process.pid, "test")
        meter.sample(memory=True)
        assert process.stdin is not None
        process.stdin.close()
    return meter


def test_memory_that_processes_share_counts_once() -> None:
    held = sum(sampled(SHARES).peak_mib.values())
    assert 64 < held < 2 * 64


def test_cpu_of_processes_that_ended_between_two_samples_counts() -> None:
    ((_, used),) = sampled(BURNS).samples
    assert used[SHORT] >= 0.5
    assert "machine" in used


def test_a_step_of_the_mathematics_is_the_mean_after_the_warm_up() -> None:
    spent = [{"engine": [float(n), 2.0 * n], "trainer": [3.0 * n, 4.0 * n]} for n in (10, 11, 12, 13)]
    assert per_step(spent, 2) == {"engine": (1.0, 2.0), "trainer": (3.0, 4.0)}
    assert per_step([], 2) == {}


def test_our_own_mathematics_are_the_passes_and_the_updates() -> None:
    steps = [{"step": step, "phases": {"update": 0.25}} for step in (10, 11)]
    passes = [[0.0] * 10 + [cpu_s, 0.0, 0.0, 0.0] for cpu_s in (1.0, 2.0, 4.0)]
    log = [
        {"kind": "load", "steps": at, "services": {"rollout-0": {"passes": sums}, "buffer": {}}}
        for at, sums in zip((5, 10, 30), passes, strict=True)
    ]
    assert own_mathematics(steps, log) == {"trainer": (0.25, 0.25), "engine": (0.1, 0.1)}


MATHEMATICS = [
    {"threads": 1, "tokens": 100.0, "wall_s": 0.4, "core_s": 0.4, "parts": {"engine": (0.4, 0.4)}},
    {"threads": 2, "tokens": 100.0, "wall_s": 0.25, "core_s": 0.5, "parts": {"engine": (0.25, 0.5)}},
]


def test_the_least_is_the_smallest_cpu_on_all_cores_or_the_wall_time_with_all_threads() -> None:
    assert least_of(MATHEMATICS, 2) == pytest.approx((0.002, 0.004))
    assert least_of(MATHEMATICS, 1) == pytest.approx((0.0025, 0.004))


def test_ratios_are_over_every_rival_and_name_the_best() -> None:
    def of(system: str, s: float, cpu: float, **more: Any) -> Run:
        return Run(system, 0, 1e-4, s_per_step=s, cpu_per_step={system: cpu}, tokens_per_step=100.0, **more)

    points = [(step, seconds, accuracy) for step, seconds, accuracy in CURVE]
    runs = [
        of("eta=1", 1.0, 2.0, points=points, start_s=8.0, peak_mib={"trainer": 300.0, "redis": 20.0}),
        of("trl", 2.0, 4.0, points=[(a, 2 * b, c) for a, b, c in points], start_s=4.0),
        of("plain", 0.8, 1.6, points=[(a, 0.8 * b, c) for a, b, c in points], start_s=4.0),
        of("trl-async", 1.5, 1.0),
    ]
    text = tables(runs, [0.70], MATHEMATICS, 2)
    heads = "eta=1 over the best rival | eta=1 over trl | eta=1 over plain | eta=1 over trl-async"
    assert f"| held-out accuracy | seconds | {heads} |" in text
    rows = [line for line in text.splitlines() if "interpolated, from the start of the process" in line]
    assert rows[0] == "| 0.70 | interpolated, from the start of the process | 23.0 | 34.0 | 16.0 | – |"
    assert rows[1].endswith("| 1.44 (plain) | 0.68 | 1.44 | – |")
    assert row_of(text, "share of mathematics", "of the CPU")[2:] == ["0.200", "0.100", "0.250", "0.400"]
    assert row_of(text, "share of mathematics", "of all cores' time")[2] == "0.200"
    assert row_of(text, "MiB", "peak of the PSS of all processes")[2] == "320.000"
    lines = [line for line in text.splitlines() if line.startswith("| core-seconds | a step |")]
    assert lines[1] == "| core-seconds | a step | 2.00 (trl-async) | 0.50 | 1.25 | 2.00 |"
    assert "1 threads: 0.4 s, 0.4 core-seconds (engine 0.4)" in text


@pytest.fixture
def measurement(
    chats: JobConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """A function that measures with one command, and the runs that were made."""
    told = chats.model_dump()
    told["tasks"] |= {"evaluation": None}
    told["rollout"] |= {"max_model_len": 64}
    (tmp_path / "job.yaml").write_text(dump_job(JobConfig.model_validate(told)))
    made: list[tuple[str, int]] = []

    def run(setting: Setting, run: Run, chosen: Any) -> tuple[Run, list[Any]]:
        made.append((run.system, run.seed))
        run.steps, run.s_per_step, run.tokens_per_step = setting.steps, float(len(made)), 10.0
        run.settings = dict(chosen) if isinstance(chosen, dict) else {}
        run.mathematics = {"engine": (1.0, 1.0)}
        return run, []

    monkeypatch.setattr(against_trl, "run_ours", run)
    monkeypatch.setattr(against_trl, "run_rival", run)
    model = replace(against_trl.MODELS["quickstart"], thresholds=())
    given = {"job": tmp_path / "job.yaml", "out": tmp_path / "out.json", "work": tmp_path / "work"}
    given |= {"lr": None, "rival_lr": None, "steps": 6, "every": 3, "timed_steps": None, "loaded": True}

    def measure(systems: list[against_trl.System], seeds: list[int], again: bool = False) -> Any:
        made.clear()
        options = argparse.Namespace(**given, again=again)
        found = against_trl.Measurement(options, model)
        monkeypatch.setattr(found, "wait_for_quiet", lambda: None)
        found.measure(systems, seeds)
        return list(made), found.results

    return measure


def test_a_stopped_measurement_goes_on_with_what_it_lacks(measurement: Any) -> None:
    ours, plain = against_trl.variants("eta=1", "", [])[0], against_trl.System("plain")
    made, results = measurement([ours, plain], [0])
    threads = len(against_trl.SOME_THREADS)
    timed = [("plain", against_trl.SWEEP_SEED)] * threads  # the settings, and then the mathematics
    assert made == [*timed, *timed, ("eta=1", 0), ("plain", 0)]
    assert results["sweep"]["plain"]["fastest"] == {"threads": against_trl.SOME_THREADS[0]}
    assert [each["core_s"] for each in results["mathematics"]] == [1.0] * threads
    made, results = measurement([ours, plain, against_trl.System("trl")], [0, 1])
    tried = len(against_trl.MODELS["quickstart"].tried["trl"])
    missing = [("trl", 0), ("trl", 1), ("plain", 1), ("eta=1", 1)]
    assert made == [("trl", against_trl.SWEEP_SEED)] * tried + missing
    assert len(results["runs"]) == 6
    made, results = measurement([ours], [0], again=True)
    assert made == [*timed, ("eta=1", 0)]
    assert len(results["runs"]) == 5


def test_the_long_job_has_sequences_of_its_length_and_28_million_parameters() -> None:
    job = long_job()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(long_config())
    parameters = sum(each.numel() for each in model.parameters())
    assert 27e6 < parameters < 30e6
    assert job["rollout"]["max_model_len"] == LENGTH
    assert job["rollout"]["group_size"] * GROUPS == EPISODES
    assert job["trainer"]["micro_batch_tokens"] >= EPISODES * LENGTH
