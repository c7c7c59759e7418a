"""What the back end megatron refuses, where parameters lie, what memory it needs: without Megatron-Core."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from areal_async.config.parallel import RankGrid
from areal_async.weights.pieces import TensorPiece
from tests.unit.trainer import rank_process
from trainer_service.backends.base import ModelUse
from trainer_service.backends.fsdp.memory import MemoryOptions, rank_memory, shape_of
from trainer_service.backends.megatron import Megatron
from trainer_service.backends.megatron.config import Dimensions, reasons_against
from trainer_service.backends.megatron.memory import stage_memory
from trainer_service.backends.megatron.ranges import read_boxes
from trainer_service.errors import CheckpointError

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 17,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
MIXTURE = CONFIG | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


@pytest.mark.parametrize(
    ("changes", "sizes", "stages", "field", "said"),
    [
        ({"tie_word_embeddings": True}, {"pipeline": 2}, 1, "parallel.pipeline", "embedding"),
        ({}, {"pipeline": 2}, 3, "parallel.pipeline", "6 stages do not share 4 layers"),
        ({}, {"pipeline": 3}, 1, "parallel.pipeline", "3 stages"),
        ({}, {}, 2, "backend_args.virtual_stages", "interleaved"),
        ({}, {"tensor": 8}, 1, "parallel.tensor", "4 key and value heads"),
        ({"intermediate_size": 45}, {"tensor": 2}, 1, "parallel.tensor", "45 rows"),
        ({}, {"shard": 2, "expert": 2}, 1, "parallel.expert", "no experts"),
        (MIXTURE, {"shard": 3, "expert": 3}, 1, "parallel.expert", "8 experts"),
        (MIXTURE | {"mlp_only_layers": [0]}, {}, 1, "model", "some of its layers"),
        ({"use_sliding_window": True}, {}, 1, "model", "sliding window"),
        ({"layer_types": ["sliding_attention"]}, {}, 1, "model", "sliding window"),
        ({"attention_bias": True}, {}, 1, "model", "output projection"),
        ({"hidden_act": "gelu"}, {}, 1, "model", "gelu"),
        ({"mlp_bias": True}, {}, 1, "model", "MLPs have biases"),
        ({"attention_dropout": 0.1}, {}, 1, "model", "dropout"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused_with_its_reason(changes, sizes, stages, field, said):
    plain = CONFIG | {"layer_types": None}
    assert list(reasons_against(plain, RankGrid())) == list(reasons_against(MIXTURE, RankGrid())) == []
    ((named, problem, fix),) = reasons_against(CONFIG | changes, RankGrid(**sizes), stages)
    assert named == field
    assert said in problem
    assert fix


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (CONFIG | {"model_type": "gpt2"}, "model_type is gpt2.*fsdp"),
        ({k: v for k, v in MIXTURE.items() if k != "num_experts"}, "lacks num_local_experts"),
        ({k: v for k, v in CONFIG.items() if k != "rms_norm_eps"}, "lacks rms_norm_eps"),
        (CONFIG | {"num_attention_heads": "4"}, "num_attention_heads of its config.json is '4'"),
        (CONFIG | {"num_key_value_heads": 0}, "num_key_value_heads of its config.json is 0"),
        (CONFIG | {"num_hidden_layers": None}, "lacks num_hidden_layers"),
        (CONFIG | {"rms_norm_eps": []}, "rms_norm_eps of its config.json is no number"),
        ([CONFIG], "no mapping"),
    ],
)
def test_another_family_and_a_config_without_a_dimension_are_refused(config, said):
    with pytest.raises(ValueError, match=said):
        Dimensions.of(config)


@pytest.mark.parametrize(("named", "pad"), [(None, None), (0, 0), (3, 3), (-1, 16), (-17, 0)])
def test_the_padding_token_is_that_of_transformers(named, pad):
    assert Dimensions.of(CONFIG | {"pad_token_id": named}).pad == pad


def test_a_job_is_told_all_that_is_wrong_before_anything_starts(tmp_path, model_dir):
    asked = {"ranks": 4, "backend": "megatron", "parallel": {"pipeline": 2, "tensor": 2}}
    job = rank_process.job_of(model_dir, tmp_path, **asked)
    found = {m.field: m.problem for m in Megatron().check_job(job, {}, "trainer.backend_args")}
    assert "CUDA" in found["trainer.device"]
    assert "embedding" in found["trainer.parallel.pipeline"]


def test_the_models_beside_the_policy_are_looked_at_too(tmp_path, model_dir):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "gpt2"}))
    objective = {"kl": {"coefficient": 0.1}}
    asked = {"backend": "megatron", "objective": objective, "reference": {"model": str(tmp_path)}}
    job = rank_process.job_of(model_dir, tmp_path, **asked)
    found = {m.field: m.problem for m in Megatron().check_job(job, {}, "trainer.backend_args")}
    assert "model_type is gpt2" in found["trainer.reference.model"]


def ranges(folder, missing=()):
    """Files of two data ranks that hold one parameter of one tensor rank."""
    folder.mkdir()
    whole = torch.arange(96 * 32, dtype=torch.float32)
    for rank, (start, end) in enumerate([(0, 1000), (1000, len(whole))]):
        if rank not in missing:
            key = f"decoder.layers.2.mlp.linear_fc1.weight@0/1:96,32:{start}"
            save_file({key: whole[start:end]}, folder / f"policy-ranges-{rank:05d}.safetensors")
    return whole.view(96, 32)


def test_a_box_is_read_from_ranges_that_another_grid_has_written(tmp_path):
    whole = ranges(tmp_path / "there")
    box = TensorPiece("model.layers.2.mlp.up_proj.weight", (48, 32), (24, 0), torch.zeros(24, 32))
    read_boxes(tmp_path / "there", "policy", [box], Dimensions.of(CONFIG))
    assert torch.equal(box.tensor, whole[48 + 24 :])


@pytest.mark.parametrize("missing", [(0,), (1,), (0, 1)])
def test_a_range_that_is_not_there_is_missed(tmp_path, missing):
    ranges(tmp_path / "there", missing)
    box = TensorPiece("model.layers.2.mlp.up_proj.weight", (48, 32), (0, 0), torch.zeros(48, 32))
    with pytest.raises(CheckpointError, match="lack"):
        read_boxes(tmp_path / "there", "policy", [box], Dimensions.of(CONFIG))


def shape(layers=28):
    config = CONFIG | {"hidden_size": 1536, "vocab_size": 150_000, "num_hidden_layers": layers}
    tensors = {"model.embed_tokens.weight": (150_000, 1536), "lm_head.weight": (150_000, 1536)}
    for layer in range(layers):
        rows = {"q_proj": 1536, "k_proj": 256, "v_proj": 256, "o_proj": 1536}
        tensors |= {f"model.layers.{layer}.self_attn.{n}.weight": (r, 1536) for n, r in rows.items()}
        tensors |= {f"model.layers.{layer}.mlp.{n}_proj.weight": (8960, 1536) for n in ("gate", "up")}
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"] = (1536, 8960)
    return shape_of(config, tensors)


def test_memory_is_shared_by_the_ranks_that_share_the_model():
    model, use = shape(), ModelUse(None)
    alone = stage_memory(model, MemoryOptions(RankGrid(), compute_bytes=2))
    # One rank has what one rank of FSDP2 has, but for bf16 weights beside their main copies.
    fsdp = rank_memory(model, MemoryOptions(compute_bytes=2))
    assert alone.state == fsdp.state + 2 * model.size
    assert alone.activations_per_token == pytest.approx(fsdp.activations_per_token, rel=0.05)
    by_tensor = stage_memory(model, MemoryOptions(RankGrid(tensor=4), compute_bytes=2))
    assert by_tensor.state == pytest.approx(alone.state / 4, rel=1e-3)
    assert by_tensor.activations_per_token == pytest.approx(alone.activations_per_token / 4, rel=1e-3)
    stages = MemoryOptions(RankGrid(pipeline=4), compute_bytes=2)
    by_stage = stage_memory(model, stages)
    assert by_stage.state < 0.4 * alone.state
    # Four micro-batches of a quarter of the layers are there at once, and more where stages are interleaved.
    assert by_stage.activations_per_token == pytest.approx(alone.activations_per_token, rel=0.02)
    interleaved = stage_memory(model, replace(stages, virtual_stages=7))
    assert interleaved.activations_per_token > by_stage.activations_per_token
    by_data = stage_memory(model, MemoryOptions(RankGrid(shard=4), compute_bytes=2))
    assert by_data.optimizer == pytest.approx(alone.optimizer / 4, rel=1e-3)
    assert by_data.gradients == alone.gradients
    kept = stage_memory(model, MemoryOptions(RankGrid(), compute_bytes=2, recompute="full"))
    assert kept.activations_per_token < alone.activations_per_token / 10
    assert MemoryOptions().of("ref", use).frozen
