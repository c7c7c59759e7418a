"""Adapters (LoRA) on their way to the engines.

The trainer publishes only the adapter, which is small. Each host merges the adapter with its own copy of the
base model.

A snapshot of an adapter contains peft's `adapter_config.json`, and its tensors have peft's names. With W
[out, in] of the base, A [r, in] and B [out, r] of the adapter, the merged weight is W + (alpha / r) · B A (Hu
et al. 2021, "LoRA", section 4.1). It is computed in float32 and then rounded.

Promises: the merged directory is complete or absent, and one process of a host makes it. The directory has
exactly the tensors of the base model's files, under their names. If any target of the adapter cannot be
merged, the whole adapter is refused.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from safetensors import SafetensorError, safe_open

from areal_async.base.errors import SnapshotError
from areal_async.base.versions import VersionTag
from areal_async.models.files import model_identity, weight_files
from areal_async.weights.channels.chunks import PARTIAL_PREFIX
from areal_async.weights.channels.host_cache import HostCache
from areal_async.weights.layout import box_of, plan_layout, torch_dtype
from areal_async.weights.manifest import ADAPTER_CONFIG, MANIFEST_FILE, Manifest
from areal_async.weights.pieces import whole_piece
from areal_async.weights.snapshot import MODEL_FILE, Snapshot, content_of, staged
from areal_async.weights.tensor_file import MappedFile, fill

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PREFIX = "base_model.model."
"""Prefix that peft puts before the name of a module that an adapter changes."""


class LoraFile(msgspec.Struct):
    """The fields of `adapter_config.json` that merging needs."""

    r: int
    lora_alpha: float
    base_identity: str = ""
    """`model_identity` of the adapter's base model."""


class _BaseTensor(NamedTuple):
    file: Any
    shape: list[int]
    dtype: torch.dtype


def is_adapter(manifest: Manifest) -> bool:
    """Return whether the snapshot is an adapter, which has to be merged with a base model."""
    return any(sidecar.file == ADAPTER_CONFIG for sidecar in manifest.sidecars)


def scale_of(folder: Path) -> float:
    """Return alpha / r of the adapter in `folder`. Raises `SnapshotError`."""
    config = _config_of(folder)
    return config.lora_alpha / config.r


def _config_of(folder: Path) -> LoraFile:
    try:
        return msgspec.json.decode((folder / ADAPTER_CONFIG).read_bytes(), type=LoraFile)
    except (OSError, msgspec.DecodeError) as error:
        raise SnapshotError(f"{folder} has no readable {ADAPTER_CONFIG}: {error}") from error


