"""Modules of a Megatron-Core model: its own linear layers, and modules of this project between them.

Attention over packed rows is computed by the same function as in the FSDP2 back end, on the heads of a tensor
rank. So rows that share prefixes are exact here too. Rotary positions come from transformers, with every kind
of scaling. Norms compute the same as in transformers and are marked for sequence parallelism. With it, tensor
ranks have different tokens, and Megatron-Core sums the gradients of a marked norm's weight over these ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from trainer_service.backends.fsdp.attention import PackedRuns, packed_attention
from trainer_service.backends.megatron.config import Dimensions
from trainer_service.data.microbatch import MicroBatch
from trainer_service.data.routes import RouterRule, replayed

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function that returns (cos, sin), each [1, T, D], for a tensor of the right dtype and positions [1, T]."""


@dataclass(frozen=True, eq=False)
class PackedPass:
    """A micro-batch and its rotation, passed through all layers in place of Megatron's `PackedSeqParams`."""

    batch: MicroBatch
    cos: Tensor
    """[1, T, D]: with `sin`, the rotation of each token."""
    sin: Tensor
    thd: PackedSeqParams | None = None
    """Description of the pack for a kernel of packed rows."""
    qkv_format: str = "packed"
    """Name of the pack's layout, for Megatron. None of Megatron's own layouts has this name."""


def padded(batch: MicroBatch, multiple: int) -> MicroBatch:
    """Return the micro-batch, padded to a multiple of `multiple`. Sequence parallelism gives each tensor rank
    the same number of tokens."""
    return batch.padded(batch.n_tokens + -batch.n_tokens % multiple)


class PackedRMSNorm(LlamaRMSNorm):
    """RMS norm: x / rms(x) · weight, normalised in fp32 and multiplied in the dtype of `x`."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size, eps)
        self.to(config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


def thd_params(batch: MicroBatch) -> PackedSeqParams | None:
    """Return Megatron's description of a pack in the THD layout. The result is None if rows share prefixes,
    which the layout cannot describe."""
    if any(trees is not None for trees in batch.branching):
        return None
    counts, lengths = zip(*batch.runs, strict=True)
    each = torch.repeat_interleave(torch.tensor(lengths), torch.tensor(counts))
    ends = F.pad(each.cumsum(0), (1, 0)).to(batch.input_ids.device, torch.int32)
    longest = max(lengths)
    return PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)


class PackedCoreAttention(nn.Module):
    """Rotation and attention for the heads of one tensor rank, without parameters.

    On CUDA with Transformer Engine, its kernel computes packs of plain rows."""

    kernel: Any = TEDotProductAttention if HAVE_TE and torch.cuda.is_available() else None

    def __init__(self, config: Any, layer_number: int, attention_type: str, **_: Any) -> None:
        super().__init__()
        self.scaling = config.kv_channels**-0.5
        self.thd = None
        if self.kernel is not None:
            self.thd = self.kernel(
                config=config,
                layer_number=layer_number,
                attn_mask_type=AttnMaskType.padding_causal,
                attention_type=attention_type,
                softmax_scale=self.scaling,
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedPass,
        **_: Any,
    ) -> Tensor:
        """Return [T, 1, H · D] from query [T, 1, H, D], and key and value [T, 1, H_kv, D]."""
        now, batch = packed_seq_params, packed_seq_params.batch
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        q, k = apply_rotary_pos_emb(q, k, now.cos.to(q.dtype), now.sin.to(q.dtype))
        if self.thd is not None and now.thd is not None:
            each = (part[0].transpose(0, 1).contiguous() for part in (q, k, v))
            mask = AttnMaskType.padding_causal
            out: Tensor = self.thd(*each, None, attn_mask_type=mask, packed_seq_params=now.thd)
            return out.reshape(len(query), 1, -1)
        found, _none = packed_attention(
            self, q, k, v, None, packed_runs=PackedRuns.of(batch), scaling=self.scaling
        )
        return found.transpose(0, 1).flatten(2)


class PackedRouter(TopKRouter):
    """Router that computes like transformers for Qwen's mixtures, or replays the engine's routes.

    It takes the softmax over all experts in fp32 and the k largest weights. They are normalised to sum to 1
    if the model requires it."""

    rule = RouterRule("softmax", normalise=True)
    routes: Tensor | None = None
    """[T, K]: routes of this tensor rank's tokens in the current pass; -1 for none."""

    def routing(self, logits: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return [T, E] weights, 0 for experts without the token, and bool [T, E], from logits [T, 1, E]."""
        logits = logits.view(-1, self.config.num_moe_experts)
        chosen = logits.float().topk(self.topk, -1).indices
        if self.routes is None:
            weight = self.rule.weights(logits, chosen)
        else:
            weight, chosen = replayed(logits, chosen, self.routes, self.rule)
        # A repeated expert has the weight 0 the second time.
        weights = torch.zeros_like(logits).scatter_add(1, chosen, weight.to(logits.dtype))
        return weights, torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)


class PackedLayer(TransformerLayer):
    """Layer that gives its router the routes of each pass, including recomputed ones."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        router = getattr(self.mlp, "router", None)
        if router is not None:
            routes = kwargs["packed_seq_params"].batch.routes
            router.routes = None if routes is None else self._of_rank(routes[self.layer_number - 1])
        return super().forward(*args, **kwargs)

    def _of_rank(self, routes: Tensor) -> Tensor:
        group = self.pg_collection.tp
        return routes.chunk(group.size())[group.rank()]


class PackedGpt(GPTModel):
    """Model whose last stage returns hidden states [T, 1, H], from which the head computes columns."""

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states


def layer_of(dimensions: Dimensions) -> ModuleSpec:
    """Return the modules of one layer."""
    mlp: Any
    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    if dimensions.experts:
        rule = RouterRule("softmax", normalise=dimensions.norm_topk)
        router = type("RouterOfModel", (PackedRouter,), {"rule": rule})
        experts = ModuleSpec(module=SequentialMLP, submodules=submodules)
        mlp = ModuleSpec(
            module=MoELayer,
            submodules=MoESubmodules(experts=experts, router=router),
            metainfo={"fuse_pre_mlp_layernorm": False},
        )
    else:
        mlp = ModuleSpec(module=MLP, submodules=submodules)
    norm_of_heads = PackedRMSNorm if dimensions.qk_norm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=PackedCoreAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=norm_of_heads,
        k_layernorm=norm_of_heads,
    )
    return ModuleSpec(
        module=PackedLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=PackedRMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=PackedRMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )
