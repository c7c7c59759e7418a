"""Compiled blocks: one graph for all equal blocks, made before the first step, equal to eager blocks.

Without a GPU, the compiler generates C++ instead of Triton. Graph breaks, compilations and the calls outside
generated kernels are the same on both. The number of generated kernels depends on the rules of fusion, which
differ in detail, so the figures here are for the C++ code.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3MoeConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from areal_async.config.job import LoraSection, OptimizerSection
from benchmarks.families import tiny_model
from tests import flash_cpu
from tests.unit.families import config_of
from tests.unit.trainer import compiled_process
from tests.unit.trainer.compiled_process import some_batches, step_of
from tests.unit.trainer.forked_ranks import run_ranks
from trainer_service.backends.base import ModelUse
from trainer_service.backends.fsdp import attention, compiled
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.data import ragged as data_ragged
from trainer_service.data.microbatch import MicroBatch
from trainer_service.errors import ModelError
from trainer_service.ranks import join_ranks

SMALL = {"head_dim": 16, "num_hidden_layers": 2}
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
CONFIGS = {
    "dense": lambda: config_of(Qwen3Config, **SMALL),
    "window": lambda: config_of(Qwen3Config, **SMALL, **WINDOW, max_window_layers=0),
    "windows": lambda: config_of(Qwen3Config, **SMALL, **WINDOW, max_window_layers=1),
    "experts": lambda: config_of(
        Qwen3MoeConfig, **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
}
"""Models of equal blocks, apart from `windows`, whose second block alone has a window."""


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


def _without_waits(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """Compile a graph in which the host does not wait for the device."""
    parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    assert "item" not in {node.target for part in parts for node in part.graph.nodes}
    return lookup_backend("aot_eager")(graph, inputs)


def test_compiled_blocks_compute_the_same_and_no_step_compiles(folders, monkeypatch):
    """With a window and selective recomputation. Without them, less is compiled."""
    monkeypatch.setattr(compiled, "COMPILER", _without_waits)
    same(folders / "window", 4, recompute="selective")


def test_sources_that_the_user_made_dynamic_stay_dynamic(folders, monkeypatch):
    monkeypatch.setattr(compiled, "COMPILER", "eager")
    with torch.compiler.config.patch(dynamic_sources="L['x'], L['y']:0"):
        for _ in range(2):
            backend_of(folders / "dense", frozen=True, compile="on")
        assert torch.compiler.config.dynamic_sources == f"L['x'], L['y']:0,{compiled.SIZES}"


FULL_LORA = {"recompute": "full", "lora": LoraSection(rank=2)}


def test_a_first_block_below_which_all_is_frozen_is_compiled_separately(folders, monkeypatch):
    """Its input has no gradient."""
    monkeypatch.setattr(compiled, "COMPILER", "eager")
    same(folders / "dense", 6, **FULL_LORA)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "graphs", "options"),
    [
        ("windows", 8, {"recompute": "selective"}),
        ("dense", 6, FULL_LORA),
        ("experts", 4, {"recompute": "full", "dtype": torch.bfloat16}),
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


def test_routes_of_experts_are_replayed_by_blocks_that_are_not_compiled(folders, monkeypatch):
    routed = []
    for batch in some_batches(0)[:2]:
        routes = torch.randint(
            4, (CONFIGS["experts"]().num_hidden_layers, batch.n_tokens, 2), dtype=torch.int16
        )
        routes[:, ::3] = -1
        routed.append(replace(batch, routes=routes))
    monkeypatch.setattr(compiled, "COMPILER", "eager")
    backend = backend_of(folders / "experts", torch.bfloat16, compile="on")
    graphs = counters["stats"]["unique_graphs"]
    found = step_of(backend, routed)[0]
    assert counters["stats"]["unique_graphs"] == graphs
    torch.testing.assert_close(found, step_of(backend_of(folders / "experts", torch.bfloat16), routed)[0])


class _Broken:
    """A compiler whose code fails in the backward pass over a tree, when plain rows have left gradients."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        self.calls += 1
        return self._failing(graph.forward) if self.calls == 4 else graph.forward

    def _failing(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def fail(gradient: torch.Tensor) -> None:
            raise RuntimeError("no code for this operator")

        def run(*inputs: Any) -> Any:
            found = forward(*inputs)
            found[0].register_hook(fail)
            return found

        return run


def test_a_model_whose_compiled_blocks_fail_runs_eagerly(folders, monkeypatch, caplog):
    monkeypatch.setattr(compiled, "COMPILER", _Broken())
    with caplog.at_level(logging.WARNING):
        backend = backend_of(folders / "dense", compile="auto")
    (record,) = [each for each in caplog.records if "run eagerly" in each.getMessage()]
    assert "qwen3" in str(record.__dict__)
    assert "RuntimeError: no code for this operator" in str(record.__dict__)
    batches = some_batches(0)
    (mine, gradients), (wanted, others) = (
        step_of(backend, batches),
        step_of(backend_of(folders / "dense"), batches),
    )
    assert torch.equal(mine, wanted)
    assert all(torch.equal(gradient, others[name]) for name, gradient in gradients.items())


@pytest.fixture(scope="module")
def two_ranks(folders):
    """A function that runs two ranks, with a compiler for shared rows, and returns their results."""

    @cache
    def run(compiler: str) -> list[dict[str, Any]]:
        given = [(rank, folders / "dense", compiler) for rank in range(2)]
        ended = run_ranks(compiled_process.__file__, *given)
        assert [status for status, _, _ in ended] == [0, 0], ended[0][2] + ended[1][2]
        return [json.loads(printed) for _, printed, _ in ended]

    return run


def test_blocks_that_one_rank_cannot_compile_run_eagerly_on_all_ranks(two_ranks):
    first, second = seen = two_ranks("eager")
    why = "trainer.backend_args.compile: the blocks of the model 'policy', a qwen3, cannot be compiled "
    assert first["refused"].startswith(f"{why}(rank 1 cannot compile them, as its log says).")
    assert second["refused"].startswith(f"{why}(BackendCompilerFailed: ")
    assert "no compiler on this host" in second["refused"]
    assert [len(rank["logged"]) for rank in seen] == [1, 1]
    assert "rank 1 cannot compile them" in first["logged"][0]
    assert "no compiler on this host" in second["logged"][0]
    assert [rank["differs"] for rank in seen] == [0, 0]


def test_flash_attention_that_one_rank_cannot_use_is_used_by_none(two_ranks):
    first, second = seen = two_ranks("eager")
    assert [rank["ragged"] for rank in seen] == [False, False]
    assert "rank 1 cannot use it" in first["attention"]
    assert "RuntimeError: no compiler on this host" in second["attention"]


@pytest.mark.parametrize("compiler", ["eager", pytest.param("aot_eager", marks=pytest.mark.nightly)])
def test_ranks_that_share_rows_compile_their_blocks(compiler, two_ranks):
    for rank in two_ranks(compiler):
        assert rank["graphs"] == [4, 4]
        assert max(rank["shared"]) < 1e-4


def test_a_block_that_waits_for_the_device_is_refused(folders, monkeypatch):
    plain = Qwen3MLP.forward
    monkeypatch.setattr(
        Qwen3MLP, "forward", lambda self, x: plain(self, x * (1.0 if x.sum().item() else 2.0))
    )
    why = r"compile: the blocks of the model 'policy', a qwen3, cannot be compiled \(\w+: .*data-dependent"
    with pytest.raises(ModelError, match=why):
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
    if recompute == "none":  # The code is counted and need not be right: a night builds it.
        monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: lambda *_: None)
    _, codes = run_and_get_code(backend_of, folders[0], torch.bfloat16, compile="on", recompute=recompute)
    assert len(codes) == 6  # evaluation, forward and backward pass; plain rows, rows with a prefix
    after = [sum(launches(code) for code in codes[at : at + 2]) for at in (1, 4)]
    with capsys.disabled():
        print(
            f"\nlaunches of a layer (plain rows, a tree), recompute {recompute}: operators before "
            f"{before[0]}, with one attention call {before[1]}, compiled {after}"
        )
    assert 10 < after[0] < after[1] <= LAUNCHES_OF_A_LAYER
