"""Log-probs, entropies and their gradients in tiles are those of the whole logits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, PhiConfig

from areal_async.config.job import OptimizerSection
from tests.unit.families import VOCABULARY, config_of
from tests.unit.trainer.conftest import plain_row, write_model
from trainer_service.backends.base import ModelUse
from trainer_service.backends.fsdp import memory
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.backends.head import Head, columns_of_units
from trainer_service.data.microbatch import build_micro_batch
from trainer_service.errors import ModelError
from trainer_service.ranks import join_ranks

WIDE = 151_936  # Vocabulary of Qwen2.5 and Qwen3


def _batch(n_units, vocabulary, *, seed=0):
    rng = np.random.default_rng(seed)
    rows = []
    for episode, n in enumerate((n_units // 3, n_units - n_units // 3)):
        ids = rng.integers(0, vocabulary, n + 1)
        temperature = rng.uniform(0.5, 1.5, n + 1).astype(np.float32)
        rows.append(plain_row(ids, slice(1, None), episode=episode, temperature=temperature))
    return build_micro_batch(rows)


def _plain(head, hidden, batch):
    """The columns by the formula, with autograd."""
    logits = (hidden @ head.weight.T).float()
    if head.bias is not None:
        logits = logits + head.bias.float()
    logits = logits * head.scale
    if head.cap is not None:
        logits = head.cap * torch.tanh(logits / head.cap)
    kept = torch.tensor([token for token in range(logits.shape[1]) if token not in head.never])
    logits, target = logits[:, kept], torch.searchsorted(kept, batch.target)
    logp = (logits / batch.temperature[:, None]).log_softmax(-1)
    return {
        "logp": logp.gather(1, target[:, None])[:, 0],
        "entropy": -(logp.exp() * logp).sum(-1),
        "greedy": logits.argmax(-1) == target,
    }


def _head(vocabulary, width, *, dtype=torch.float32, bias=False, scale=1.0, cap=None, seed=0, never=()):
    random = torch.Generator().manual_seed(seed)
    weight = (torch.randn(vocabulary, width, generator=random) * 3 / width**0.5).to(dtype)
    shift = torch.randn(vocabulary, generator=random).to(dtype).requires_grad_() if bias else None
    return Head(weight.requires_grad_(), shift, scale, cap, never=never)


def _gradients(columns_by, head, hidden, batch, names, coefficients):
    columns = columns_by(head, hidden, batch)
    sum((columns[name] * coefficients[name]).sum() for name in names).backward()
    found = [t.grad.clone() for t in (hidden, head.weight, head.bias) if t is not None]
    for tensor in (hidden, head.weight, head.bias):
        if tensor is not None:
            tensor.grad = None
    return {name: columns[name].detach() for name in names}, found


def _both(head, batch, names):
    """Columns and gradients in tiles, and of the plain computation in fp32."""
    width = head.weight.shape[1]
    random = torch.Generator().manual_seed(7)
    hidden = torch.randn(len(batch.target), width, generator=random).to(head.weight.dtype).requires_grad_()
    coefficients = {name: torch.randn(len(batch.target), generator=random) for name in names}

    def tiled(head, hidden, batch):
        return columns_of_units(head, hidden, batch, names)

    own = _gradients(tiled, head, hidden, batch, names, coefficients)
    wide = Head(
        head.weight.detach().float().requires_grad_(),
        None if head.bias is None else head.bias.detach().float().requires_grad_(),
        head.scale,
        head.cap,
        never=head.never,
    )
    exact = hidden.detach().float().requires_grad_()
    return own, _gradients(_plain, wide, exact, batch, names, coefficients)


@pytest.fixture
def narrow(monkeypatch):
    """Tiles are as narrow as they are in a large micro-batch."""
    monkeypatch.setattr(memory, "LEAST_LOGITS_BYTES", 0)


@pytest.mark.parametrize("names", [("logp",), ("entropy",), ("logp", "entropy")], ids="+".join)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True},
        {"scale": 0.25},
        {"cap": 4.0},
        {"never": (0, *range(60, 97))},
        {"bias": True, "scale": 3.0, "cap": 2.0, "never": (5, 40)},
    ],
    ids=["plain", "bias", "scale", "cap", "never", "all"],
)
def test_tiles_compute_what_the_whole_does(names, options, narrow):
    head, batch = _head(97, 24, **options), _batch(53, 97)
    sampled = [token for token in range(97) if token not in head.never]
    batch = replace(batch, target=torch.tensor(sampled)[batch.target % len(sampled)])
    own, exact = _both(head, batch, names)
    for name in names:
        torch.testing.assert_close(own[0][name], exact[0][name], atol=1e-5, rtol=1e-5)
    for mine, want in zip(own[1], exact[1], strict=True):
        torch.testing.assert_close(mine, want, atol=1e-5, rtol=1e-4)


def test_greedy_in_tiles_is_that_of_the_whole(narrow):
    head, batch = _head(17, 24), _batch(200, 17)
    hidden = torch.randn(200, 24, generator=torch.Generator().manual_seed(1))
    (found,) = columns_of_units(head, hidden, batch, ("greedy",)).values()
    assert torch.equal(found, _plain(head, hidden, batch)["greedy"])
    assert 0 < found.sum() < len(found)


def test_a_pass_without_units_has_a_gradient_of_zero():
    """A rank short of rows reduces as many gradients as the others."""
    head, hidden = _head(17, 24), torch.zeros(0, 24, requires_grad=True)
    columns = columns_of_units(head, hidden, build_micro_batch([]), ("logp", "entropy", "greedy"))
    assert [tuple(column.shape) for column in columns.values()] == [(0,)] * 3
    (columns["logp"].sum() + columns["entropy"].sum()).backward()
    assert head.weight.grad.shape == head.weight.shape
    assert not head.weight.grad.any()
    assert hidden.grad is not None


def test_a_frozen_output_layer_gets_no_gradient():
    head, batch = _head(17, 24), _batch(9, 17)
    head.weight.requires_grad_(False)
    hidden = torch.randn(9, 24, requires_grad=True)
    columns_of_units(head, hidden, batch, ("logp",))["logp"].sum().backward()
    assert head.weight.grad is None
    assert hidden.grad.any()


def test_bfloat16_adds_up_the_gradient_of_hidden_states_in_fp32(narrow):
    """Some fifty tiles added up in bfloat16 would be off by several times more than one product's rounding;
    the weight's gradient is one product."""
    names, batch = ("logp",), _batch(400, 501)
    own, exact = _both(_head(501, 24, dtype=torch.bfloat16), batch, names)
    assert (own[0]["logp"] - exact[0]["logp"]).abs().max() < 0.1
    for mine, want in zip(own[1], exact[1], strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.float() - want).norm() < 0.006 * want.norm()


