"""The stages of one model on a rank: creation, loading from the model's files, and export."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from areal_async.config.parallel import RankGrid
from areal_async.models.accelerator import with_exact_rotations
from areal_async.weights.pieces import TensorPiece
from trainer_service.backends.base import ModelHead
from trainer_service.backends.common import FLOATS, loaded_on_all, open_tensors
from trainer_service.backends.megatron.config import Dimensions, MegatronOptions, reasons_against
from trainer_service.backends.megatron.layers import PackedGpt, PackedRMSNorm, Rotary, layer_of
from trainer_service.backends.megatron.names import (
    EMBEDDING,
    OUTPUT,
    VALUE,
    StagePlace,
    boxes_of,
    global_name,
)
from trainer_service.ranks import Ranks


@dataclass(frozen=True, eq=False)
class StageParameter:
    """A parameter of one of the rank's stages."""

    name: str
    """Name with the layer's and the expert's number in the whole model."""
    tensor: nn.Parameter
    place: StagePlace

    @property
    def is_copy(self) -> bool:
        """Whether tensor rank 0 has the same parameter."""
        return self.place.tensor > 0 and not getattr(self.tensor, "tensor_model_parallel", False)


@dataclass(frozen=True, eq=False)
class Stages:
    """A rank's stages of one model, in order. There are several if stages are interleaved."""

    chunks: list[PackedGpt]
    config: TransformerConfig
    dimensions: Dimensions
    rotary: Rotary
    grid: RankGrid

    @property
    def last(self) -> PackedGpt | None:
        """The last stage of the model, if this rank has it."""
        return self.chunks[-1] if self.chunks[-1].post_process else None

    def parameters(self) -> Iterator[StageParameter]:
        """Yield every parameter of the rank once."""
        tensor, tensors = _tensor_place()
        experts = self.dimensions.experts // self.grid.expert
        first_expert = parallel_state.get_expert_model_parallel_rank() * experts
        place = StagePlace(tensor, tensors, first_expert)
        for chunk in self.chunks:
            layers = chunk.decoder.layers
            first = layers[0].layer_number - 1 if len(layers) else 0
            for name, parameter in chunk.named_parameters():
                yield StageParameter(global_name(name, first, place), parameter, place)

    def boxes(self, parameter: StageParameter, tensor: Tensor) -> Iterator[TensorPiece]:
        """Yield the boxes of a tensor with the shape of `parameter`."""
        return boxes_of(parameter.name, tensor, parameter.place, self.dimensions)


def make_stages(folder: Path, ranks: Ranks, options: MegatronOptions, head: ModelHead) -> Stages:
    """Create the rank's stages of the model in `folder`, with its weights. If one rank cannot read it, all
    ranks raise `ModelError`."""

    def load() -> Stages:
        stages = _make(folder, ranks, options, head)
        _fill(stages, folder)
        return stages

    return loaded_on_all(folder, ranks, load)


def _tensor_place() -> tuple[int, int]:
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


