"""Reader of a Hugging Face model folder: its weight files, their headers, and the layers in `config.json`.

Only safetensors files that transformers loads are read. A folder may contain other ones, such as
`consolidated.safetensors`, which has another format. This module needs no torch."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from areal_async.base.own_files import parts_of

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MOST_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format for the size of a header."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names in configurations for the number of experts per layer."""
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
"""Names in configurations for the number of experts per token."""
_OF_EXPERTS = re.compile(r"\blayers\.(\d+)\..*\bexperts\.")
BY_LENGTH = frozenset({"dynamic", "longrope"})
"""Kinds of rotary positions whose frequencies depend on the longest row of a pass."""
SAMPLE_BYTES = 64
"""Number of bytes at the start of each tensor that are hashed to distinguish models of the same shape."""


class StoredTensor(NamedTuple):
    """A tensor as its file's header describes it: dtype in the terms of safetensors, first byte, and end byte
    (exclusive)."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Mixture(NamedTuple):
    """A mixture of experts: the number of experts per layer, the number of experts per token, and the layers
    with experts."""

    experts: int
    chosen: int
    layers: tuple[int, ...]

    @property
    def route_bytes(self) -> int:
        """Bytes of the routes of one token (`areal_async/trajectory/routes.py`)."""
        return len(self.layers) * self.chosen * (1 if self.experts < 256 else 2)


def is_mixture(folder: Path) -> bool:
    """Return whether config.json describes a mixture of experts. A model without a readable config.json
    counts as dense."""
    return _of_config(folder, EXPERTS) > 0


def mixture_of(folder: Path) -> Mixture:
    """Return the mixture that config.json and the names of the tensors describe. Its layers are the layers
    with tensors of experts. Raises `OSError`, and ValueError if the number of experts or the layers with
    experts cannot be found."""
    experts, chosen = _of_config(folder, EXPERTS), _of_config(folder, CHOSEN)
    layers = {int(found[1]) for name in stored_tensors(folder) if (found := _OF_EXPERTS.search(name))}
    if not (experts and chosen and layers):
        raise ValueError(
            f"{folder} does not say how many experts it has, in which layers, or how many a token goes to"
        )
    return Mixture(experts, chosen, tuple(sorted(layers)))


def _of_config(folder: Path, names: tuple[str, ...]) -> int:
    """Return the first number that config.json has under one of the given names. Return 0 if there is none or
    the file cannot be read."""
    try:
        config = text_part(json.loads((folder / "config.json").read_bytes()))
        return next((int(config[name]) for name in names if (config.get(name) or 0) > 0), 0)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return 0


def cannot_be_packed(config: Mapping[str, Any]) -> str:
    """Return the reason why the trainer refuses a model with this config.json, or "" if there is none. This
    check finds common reasons without torch; the trainer's probe of the model decides."""
    text = text_part(config)
    if chunk := text.get("attention_chunk_size"):
        return f"attends in chunks (attention_chunk_size: {chunk}), which packed attention does not compute"
    return ""


def carries_state(config: Mapping[str, Any]) -> str:
    """Return why the trainer must not pack the rows of a model with this config.json one after the other, or
    "" if there is no such reason."""
    if states := sorted(kind for kind in _layer_kinds(text_part(config)) if _STATE_LAYER.search(kind)):
        return f"has layers of kind {', '.join(states)}, whose state goes on from token to token"
    return ""


_STATE_LAYER = re.compile("linear|mamba|ssm|conv|recurrent|rwkv|delta|retention|hybrid|lightning")


ALWAYS_KNOWN = frozenset({"position_ids", "position_embeddings", "cache_position"})
"""Arguments that some models pass to every attention function, but that our attention function does not
need."""
OFF = frozenset({"use_cache", "output_attentions", "output_router_logits"})
"""Arguments that have no effect if they are false."""


def unknown_arguments(arguments: Mapping[str, Any]) -> str:
    """Return the names of the `arguments` that our attention function does not know and must not ignore, or
    ""."""
    unknown = [
        name
        for name, value in arguments.items()
        if value is not None
        and name not in ALWAYS_KNOWN
        and not (name in OFF and value is False)
        and not (name == "is_causal" and value is True)
    ]
    return ", ".join(sorted(unknown))


