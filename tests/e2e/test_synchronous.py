"""max_staleness 0 is synchronous training, step for step."""

import importlib.util
from pathlib import Path

import pytest

from areal_async.config.load import load_job
from areal_async.trajectory import unpack
from trainer_service.data.recording import read_step

pytestmark = [pytest.mark.slow, pytest.mark.alone]

_spec = importlib.util.spec_from_file_location(
    "reference_loop", Path(__file__).parents[1] / "golden" / "reference_loop.py"
)
reference_loop = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference_loop)


def test_at_staleness_zero_every_unit_has_the_version_of_its_step(synchronous_run):
    for step in range(10):
        for blob in read_step(synchronous_run.folder / "batches", step).blobs.values():
            units = unpack(blob).units
            assert set(units.version[units.mask == 1].tolist()) == {step}


def test_at_staleness_zero_a_synchronous_loop_over_the_recorded_batches_has_the_same_losses(synchronous_run):
    steps = [read_step(synchronous_run.folder / "batches", step) for step in range(10)]
    trainer = load_job(synchronous_run.folder / "job.yaml").trainer
    expected = reference_loop.reference_losses(synchronous_run.weights(0), steps, trainer)
    assert [step.losses[0] for step in steps] == pytest.approx([loss for loss, _ in expected], abs=1e-5)
    assert [step.grad_norms[0] for step in steps] == pytest.approx([norm for _, norm in expected], rel=1e-3)
