"""From a process's place in the run to the GPUs of its engines, without a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_async.config.job import JobConfig
from areal_async.runtime.context import ServiceContext
from rollout_service.engines.base import EngineError
from rollout_service.engines.devices import own_device, own_gpus
from rollout_service.engines.http.adapter import settings_of
from rollout_service.evaluator import engine_job


def job_with(**rollout: Any) -> JobConfig:
    job = {"job": "j", "model": "m", "tasks": {"train": "t.jsonl"}, "rollout": rollout}
    return JobConfig.model_validate(job)


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")


def test_replicas_of_two_workers_and_the_evaluation_have_gpus_of_their_own(
    tmp_path: Path, four_gpus: None
) -> None:
    two = job_with(device="cuda", workers=2, replicas=2)
    worker = ServiceContext.for_test(two, tmp_path, "rollout", "rollout-1", index=1)
    assert [own_device(two, worker, replica) for replica in range(2)] == ["cuda:2", "cuda:3"]
    job = job_with(device="cuda", workers=3)
    evaluator = ServiceContext.for_test(job, tmp_path, "evaluator", "evaluator")
    assert own_device(engine_job(job), evaluator, 0) == "cuda:3"
    assert own_device(job_with(), None, 0) == "cpu"


def test_a_server_sees_its_own_gpus_alone_by_the_names_of_ours(tmp_path: Path, four_gpus: None) -> None:
    environment = tmp_path / "env"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(sys.executable)
    for engine, flag in (("sglang", "tp-size"), ("vllm", "tensor-parallel-size")):
        server = {"environment": str(environment), "arguments": {flag: 2}}
        job = job_with(engine=engine, device="cuda", replicas=2, server=server)
        place = ServiceContext.for_test(job, tmp_path, "rollout", "rollout-0")
        found = [
            settings_of(job, slots=1, activity="rollout", place=place, replica=replica).gpus
            for replica in range(2)
        ]
        assert found == [("4", "5"), ("6", "7")]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_a_gpu_that_is_not_there_is_named_with_its_field(tmp_path: Path) -> None:
    job = job_with(device="cuda:2")
    with pytest.raises(EngineError, match=r"rollout\.device: cuda:2 .* needs 3, and 2 are visible"):
        own_gpus(job, None, 0, visible=2)
    place = ServiceContext.for_test(job, tmp_path, "evaluator", "evaluator")
    with pytest.raises(EngineError, match=r"evaluation\.device"):
        own_gpus(engine_job(job), place, 0, visible=2)
