"""Engines are parts: one of another installed package generates for a worker, and says what it cannot do;
and each has GPUs of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from areal_async.base.mistakes import ConfigError
from areal_async.config.checks import check_fields
from areal_async.config.devices import width_of
from areal_async.config.engines import engine_part
from areal_async.config.job import JobConfig
from areal_async.config.parts import own_part_mistakes
from areal_async.config.registry import ENGINES, PartError
from areal_async.launch.plan import ready_limit_s
from areal_async.launch.preflight import check_contents
from rollout_service.engines import make_engine
from rollout_service.engines.base import EngineError
from rollout_service.engines.devices import own_device, own_gpus
from rollout_service.engines.http.adapter import settings_of
from rollout_service.evaluator import engine_job
from tests.contexts import context_for_test
from tests.unit.rollout.fakes import FakeBuffer, group, job, working

STUB = """
import numpy as np
from areal_async import EnginePart, EngineStats, GenerateResult, Section, VersionTag

class Backwards:
    version = VersionTag("policy", 0, 0)

    def __init__(self, slots):
        self.slots, self.done = slots, 0

    async def generate(self, request):
        ids = np.asarray(request.prompt_ids, np.int32)[::-1]
        self.done += 1
        zeros = np.zeros(len(ids), np.int32)
        text = "".join(map(chr, ids))
        return GenerateResult(ids, zeros.astype(np.float32), zeros, zeros, "stop", text)

    def stats(self):
        return EngineStats(0, 0, self.slots, 0.0, 0, self.done, 0.0)

class Part(EnginePart):
    update_modes = frozenset({"keep"})
    is_server = True

    class Arguments(Section):
        gpus: int = 3

    def width(self, rollout):
        return self.Arguments.model_validate(rollout.engine_args).gpus

    def make(self, job, *, slots, activity, place, replica):
        return Backwards(slots)

