"""Every training runs on a device: tensors of two devices never meet, and the host hardly waits.

The device is made from host memory (`tests/accelerator/device.py`), so this runs without a GPU. A case runs
on it and on the CPU, with the real back end and the real loops.
"""

import pytest
import torch

from tests.accelerator.cases import BUDGETS, FILES, RL, STEPS, Ran, run
from tests.unit.trainer.conftest import write_model
from trainer_service.data.ragged import LEAST_TOKENS

PER_MICRO_BATCH, PER_STEP = 2, 4
"""Most waits of the host for the device that a step may have."""
PER_UPDATE = 3
"""Waits of each further update, which is decided on its own: its loss, its gradient's norm, its weights."""
NEW_SHAPES = 4
"""Most shapes of attention calls that the second step may bring."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model, and another of its shape."""
    folder = tmp_path_factory.mktemp("models")
    return write_model(folder / "model", layers=1), write_model(folder / "other", layers=1, seed=7)


@pytest.fixture(scope="module")
def ran(models, tmp_path_factory):
    """Run a case on a device, once for all tests of this module."""
    known: dict[tuple[str, str, str], Ran] = {}

    def of(name: str, device: str, budget: str = "") -> Ran:
        budget = budget or ("medium" if name.endswith("ragged") else "cut")
        if (name, device, budget) not in known:
            out = tmp_path_factory.mktemp("case")
            known[name, device, budget] = run(name, *models, out, device=device, budget=BUDGETS[budget])
        return known[name, device, budget]

    return of


def close(found, want, rel, at=""):
    """Compare figures of any nesting."""
    if isinstance(want, dict):
        assert found.keys() == want.keys(), at
        for name in want:
            close(found[name], want[name], rel, f"{at}.{name}")
    elif isinstance(want, list):
        assert len(found) == len(want), at
        for number, pair in enumerate(zip(found, want, strict=True)):
            close(*pair, rel, f"{at}[{number}]")
    else:
        assert found == pytest.approx(want, rel=rel, abs=rel / 10), at


@pytest.mark.parametrize("name", [*RL, *FILES])
def test_a_training_mixes_no_devices_and_gives_what_the_cpu_gives(ran, name):
    found, want = ran(name, "cuda:0"), ran(name, "cpu")
    narrow = name.startswith("bfloat16")
    assert len(found.figures) == STEPS
    if narrow:  # a clip decides otherwise where a ratio is rounded otherwise
        for one, other in zip(found.figures, want.figures, strict=True):
            for name in one.keys() & {"losses", "norms", "loss", "norm"}:
                close(one[name], other[name], 0.1)
    else:
        close(found.figures, want.figures, 2e-5)
    assert found.weights.keys() == want.weights.keys()
    for weight, tensor in want.weights.items():
        torch.testing.assert_close(found.weights[weight], tensor, atol=1e-2 if narrow else 1e-5, rtol=0)


@pytest.mark.parametrize("name", [*RL, *FILES])
def test_the_host_waits_no_longer_than_allowed_for_a_single_micro_batch(ran, name):
    """However many there are: nothing is read in a micro-batch."""
    found = ran(name, "cuda:0")
    assert found.micro_batches > found.updates, "nothing is cut"
    most = PER_MICRO_BATCH + PER_STEP + PER_UPDATE * (found.updates - 1)
    assert sum(found.syncs.values()) <= most, said(found.syncs)


@pytest.mark.parametrize("name", ["preset-grpo", "preset-gspo", "sft", "dpo"])
def test_more_micro_batches_are_no_more_waits(ran, name):
    whole, cut = ran(name, "cuda:0", "whole"), ran(name, "cuda:0")
    assert cut.micro_batches > whole.micro_batches
    assert sum(cut.syncs.values()) == sum(whole.syncs.values()), said(cut.syncs)


def test_two_models_that_are_trained_together_wait_once_for_each_norm(ran):
    found = ran("critic-model", "cuda:0")
    assert found.updates == 2
    of_model = [
        n for each, n in found.syncs.items() if each.place.startswith("trainer_service/backends/fsdp/")
    ]
    assert sum(of_model) == 2 * found.updates  # of the gradients and of the new weights


def said(syncs):
    return "\n".join(f"{n} {each}" for each, n in syncs.items())


def test_rows_of_many_lengths_are_attention_calls_of_few_shapes(ran):
    first, second = ran("bfloat16-ragged", "cuda:0").attention
    assert len(second) >= 10
    assert {call[0] for call in second} == {"_varlen_attn"}
    assert len({*second} - {*first}) <= NEW_SHAPES
    tokens = {call[1][0][0] for call in (*first, *second)}
    assert not any(each % LEAST_TOKENS for each in tokens), tokens


def test_calls_of_exact_attention_are_counted_too(ran):
    _, second = ran("preset-grpo", "cuda:0").attention
    assert {call[0] for call in second} == {"sdpa"}
