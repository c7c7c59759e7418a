"""New weights for a vLLM server: requirements on a snapshot's directory before a reload.

vLLM 0.32.0 does not check what it reloads. If the directory lacks a tensor, `reload_weights` keeps the old
tensor and still answers 200. With a surplus tensor, or another shape, the whole server dies. So directories
are compared with the first one. On a CPU, the server computes with a packed copy of the output layer. A
reload skips an output layer that is tied to the embedding, so the packed copy would keep the first weights.
There, the server gets the tied layer as a separate tensor (`untied`).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from areal_async.base.errors import SnapshotError
from areal_async.weights.layout import Box, plan_layout
from areal_async.weights.tensor_file import parse_header
from rollout_service.engines.base import EngineError
from rollout_service.engines.http.adapter import read_config, read_layout

HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
HEAD_FILE = "lm_head.safetensors"


def is_tied(folder: Path) -> bool:
    """Return whether the output layer is the embedding, without a stored tensor of its own."""
    return bool(read_config(folder).get("tie_word_embeddings")) and HEAD not in read_layout(folder)


def untied(folder: Path, into: Path) -> Path:
    """Write the same model to `into`, with the output layer stored as a copy of the embedding. All other
    files are links into `folder`. Raises `EngineError` if the embedding is not found."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    for item in folder.iterdir():
        # An index would name the files to load, and it lacks the added file.
        if item.name != "config.json" and not item.name.endswith(".index.json"):
            (into / item.name).symlink_to(item.resolve())
    config = read_config(folder) | {"tie_word_embeddings": False}
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = config["text_config"] | {"tie_word_embeddings": False}
    (into / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for file in folder.glob("*.safetensors"):
        try:
            if _write_head(file, into / HEAD_FILE):
                return into
        except (OSError, SnapshotError) as error:
            raise EngineError(f"{file} cannot be read: {error}") from error
    raise EngineError(
        f"{folder} ties its output layer to an embedding that is none of *.{EMBEDDING}: vLLM on a CPU "
        "cannot update such a model; use another rollout.engine"
    )


def _write_head(file: Path, head: Path) -> bool:
    """Write the embedding of `file` to `head` as the output layer. Return whether `file` has an embedding.
    Bytes are copied unchanged, without torch. Raises `OSError` and `SnapshotError`."""
    with file.open("rb") as stream:
        size = stream.read(8)
        header = size + stream.read(int.from_bytes(size, "little"))
        for name, entry in parse_header(header).items():
            if name.endswith(EMBEDDING):
                box = Box(HEAD, entry.dtype, entry.shape, [0] * len(entry.shape), entry.shape)
                begin, end = entry.data_offsets
                stream.seek(len(header) + begin)
                head.write_bytes(plan_layout([[box]], head.name).header + stream.read(end - begin))
                return True
    return False
