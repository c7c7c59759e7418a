"""What a whole job leaves behind, asynchronous and synchronous."""

import ipaddress

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_async.config.load import load_job
from tests.chaos.history import check
from tests.chaos.job import promise_of
from tests.e2e.kinds import SERVICES
from tests.e2e.versions import spans_of
from tests.events import read_events
from tests.golden.reference_loop import reference_losses
from tests.unit.launch.test_report import PROMISED
from trainer_service.data.recording import read_step

pytestmark = pytest.mark.slow


def test_a_finished_job_leaves_its_summary_curves_logs_and_a_model_that_transformers_loads(finished):
    run = finished("plain")
    assert None not in [run.summary[field] for field in PROMISED.split()]
    for name in ("curves.png", "metrics.jsonl", "logs/trainer.log", "logs/rollout-0.log", "job.yaml"):
        assert (run.folder / name).stat().st_size > 0
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "model")
    model = AutoModelForCausalLM.from_pretrained(run.folder / "model")
    prompt = tokenizer("12+34=", return_tensors="pt").input_ids
    assert model.generate(prompt, max_new_tokens=3, do_sample=False).shape[1] > prompt.shape[1]


def test_staleness_is_bounded_in_an_asynchronous_job_and_nothing_is_wasted_for_it(finished):
    run = finished("plain")
    assert run.summary["max_staleness_seen"] <= run.summary["max_staleness_bound"] == 4
    assert run.summary["share_stale"] > 0.2
    assert run.summary["episodes_trained"] == 10 * 8 * 4
    assert run.summary["episodes_dropped"] == 0
    assert max(step["staleness_max"] for step in run.records("step")) <= 4


def test_trained_effectively_once_in_a_job_that_nothing_happens_to(finished):
    run = finished("plain")
    promise = promise_of(load_job(run.workspace.folder / "plain.yaml"))
    assert check(read_events(run.folder), promise).violations == []


def test_nothing_of_a_running_job_can_be_reached_from_outside(finished):
    scan = finished("plain").observed
    assert {*SERVICES} <= scan["listening"].keys(), "their metrics at least"
    reached = {address for found in scan["listening"].values() for address in found}
    assert all(ipaddress.ip_address(address).is_loopback for address in reached), scan["listening"]
    assert scan["datagram"] == {}


def test_versions_are_true_for_every_span_of_episodes_that_span_weight_updates(finished):
    found = spans_of(finished("plain"), 10, most=16)
    assert found.worst < 1e-4
    assert found.several >= 20, "the run was meant to update weights in mid-generation"
    assert found.wrong > 1e-3, "the versions must differ enough for a wrong stamp to show"


def test_evaluation_runs_beside_training_from_the_first_version_to_the_last(finished):
    evaluations = finished("plain").records("evaluation")
    assert evaluations[0]["version"] == 0
    assert evaluations[-1]["version"] == 10
    assert {evaluation["n"] for evaluation in evaluations} == {64}


def test_staleness_is_bounded_at_zero_without_dropping(finished):
    summary = finished("synchronous").summary
    assert summary["max_staleness_seen"] == summary["max_staleness_bound"] == 0
    assert summary["share_stale"] == 0
    assert summary["episodes_trained"] == 10 * 8 * 4
    assert summary["episodes_dropped"] == 0


def test_at_staleness_zero_a_synchronous_loop_over_the_recorded_batches_has_the_same_losses(finished):
    """The loop looks at the version of every unit too: that of its step."""
    run = finished("synchronous")
    steps = [read_step(run.folder / "batches", step) for step in range(10)]
    trainer = load_job(run.folder / "job.yaml").trainer
    expected = reference_losses(run.weights(0), steps, trainer)
    assert [step.losses[0] for step in steps] == pytest.approx([loss for loss, _ in expected], abs=1e-5)
    assert [step.grad_norms[0] for step in steps] == pytest.approx([norm for _, norm in expected], rel=1e-3)