class BaseWeights:
    """The weights in a Hugging Face directory, read tensor by tensor from its safetensors files."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        """Open the files. Floating-point tensors are converted to `dtype`. Raises `SnapshotError` for
        unreadable files."""
        self.folder = folder
        self._dtype = dtype
        self._files = ExitStack()
        self._tensors: dict[str, _BaseTensor] = {}
        try:
            for path in weight_files(folder):
                file = self._files.enter_context(safe_open(path, framework="pt"))
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    part = file.get_slice(name)
                    self._tensors[name] = _BaseTensor(file, part.get_shape(), torch_dtype(part.get_dtype()))
        except (OSError, ValueError, SafetensorError, KeyError) as error:
            raise SnapshotError(f"the base model {folder} cannot be read: {error}") from error
        if not self._tensors:
            raise SnapshotError(f"the base model {folder} has no safetensors files")

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def close(self) -> None:
        self._files.close()

    def empty(self) -> dict[str, Tensor]:
        """Return each tensor of the merged model by name, on the meta device with its shape and dtype."""
        import torch

        return {
            name: torch.empty(found.shape, dtype=self._published(found.dtype), device="meta")
            for name, found in self._tensors.items()
        }

    def merged(self, adapter: Mapping[str, Tensor], scale: float) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the base by name, one at a time. Tensors that `adapter` changes are yielded
        in merged form.

        `adapter` maps peft's names to tensors. Raises `SnapshotError` if `adapter` changes a tensor that the
        base lacks.
        """
        import torch

        targets = self._targets(adapter)
        for name, found in self._tensors.items():
            tensor = found.file.get_tensor(name)
            if name in targets:
                a, b = (adapter[key].to("cpu", torch.float32) for key in targets[name])
                tensor = tensor.float() + scale * (b @ a)
            yield name, tensor.to(self._published(found.dtype))

    def _published(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if dtype.is_floating_point else dtype

    def _targets(self, adapter: Mapping[str, Tensor]) -> dict[str, tuple[str, str]]:
        """Return the names of the matrices A and B for each base tensor that the adapter changes."""
        targets = {}
        for key, a in adapter.items():
            module, found, _ = key.partition(".lora_A.")
            if not found:
                continue
            name, other = f"{module.removeprefix(PREFIX)}.weight", f"{module}.lora_B.weight"
            base, b = self._tensors.get(name), adapter.get(other)
            fits = base is not None and b is not None and a.shape[0] == b.shape[1]
            if base is None or b is None or not fits or base.shape != [b.shape[0], a.shape[1]]:
                shape = base.shape if base is not None else "not in its files"
                raise SnapshotError(
                    f"the adapter's {key} does not fit the base model {self.folder}: {name} is {shape}"
                )
            targets[name] = (key, other)
        if 2 * len(targets) != len(adapter):
            some = sorted(adapter)[:3]
            raise SnapshotError(f"the adapter has tensors that are no A or B of a layer: {some}")
        return targets


def write_merged(
    base: BaseWeights,
    adapter: Mapping[str, Tensor],
    scale: float,
    files: Mapping[str, bytes | Path],
    into: Path,
) -> None:
    """Write the merged model and `files` to `into`, a directory that transformers and every engine can load.

    The manifest is written last. Raises `SnapshotError` and `OSError`. An error leaves no files behind.
    `HostCache.sweep` removes the files of a process that dies.
    """
    with staged(into.with_name(f"{PARTIAL_PREFIX}{into.name}-merging")) as staging:
        boxes = [box_of(whole_piece(name, tensor)) for name, tensor in base.empty().items()]
        layout = plan_layout([boxes], MODEL_FILE)
        with closing(MappedFile(staging / MODEL_FILE, layout.size_bytes)) as mapped:
            mapped.write(0, layout.header)
            for name, tensor in base.merged(adapter, scale):
                fill(mapped, layout, whole_piece(name, tensor))
            mapped.flush()
        for name in sorted(files, key=lambda name: name == MANIFEST_FILE):
            (staging / name).write_bytes(content_of(files[name]))
        shutil.rmtree(into, ignore_errors=True)
        os.rename(staging, into)


class Merger:
    """Merges a job's adapter snapshots into whole weights, for one process.

    The directories are under `root`, which all processes of the host share.
    """

    def __init__(self, base: Path, dtype: torch.dtype, root: Path, *, tensors: bool) -> None:
        """Create a merger. If `tensors` is true, the engine loads tensors from memory, so no directory is
        written."""
        self._base, self._dtype = base, dtype
        self._cache = HostCache(root)
        self._tensors = tensors
        self._weights: BaseWeights | None = None
        self._identity = ""

    async def merged(self, snapshot: Snapshot, manifest_hash: str) -> Snapshot:
        """Return the verified adapter `snapshot`, merged. Raises `SnapshotError`.

        The result has either the merged tensors, or the path of the merged directory and no tensors.
        """
        if self._tensors:
            return await asyncio.to_thread(self._in_memory, snapshot)
        make = partial(asyncio.to_thread, self._on_disk, snapshot)
        path = await self._cache.obtain(snapshot.tag.label, manifest_hash, make)
        return Snapshot(snapshot.tag, path, snapshot.manifest, {})

    def served(self, tag: VersionTag, *, failed: bool = False) -> None:
        """Record that this process now serves `tag`, or, with `failed`, that it could not. Directories that
        are no longer needed may then be removed."""
        self._cache.served(tag.label, failed=failed)

    def close(self) -> None:
        self._cache.close()
        if self._weights is not None:
            self._weights.close()

    def _opened(self, snapshot: Snapshot) -> BaseWeights:
        """Return the base weights. Raises `SnapshotError` if the adapter has another base."""
        if self._weights is None:
            self._weights = BaseWeights(self._base, self._dtype)
            self._identity = model_identity(self._base)
        if _config_of(snapshot.path).base_identity != self._identity:
            raise SnapshotError(
                f"{self._base} on this host is not the model that {snapshot.tag.label} is an adapter of: "
                "copy the trainer's there"
            )
        return self._weights

    def _in_memory(self, snapshot: Snapshot) -> Snapshot:
        tensors = dict(self._opened(snapshot).merged(snapshot.tensors, scale_of(snapshot.path)))
        return Snapshot(snapshot.tag, snapshot.path, snapshot.manifest, tensors)

    def _on_disk(self, snapshot: Snapshot) -> None:
        try:
            files = {p.name: p for p in snapshot.path.iterdir() if p.name not in (MODEL_FILE, ADAPTER_CONFIG)}
            into = self._cache.path(snapshot.tag.label)
            # The directory's manifest names its base and its adapter.
            write_merged(self._opened(snapshot), snapshot.tensors, scale_of(snapshot.path), files, into)
        except OSError as error:
            raise SnapshotError(f"{snapshot.tag.label} cannot be merged: {error}") from error


def adapter_config(
    *, rank: int, alpha: float, targets: list[str], base: Path, identified: bool = True
) -> bytes:
    """Return the content of `adapter_config.json` for peft, vLLM and SGLang. `targets` are full module names.

    An `identified` configuration has an extra field that identifies the base model. Our hosts need that
    field, and peft warns about it. Raises `OSError`, and `ValueError` for a base without safetensors files.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(targets),
    }
    if identified:
        config["base_identity"] = model_identity(base)
    return json.dumps(config, indent=2).encode() + b"\n"
