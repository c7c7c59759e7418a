"""The manifest of a snapshot: the tensors, the bytes of each, and a hash of every byte.

On disk it is one JSON object `{"hash": …, "manifest": {…}}` in msgspec's compact form. `hash` covers the
bytes of the inner object. A file that differs in any byte from the output of this module is refused. The hash
in a notice covers the whole file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec
from blake3 import blake3

from areal_async.base.errors import SnapshotError
from areal_async.base.own_files import delete_path
from areal_async.base.versions import POLICY_NAME, VersionTag

MANIFEST_SCHEMA = 4
MANIFEST_FILE = "manifest.json"
DELTA_SUFFIX = ".delta"
ADAPTER_CONFIG = "adapter_config.json"
"""Name of the file that marks a snapshot as an adapter (LoRA). Its weights depend on this file."""
MAX_MANIFEST_BYTES = 256 << 20
HASH_PREFIX = "blake3:"
WRITING_PREFIX = ".writing-"  # prefix of the name of an unfinished directory
SPARE_PREFIX = (
    ".spare-"  # prefix of the name of a model file that no snapshot contains and that may be filled
)
_OURS = re.compile(
    rf"{POLICY_NAME}-e\d+-v\d+(\.delta)?|{re.escape(WRITING_PREFIX)}.*|{re.escape(SPARE_PREFIX)}.*"
)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


class Part(msgspec.Struct, frozen=True):
    """A box of a tensor of `shape`: the elements from `offset` on, with `extent` in each dimension.

    The whole tensor is stored in `file` under its name. Its boxes are consecutive runs of whole rows (of the
    first dimension), so each box is also a run of bytes. `hash` covers these bytes. `dtype` is safetensors'
    name.
    """

    tensor: str
    dtype: str
    shape: list[int]
    offset: list[int]
    extent: list[int]
    file: str
    hash: str


class _File(msgspec.Struct, frozen=True):
    """A file in the snapshot's directory, not in a subdirectory."""

    file: str
    size_bytes: int


class Shard(_File, frozen=True):
    """A safetensors file. `header_hash` covers its first `header_bytes`, and the parts cover the rest
    exactly."""

    header_bytes: int
    header_hash: str


class Sidecar(_File, frozen=True):
    """A file without tensors: configuration or tokenizer."""

    hash: str


class Manifest(msgspec.Struct, frozen=True):
    schema: int
    tag: VersionTag
    base: VersionTag | None
    """The snapshot that this delta changes into `tag`, or None in a full manifest."""
    codec: Literal["full", "delta"]
    parts: list[Part]
    shards: list[Shard]
    sidecars: list[Sidecar]
    tied: dict[str, str]
    """Names without bytes of their own, each with the tensor whose data it shares."""
    base_hash: str = ""
    """Hash of the base's manifest file, in a delta."""
    target_hash: str = ""
    """Hash of the full snapshot's manifest file, in a delta."""
    patches: list[int] = []
    """Bytes of each part's patch, 0 for an unchanged part. The patches are consecutive in the delta file, in
    the order of the target's parts. The value is empty in a full manifest."""


class _Sealed(msgspec.Struct, frozen=True):
    hash: str
    manifest: msgspec.Raw


def named(hashed: blake3) -> str:
    """Return a hash with its prefix: `blake3:` and 64 hex digits."""
    return HASH_PREFIX + hashed.hexdigest()


def hash_of(data: bytes | memoryview) -> str:
    return named(blake3(data))


def seal(manifest: Manifest) -> bytes:
    inner = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Sealed(hash_of(inner), msgspec.Raw(inner)))


def unseal(data: bytes) -> Manifest:
    """Return the manifest. Raises `SnapshotError` unless `data` is exactly the output of `seal` for this
    schema."""
    try:
        inner = msgspec.json.decode(data, type=_Sealed).manifest
        manifest = msgspec.json.decode(inner, type=Manifest)
        canonical = seal(manifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SnapshotError(f"not a manifest: {error}") from error
    if canonical != data:
        raise SnapshotError("the manifest is not byte for byte as it was written")
    if manifest.schema != MANIFEST_SCHEMA:
        raise SnapshotError(f"a manifest of schema {manifest.schema}; this program reads {MANIFEST_SCHEMA}")
    names = [entry.file for entry in files_of(manifest)]
    for name in names:
        check_file_name(name)
    if len(set(names)) != len(names):
        raise SnapshotError("the manifest names a file twice")
    return manifest


def files_of(manifest: Manifest) -> list[Shard | Sidecar]:
    """Return all files of the snapshot except the manifest itself."""
    return [*manifest.shards, *manifest.sidecars]


def check_file_name(name: str) -> None:
    """Raise `SnapshotError` unless the name is valid for a file in a snapshot's directory."""
    if not _PLAIN_NAME.fullmatch(name) or name == MANIFEST_FILE:
        raise SnapshotError(f"{name!r} cannot be the name of a file in a snapshot")


def name_of(manifest: Manifest) -> str:
    """Return the name of the manifest's directory."""
    return manifest.tag.label + (DELTA_SUFFIX if manifest.codec == "delta" else "")


def remove_snapshots(root: Path) -> None:
    """Remove everything that a publisher wrote into `root`, complete or not. Other files stay. Raises
    `OSError`."""
    for path in root.iterdir():
        if _OURS.fullmatch(path.name):
            delete_path(path)
