"""Two policies in one job, one of them on vLLM and the other on SGLang, also in one path: each engine serves
the weights of its own policy, of the very version that it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_async.cli.quickstart.model import write_model
from tests.e2e.conftest import started
from tests.forks import CLEAN_VARIABLE
from tests.jobs import DUET, DUET_CODE, make_workspace

pytestmark = pytest.mark.engine

STEPS, GROUPS, GROUP_SIZE, STALENESS = 6, 4, 4, 1
ENGINES = {"coder": "vllm", "tester": "sglang"}


def test_two_policies_have_engines_of_their_own(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path)
    for seed, policy in enumerate(ENGINES, 1):
        write_model(tmp_path / policy, seed=seed)
    (tmp_path / "duet.py").write_text(DUET_CODE)
    job_file = workspace.job(
        "duo",
        buffer={"batch_groups": GROUPS, "max_staleness": STALENESS},
        rollout__workflow=DUET,
        trainer__steps=STEPS,
        policies={name: {"model": name, "rollout": {"engine": engine}} for name, engine in ENGINES.items()},
    )
    with started(workspace, "run", job_file, **{CLEAN_VARIABLE: "1"}) as job:
        job.wait_for_steps(1)
        worker = job.service("rollout-0")
        assert "libtorch" not in Path(f"/proc/{worker.pid}/maps").read_text(), "it only talks to servers"
        run = job.end()
    assert run.summary["episodes_dropped"] == 0
    assert run.summary["restarts"] == {}, run.logs()
    for name in ENGINES:
        figures = run.summary["policies"][name]
        assert (figures["steps"], figures["episodes_trained"]) == (STEPS, STEPS * GROUPS * GROUP_SIZE)
        assert figures["max_staleness_seen"] <= STALENESS
        checks = [check for check in run.records("self_check") if check["policy"] == name]
        assert max(check["version"] for check in checks) > 0
        assert all(check["passed"] and check["max"] < 1e-3 for check in checks)