PART = Part()
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with the engine `backwards`."""
    metadata = tmp_path / "backwards_engine-1.0.dist-info"
    metadata.mkdir()
    (tmp_path / "backwards_engine.py").write_text(STUB)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: backwards-engine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[areal_async.engines]\nbackwards = backwards_engine:PART\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    ENGINES.__dict__.pop("installed", None)
    yield
    ENGINES.__dict__.pop("installed", None)


def mistakes(**rollout: Any) -> list[str]:
    job = {"job": "j", "model": "m", "tasks": {"train": "t.jsonl"}, "reward": {"name": "math"}}
    named = JobConfig.model_validate(job | {"rollout": rollout})
    found = [*check_fields(named), *own_part_mistakes(named)]
    return [f"{mistake.field}: {mistake.problem}" for mistake in found if "rollout." in mistake.field]


async def test_an_engine_of_another_package_generates_for_a_worker(package: None) -> None:
    named = job(engine="backwards", update_mode="keep")
    engine = make_engine(named, slots=8, activity="rollout")

    async with working(FakeBuffer([group(1), group(2)]), engine=engine) as (_, buffer, _engine):
        await buffer.until(lambda: buffer.whole(1, 2))
    assert engine.stats().requests_total == 8
    assert ready_limit_s(named) == ready_limit_s(job()) + named.rollout.server.ready_s


def test_what_an_engine_says_of_itself_is_asked_of_the_job(package: None) -> None:
    assert mistakes(engine="backwards", update_mode="keep") == []
    (found,) = mistakes(update_mode="session")  # it has no cache between the turns of an episode
    assert found == "rollout.update_mode: the engine of rollout.engine cannot do session"
    (found,) = mistakes(engine="backwards")
    assert found == "rollout.update_mode: the engine of rollout.engine cannot do recompute"
    assert width_of(job(engine="backwards").rollout) == 3
    assert mistakes(engine="backwards", update_mode="keep", engine_args={"gpu": 2}) == [
        "rollout.engine_args.gpu: backwards has no argument 'gpu'"
    ]


@pytest.mark.parametrize(
    ("engine", "flag", "value", "refused"),
    [
        ("sglang", "quantization", "fp8", True), ("sglang", "--quantization_param_path", "scales.json", True),
        ("sglang", "hicache-storage-backend", "file", True), ("sglang", "weight-cache-mode", "off", False),
        ("sglang", "kv-cache-dtype", "fp8_e4m3", False), ("sglang", "enable-lmcache", False, False),
        ("sglang", "offload-group-size", 4, True), ("sglang", "offload-group-size", -1, False),
        ("sglang", "cpu-offload-gb", 4, False), ("vllm", "calculate-kv-scales", True, True),
        ("vllm", "enable_eplb", True, True),
        ("vllm", "kv-transfer-config", '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}', True),
        ("vllm", "kv-offloading-size", 4, False), ("vllm", "cpu-offload-gb", 0, False),
        ("vllm", "cpu-offload-gb", 4, True), ("vllm", "kv-cache-dtype", "fp8", False),
    ],
)  # fmt: skip
def test_flags_of_servers_that_updates_do_not_reach_are_refused(engine, flag, value, refused):
    server = {"arguments": {flag: value}}
    found = mistakes(engine=engine, server=server)
    assert [f"rollout.server.arguments.{flag}" in one for one in found] == [True] * refused
    named = job(engine=engine).model_copy(deep=True)
    evaluated = type(named).model_validate(named.model_dump() | {"evaluation": {"server": server}})
    fields = [mistake.field for mistake in check_fields(evaluated)]
    assert (f"evaluation.server.arguments.{flag}" in fields) == refused


@pytest.mark.parametrize(
    ("engine", "flag", "value", "dtype"),
    [
        ("vllm", "quantization", "fp8", "fp8"),
        ("vllm", "--kv_cache_dtype", "fp8_e4m3", "fp8_e4m3"),
        ("sglang", "kv-cache-dtype", "fp8_e5m2", "fp8_e5m2"),
        ("sglang", "kv-cache-dtype", "auto", "bfloat16"),
        ("vllm", "kv-cache-dtype", "bfloat16", "bfloat16"),
        ("vllm", "seed", 3, "bfloat16"),
    ],
)
def test_the_log_probs_of_a_quantised_server_are_not_those_of_its_dtype(engine, flag, value, dtype):
    rollout = job(engine=engine, dtype="bfloat16", server={"arguments": {flag: value}}).rollout
    assert engine_part(engine).served_dtype(rollout) == dtype


def test_an_engine_in_a_file_is_asked_before_anything_starts_and_by_who_uses_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("print('hello')\n" + STUB)
    own = job(engine=f"{tmp_path}/mine.py:PART", device="cuda", engine_args={"gpus": 2}, update_mode="keep")
    assert width_of(own.rollout) == 1  # nothing has run the file
    with pytest.raises(ConfigError, match=r"(?s)rollout\.device: .*rollout\.engine: .*no Python environment"):
        check_contents(own, source="job")
    wrong = job(engine=own.rollout.engine, engine_args={"gpu": 2}, update_mode="keep")
    with pytest.raises(ConfigError, match=r"rollout\.engine_args\.gpu: .* It takes gpus"):
        check_contents(wrong, source="job")
    with pytest.raises(PartError, match=r"rollout\.engine_args\.gpu: .* It takes gpus"):
        make_engine(wrong, slots=8, activity="rollout")
    with pytest.raises(PartError, match=r"rollout\.update_mode: .* cannot do recompute"):
        make_engine(job(engine=own.rollout.engine), slots=8, activity="rollout")
    make_engine(own, slots=8, activity="rollout")
    assert width_of(own.rollout) == 2
    assert ready_limit_s(own) == ready_limit_s(job()) + own.rollout.server.ready_s


def test_an_engine_in_a_file_is_looked_for_and_not_run(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("raise SystemExit('run')\nmine = 1\n")
    assert mistakes(engine=f"{file}:mine") == []
    assert mistakes(engine=f"{file}:other") == [f"rollout.engine: {file} defines no 'other'"]


# --- from a process's place in the run to the GPUs of its engines, without a GPU -------------------------


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")


def test_replicas_of_two_workers_and_the_evaluation_have_gpus_of_their_own(tmp_path, four_gpus):
    two = job(device="cuda", workers=2, replicas=2)
    worker = context_for_test(two, tmp_path, "rollout", "rollout-1", index=1)
    assert [own_device(two, worker, replica) for replica in range(2)] == ["cuda:2", "cuda:3"]
    three = job(device="cuda", workers=3)
    evaluator = context_for_test(three, tmp_path, "evaluator", "evaluator")
    assert own_device(engine_job(three), evaluator, 0) == "cuda:3"
    assert own_device(job(), None, 0) == "cpu"


def test_a_server_sees_its_own_gpus_alone_by_the_names_of_ours(tmp_path: Path, four_gpus: None) -> None:
    environment = tmp_path / "env"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(sys.executable)
    for engine, flag in (("sglang", "tp-size"), ("vllm", "tensor-parallel-size")):
        server = {"environment": str(environment), "arguments": {flag: 2}}
        ours = job(engine=engine, device="cuda", replicas=2, server=server)
        place = context_for_test(ours, tmp_path, "rollout", "rollout-0")
        how: Any = {"slots": 1, "activity": "rollout", "place": place}
        found = [settings_of(ours, **how, replica=replica) for replica in range(2)]
        assert [settings.gpus for settings in found] == [("4", "5"), ("6", "7")]
        assert {settings.dtype for settings in found} == {"bfloat16"}, "`auto` stands for it on a GPU"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_the_log_of_a_users_server_lies_among_the_logs_of_the_run(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text("from rollout_service.engines.vllm import PART as MINE\n", encoding="utf-8")
    ours = job(engine=f"{own}:MINE", server={"urls": ["http://127.0.0.1:1"]})
    place = context_for_test(ours, tmp_path, "rollout", "rollout-0")
    settings = settings_of(ours, slots=1, activity="rollout", place=place, replica=0)
    assert settings.log_path == place.run_dir / "logs" / "rollout-0-MINE-0.log"


def test_a_gpu_that_is_not_there_is_named_with_its_field(tmp_path: Path) -> None:
    third = job(device="cuda:2")
    with pytest.raises(EngineError, match=r"rollout\.device: cuda:2 .* needs 3, and 2 are visible"):
        own_gpus(third, None, 0, visible=2)
    place = context_for_test(third, tmp_path, "evaluator", "evaluator")
    with pytest.raises(EngineError, match=r"evaluation\.device"):
        own_gpus(engine_job(third), place, 0, visible=2)


def test_a_process_that_sees_its_own_gpus_alone_counts_them_from_nought(tmp_path: Path) -> None:
    wide = job(device="cuda", workers=3, replicas=2)
    worker = context_for_test(wide, tmp_path, "rollout", "rollout-2", index=2)
    own = replace(worker, place=msgspec.structs.replace(worker.place, gpus_of_its_own=True))
    assert [own_gpus(wide, own, replica, visible=2) for replica in range(2)] == [(0,), (1,)]
    evaluator = context_for_test(wide, tmp_path, "evaluator", "evaluator")
    alone = replace(evaluator, place=msgspec.structs.replace(evaluator.place, gpus_of_its_own=True))
    assert own_gpus(engine_job(wide), alone, 0, visible=1) == (0,)
    rank = context_for_test(wide, tmp_path, "trainer", "trainer-3", index=3)
    assert rank.gpu_index == 3
    assert replace(rank, place=msgspec.structs.replace(rank.place, gpus_of_its_own=True)).gpu_index == 0
