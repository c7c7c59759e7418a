"""Megatron-Core on a CPU: every grid of ranks trains what one rank of FSDP2 trains."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from areal_async.config.job import TrainerSection
from areal_async.models.files import stored_tensors
from tests.unit.families import LLAMA3_ROPE, config_of
from tests.unit.trainer import megatron_process as process
from tests.unit.trainer.forked_ranks import run_script
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.backends.fsdp.memory import planned as planned_for
from trainer_service.backends.megatron import megatron
from trainer_service.ranks import join_ranks

pytest.importorskip("megatron.core", reason="no Megatron-Core")

SIZES = {
    "vocab_size": 17,  # which two tensor ranks do not share evenly
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 3,  # A token of the rows; its row of the embedding learns nothing from being read
    "eos_token_id": 2,
}
LAYERS = SIZES["num_hidden_layers"]
ROUTED = "moe with routes"
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
MODELS = {
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True, "pad_token_id": 0, "eos_token_id": 0}),
    "llama": (LlamaConfig, {"rope_parameters": LLAMA3_ROPE | {"factor": 8.0}, "pad_token_id": -1}),
    "moe": (Qwen3MoeConfig, {"head_dim": 16, "pad_token_id": None} | EXPERTS),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    found = {}
    for seed, (name, (kind, changes)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        found[name] = tmp_path_factory.mktemp(name)
        config = config_of(kind, **SIZES | {"tie_word_embeddings": False} | changes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.generation_config.pad_token_id = None  # It cannot be saved with one that is negative
        model.save_pretrained(found[name])
    return found


@pytest.fixture(scope="module")
def of_one_rank(models):
    """What one rank of FSDP2 is told, after two steps and of a third, and its weights after two."""
    torch.set_num_threads(1)
    found = {}
    for name, folder in (models | {ROUTED: models["moe"]}).items():
        backend = FsdpBackend(process.models_of(folder), join_ranks(0, 1), dtype=torch.float32)
        layers = LAYERS if name == ROUTED else 0
        told = process.trained(backend, range(process.STEPS), layers)
        weights = {key: t.clone() for key, t in process.whole(backend.export("policy")).items()}
        after = process.trained(backend, range(process.STEPS, process.STEPS + 1), layers)
        found[name] = told, after, weights
    return found


def grids(world: int, out: Path, asked: list[dict]) -> list[tuple]:
    """What each grid is told, as `of_one_rank` has it, of ranks that go through all of them."""
    run_script(process.__file__, world, out, *map(json.dumps, asked))
    found = []
    for number in range(len(asked)):
        of_ranks = [json.loads((out / f"told-{number}-{rank}.json").read_text()) for rank in range(world)]
        told, after = ({key: [] for key in ("losses", "columns")} for _ in range(2))
        for rank in of_ranks:
            after["held"] = max(after.get("held", 0), rank[1]["held"])
            for mine, all_of in zip(rank, (told, after), strict=True):
                for key in ("losses", "columns"):
                    all_of[key] += mine[key]
                all_of["norms"] = mine["norms"]
                assert mine["norms"] == of_ranks[0][(told, after).index(all_of)]["norms"]
        found.append((told, after, load_file(out / f"weights-{number}.safetensors")))
    return found


def assert_alike(found: dict, expected: dict) -> None:
    for key in ("losses", "columns"):  # in whatever order ranks have them
        assert sorted(found[key]) == pytest.approx(sorted(expected[key]), rel=1e-4, abs=1e-3)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)


def assert_close(weights: dict, theirs: dict) -> None:
    assert weights.keys() == theirs.keys()
    for name, tensor in weights.items():
        assert torch.allclose(tensor, theirs[name], rtol=1e-4, atol=1e-4), name


TWO = [
    ("qwen3", {"tensor": 2}, {}),
    ("qwen3", {"pipeline": 2}, {}),
    ("qwen3", {"pipeline": 2}, {"virtual_stages": 2}),
    ("qwen2", {"tensor": 2}, {"recompute": "selective"}),
    ("llama", {"shard": 2}, {"recompute": "full"}),
    ("moe", {"shard": 2, "expert": 2}, {}),
    ("moe", {"tensor": 2}, {}),
    (ROUTED, {"tensor": 2}, {"recompute": "full"}),
    (ROUTED, {"pipeline": 2}, {"virtual_stages": 2}),
]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, models):
    out = tmp_path_factory.mktemp("two")
    asked = [
        {
            "model": str(models[name.split()[0]]),
            "sizes": s,
            "options": o,
            "routes": LAYERS * (name == ROUTED),
            "thd": name == "llama",
        }
        for name, s, o in TWO
    ]
    return out, grids(2, out, asked)


@pytest.mark.parametrize("number", range(len(TWO)), ids=[f"{m}-{s}-{o}" for m, s, o in TWO])
def test_two_ranks_train_what_one_rank_of_fsdp_trains(two_ranks, of_one_rank, number):
    told, after, weights = two_ranks[1][number]
    expected, expected_after, theirs = of_one_rank[TWO[number][0]]
    assert_alike(told, expected)
    assert_alike(after, expected_after)
    assert_close(weights, theirs)


def shapes(folder: Path) -> tuple:
    tensors = {name: stored.shape for name, stored in stored_tensors(folder).items()}
    return json.loads((folder / "config.json").read_text()), tensors


def test_the_plan_counts_what_a_rank_keeps_between_steps(two_ranks, models):
    """The worst rank's state, of all three models; buffers are rounded up to whole lines of memory."""
    for (name, sizes, options), (_, after, _) in zip(TWO, two_ranks[1], strict=True):
        trainer = TrainerSection(ranks=2, parallel=sizes, backend_args=options, dtype="float32")
        _, planned = planned_for(
            trainer, process.models_of(models[name.split()[0]]), shapes, megatron.memory_of
        )
        assert after["held"] == pytest.approx(planned.state, rel=0.1), (name, sizes)


def test_any_grid_goes_on_from_the_checkpoint_of_another(tmp_path, models, two_ranks, of_one_rank):
    """Four ranks from two tensor ranks' and from two stages', with tensor and data ranks and with stages; and
    from the beginning."""
    out, _ = two_ranks
    qwen3, moe = str(models["qwen3"]), str(models["moe"])
    four = {"tensor": 2, "shard": 2}
    asked = [
        {"sizes": four, "model": qwen3, "from": str(out / "checkpoint-1")},
        {"sizes": {"tensor": 2, "pipeline": 2}, "model": qwen3, "from": str(out / "checkpoint-0")},
        {"sizes": {"expert": 2, "shard": 4}, "model": moe, "from": str(out / "checkpoint-6")},
        {"sizes": four, "model": moe},
    ]
    for number, (told, after, weights) in enumerate(grids(4, tmp_path, asked)):
        expected, expected_after, theirs = of_one_rank["moe" if number >= 2 else "qwen3"]
        assert_alike(after, expected_after)
        if "from" not in asked[number]:
            assert_alike(told, expected)
            assert_close(weights, theirs)
