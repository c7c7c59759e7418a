"""Whole jobs on Megatron-Core, on a CPU: stages outlive the death of one of them."""

import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import started
from tests.jobs import make_workspace
from tests.megatron_jobs import ON_CPU, untie

pytest.importorskip("megatron.core", reason="no Megatron-Core")


@pytest.mark.slow
def test_a_job_on_ranks_of_megatron_outlives_each_of_them(tmp_path):
    workspace = make_workspace(tmp_path)
    untie(workspace.folder / "model")
    (workspace.folder / "on_cpu.py").write_text(ON_CPU)
    job_file = workspace.job(
        "staged",
        trainer__backend="on_cpu.py:megatron",
        trainer__ranks=2,
        trainer__parallel={"pipeline": 2},
        trainer__steps=8,
        trainer__record_batches=False,
        checkpoint={"every_steps": 2, "keep": 2},
        supervisor={"ready_s": 600, "restarts": 10, "first_pause_s": 0.1},
    )
    with started(workspace, "run", job_file) as job:
        for victim in ("trainer-1", "trainer"):
            job.wait_for_steps(3)
            job.service(victim).kill()
        run = job.end()
    assert run.summary["steps"] == 8
    assert run.summary["episodes_trained"] == 8 * 8 * 4
    assert run.summary["max_staleness_seen"] <= 4
    died = [record["service"] for record in run.records("restart")]
    assert {"trainer-1", "trainer"} <= {*died}
    trained = load_file(run.folder / "model" / "model.safetensors")
    first = load_file(workspace.folder / "model" / "model.safetensors")
    assert trained.keys() == first.keys()
    assert all((trained[name] != first[name]).any() for name in first if "norm" not in name)
