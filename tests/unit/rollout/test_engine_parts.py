"""Engines are parts: one of another installed package generates for a worker, and says what it cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_async.config.checks import check_fields, own_part_mistakes
from areal_async.config.engines import EnginePart, declared_engine
from areal_async.config.job import JobConfig
from areal_async.launch.plan import ready_limit_s
from areal_async.registry import ENGINES
from rollout_service.engines import BUILT_IN, make_engine
from tests.unit.rollout.fakes import FakeBuffer, group, job, working

STUB = """
import numpy as np
from areal_async.config.engines import EnginePart
from areal_async.rpc.schema import VersionTag
from rollout_service.engines.base import EngineStats, GenerateResult

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

    def width(self, arguments):
        return 3

    def make(self, job, *, slots, activity, place, replica):
        return Backwards(slots)

PART = Part()
"""


@pytest.fixture(autouse=True)
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


async def test_an_engine_of_another_package_generates_for_a_worker() -> None:
    named = job(engine="backwards", update_mode="keep")
    engine = make_engine(named, slots=8, activity="rollout")

    async with working(FakeBuffer([group(1), group(2)]), engine=engine) as (_, buffer, _engine):
        await buffer.until(lambda: buffer.whole(1, 2))
    assert engine.stats().requests_total == 8
    assert ready_limit_s(named) == ready_limit_s(job()) + named.rollout.server.ready_s


def test_what_an_engine_says_of_itself_is_asked_of_the_job() -> None:
    assert mistakes(engine="backwards", update_mode="keep") == []
    (found,) = mistakes(engine="backwards")
    assert found == "rollout.update_mode: the engine of rollout.engine cannot do recompute"
    assert declared_engine("backwards").width({}) == 3


def test_an_engine_in_a_file_is_looked_for_and_not_run(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("raise SystemExit('run')\nmine = 1\n")
    assert mistakes(engine=f"{file}:mine") == []
    assert mistakes(engine=f"{file}:other") == [f"rollout.engine: {file} defines no 'other'"]


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_engine_declares_a_wider_bound_for_bfloat16(name: str) -> None:
    part = declared_engine(name)
    assert isinstance(part, EnginePart)
    assert 0 < part.logprob_bounds["float32"] < part.logprob_bounds["bfloat16"]
    assert part.update_modes == {"recompute", "keep"}