def looks_beyond_tokens(config: Mapping[str, Any]) -> str:
    """Return the reason why several ranks cannot split a row of a model with this config.json, or "" if they
    can. There are two reasons: a layer other than attention depends on several tokens, or rotary positions
    depend on the longest row of a pass."""
    text = text_part(config)
    kinds = _layer_kinds(text)
    if mixing := sorted(kind for kind in kinds if "attention" not in kind or kind == "linear_attention"):
        return f"has layers of kind {', '.join(mixing)}, which look at several tokens"
    if by_length := sorted(_rotary_kinds(text) & BY_LENGTH):
        return f"has rotary positions of kind {by_length[0]}, which depend on the longest row of a pass"
    return ""


def most_positions(config: Mapping[str, Any]) -> int | None:
    """Return the number of tokens up to which the rotary positions of a row do not depend on the other rows
    of a pass. Return None if there is no such limit."""
    text = text_part(config)
    kinds = _rotary_kinds(text)
    found = [each.get("original_max_position_embeddings") for each in _ropes(text)]
    if "longrope" in kinds:
        found.append(text.get("original_max_position_embeddings"))
    limits = [limit for limit in (*found, text.get("max_position_embeddings")) if isinstance(limit, int)]
    return min(limits) if kinds & BY_LENGTH and limits else None


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that describes the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _layer_kinds(text: Mapping[str, Any]) -> set[str]:
    """Return the kinds of layers in a config."""
    fields = ("layer_types", "layers_block_type", "block_types")
    return {str(kind) for field in fields for kind in _list(text.get(field))}


def _ropes(text: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the descriptions of rotary positions: one, or one for each kind of layer."""
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    return [found for found in (rope, *_list(rope)) if isinstance(found, dict)]


def _rotary_kinds(text: Mapping[str, Any]) -> set[str]:
    return {str(found.get("rope_type") or found.get("type")) for found in _ropes(text)}


def _list(value: object) -> list[Any]:
    """Return the elements of a list or the values of a mapping. Return [] for other values."""
    if isinstance(value, dict):
        return [*value.values()]
    return value if isinstance(value, list) else []


def no_folder(path: Path) -> str:
    """Return the message that the folder `path` does not exist."""
    return f"{path} is a file, not a folder" if path.exists() else f"the folder {path} does not exist"


def weight_files(folder: Path) -> list[Path]:
    """Return `model.safetensors`, or the files of the index in order. Return [] if there is neither. Raises
    `OSError`, and ValueError for a broken index."""
    if (folder / ONE_FILE).is_file():
        return [folder / ONE_FILE]
    if not (folder / INDEX).is_file():
        return []
    try:
        names = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
        return [folder.joinpath(*parts_of(name)) for name in names]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / INDEX} is no index of safetensors files") from error


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a model by name. Only the headers are read. Raises `OSError`, and ValueError if a
    file is not a safetensors file."""
    found = {}
    for path in weight_files(folder):
        with path.open("rb") as file:
            start = file.read(8)
            size = struct.unpack("<Q", start)[0] if len(start) == 8 else MOST_HEADER_BYTES + 1
            if size > MOST_HEADER_BYTES:
                raise ValueError(f"{path} is no safetensors file")
            try:
                for name, entry in json.loads(file.read(size)).items():
                    if name != "__metadata__":
                        begin, end = (8 + size + offset for offset in entry["data_offsets"])
                        found[name] = StoredTensor(path, entry["dtype"], tuple(entry["shape"]), begin, end)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ValueError(f"{path} is no safetensors file") from error
    return found


def model_identity(folder: Path) -> str:
    """Return a hash that identifies the weights of a model without reading all of them. It covers names,
    dtypes and shapes, and the first bytes of each tensor. It does not depend on the distribution of tensors
    over files. Raises as `stored_tensors` does."""
    hashed = blake3()
    for name, stored in sorted(stored_tensors(folder).items()):
        with stored.path.open("rb") as file:
            file.seek(stored.begin)
            first = file.read(min(SAMPLE_BYTES, stored.end - stored.begin))
        hashed.update(json.dumps([name, stored.dtype, stored.shape, first.hex()]).encode())
    return f"blake3:{hashed.hexdigest()}"
