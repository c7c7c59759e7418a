"""Rewards in other languages: a server that holds none of our code drives a real job, and loses nothing when
it is killed and started again in mid-job."""

import shutil

import pyarrow.parquet as pq
import pytest

from tests.e2e.conftest import told_by
from tests.e2e.kinds import OWN_STEPS

needs_node = pytest.mark.skipif(
    shutil.which("node") is None, reason="needs Node.js: the Debian package nodejs"
)
pytestmark = [pytest.mark.slow, needs_node]


def test_a_server_in_another_language_trains_a_job_and_its_death_loses_nothing(finished, tmp_path):
    run = finished("own-services")
    assert len({step["step"] for step in run.records("step")}) == OWN_STEPS
    kinds = {item[2] for event in run.events("verdicts") for item in event["items"]}
    assert kinds == {"score"}, "the death of the server became verdicts"
    told_by("buffer", "export", run.folder, tmp_path / "batches.parquet", "--batches")
    rows = pq.read_table(tmp_path / "batches.parquet", columns=["response_text", "reward"]).to_pylist()
    assert len(rows) == OWN_STEPS * 8 * 4
    for row in rows:
        text = row["response_text"]
        assert row["reward"] == pytest.approx(text.count("1") / max(1, len(text)), abs=1e-6)
    rewards = [step["reward_mean"] for step in run.records("step")]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2, "the job learned nothing"
