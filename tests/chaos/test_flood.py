"""Malformed messages at every socket of a running job; the long form is `python -m tests.chaos.flood`."""

import pytest

from tests.chaos.flood import MOST_GROWTH_MB, run

MESSAGES = 150
KINDS = ("redis", "buffer", "weights", "control", "chunks", "gateway", "metrics", "reward")


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(660)
def test_malformed_messages_at_every_socket_leave_a_job_with_exact_counts(tmp_path):
    verdict, figures = run(
        tmp_path, steps=100, messages=MESSAGES, connections=150, quiet_steps=1, limit_s=600.0
    )
    assert verdict.violations == []
    assert verdict.figures["lost_episodes"] == verdict.figures["trained_twice"] == 0
    assert verdict.figures["trainer_epochs"] == 1, "nobody was started again"
    flooded = [name for name in figures if not name.endswith("_mb") and name != "job"]
    assert [kind for kind in KINDS if not any(kind in name for name in flooded)] == []
    for name in flooded:
        assert figures[name].get("known", MESSAGES) == MESSAGES, name
    assert max(figures["growth_mb"].values()) < MOST_GROWTH_MB
