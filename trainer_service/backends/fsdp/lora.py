"""Low-rank adapters in a model that FSDP shards: the base is frozen, and only the adapters are trained.

peft puts the layers in; values and names are ours, since the model is on the meta device then and its files
hold the base alone. With targets that are linear layers W [out, in], A [rank, in] begins as a uniform sample
in ± 1/sqrt(in) (peft's and torch's `kaiming_uniform_(a=√5)`) and B [out, rank] as zeros, so that the first
version is the base model.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor, nn

from areal_async.config.job import LoraSection
from areal_async.weights.adapter import PREFIX
from trainer_service.errors import ModelError

ADAPTER = "default"  # The name under which peft knows the one adapter
BASE = ".base_layer."


def add_adapters(model: Any, section: LoraSection) -> list[str]:
    """Put adapters into the linear layers of `model` that `section.targets` names by the last part of their
    name (without any: all but the output layer), and freeze everything else; returns their full names.

    Raises `ModelError` where a target names no layer."""
    from peft import LoraConfig, inject_adapter_in_model

    head = model.get_output_embeddings()
    linear = {
        name: name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    wanted = section.targets or tuple(linear.values())
    if missing := sorted(set(wanted) - set(linear.values())):
        raise ModelError(
            f"trainer.lora.targets: the model has no linear layer called {', '.join(missing)}. It has "
            f"{', '.join(sorted(set(linear.values())))}."
        )
    chosen = [name for name, last in linear.items() if last in wanted]
    alpha: Any = section.alpha  # declared as a whole number; what is used is alpha / r
    config = LoraConfig(r=section.rank, lora_alpha=alpha, target_modules=chosen)
    inject_adapter_in_model(config, model, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    return chosen


def is_adapter(parameter: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return f".{ADAPTER}.weight" in parameter and (".lora_A." in parameter or ".lora_B." in parameter)


def base_name(parameter: str) -> str:
    """Return the name of a parameter of the base in a model without adapters."""
    return parameter.replace(BASE, ".")


def published_name(parameter: str) -> str:
    """Return the name of an adapter's parameter in peft's files."""
    return PREFIX + parameter.replace(f".{ADAPTER}.weight", ".weight")


def first_value(parameter: str, shape: torch.Size, seed: int) -> Tensor:
    """f32 of `shape`: the value with which an adapter's parameter begins, the same on every rank."""
    if ".lora_B." in parameter:
        return torch.zeros(shape)
    digest = hashlib.blake2b(f"{seed}:{parameter}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
