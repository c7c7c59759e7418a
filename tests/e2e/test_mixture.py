"""A whole job on a mixture of experts: the engine's routes reach the trainer, and Redis never sees them."""

from urllib.parse import quote

import pytest

from replay_buffer.attachments import ROUTES as PREFIX
from tests.e2e.kinds import SURVIVOR_STEPS
from trainer_service.data.recording import Recording

pytestmark = pytest.mark.slow


def test_a_job_trains_a_mixture_by_the_routes_of_its_engine_over_a_killed_buffer(finished):
    run = finished("survivor")
    assert "buffer" in {record["service"] for record in run.records("restart")}
    assert run.summary["episodes_trained"] == SURVIVOR_STEPS * 8 * 4
    for step in run.records("step"):
        # The last token of an answer, which the engine has not fed, is not fed here either.
        assert step["replayed_tokens"] == step["packed_tokens"] > 0
    checks = run.records("self_check")
    assert checks
    assert all(check["passed"] for check in checks)


def test_routes_stay_out_of_redis_and_are_freed_with_their_groups(finished):
    run = finished("survivor")
    assert run.observed["episodes_in_redis"]
    assert not run.observed["routes_in_redis"]
    recorded, steps = Recording(run.folder), range(SURVIVOR_STEPS)
    trained = {quote(g.group_id, safe="") for step in steps for g in recorded.read(step).batch.groups}
    held = run.folder / "buffer" / "episodes"
    left = {path.name.removeprefix(PREFIX).split(",")[0] for path in held.glob(f"{PREFIX}*")}
    assert len(trained) == SURVIVOR_STEPS * 8
    assert left.isdisjoint(trained)
