"""Mapping between a rank's parameters and boxes of a model's Hugging Face tensors.

Loading, export and checkpoints use the same mapping. `boxes_of` cuts a tensor with the shape of a rank's
parameter into views. Each view is a box (a rectangular part) of a tensor in the model's files. `linear_qkv`
has for each key head its query heads, the key and the value. `linear_fc1` has the gate above the
up-projection. Embedding and output layer are padded to a multiple of the tensor ranks; the padding belongs to
no box.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from areal_async.weights.pieces import TensorPiece
from trainer_service.backends.megatron.config import Dimensions

LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.weight)$")
WHOLE_NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
"""Parameters of a layer that every tensor rank has completely."""
EMBEDDING, OUTPUT, VALUE = "embedding.word_embeddings.weight", "output_layer.weight", "score.weight"


@dataclass(frozen=True)
class StagePlace:
    """Place of a rank's parameters in the model."""

    tensor: int
    """Index of the rank among the tensor ranks."""
    tensors: int
    first_expert: int = 0
    """Index of the rank's first expert in each layer."""


def global_name(name: str, first_layer: int, place: StagePlace) -> str:
    """Return a stage parameter's name with the layer's and the expert's number in the whole model.
    `first_layer` is the number of the stage's first layer, from 0."""
    if not (layer := LAYER.match(name)):
        return name
    rest = layer[2]
    if expert := EXPERT.match(rest):
        rest = f"mlp.experts.local_experts.{int(expert[1]) + place.first_expert}.{expert[2]}"
    return f"decoder.layers.{int(layer[1]) + first_layer}.{rest}"


def boxes_of(name: str, tensor: Tensor, place: StagePlace, model: Dimensions) -> Iterator[TensorPiece]:
    """Yield the boxes in `tensor`, as views. The tensor has the shape of the parameter `name` on a rank at
    `place`.

    `name` is a global name. Raises `KeyError` for an unknown parameter."""
    if layer := LAYER.match(name):
        prefix = f"model.layers.{layer[1]}."
        yield from _of_layer(prefix, layer[2], tensor, place, model)
    elif name == "decoder.final_layernorm.weight":
        yield _rows("model.norm.weight", tensor, 0, model.hidden)
    elif name == VALUE:
        yield _rows(VALUE, tensor, 0, 1)
    else:
        files = {EMBEDDING: "model.embed_tokens.weight", OUTPUT: "lm_head.weight"}[name]
        first = place.tensor * len(tensor)
        real = max(0, min(len(tensor), model.vocabulary - first))
        yield _rows(files, tensor[:real], first, model.vocabulary)


def _of_layer(
    prefix: str, name: str, tensor: Tensor, place: StagePlace, model: Dimensions
) -> Iterator[TensorPiece]:
    if (whole := WHOLE_NAMES.get(name)) is not None:
        yield _rows(prefix + whole, tensor, 0, len(tensor))
    elif name.startswith("self_attention.linear_qkv."):
        yield from _of_heads(prefix, name.rpartition(".")[2], tensor, place, model)
    elif name == "self_attention.linear_proj.weight":
        yield _columns(f"{prefix}self_attn.o_proj.weight", tensor, place)
    else:
        expert = EXPERT.match(name)
        inside = f"{prefix}mlp.experts.{expert[1]}." if expert else f"{prefix}mlp."
        layer = expert[2] if expert else name.removeprefix("mlp.")
        if layer == "linear_fc2.weight":
            yield _columns(f"{inside}down_proj.weight", tensor, place)
        elif layer == "linear_fc1.weight":
            half = len(tensor) // 2
            for part, projection in zip(tensor.split(half), ("gate_proj", "up_proj"), strict=True):
                yield _rows(f"{inside}{projection}.weight", part, place.tensor * half, half * place.tensors)
        else:
            raise KeyError(name)


def _of_heads(
    prefix: str, kind: str, tensor: Tensor, place: StagePlace, model: Dimensions
) -> Iterator[TensorPiece]:
    groups, width = model.key_heads // place.tensors, model.head_width
    per_group = model.heads // model.key_heads
    heads = {"q_proj": per_group, "k_proj": 1, "v_proj": 1}
    for group, rows in enumerate(tensor.split((per_group + 2) * width)):
        parts = rows.split([count * width for count in heads.values()])
        for part, (projection, count) in zip(parts, heads.items(), strict=True):
            first = (place.tensor * groups + group) * count * width
            whole = model.key_heads * count * width
            yield _rows(f"{prefix}self_attn.{projection}.{kind}", part, first, whole)


def _rows(name: str, tensor: Tensor, first: int, whole: int) -> TensorPiece:
    shape = (whole, *tensor.shape[1:])
    return TensorPiece(name, shape, (first, *(0 for _ in tensor.shape[1:])), tensor)


def _columns(name: str, tensor: Tensor, place: StagePlace) -> TensorPiece:
    rows, width = tensor.shape
    return TensorPiece(name, (rows, width * place.tensors), (0, place.tensor * width), tensor)
