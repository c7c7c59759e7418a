"""Compiled blocks: one graph for all equal blocks, made before the first step, equal to eager blocks.

Without a GPU, the compiler generates C++ instead of Triton. Graph breaks, compilations and the calls outside
generated kernels are the same on both. The number of generated kernels depends on the rules of fusion, which
differ in detail, so the figures here are for the C++ code.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3MoeConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from areal_async.config.job import LoraSection, OptimizerSection
from benchmarks.families import tiny_model
from tests import flash_cpu
from tests.unit.families import VOCABULARY, config_of
from tests.unit.trainer.conftest import plain_row
from trainer_service.backends.base import ModelUse
from trainer_service.backends.fsdp import attention, compiled
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.data import ragged as data_ragged
from trainer_service.data.microbatch import MicroBatch, build_micro_batch
from trainer_service.data.prefixes import plant
from trainer_service.errors import ModelError
from trainer_service.ranks import join_ranks

CONFIGS = {
    "dense": lambda: config_of(Qwen3Config, head_dim=16),
    "window": lambda: config_of(
        Qwen3Config, head_dim=16, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "experts": lambda: config_of(
        Qwen3MoeConfig, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
}


@pytest.fixture(autouse=True)
def ragged(monkeypatch):
    """Attention over ragged rows, as on CUDA, with a compiler that is fast to start."""
    monkeypatch.setattr(attention, "why_not_ragged", lambda *_: "")
    monkeypatch.setattr(compiled, "COMPILER", "aot_eager")
    monkeypatch.setattr(data_ragged, "LEAST_LENGTH", 256)  # A row of the later steps is longer.
    torch._dynamo.reset()
    counters.clear()
    with flash_cpu.installed():
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, made in CONFIGS.items():
        tiny_model(made()).save_pretrained(folder / name)
    return folder


def backend_of(folder: Path, dtype=torch.float32, frozen=False, **options) -> FsdpBackend:
    models = {"policy": ModelUse(folder) if frozen else ModelUse(folder, OptimizerSection(lr=1e-3), 100)}
    return FsdpBackend(models, join_ranks(0, 1), dtype=dtype, **options)


def some_batches(seed: int) -> list[MicroBatch]:
    """A pack of plain rows, one of a tree with nested branches, and the pass of a rank without work."""
    rng = np.random.default_rng(seed)

    def row(episode: int, ids: np.ndarray):
        return plain_row(ids, slice(1, None), episode=episode, feeds_last=True)

    def ids(most: int) -> np.ndarray:
        return rng.integers(2, VOCABULARY, rng.integers(2, most))

    trunk = ids(200)
    turn = np.concatenate([trunk, ids(60)])
    rows = [row(n, np.concatenate([start, ids(40)])) for n, start in enumerate([trunk, turn, turn, trunk])]
    trees = plant(rows, np.zeros(4, int), 1 << 20)
    plain = [row(n, ids(most)) for n, most in enumerate((9, 90, 300, 5))]
    if seed:  # Every size has its smallest value at the start of a run. It grows here.
        plain += [row(n, ids(9)) for n in range(4, 12)] + [row(12, rng.integers(2, VOCABULARY, 400))]
    return [
        build_micro_batch(plain),
        build_micro_batch([r for tree in trees for r in tree.rows]),
        build_micro_batch([]),
    ]


def step_of(backend: FsdpBackend, batches: list[MicroBatch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs before and in training, and gradients."""
    before = backend.evaluate("policy", batches, lambda _, columns: columns["logp"])
    found = list(before)

    def loss_of(index: int, columns) -> torch.Tensor:
        found.append(columns["logp"].detach())
        return (columns["logp"] * torch.cos(torch.arange(len(columns["logp"])))).sum()

    backend.train("policy", batches, loss_of)
    parameters = backend._models["policy"].module.named_parameters()
    gradients = {name: p.grad.to_local().clone() for name, p in parameters if p.grad is not None}
    backend.discard()
    return torch.cat(found), gradients


