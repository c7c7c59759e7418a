"""The memory model at the sizes of Qwen2.5-7B and Qwen3-8B, against what transformers makes on `meta`.
`meta`.

Tensors there have shapes and no data. Each storage counts from the operator that makes it until it is freed.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AttentionInterface, Qwen2Config, Qwen2Model, Qwen3Config, Qwen3Model

from trainer_service.backends.fsdp import recompute as recomputation
from trainer_service.backends.fsdp.memory import (
    MemoryOptions,
    kept_per_token,
    passing_per_token,
    shape_of,
)
from trainer_service.backends.fsdp.recompute import recompute_blocks

TOKENS = 8192
COMMON = {"vocab_size": 152_064, "head_dim": 128}
MODELS = {
    "qwen2.5-7b": (
        Qwen2Model,
        Qwen2Config(
            hidden_size=3584,
            num_hidden_layers=28,
            intermediate_size=18_944,
            num_attention_heads=28,
            num_key_value_heads=4,
            **COMMON,
        ),
    ),
    "qwen3-8b": (
        Qwen3Model,
        Qwen3Config(
            hidden_size=4096,
            num_hidden_layers=36,
            intermediate_size=12_288,
            num_attention_heads=32,
            num_key_value_heads=8,
            **COMMON,
        ),
    ),
}


def flash(module, query, key, value, mask, scaling=None, **rest):
    """The flash kernel of a GPU, whose output is packed for the next layer as `attention.py` packs it."""
    out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=scaling)[0]
    return out.transpose(1, 2).clone(memory_format=torch.contiguous_format), None


class Storages(TorchDispatchMode):
    """Bytes of all storages that operators made and that are alive, without those of `known` tensors."""

    def __init__(self, known):
        super().__init__()
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage):
        if storage._cdata in self.sizes:
            return
        self.sizes[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, storage._cdata)

    def _freed(self, key):
        self.now -= self.sizes.pop(key)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_the_activations_of_billions_of_parameters_are_those_that_the_modules_keep(
    name, recompute, monkeypatch
):
    kind, config = MODELS[name]
    AttentionInterface.register("shapes_only", flash)
    with torch.device("meta"):
        model = kind._from_config(config, dtype=torch.bfloat16, attn_implementation="shapes_only")
    monkeypatch.setattr(recomputation, "FSDPModule", type(model.layers[0]))
    recompute_blocks(model, recompute)
    for parameter in model.parameters():  # gradients are counted apart
        parameter.register_post_accumulate_grad_hook(lambda tensor: setattr(tensor, "grad", None))
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    with Storages([*model.parameters(), *model.buffers(), ids]) as storages:
        out = model(input_ids=ids, use_cache=False).last_hidden_state
        kept = storages.now
        out.sum().backward()
    shapes = {f"model.{key}": tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    block, hidden = shape_of(config.to_dict(), shapes).blocks[0], config.hidden_size
    options = MemoryOptions(compute_bytes=2, recompute=recompute)
    # The last norm: its input in fp32, the normalised numbers and its output.
    expected = TOKENS * (config.num_hidden_layers * kept_per_token(block, hidden, options) + 8 * hidden)
    assert kept == pytest.approx(expected, rel=0.01)
    # The last block's backward pass comes first.
    expected += TOKENS * passing_per_token(block, hidden, options)
    assert storages.peak == pytest.approx(expected, rel=0.06)
