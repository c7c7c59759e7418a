"""What a server engine reads of a model's folder: the sizes, and by the headers of its files which tensors it
holds. Nothing of the tensors is read.

A server loads what it finds: a tensor that is missing keeps its old weights, one too many or a file that is
cut short may be the server's end. So a folder is compared with the first one before a server sees it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rollout_service.engines.base import EngineError

Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""Of each tensor its dtype (safetensors' word) and shape."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    vocab_size: int
    """Ids below it have a row in the embedding; a server may die of others."""
    positions: int | None
    """Most tokens that the model can place; None when its configuration sets no limit."""


def read_model(folder: Path) -> ModelFacts:
    """The facts in `config.json`. Raises `EngineError`."""
    config = read_config(folder)
    config = config.get("text_config") or config
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise EngineError(f"{folder / 'config.json'} names no vocab_size: it is no model for text")
    return ModelFacts(vocab_size, config.get("max_position_embeddings"))


def read_config(folder: Path) -> dict[str, Any]:
    """The model's configuration. Raises `EngineError`."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise EngineError(f"{folder} has no config.json: it is no model that a server can load") from error
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise EngineError(f"{path} holds no configuration")
    return config


def read_layout(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors of all safetensors files. Raises `EngineError`, also for a file that is cut short."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                    view = tensors.get_slice(name)
                    found[name] = (view.get_dtype(), tuple(view.get_shape()))
        except (OSError, SafetensorError) as error:
            raise EngineError(f"{file} cannot be read, or was cut short: {error}") from error
    if not found:
        raise EngineError(f"{folder} has no safetensors file with weights")
    return found


def check_folder(expected: Layout, folder: Path) -> None:
    """Raises `EngineError` unless a server that serves the tensors `expected` can load `folder`: it is a
    model with the same tensors, of the same shapes and dtypes, in whole files."""
    read_config(folder)
    found = read_layout(folder)
    missing, foreign = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    other = sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name])
    for what, names in (("lacks", missing), ("has besides", foreign), ("has in another form", other)):
        if names:
            raise EngineError(
                f"{folder} does not fit the engine's model: it {what} {', '.join(names[:3])}"
                f"{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
            )
