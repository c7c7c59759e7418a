"""Low-rank adapters in a model that FSDP shards. The base is frozen, and only the adapters are trained.

peft inserts the layers. Their values and names are set here, because the model is on the meta device at that
time and its files only have the base. For a target layer W [out, in], A [rank, in] starts as a uniform sample
in ± 1/sqrt(in) (`kaiming_uniform_(a=√5)` in peft and torch). B [out, rank] starts as zeros, so the first
version equals the base model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from areal_async.config.job import LoraSection
from areal_async.weights.adapter import PREFIX
from areal_async.weights.names import BoxOfFile, Storage
from trainer_service.errors import ModelError

ADAPTER = "default"  # peft's name of the only adapter
BASE = ".base_layer."  # in names of base parameters, where a model without adapters has a dot


def add_adapters(model: Any, section: LoraSection) -> list[str]:
    """Add adapters to linear layers of `model` and freeze everything else. Returns the layers' full names.

    `section.targets` selects layers of the language model by the last part of their name; the default is all
    except the output layer and the layers of `_weights_alone`. Raises `ModelError` if a target matches no
    layer."""
    from peft import LoraConfig, inject_adapter_in_model

    language = {*model.get_decoder().modules()} - {model.get_output_embeddings()} - _weights_alone(model)
    linear = {
        name: name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module in language
    }
    wanted = section.targets or tuple(linear.values())
    if missing := sorted(set(wanted) - set(linear.values())):
        raise ModelError(
            f"trainer.lora.targets: the model has no layer called {', '.join(missing)} for adapters. It has "
            f"{', '.join(sorted(set(linear.values())))}."
        )
    chosen = [name for name, last in linear.items() if last in wanted]
    alpha: Any = section.alpha  # declared as an int, but only alpha / r is used
    config = LoraConfig(r=section.rank, lora_alpha=alpha, target_modules=chosen)
    # In a transformers model, peft moves some targets, such as those of shared experts, to other layers. In
    # any other module, it takes the names as they are.
    bare = nn.Module()
    bare._modules = model._modules
    inject_adapter_in_model(config, bare, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    return chosen


def _weights_alone(model: nn.Module) -> set[nn.Module]:
    """Return the layers of state-space mixers (Mamba) of which kernels read the weights without calling the
    layer. Adapters of such layers would have no effect."""
    mixers = [each for each in model.modules() if hasattr(each, "A_log") and hasattr(each, "D")]
    return {
        getattr(mixer, name) for mixer in mixers for name in ("dt_proj", "out_proj") if hasattr(mixer, name)
    }


def is_adapter(parameter: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return f".{ADAPTER}.weight" in parameter and (".lora_A." in parameter or ".lora_B." in parameter)


def published(parameter: str, shape: torch.Size, storage: Mapping[str, Storage]) -> BoxOfFile:
    """Return the place of an adapter's parameter in peft's files. Its layer is called as in the model's
    files, which `storage` describes. Raises `ModelError` if they have the layer in another form."""
    owner, _, matrix = parameter.rpartition(".lora_")
    base = storage[f"{owner}{BASE}weight"]
    if not isinstance(base, BoxOfFile) or any(base.offset):
        raise ModelError(
            f"trainer.lora.targets: {owner} is not one tensor of the model's files. Leave it out."
        )
    name = f"{base.name.removesuffix('.weight')}.lora_{matrix.replace(f'.{ADAPTER}.weight', '.weight')}"
    return BoxOfFile(PREFIX + name, tuple(shape), (0,) * len(shape))


def first_value(parameter: str, shape: torch.Size, seed: int) -> Tensor:
    """Return f32 of `shape`: the initial value of an adapter's parameter, the same on every rank."""
    if ".lora_B." in parameter:
        return torch.zeros(shape)
    digest = hashlib.blake2b(f"{seed}:{parameter}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
