"""versions_are_true: what is opened is the version that was announced, and no other."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from areal_async.base.errors import SnapshotError
from areal_async.rpc.client import Client
from areal_async.rpc.weights_messages import SnapshotNotice
from areal_async.weights.delta import apply_delta, write_delta
from areal_async.weights.manifest import DELTA_SUFFIX, MANIFEST_FILE, seal, unseal
from areal_async.weights.receiver import Receiver
from areal_async.weights.snapshot import SnapshotInfo
from tests.snapshots import write_snapshot
from tests.unit.weights.world import SECRET, tag


def snapshot(root: Path, version: int) -> SnapshotInfo:
    return write_snapshot(root, tag(version), {"w": torch.full((100,), float(version))})


def test_versions_are_true_a_delta_makes_no_other_version_than_its_own(tmp_path):
    base, new = snapshot(tmp_path, 1), snapshot(tmp_path, 2)
    delta = write_delta(base.path, new.path)
    assert delta is not None
    manifest = unseal((delta.path / MANIFEST_FILE).read_bytes())
    lying = delta.path.rename(tmp_path / f"{tag(3).label}{DELTA_SUFFIX}")
    (lying / MANIFEST_FILE).write_bytes(seal(msgspec.structs.replace(manifest, tag=tag(3))))
    with pytest.raises(SnapshotError, match="of the delta's tag"):
        apply_delta(base.path, lying, tmp_path / tag(3).label)
    assert not (tmp_path / tag(3).label).exists()


async def test_versions_are_true_a_receiver_opens_no_other_version_than_was_announced(tmp_path):
    held = snapshot(tmp_path, 1)
    receiver = Receiver(Client("ipc:///nobody", job="j", role="r", name="r", access=SECRET), "r")
    said = SnapshotNotice(tag(2), str(held.path), held.manifest_hash, False, held.size_bytes, "", None)
    with pytest.raises(SnapshotError, match="announced as"):
        await receiver.open(said)
    assert (await receiver.open(msgspec.structs.replace(said, tag=tag(1)))).tag == tag(1)
    await receiver.close()
