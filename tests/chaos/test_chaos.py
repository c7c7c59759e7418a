"""The chaos run and the flood in short: real processes killed at labelled places and at random, malformed
messages at every socket of a job, and the checker's verdict. One storm of real kills runs every time, beside
the ten thousand simulated sequences of `test_simulated.py`; docs/recovery.md has the long forms."""

import json
import random

import pytest

from tests.chaos.flood import MOST_GROWTH_MB, run
from tests.chaos.job import Job, write_duet, write_job
from tests.chaos.plan import cuts, each_role_once
from tests.chaos.ranks import RankStorm
from tests.chaos.storm import Storm
from tests.waiting import deadline_s

pytestmark = pytest.mark.slow

LIMIT_S = deadline_s(900)
PLACES = (
    "trainer.after_publish@3",
    "trainer.mid_checkpoint@2",
    "buffer.before_reply@200",
    "rollout.before_put@12",
    "reward.before_verdict@10",
)


@pytest.mark.timeout(LIMIT_S + 60)
def test_trained_effectively_once_and_one_death_is_local_under_chaos(tmp_path):
    """With tier `always` and an intact log exactly nothing is lost."""
    rng = random.Random(5)
    job_file = write_job(tmp_path, "chaos", steps=40, seed=5, durability="always")
    storm = Storm(Job(job_file, ",".join(PLACES)), limit_s=LIMIT_S)
    storm.run(
        each_role_once(rng, ["redis", "evaluator", "rollout-1", "buffer", "supervisor"], longest_gap_s=4)
    )
    verdict = storm.judge()
    assert verdict.violations == []
    assert verdict.figures["lost_episodes"] == verdict.figures["trained_twice"] == 0
    assert verdict.figures["max_staleness"] <= 4
    assert verdict.figures["kills"] >= 8, verdict.figures
    # A worker may be killed between an acknowledgement and writing so down.
    assert verdict.figures["acknowledged_episodes"] > 1000


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.nightly
def test_of_two_policies_each_keeps_its_promises_whoever_dies(tmp_path):
    rng = random.Random(9)
    storm = Storm(Job(write_duet(tmp_path, "duet", steps=20, seed=9)), limit_s=LIMIT_S, seed=9)
    roles = ["trainer-tester", "trainer-coder", "rollout-0", "buffer", "supervisor"]
    storm.run(each_role_once(rng, roles, longest_gap_s=2.0))
    verdict = storm.judge()
    assert verdict.violations == []
    for policy, most in (("coder", 4), ("tester", 2)):
        figures = verdict.figures["policies"][policy]
        assert figures["lost_episodes"] == figures["trained_twice"] == 0
        assert figures["max_staleness"] <= most
        assert figures["trainer_epochs"] >= 2


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.nightly
def test_a_redis_that_lost_the_end_of_its_log_costs_at_most_two_seconds_of_work(tmp_path):
    """With tier `everysec`: detected, queued again, counted, and the job is done all the same."""
    job_file = write_job(tmp_path, "cut", steps=30, seed=6, durability="everysec")
    storm = Storm(Job(job_file), limit_s=LIMIT_S, seed=6)
    storm.run(cuts(2, gap_s=1.0))
    verdict = storm.judge(lost_s=2.0)
    assert verdict.violations == []
    assert storm.cuts >= 1
    assert 0 < verdict.figures["lost_work_s"] <= 2
    log = (storm.job.run_dir / "logs" / "buffer.log").read_text().splitlines()
    told = [json.loads(line)["lost"] for line in log if "acknowledged writes; what" in line]
    assert sum(told) >= verdict.figures["lost_writes"] > 0


@pytest.mark.timeout(deadline_s(660))
@pytest.mark.nightly
def test_malformed_messages_at_every_socket_leave_a_job_with_exact_counts(tmp_path):
    messages = 60
    kinds = ("redis", "buffer", "weights", "control", "chunks", "gateway", "metrics", "reward")
    verdict, figures = run(
        tmp_path, steps=90, messages=messages, connections=60, quiet_steps=1, limit_s=LIMIT_S
    )
    assert verdict.violations == []
    assert verdict.figures["lost_episodes"] == verdict.figures["trained_twice"] == 0
    assert verdict.figures["trainer_epochs"] == 1, "nobody was started again"
    flooded = [name for name in figures if not name.endswith("_mb") and name != "job"]
    assert [kind for kind in kinds if not any(kind in name for name in flooded)] == []
    for name in flooded:
        assert figures[name].get("known", messages) == messages, name
    assert {name: mb for name, mb in figures["growth_mb"].items() if mb >= MOST_GROWTH_MB} == {}


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.nightly
def test_ranks_that_die_or_hang_bring_their_group_back_and_an_outage_of_the_buffer_ends_none(tmp_path):
    """The outage is longer than any collective may last."""
    rng = random.Random(7)
    trainer = {"trainer__ranks": 2, "trainer__hang_s": 15.0, "trainer__collective_s": 10.0}
    job_file = write_job(tmp_path, "ranks", steps=24, seed=7, durability="always", **trainer)
    storm = RankStorm(Job(job_file), limit_s=LIMIT_S, seed=7)
    storm.disturb(["kill", "outage", "stop"], rng, longest_gap_s=2.0, outage_s=14.0)
    figures = storm.figures()
    assert figures["broken"] == []
    assert figures["lost_episodes"] == figures["trained_twice"] == 0
    assert figures["outages_outlived"] == 1
    assert figures["group_restarts"] == 2
    assert sum(count for text, count in figures["reports"].items() if "no sign of life for 15 s" in text) == 1
