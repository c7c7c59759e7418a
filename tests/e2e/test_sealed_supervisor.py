"""A job on two hosts that share nothing but a network, whose supervisor is killed: what its buffer had
acknowledged is there after each resume."""

import json
from pathlib import Path

import pytest

from areal_async.config.load import load_job
from areal_async.service.record import read_run_log
from tests.chaos.job import write_job
from tests.events import read_events
from tests.sealed.world import CLUSTER, KilledJob, judged, sealed_hosts, unusable

AWAY = {role: {"labels": {"part": "away"}} for role in ("trainer", "rollout", "evaluator")}
PLACES = AWAY | {"reward": {"labels": {"part": "home"}}}
STEPS, FIRST_CHECKPOINT = 24, 10


@pytest.mark.slow
@pytest.mark.skipif(bool(unusable()), reason=unusable())
@pytest.mark.nightly
@pytest.mark.parametrize("durability", ["everysec", "always"])
def test_a_supervisor_that_is_killed_loses_nothing_that_was_acknowledged(
    tmp_path: Path, durability: str
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    checkpoint = {"every_steps": FIRST_CHECKPOINT, "keep": 2}
    changes = {"rollout__workers": 1, "placement": PLACES, "checkpoint": checkpoint}
    job_file = write_job(folder, "sup", steps=STEPS, seed=5, durability=durability, **changes)
    (folder / "cluster.yaml").write_text(CLUSTER)
    with sealed_hosts(tmp_path) as hosts:
        for part in ("home", "away"):
            hosts.node(hosts.add(), 4, part=part)
        hosts.copy_in(folder)
        job = KilledJob(hosts, "sup", tmp_path / "output.log")
        job.start("run")
        for kill_at in (FIRST_CHECKPOINT // 2, FIRST_CHECKPOINT + 3):
            job.until_step(kill_at)
            job.kill()
            job.start("resume")
        assert job.process.wait(600) == 0, job.output.read_text()[-4000:]
        run_dir = hosts.copy_out("runs/sup", tmp_path / "back")
    verdict = judged(run_dir, load_job(job_file))
    assert verdict.violations == []
    assert verdict.figures["lost_episodes"] == 0
    assert json.loads((run_dir / "summary.json").read_text())["lost_writes"] == 0
    loaded = [event for event in read_events(run_dir) if event["event"] == "loaded"]
    assert [event["lost_writes"] for event in loaded] == [0, 0, 0]
    assert min(event["revision"] for event in loaded[1:]) > 1, "it opens the log of the run before"
    assert max(r["step"] for r in read_run_log(run_dir / "metrics.jsonl") if r["kind"] == "step") == STEPS - 1
