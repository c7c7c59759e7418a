"""Which GPUs an engine has, and what is refused before the start. No GPU is needed for that."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.base.gpus import names_of
from areal_async.base.yaml_file import parse_yaml
from areal_async.config.devices import (
    device_mistakes,
    engine_gpus,
    rank_device,
    rollout_gpus,
    shared_with_engines,
    trainer_gpus,
    width_of,
)
from areal_async.config.job import JobConfig


def job_with(rollout: dict[str, Any] | None = None, **sections: Any) -> JobConfig:
    job = {"job": "j", "model": "m", "tasks": {"train": "t.jsonl"}, "rollout": rollout or {}}
    return JobConfig.model_validate(job | sections)


def gpus(job: JobConfig, visible: int, worker: int | None, replica: int = 0) -> tuple[int, ...]:
    return engine_gpus(job, worker=worker, replica=replica, visible=visible)


@given(workers=st.integers(1, 4), replicas=st.integers(1, 4), width=st.integers(1, 4), more=st.integers(0, 3))
def test_no_two_engines_of_a_job_that_is_taken_share_a_gpu(workers, replicas, width, more):
    section = {"device": "cuda", "engine": "vllm", "workers": workers, "replicas": replicas}
    job = job_with(section | {"server": {"arguments": {"tensor_parallel_size": width}}})
    needed = workers * replicas * width
    assert not list(device_mistakes(job, needed + more))
    assert list(device_mistakes(job, needed - 1))
    engines = [gpus(job, needed + more, w, r) for w in range(workers) for r in range(replicas)]
    assert [len(engine) for engine in engines] == [width] * len(engines)
    assert sorted(gpu for engine in engines for gpu in engine) == list(range(needed))
    assert rollout_gpus(job) == set(range(needed))


def test_the_evaluation_comes_after_the_workers_and_round_to_the_first():
    job = job_with({"device": "cuda", "workers": 2, "replicas": 2})
    assert gpus(job, 5, None) == (4,)
    assert gpus(job, 4, None) == (0,)
    # A worker that joins later finds no GPU of its own either.
    assert gpus(job, 4, 2, 1) == (1,)


def test_a_named_gpu_is_that_one_for_every_engine():
    job = job_with({"device": "cuda:1", "workers": 2, "replicas": 3})
    assert {gpus(job, 2, worker, replica) for worker in (0, 1, None) for replica in range(3)} == {(1,)}
    assert not list(device_mistakes(job, 2))
    assert rollout_gpus(job) == {1}


@given(ranks=st.integers(1, 4), workers=st.integers(1, 3), width=st.integers(1, 2), more=st.integers(0, 2))
def test_engines_have_the_gpus_that_no_rank_of_the_trainer_has(ranks, workers, width, more):
    section = {"device": "cuda", "engine": "vllm", "workers": workers}
    section["server"] = {"arguments": {"tensor_parallel_size": width}}
    job = job_with(section, trainer={"device": "cuda", "ranks": ranks})
    visible = ranks + workers * width + more
    assert not list(device_mistakes(job, visible))
    assert list(trainer_gpus(job)) == list(range(ranks))
    assert rollout_gpus(job, visible) == rollout_gpus(job) == set(range(ranks, ranks + workers * width))
    assert not set(gpus(job, visible, None)) & set(range(ranks))
    assert not list(shared_with_engines(job, visible))


def test_ranks_from_a_named_gpu_on_leave_those_before_it_to_the_engines():
    job = job_with({"device": "cuda", "workers": 2}, trainer={"device": "cuda:1", "ranks": 2})
    assert [rank_device(job.trainer.device, rank) for rank in range(2)] == ["cuda:1", "cuda:2"]
    assert [gpus(job, 4, worker) for worker in range(2)] == [(0,), (3,)]
    # On another host no GPU is the trainer's.
    assert engine_gpus(job, worker=1, replica=0, visible=4, beside_trainer=False) == (1,)


def test_one_gpu_is_for_all_and_more_are_shared_only_where_that_is_said():
    both = job_with({"device": "cuda"}, trainer={"device": "cuda"})
    assert gpus(both, 1, 0) == gpus(both, 1, None) == (0,)
    assert not list(device_mistakes(both, 1))
    (mistake,) = shared_with_engines(both, 1)
    assert mistake.field == "weights.channel"
    said = job_with({"device": "cuda:0", "workers": 3}, trainer={"device": "cuda", "ranks": 2})
    assert (list(device_mistakes(said, 2)), bool(list(shared_with_engines(said)))) == ([], True)


@pytest.mark.parametrize(
    ("engine", "arguments", "width"),
    [
        ("local", {"tp-size": 4}, 1),
        ("sglang", {}, 1),
        ("sglang", {"tp_size": 2, "--pp-size": 3}, 6),
        ("sglang", {"tp": 4, "dp": 2}, 8),
        ("sglang", {"tp": 4, "dp": 2, "enable-dp-attention": True}, 4),
        ("sglang", {"tensor-parallel-size": "2"}, 2),
        ("vllm", {"tensor-parallel-size": 2, "data_parallel_size": 2, "tp-size": 9}, 4),
        ("vllm", {"tensor-parallel-size": None}, 1),
    ],
)
def test_an_engine_has_as_many_gpus_as_its_parallel_sizes_say(engine, arguments, width):
    job = job_with({"engine": engine, "device": "cuda", "server": {"arguments": arguments}})
    assert width_of(job.rollout) == width


@pytest.mark.parametrize(
    ("job", "visible", "field", "words"),
    [
        ("rollout: {device: cuda, workers: 2, replicas: 2}", 3, "rollout.device", "need 4, and 3 are"),
        ("rollout: {device: cuda}", 0, "rollout.device", "needs 1, and 0 are visible"),
        ("rollout: {device: 'cuda:2'}", 2, "rollout.device", "needs 3, and 2 are visible"),
        ("trainer: {device: 'cuda:1'}", 1, "trainer.device", "needs 2, and 1 are visible"),
        ("evaluation: {device: cuda}", 0, "evaluation.device", "needs 1, and 0 are"),
        (
            "{placement: {share: time}, rollout: {device: cuda}, trainer: {device: cuda}}",
            *(2, "placement.share", "nothing is shared: 2 GPUs are visible"),
        ),
        ("trainer: {device: cuda, ranks: 4}", 3, "trainer.device", "needs 4, and 3 are visible"),
        ("trainer: {device: 'cuda:2', ranks: 2}", 3, "trainer.device", "needs 4, and 3 are visible"),
        (
            "{rollout: {device: cuda, workers: 2}, trainer: {device: cuda, ranks: 2}}",
            *(3, "rollout.device", "need 2, and 3 are visible, of which the trainer has 2"),
        ),
        (
            "{rollout: {engine: vllm, server: {arguments: {tensor-parallel-size: 2}}}, "
            "evaluation: {device: cuda}}",
            *(1, "evaluation.device", "2 GPUs for one engine needs 2, and 1 are visible"),
        ),
    ],
)
def test_what_the_gpus_are_too_few_for_is_named(job, visible, field, words):
    (mistake,) = device_mistakes(job_with(**parse_yaml(job)), visible)
    assert mistake.field == field
    assert words in mistake.problem


@pytest.mark.parametrize(("device", "visible"), [("cuda", 1), ("cuda:1", 2), ("cpu", 0)])
def test_trainer_and_engine_may_share_one_device_in_time(device, visible):
    sections = {"rollout": {"device": device}, "trainer": {"device": device}, "placement": {"share": "time"}}
    assert not list(device_mistakes(job_with(**sections), visible))


def test_a_cpu_needs_none_and_servers_that_run_already_have_their_own():
    job = job_with({"workers": 3})
    assert gpus(job, 0, 2) == ()
    assert not list(device_mistakes(job, 0))
    job = job_with({"engine": "vllm", "device": "cuda", "server": {"urls": ["http://a", "http://b"]}})
    assert not list(device_mistakes(job, 0))
    assert gpus(job, 1, None) == (0,)


def test_a_child_is_told_the_names_that_its_parent_was_told():
    assert names_of((0, 2), {}) == ("0", "2")
    assert names_of((0, 2), {"CUDA_VISIBLE_DEVICES": "4, 5,GPU-ab"}) == ("4", "GPU-ab")
    assert names_of((), {"CUDA_VISIBLE_DEVICES": "4"}) == ()
