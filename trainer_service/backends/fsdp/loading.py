"""Loading a Hugging Face directory as a sharded model.

Rank 0 alone reads the files (safetensors only) and hands every rank its shard. Modules are made on the meta
device and get memory after sharding; *every* buffer is then filled from rank 0 too: a rotary embedding's
`inv_freq` is in no state dict and would otherwise stay whatever was in that memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

from trainer_service.backends.fsdp.attention import PACKED_ATTENTION
from trainer_service.errors import ModelError
from trainer_service.ranks import Ranks


def load_sharded(folder: Path, ranks: Ranks, dtype: torch.dtype) -> nn.Module:
    """The causal language model in `folder`, sharded over `ranks`: fp32 parameters, computing in `dtype`.

    Raises `ModelError`."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        source = _whole_model(folder) if ranks.first else None
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(
            f"no model can be loaded from {folder}: {error}. It must be a Hugging Face causal-LM directory "
            "with config.json and safetensors weights."
        ) from error
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=PACKED_ATTENTION
        )
    _shard(model, ranks, dtype)
    model.to_empty(device=ranks.device)
    model.tie_weights()
    _fill(model, source, ranks)
    model.train()
    return cast(nn.Module, model)


def tied_names(model: nn.Module) -> dict[str, str]:
    """Alias -> name for parameters that occur more than once."""
    names: dict[int, str] = {}
    aliases = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            aliases[name] = first
    return aliases


def _whole_model(folder: Path) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, local_files_only=True
    )
    return model


def _shard(model: nn.Module, ranks: Ranks, dtype: torch.dtype) -> None:
    blocks = set(getattr(model, "_no_split_modules", None) or ())
    policy = (
        MixedPrecisionPolicy()
        if dtype == torch.float32
        else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    )
    for module in [m for m in model.modules() if type(m).__name__ in blocks]:
        fully_shard(module, mesh=ranks.mesh, mp_policy=policy)
    # The root too gives its parameters back after a forward: a pass without backward leaves nothing stale.
    fully_shard(model, mesh=ranks.mesh, mp_policy=policy, reshard_after_forward=True)


@torch.no_grad()
def _fill(model: nn.Module, source: nn.Module | None, ranks: Ranks) -> None:
    values = {}
    if source is not None:
        values = {**dict(source.named_parameters()), **dict(source.named_buffers())}
        missing = {name for name, _ in model.named_parameters()} - values.keys()
        if missing:
            raise ModelError(f"the model's files lack {', '.join(sorted(missing)[:5])}")
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        if ranks.world == 1:
            parameter.to_local().copy_(values[name])
            continue
        whole = values[name].detach() if values else torch.empty(parameter.shape)
        shard = distribute_tensor(whole.to(ranks.device), ranks.mesh, parameter.placements)
        parameter.to_local().copy_(shard.to_local())
    for name, buffer in model.named_buffers():
        if values:
            buffer.copy_(values[name])
        ranks.broadcast(buffer)
