"""A whole job on channel `nccl`, with a worker on a host of another name and a trainer that is killed on the
way."""

from __future__ import annotations

import re
from typing import Any

import pytest

from areal_async.base.events import VARIABLE
from tests.e2e.conftest import running, workspace
from tests.e2e.test_weights_channels import TOUGH, assert_versions_are_true
from tests.scrape import fetch_samples
from tests.waiting import LIMIT_S

__all__ = ["running", "workspace"]
pytestmark = [pytest.mark.engine, pytest.mark.nightly]
STEPS = 40
BEFORE_DEATH = 3  # Buckets, each a whole model, that the trainer sends before it is killed


def test_one_death_is_local_a_job_whose_trainer_sends_tensors_and_dies(workspace: Any, running: Any) -> None:
    job_file = workspace.job(
        "tensors",
        rollout__engine="sglang",
        trainer__steps=STEPS,
        checkpoint={"every_steps": 1, "keep": 100},
        observe={"metrics_port": 0, "event_log": True},
        supervisor=TOUGH | {"ready_s": 600},
        weights={"channel": "nccl", "channel_args": {"give_up_s": 20}},
        placement={"pretend": {"rollout-0": "host-1"}},
    )
    with running("run", job_file, **{VARIABLE: f"weights.bucket_sent@{BEFORE_DEATH}"}) as job:
        job.wait_for(lambda: len(job.events("opened")) == 2, "the second trainer", LIMIT_S)
        log = (job.folder / "logs" / "rollout-0.log").read_text()
        port = int(re.findall(r'"event": ?"service starts".*?"metrics_port": ?(\d+)', log)[-1])

        def taken(channel: str = "nccl") -> float:
            found = fetch_samples(port).items()
            return sum(v for k, v in found if k.startswith("areal_weights_received_bytes") and channel in k)

        # Tensors came before the death, and come after it.
        size = (workspace.folder / "model" / "model.safetensors").stat().st_size
        job.wait_for(lambda: taken() > (BEFORE_DEATH + 0.5) * size, "tensors of the second trainer", LIMIT_S)
        assert taken("zmq") > size, "the snapshots beside them"
        run = job.end()
    assert [event["name"] for event in job.events("failpoint")] == ["weights.bucket_sent"]
    assert_versions_are_true(run, STEPS)
