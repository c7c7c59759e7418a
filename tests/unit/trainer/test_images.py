"""Images in the trainer: packed rows get the log-probs and gradients of the model's own forward pass."""

import pytest
import torch

from safetensors.torch import load_file

from areal_async.config.job import LoraSection
from areal_async.weights.names import names_in_files
from tests.unit.trainer import images_process
from tests.unit.trainer.forked_ranks import run_script
from tests.unit.trainer.image_rows import own_logprobs, own_model, row_with, rows_of, weights_of
from tests.unit.trainer.images_process import weights
from tests.vision import write_vision_model
from trainer_service.data.microbatch import build_micro_batch, plan_passes
from trainer_service.ranks import join_ranks

KINDS = ["qwen2_5_vl", "qwen3_vl"]


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return {kind: write_vision_model(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def backend_of(folder, **options):
    return images_process.backend_of(folder, join_ranks(0, 1), **options)


def batches_of(folder, budget=1 << 20, side_by_side=False):
    """Micro-batches of rows with images, which share prefixes, and the rows in their order."""
    rows, groups = rows_of(folder)
    passes = plan_passes(rows, join_ranks(0, 1), budget, groups=groups, side_by_side=side_by_side)
    return [build_micro_batch(chosen) for chosen in passes], [row for chosen in passes for row in chosen]


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
    """The same by the model's own forward pass over one row at a time, under the names in its files."""
    model = own_model(folder)
    logp = torch.cat([own_logprobs(model, folder, row) for row in rows])
    (logp * weights_of(len(logp))).sum().backward()
    found = {}
    for name, parameter in model.named_parameters():
        (in_files,) = names_in_files(model, {name: parameter})
        found[in_files] = parameter.grad
    return logp.detach(), found


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


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_what_one_rank_trains(folders, kind, tmp_path):
    """Also if one of them has no images, no rank has images, or one has no rows, and if they share rows."""
    run_script(images_process.__file__, folders[kind], tmp_path)
    for name, options in images_process.CASES.items():
        alone = backend_of(folders[kind], vision=options.get("vision", "frozen"))
        wanted = images_process.gradient_of(alone, images_process.batches_of(folders[kind], (0, 1)))
        found = load_file(tmp_path / f"{name}.safetensors")
        require_equal(found, wanted)
        assert found.keys() == wanted.keys()
        assert any(found[each].any() for each in found if not is_of_language(each)) == (name != "frozen")
