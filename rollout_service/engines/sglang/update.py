"""Exchanging the weights of an SGLang server by a directory, so that what it serves is known afterwards."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import msgspec

from areal_async.rpc.messages import VersionTag
from rollout_service.engines.base import EngineError
from rollout_service.engines.server.http import ServerClient, words
from rollout_service.engines.server.spans import format_tag
from rollout_service.engines.server.tensors import Layout, check_same, read_layout
from rollout_service.engines.sglang.probe import ModelInfo

FLUSH_ATTEMPTS = 20
FLUSH_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Directory:
    """A snapshot's place: all that is kept of one. Its tensors are not asked for: they would be read, while
    the engine is paused, into memory of this process."""

    tag: VersionTag
    path: Path


class Updated(msgspec.Struct):
    success: bool = False
    message: str = ""


def check_directory(served: Layout, directory: Path) -> None:
    """Raises `EngineError` unless `directory` has exactly the tensors that are served, in whole files: the
    server takes one without some of them as an update, and leaves the old ones in their places; and where it
    fails inside a file it goes back by loading the same file again, and dies of it."""
    if not (directory / "config.json").is_file():
        raise EngineError(f"{directory} has no config.json: it is no model that a server can load")
    check_same(served, read_layout(directory), directory)


async def load_directory(client: ServerClient, snapshot: Directory, *, flush: bool, timeout_s: float) -> None:
    """Have the paused server load `snapshot.path` and serve it as its tag; with `flush` no KV of other
    weights is left in its cache. Raises `EngineError`, after which nobody knows what the server holds."""
    tag = format_tag(snapshot.tag)
    body = {
        "model_path": str(snapshot.path),
        "weight_version": tag,
        # Refused while requests have KV, which a pause in place leaves them; the new weights are in place
        # then, under the old version's name. So it is asked for only where nothing has KV.
        "flush_cache": flush,
        "abort_all_requests": False,
        "load_format": "safetensors",
    }
    for attempt in range(1, FLUSH_ATTEMPTS + 1):
        status, content = await client.request("POST", "/update_weights_from_disk", body, timeout_s=timeout_s)
        updated = _updated(content)
        if status == 200 and updated.success:
            break
        if "cache was not flushed" not in updated.message or attempt == FLUSH_ATTEMPTS:
            why = updated.message or words(content)
            raise EngineError(f"{client.name} did not load {snapshot.path}: {why}")
        # A request was still leaving the batch. Loading the same again is harmless, and names the version.
        await asyncio.sleep(FLUSH_PAUSE_S)
    info = await client.get("/model_info", ModelInfo)
    if info.weight_version != tag:
        raise EngineError(f"{client.name} loaded {tag}, but says that it serves {info.weight_version}")


def _updated(content: bytes) -> Updated:
    try:
        return msgspec.json.decode(content, type=Updated)
    except msgspec.MsgspecError:
        return Updated()
