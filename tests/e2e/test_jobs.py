"""What a whole job leaves behind, asynchronous and synchronous."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_async.config.load import load_job
from tests.golden.reference_loop import reference_losses
from tests.unit.launch.test_report import PROMISED
from trainer_service.data.recording import read_step

pytestmark = pytest.mark.slow


def test_a_finished_job_leaves_its_summary_curves_logs_and_a_model_that_transformers_loads(asynchronous_run):
    assert None not in [asynchronous_run.summary[field] for field in PROMISED.split()]
    for name in ("curves.png", "metrics.jsonl", "logs/trainer.log", "logs/rollout-0.log", "job.yaml"):
        assert (asynchronous_run.folder / name).stat().st_size > 0
    tokenizer = AutoTokenizer.from_pretrained(asynchronous_run.folder / "model")
    model = AutoModelForCausalLM.from_pretrained(asynchronous_run.folder / "model")
    prompt = tokenizer("12+34=", return_tensors="pt").input_ids
    assert model.generate(prompt, max_new_tokens=3, do_sample=False).shape[1] > prompt.shape[1]


def test_staleness_is_bounded_in_an_asynchronous_job_and_nothing_is_wasted_for_it(asynchronous_run):
    summary = asynchronous_run.summary
    assert summary["max_staleness_seen"] <= summary["max_staleness_bound"] == 4
    assert summary["share_stale"] > 0.2
    assert summary["episodes_trained"] == 10 * 8 * 4
    assert summary["episodes_dropped"] == 0
    assert max(step["staleness_max"] for step in asynchronous_run.records("step")) <= 4


def test_staleness_is_bounded_at_zero_without_dropping(synchronous_run):
    summary = synchronous_run.summary
    assert summary["max_staleness_seen"] == summary["max_staleness_bound"] == 0
    assert summary["share_stale"] == 0
    assert summary["episodes_trained"] == 10 * 8 * 4
    assert summary["episodes_dropped"] == 0


def test_evaluation_runs_beside_training_from_the_first_version_to_the_last(asynchronous_run):
    evaluations = asynchronous_run.records("evaluation")
    assert evaluations[0]["version"] == 0
    assert evaluations[-1]["version"] == 10
    assert {evaluation["n"] for evaluation in evaluations} == {64}


def test_at_staleness_zero_a_synchronous_loop_over_the_recorded_batches_has_the_same_losses(synchronous_run):
    """The loop looks at the version of every unit too: that of its step."""
    steps = [read_step(synchronous_run.folder / "batches", step) for step in range(10)]
    trainer = load_job(synchronous_run.folder / "job.yaml").trainer
    expected = reference_losses(synchronous_run.weights(0), steps, trainer)
    assert [step.losses[0] for step in steps] == pytest.approx([loss for loss, _ in expected], abs=1e-5)
    assert [step.grad_norms[0] for step in steps] == pytest.approx([norm for _, norm in expected], rel=1e-3)
