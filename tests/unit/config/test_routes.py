"""`rollout.routes`: when a job replays the engine's routes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from areal_async.config.checks import check_fields, episode_limit_bytes, policies_mistakes
from areal_async.config.job import JobConfig
from areal_async.config.routes import replays, route_bytes
from areal_async.models.files import Mixture, mixture_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A mixture of 300 experts in its second and fourth layer, of which a token goes to three."""
    config = {"num_hidden_layers": 4, "n_routed_experts": 300, "num_experts_per_tok": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = [f"model.layers.{n}.mlp.experts.0.up_proj.weight" for n in (3, 1)]
    tensors = {name: np.zeros((1, 1), np.float32) for name in (*names, "model.layers.0.mlp.up_proj.weight")}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def job_of(folder: Path, **rollout: Any) -> JobConfig:
    more = {"policies": rollout.pop("policies")} if "policies" in rollout else {}
    return JobConfig.model_validate(
        {"job": "j", "model": str(folder), "tasks": {"train": "t.jsonl"}, "rollout": rollout, **more}
    )


def said_of_routes(job: JobConfig) -> list[tuple[str, str]]:
    return [(m.problem, m.fix) for m in check_fields(job) if m.field == "rollout.routes"]


def test_a_mixture_is_read_off_its_files(folder: Path) -> None:
    assert mixture_of(folder) == Mixture(300, 3, (1, 3))
    assert mixture_of(folder).route_bytes == 2 * 3 * 2
    (folder / "config.json").write_text('{"num_experts": 8}')
    with pytest.raises(ValueError, match="how many a token goes to"):
        mixture_of(folder)


def test_auto_replays_where_engine_and_trainer_can(folder: Path) -> None:
    engines = ("local", "sglang", "vllm", "mine.py:PART")
    assert [name for name in engines if replays(job_of(folder, engine=name))] == ["local", "sglang"]
    assert not replays(job_of(folder, routes="off"))
    assert route_bytes(job_of(folder)) == 12
    more = episode_limit_bytes(job_of(folder)) - episode_limit_bytes(job_of(folder, routes="off"))
    assert more == 12 * job_of(folder).rollout.max_model_len
    for says_nothing in ("{}", '{"num_experts": 8}'):
        (folder / "config.json").write_text(says_nothing)
        assert not replays(job_of(folder))
        assert route_bytes(job_of(folder)) == 0


def test_an_engine_that_tells_no_routes_is_refused_by_name(folder: Path) -> None:
    ((problem, fix),) = said_of_routes(job_of(folder, engine="vllm", routes="replay"))
    assert "the engine of rollout.engine tells no routes" in problem
    assert "Set it to off, or use another rollout.engine" in fix
    assert said_of_routes(job_of(folder, engine="vllm")) == []
    assert said_of_routes(job_of(folder, routes="replay")) == []


def test_several_policies_replay_nothing(folder: Path) -> None:
    both = {"policies": {"one": {}, "two": {}}, "workflow": "agent"}
    job = job_of(folder, **both)
    assert not any(replays(each) for each in (job, *job.views.values()))
    job = job_of(folder, routes="replay", **both)
    fields = [m.field for m in policies_mistakes([*job.views.values()])]
    assert fields.count("rollout.routes") == 1