def same(folder: Path, wanted_graphs: int, **options) -> None:
    """Compare compiled with eager blocks over three steps, and count graphs."""
    eager = backend_of(folder, **options)
    backend = backend_of(folder, compile="on", **options)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == wanted_graphs
    assert not counters["graph_break"]
    for seed in range(3):
        batches = some_batches(seed)
        (mine, gradients), (wanted, others) = step_of(backend, batches), step_of(eager, batches)
        torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-5)
        assert gradients.keys() == others.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, others[name], atol=1e-4, rtol=1e-4)
    assert counters["stats"]["unique_graphs"] == graphs


def test_compiled_blocks_compute_the_same_and_no_step_compiles(folders):
    same(folders / "dense", 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "graphs", "options"),
    [
        ("window", 8, {"recompute": "selective"}),
        # The input of the first block has no gradient, because the embeddings are frozen.
        ("dense", 6, {"recompute": "full", "lora": LoraSection(rank=2)}),
        pytest.param("experts", 4, {"recompute": "full", "dtype": torch.bfloat16}, marks=pytest.mark.nightly),
    ],
    ids=["window selective", "lora full", "experts full"],
)
def test_windows_adapters_experts_and_recomputation_are_compiled_too(model, graphs, options, folders):
    same(folders / model, graphs, **options)


@pytest.mark.parametrize(("recompute", "forwards"), [("none", 1), ("selective", 1), ("full", 2)])
def test_selective_recomputation_keeps_the_result_of_attention(recompute, forwards, folders):
    backend = backend_of(folders / "dense", recompute=recompute)
    layers = backend._models["policy"].module.config.num_hidden_layers
    flash_cpu.calls.clear()
    batch = some_batches(0)[1]
    backend.train("policy", [batch], lambda _, columns: columns["logp"].sum())
    assert flash_cpu.calls == {"forward": forwards * layers, "backward": layers}


def test_routes_of_experts_are_replayed_by_blocks_that_are_not_compiled(folders):
    routed = []
    for batch in some_batches(0)[:2]:
        routes = torch.randint(
            4, (CONFIGS["experts"]().num_hidden_layers, batch.n_tokens, 2), dtype=torch.int16
        )
        routes[:, ::3] = -1
        routed.append(replace(batch, routes=routes))
    backend = backend_of(folders / "experts", torch.bfloat16, compile="on")
    graphs = counters["stats"]["unique_graphs"]
    found = step_of(backend, routed)[0]
    assert counters["stats"]["unique_graphs"] == graphs
    torch.testing.assert_close(found, step_of(backend_of(folders / "experts", torch.bfloat16), routed)[0])


