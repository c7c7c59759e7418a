"""A job on a Redis of one's own, with a login and a disk that fills up while the job runs."""

import pytest

from tests.e2e.kinds import OWN_STEPS
from tests.e2e.test_reward_servers import needs_node

pytestmark = [pytest.mark.slow, needs_node]


def test_a_full_disk_of_redis_stalls_a_job_by_name_and_loses_nothing(finished):
    run = finished("own-services")
    assert run.observed["stalled_at"] < OWN_STEPS
    assert run.summary["episodes_trained"] == OWN_STEPS * 8 * 4
    assert run.summary["episodes_dropped"] == 0
    assert not any(run.summary["restarts"].values()), "nothing died of it"
    assert [step["step"] for step in run.records("step")] == list(range(OWN_STEPS))


def test_the_password_of_redis_is_written_nowhere(finished):
    run = finished("own-services")
    for file in run.folder.rglob("*"):
        assert not file.is_file() or b"hunter2" not in file.read_bytes(), file
    assert "hunter2" not in run.observed["told"]