def _make(folder: Path, ranks: Ranks, options: MegatronOptions, head: ModelHead) -> Stages:
    grid, virtual_stages = options.grid, options.virtual_stages
    given = json.loads((folder / "config.json").read_bytes())
    found = Dimensions.of(given)
    for field, problem, fix in reasons_against(given, grid, virtual_stages):
        raise ValueError(f"{problem} ({field}). {fix}")
    config = _transformer_config(found, options)
    rotary = _rotary(folder, ranks.device)
    layer = layer_of(found)
    chunks = []
    for stage in range(virtual_stages):
        number = stage if virtual_stages > 1 else None
        ends = {"ignore_virtual": number is None, "vp_stage": number}
        chunk = PackedGpt(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(
                layer_specs=[layer] * (found.layers // (grid.pipeline * virtual_stages)),
                layer_norm=PackedRMSNorm,
            ),
            vocab_size=-(-found.vocabulary // grid.tensor) * grid.tensor,
            max_sequence_length=0,
            pre_process=parallel_state.is_pipeline_first_stage(**ends),
            post_process=parallel_state.is_pipeline_last_stage(**ends),
            share_embeddings_and_output_weights=found.tied and head != "value",
            position_embedding_type="none",
            vp_stage=number,
        )
        if chunk.post_process and head != "tokens":
            chunk.score = nn.Linear(found.hidden, 1, bias=False, dtype=torch.float32)
            nn.init.zeros_(chunk.score.weight)
        if chunk.post_process and head == "value":
            chunk.output_layer = None
        if chunk.pre_process and found.pad is not None:
            _hold_row(chunk.embedding.word_embeddings, found.pad)
        _mark(chunk)
        chunks.append(chunk.to(ranks.device))
    return Stages(chunks, config, found, rotary, grid)


def _hold_row(embedding: VocabParallelEmbedding, token: int) -> None:
    """Exclude the embedding's row of `token` from the gradient of look-ups. A tied output layer still gives
    this row a gradient."""
    rank, world = _tensor_place()

    def cut(module: nn.Module, given: tuple[Tensor, ...], read: Tensor) -> Tensor:
        ids = given[0]  # [B, S]; `read` is [B, S, H], or [S / t, B, H] for this rank's part of the sequence
        if embedding.reduce_scatter_embeddings:
            ids = ids.transpose(0, 1).chunk(world)[rank]
        return torch.where((ids == token)[..., None], read.detach(), read)

    embedding.register_forward_hook(cut)


def _mark(chunk: PackedGpt) -> None:
    """Mark each parameter that is split over tensor ranks, so that norms of gradients count whole parameters
    once.

    This is necessary because Megatron-Core sets the mark only when it initialises values itself."""
    for module in chunk.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
            for name, parameter in module.named_parameters(recurse=False):
                if name == "weight" or isinstance(module, ColumnParallelLinear):
                    parameter.tensor_model_parallel = True


def _rotary(folder: Path, device: torch.device) -> Rotary:
    """Return transformers' rotary embedding of the model; it has no parameters."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(config).model.rotary_emb)
    module = kind(config).to(device)
    with_exact_rotations(module)
    found: Rotary = module
    return found


def _transformer_config(found: Dimensions, options: MegatronOptions) -> TransformerConfig:
    """Return the configuration of the layers."""
    # Long: each setting has its own line.
    grid, dtype, recompute = options.grid, options.dtype, options.recompute
    mixture: dict[str, Any] = {}
    if found.experts:
        mixture = {
            "num_moe_experts": found.experts,
            "moe_router_topk": found.experts_per_token,
            "moe_ffn_hidden_size": found.expert_mlp,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
        }
    kept: dict[str, Any] = {}
    if recompute == "selective":
        kept = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    elif recompute == "full":
        kept = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    interleaved = options.virtual_stages > 1
    return TransformerConfig(
        num_layers=found.layers,
        hidden_size=found.hidden,
        ffn_hidden_size=found.mlp,
        num_attention_heads=found.heads,
        num_query_groups=found.key_heads,
        kv_channels=found.head_width,
        normalization="RMSNorm",
        layernorm_epsilon=found.norm_eps,
        qk_layernorm=found.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=found.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=grid.tensor,
        sequence_parallel=grid.tensor > 1,
        pipeline_model_parallel_size=grid.pipeline,
        virtual_pipeline_model_parallel_size=options.virtual_stages if interleaved else None,
        expert_model_parallel_size=grid.expert,
        # Packs between stages have a different length each time.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # required for variable lengths, even without experts
        # Batched exchange between interleaved stages silently gives wrong gradients.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # Gradients are sums over all micro-batches and ranks.
        calculate_per_token_loss=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        # These settings need Apex or Transformer Engine.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        deallocate_pipeline_outputs=False,
        **mixture,
        **kept,
    )


@torch.no_grad()
def _fill(stages: Stages, folder: Path) -> None:
    """Read the rank's boxes of each tensor, one by one, from the files into their places.

    Raises `ValueError` if a tensor is missing, has another shape or is quantised."""
    with ExitStack() as stack:
        files = open_tensors(folder, stack)
        for parameter in stages.parameters():
            if parameter.name in (EMBEDDING, OUTPUT):
                parameter.tensor.zero_()  # including the padding rows
            for piece in stages.boxes(parameter, parameter.tensor.data):
                if piece.name == VALUE and VALUE not in files:
                    continue
                if (view := files.get(piece.name)) is None:
                    raise ValueError(f"its files have no {piece.name}")
                if tuple(view.get_shape()) != piece.shape:
                    raise ValueError(
                        f"{piece.name} has the shape {tuple(view.get_shape())}, and by its config.json "
                        f"{piece.shape}"
                    )
                if view.get_dtype() not in FLOATS:
                    raise ValueError(
                        f"{piece.name} is in {view.get_dtype()}: what is quantised cannot be trained"
                    )
                piece.tensor.copy_(view[piece.box or ...])