class _Broken:
    """A compiler that fails at the training pass over a tree, when plain rows have left gradients."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: object) -> object:
        self.calls += 1
        if self.calls == 7:
            raise RuntimeError("no code for this operator")
        return graph.forward


@pytest.mark.parametrize("how", ["auto", "on"])
def test_a_model_that_cannot_be_compiled_runs_eagerly_or_is_refused_at_the_start(
    how, folders, monkeypatch, caplog
):
    monkeypatch.setattr(compiled, "COMPILER", _Broken())
    if how == "on":
        with pytest.raises(
            ModelError, match=r"compile: the blocks of the model 'policy', a qwen3, .*no code for this"
        ):
            backend_of(folders / "window", compile=how)
        return
    with caplog.at_level(logging.WARNING):
        backend = backend_of(folders / "window", compile=how)
    (record,) = [each for each in caplog.records if "run eagerly" in each.getMessage()]
    assert "qwen3" in str(record.__dict__)
    batches = some_batches(0)
    (mine, gradients), (wanted, others) = (
        step_of(backend, batches),
        step_of(backend_of(folders / "window"), batches),
    )
    assert torch.equal(mine, wanted)
    assert all(torch.equal(gradient, others[name]) for name, gradient in gradients.items())


def test_a_block_that_waits_for_the_device_is_refused(folders, monkeypatch):
    plain = Qwen3MLP.forward
    monkeypatch.setattr(
        Qwen3MLP, "forward", lambda self, x: plain(self, x * (1.0 if x.sum().item() else 2.0))
    )
    with pytest.raises(ModelError, match="compile: the blocks of the model 'policy', a qwen3, cannot"):
        backend_of(folders / "dense", compile="on")


def test_blocks_are_not_compiled_for_attention_by_lists_of_lengths(folders, monkeypatch):
    monkeypatch.setattr(attention, "why_not_ragged", lambda *_: "no reason")
    backend_of(folders / "dense", compile="auto")
    assert not counters["stats"]
    with pytest.raises(ModelError, match="compile: the attention of the model 'policy' is not one call"):
        backend_of(folders / "dense", compile="on")


CALL = re.compile(r"= (torch\.ops\.[\w.]+|extern_kernels\.\w+)\(|extern_kernels\.(\w+)\(")
INSIDE = {
    "torch_attn._varlen_attn.default": 2,
    "torch_attn._varlen_attn_backward.default": 7,
    "aten.segment_reduce.default": 2,
}
"""Kernels inside of an operator on CUDA, by FlashAttention-2's source: forward, and the random state; delta,
gradients, the rounding of dQ, its zeros, and with GQA the sums of dK and dV over heads."""
LAUNCHES_OF_A_LAYER = 120


def launches(code: str) -> int:
    """Return the number of kernels that a generated graph launches. Each loop nest of the C++ code counts as
    a kernel, though several may be in a function."""
    body = code[code.index("def call(") :]
    nests = code.count("for(int64_t x0=")
    called = [one or f"extern_kernels.{other}" for one, other in CALL.findall(body)]
    return nests + sum(INSIDE.get(name.removeprefix("torch.ops."), 1) for name in called)


class _Dispatched(TorchDispatchMode):
    """Counts operators that are no views and do not only allocate."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func._schema.returns
        view = any(each.alias_info is not None and not each.alias_info.is_write for each in returned)
        self.count += not view and not func.overloadpacket.__name__.startswith(
            ("empty", "new_empty", "_unsafe_view")
        )
        return func(*args, **kwargs or {})


def dispatched(folders: list[Path], batch: MicroBatch, **options) -> int:
    """Return the operators of a layer's forward and backward pass, uncompiled: the difference between a model
    of two layers and one of one layer."""
    found = []
    for folder in folders:
        backend = backend_of(folder, torch.bfloat16, **options)
        backend.train("policy", [batch], lambda _, columns: columns["logp"].sum())
        with _Dispatched() as mode:
            backend.train("policy", [batch], lambda _, columns: columns["logp"].sum())
        found.append(mode.count)
    return found[1] - found[0]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.nightly)])
def test_a_layer_launches_at_most_120_kernels(recompute, tmp_path, monkeypatch, capsys):
    """Counted on code for a CPU, and compared with the operators of uncompiled blocks and exact attention.
    The code for a GPU has not been counted."""
    folders = [tmp_path / str(layers) for layers in (1, 2)]
    for layers, folder in enumerate(folders, 1):
        tiny_model(config_of(Qwen3Config, head_dim=16, num_hidden_layers=layers)).save_pretrained(folder)
    plain, tree, _ = some_batches(0)
    before = []
    for reason in ("a reason", ""):
        monkeypatch.setattr(attention, "why_not_ragged", lambda *_, reason=reason: reason)
        before.append([dispatched(folders, batch, recompute=recompute) for batch in (plain, tree)])
    monkeypatch.setattr(compiled, "COMPILER", "inductor")
    _, codes = run_and_get_code(backend_of, folders[0], torch.bfloat16, compile="on", recompute=recompute)
    assert len(codes) == 6  # evaluation, forward and backward pass; plain rows, rows with a prefix
    after = [sum(launches(code) for code in codes[at : at + 2]) for at in (1, 4)]
    with capsys.disabled():
        print(
            f"\nlaunches of a layer (plain rows, a tree), recompute {recompute}: operators before "
            f"{before[0]}, with one attention call {before[1]}, compiled {after}"
        )
    assert 10 < after[0] < after[1] <= LAUNCHES_OF_A_LAYER
