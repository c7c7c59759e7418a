"""The modules of a Megatron-Core model: its own linear layers, and modules of ours between them.

Attention over packed rows is the function that FSDP2 uses, on the heads of a tensor rank: trees of rows with
shared prefixes are as exact here as there. Rotary positions are those of transformers, so every kind of
scaling is. Norms are written as transformers writes them, and marked for sequence parallelism, where the
tensor ranks have different tokens and the gradients of a norm's weight are summed over them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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

from trainer_service.backends.fsdp.attention import PackedRuns, packed_attention
from trainer_service.backends.megatron.config import Dimensions
from trainer_service.data.microbatch import MicroBatch
from trainer_service.data.routes import RouterRule, replayed

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(cos, sin), each [1, T, D], for a tensor of the right dtype and positions [1, T]."""


@dataclass(frozen=True, eq=False)
class PackedPass:
    """A micro-batch and its rotation, passed through all layers in the place of Megatron's
    `PackedSeqParams`."""

    batch: MicroBatch
    cos: Tensor
    """[1, T, D], with `sin` the rotation of each token."""
    sin: Tensor
    thd: PackedSeqParams | None = None
    """The same for a kernel that takes packed rows."""
    qkv_format: str = "packed"
    """Megatron's name of the layout: none of its own."""


def padded(batch: MicroBatch, multiple: int) -> MicroBatch:
    """Return the micro-batch with rows of one token appended, so that its length is a multiple of `multiple`.
    Sequence parallelism needs equally many tokens on each tensor rank."""
    lacking = -batch.n_tokens % multiple
    if not lacking:
        return batch
    zeros = batch.input_ids.new_zeros(1, lacking)
    return replace(
        batch,
        input_ids=torch.cat([batch.input_ids, zeros], 1),
        position_ids=torch.cat([batch.position_ids, zeros], 1),
        runs=[*batch.runs, (lacking, 1)],
        branching=[*batch.branching, None],
        routes=None if batch.routes is None else F.pad(batch.routes, (0, 0, 0, lacking), value=-1),
    )


class PackedRMSNorm(nn.Module):
    """x / rms(x) · weight, computed in fp32 and multiplied in the dtype of `x`."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


def thd_params(batch: MicroBatch) -> PackedSeqParams | None:
    """Return Megatron's description of a pack in the THD layout; None if rows share a prefix, which THD
    cannot describe."""
    if any(trees is not None for trees in batch.branching):
        return None
    counts, lengths = zip(*batch.runs, strict=True)
    each = torch.repeat_interleave(torch.tensor(lengths), torch.tensor(counts))
    ends = F.pad(each.cumsum(0), (1, 0)).to(batch.input_ids.device, torch.int32)
    longest = max(lengths)
    return PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)


class PackedCoreAttention(nn.Module):
    """Rotation and attention of the heads of one tensor rank. It has no parameters.

    Where Transformer Engine is there, on CUDA, its kernel for packed rows takes packs of plain rows."""

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
        """query [T, 1, H, D], key and value [T, 1, H_kv, D] -> [T, 1, H · D]."""
        now, batch = packed_seq_params, packed_seq_params.batch
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        cos, sin = (each[:, None].to(q.dtype) for each in (now.cos, now.sin))
        q, k = (each * cos + _half_turned(each) * sin for each in (q, k))
        if self.thd is not None and now.thd is not None:
            each = (part[0].transpose(0, 1).contiguous() for part in (q, k, v))
            mask = AttnMaskType.padding_causal
            out: Tensor = self.thd(*each, None, attn_mask_type=mask, packed_seq_params=now.thd)
            return out.reshape(len(query), 1, -1)
        found, _none = packed_attention(
            self, q, k, v, None, packed_runs=PackedRuns(batch.runs, batch.branching), scaling=self.scaling
        )
        return found.transpose(0, 1).flatten(2)


def _half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class PackedRouter(TopKRouter):
    """Routes as transformers routes Qwen's mixtures: softmax over all experts in fp32, the k largest, and
    those made to sum to 1 where the model says so. Where routes are replayed they are the engine's."""

    rule = RouterRule("softmax", normalise=True)
    routes: Tensor | None = None
    """[T, K]: routes of this tensor rank's tokens in the current pass; -1 for none."""

    def routing(self, logits: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """([T, E] weights, 0 where a token does not go; bool [T, E]) of logits [T, 1, E]."""
        logits = logits.view(-1, self.config.num_moe_experts)
        chosen = logits.float().topk(self.topk, -1).indices
        if self.routes is None:
            weight = self.rule.weights(logits, chosen)
        else:
            weight, chosen = replayed(logits, chosen, self.routes, self.rule)
        # An expert that is named twice weighs nothing the second time.
        weights = torch.zeros_like(logits).scatter_add(1, chosen, weight.to(logits.dtype))
        return weights, torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)


class PackedLayer(TransformerLayer):
    """Tells its router the routes of each pass, also of one that is computed again in the backward pass."""

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
    """Its last stage gives hidden states [T, 1, H], of which the head makes columns."""

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