class _Largest(TorchDispatchMode):
    """The most elements of a tensor that an operator gives."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize(("dtype", "bytes_"), [(torch.float32, 8), (torch.bfloat16, 10)], ids=["f32", "bf16"])
def test_at_a_wide_vocabulary_no_tensor_is_as_large_as_all_logits(dtype, bytes_):
    """A number of a tile takes `bytes_` in all its tensors; they have 32 MiB together here, and no tensor has
    a tenth of all logits."""
    head, batch = _head(WIDE, 8, dtype=dtype), _batch(600, WIDE)
    hidden = torch.randn(600, 8, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()
    with _Largest() as found:
        columns = columns_of_units(head, hidden, batch, ("logp", "entropy"))
        (columns["logp"].sum() + columns["entropy"].sum()).backward()
    assert max(WIDE * 8, 2**25 * 0.9 / bytes_) <= found.largest <= 2**25 / bytes_ < 600 * WIDE / 10
    if dtype == torch.float32:
        with torch.no_grad():
            want = _plain(head, hidden[:40], _batch_head(batch, 40))
        torch.testing.assert_close(columns["logp"][:40].detach(), want["logp"], atol=1e-5, rtol=1e-5)


def _batch_head(batch, n):
    """What `_plain` reads of the first `n` units."""
    return type("Part", (), {"target": batch.target[:n], "temperature": batch.temperature[:n]})


SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "initializer_range": 0.5}
HEADS = {
    "granite": (GraniteConfig, {"logits_scaling": 8.0}),
    "cohere": (CohereConfig, {"logit_scale": 0.125}),
    "gemma2": (
        Gemma2Config,
        {"head_dim": 16, "final_logit_softcapping": 2.0, "attn_logit_softcapping": None},
    ),
    "phi": (PhiConfig, {}),  # has a bias
}


def _saved(folder, config):
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def _backend(folder):
    models = {"policy": ModelUse(folder, OptimizerSection(), 1)}
    return FsdpBackend(models, join_ranks(0, 1), dtype=torch.float32)


@pytest.mark.parametrize("family", HEADS)
def test_what_a_family_does_to_its_logits_is_in_the_columns(family, tmp_path):
    kind, changes = HEADS[family]
    model, batch = _saved(tmp_path, config_of(kind, **SMALL, **changes)), _batch(30, VOCABULARY)
    (found,) = _backend(tmp_path).evaluate("policy", [batch], lambda index, columns: columns["logp"])
    alone, start = [], 0
    for count, length in batch.runs:
        for _ in range(count):
            ids = batch.input_ids[:, start : start + length]
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits[0]
            part = slice(start, start + length)
            scaled = logits / batch.temperature[part, None]
            alone.append(scaled.log_softmax(-1).gather(1, batch.target[part, None])[:, 0])
            start += length
    torch.testing.assert_close(found, torch.cat(alone), atol=1e-4, rtol=1e-4)


def test_a_model_that_does_something_unknown_to_its_logits_is_refused(tmp_path, monkeypatch):
    folder = write_model(tmp_path / "model")
    known = Head.of
    monkeypatch.setattr(Head, "of", lambda model: Head(known(model).weight, None, scale=1.1))
    with pytest.raises(ModelError, match="the log-probs of packed rows are not those"):
        _backend(folder)


def test_only_values_of_units_leave_the_back_end(model_dir):
    """Whatever is asked for, a column is [S]: nothing of the vocabulary's width crosses the protocol."""
    backend, batches = _backend(model_dir), [_batch(11, 17), _batch(5, 17, seed=1)]
    names = ("logp", "entropy", "greedy")
    seen = []

    def note(index, columns):
        seen.append((index, {name: (tuple(c.shape), c.dtype) for name, c in columns.items()}))
        return columns["logp"].requires_grad

    wanted = [
        {name: ((n,), torch.bool if name == "greedy" else torch.float32) for name in names} for n in (11, 5)
    ]
    assert backend.evaluate("policy", batches, note, columns=names) == [False, False]
    assert seen == [*enumerate(wanted)]
    seen.clear()

    def loss_of(index, columns):
        assert note(index, columns)
        return columns["logp"].sum() + columns["entropy"].sum()

    backend.train("policy", batches, loss_of, columns=names[:2])
    assert seen == [(i, {name: want[name] for name in names[:2]}) for i, want in enumerate(wanted)]
    with pytest.raises(ValueError, match="no column logits"):
        backend.evaluate("policy", batches, note, columns=("logits",))
