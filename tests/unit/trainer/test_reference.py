"""At max_staleness 0 the trainer is the synchronous reference loop, step for step."""

import pytest

from tests.golden.reference_loop import reference_losses
from tests.unit.trainer import rank_process
from trainer_service.data.recording import read_step, write_step


@pytest.mark.parametrize("prox", ["recompute", "reuse"])
def test_staleness_zero_equals_synchronous_training(tmp_path, model_dir, make_batch, prox):
    """Ten steps of the real loop, recorded by itself and replayed by the plain one."""
    for step in range(10):
        batch, blobs = make_batch(step, groups=4, group_size=6, temperature=0.8, lengths=(1, 6))
        write_step(tmp_path / "given", batch, blobs)
    settings = {
        "steps": 10,
        "minibatches": 1,
        "micro_batch_tokens": 64,
        "optimizer": {"lr": 3e-3, "clip_grad_norm": 0.2},
        "objective": {"prox": prox, "correction_args": {"cap": 1.1}},
    }
    rank_process.run(0, 1, model_dir, tmp_path / "given", tmp_path / "run", record_batches=True, **settings)
    steps = [read_step(tmp_path / "run" / "batches", step) for step in range(10)]
    trainer = rank_process.job_of(model_dir, tmp_path, **settings).trainer
    expected = reference_losses(model_dir, steps, trainer)
    assert [step.losses[0] for step in steps] == pytest.approx([loss for loss, _ in expected], abs=1e-5)
    assert [step.grad_norms[0] for step in steps] == pytest.approx([norm for _, norm in expected], rel=1e-4)
    assert max(norm for _, norm in expected) > 0.2
