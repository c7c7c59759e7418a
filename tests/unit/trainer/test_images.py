"""Images in the trainer: packed rows get the log-probs and gradients of the model's own forward pass."""

import pytest
import torch

from areal_async.config.job import LoraSection, OptimizerSection
from areal_async.weights.pieces import whole_tensors
from tests.unit.trainer.image_rows import own_logprobs, own_model, row_with, rows_of, weights_of
from tests.vision import write_vision_model
from trainer_service.backends.base import ModelUse
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.data.microbatch import build_micro_batch, plan_passes
from trainer_service.ranks import join_ranks

KINDS = ["qwen2_5_vl", "qwen3_vl"]
OF_GRADIENT = OptimizerSection(lr=1e8, eps=1e8, clip_grad_norm=1e8)
"""With so large an eps AdamW takes the gradient itself off the weights."""


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return {kind: write_vision_model(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def backend_of(folder, **options):
    models = {"policy": ModelUse(folder, OF_GRADIENT, 10)}
    return FsdpBackend(models, join_ranks(0, 1), **{"dtype": torch.float32, **options})


def batches_of(folder, budget=1 << 20, side_by_side=False):
    """Micro-batches of rows with images, which share prefixes, and the rows in their order."""
    rows, groups = rows_of(folder)
    passes = plan_passes(rows, join_ranks(0, 1), budget, groups=groups, side_by_side=side_by_side)
    return [build_micro_batch(chosen) for chosen in passes], [row for chosen in passes for row in chosen]


def weights(backend):
    return {name: tensor.clone() for name, tensor in whole_tensors(backend.export("policy")).items()}


def trained(backend, batches):
    """The log-probs of all units, and the gradient of their weighted sum by name."""
    logp = torch.cat(backend.evaluate("policy", batches, lambda _, columns: columns["logp"]))
    factors = weights_of(len(logp)).split([batch.n_units for batch in batches])
    before = weights(backend)
    backend.train("policy", batches, lambda index, columns: (columns["logp"] * factors[index]).sum())
    backend.optimizer_step()
    after = weights(backend)
    return logp, {name: before[name] - after[name] for name in before}


def own(folder, rows):
    """The same by the model's own forward pass over one row at a time."""
    model = own_model(folder)
    logp = torch.cat([own_logprobs(model, folder, row) for row in rows])
    (logp * weights_of(len(logp))).sum().backward()
    return logp.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def require_equal(found, wanted):
    """Gradients are equal to 1e-5 of the largest number of each tensor; frozen ones of a vision tower are 0."""
    for name, expected in wanted.items():
        bound = 1e-5 * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(found[name], expected, atol=bound, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def is_of_language(name):
    return "visual" not in name


@pytest.mark.parametrize("vision", ["frozen", "trained"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_equal_the_models_own_forward_pass(folders, kind, vision):
    backend = backend_of(folders[kind], vision=vision)
    batches, rows = batches_of(folders[kind])
    assert batches[0].shared_tokens > 10
    logp, gradient = trained(backend, batches)
    want, own_gradient = own(folders[kind], rows)
    torch.testing.assert_close(logp, want, atol=1e-5, rtol=0)
    if vision == "frozen":
        tower = {name for name in own_gradient if not is_of_language(name)}
        own_gradient |= {name: torch.zeros_like(own_gradient[name]) for name in tower}
    require_equal(gradient, own_gradient)
