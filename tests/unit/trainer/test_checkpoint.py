"""A checkpoint is complete or not there; a damaged one is refused."""

import pytest

from areal_async.rpc.schema import VersionTag
from trainer_service.checkpoint import (
    Checkpoints,
    PublishedVersions,
    named_checkpoints,
    newest_usable,
    open_checkpoint,
)
from trainer_service.errors import CheckpointError
from trainer_service.ranks import join_ranks

OF = {"job": "job", "policy": "alice"}


def _save(root, step, *, keep=2, checkpoints=None, content=b"weights"):
    checkpoints = checkpoints or Checkpoints(root, **OF, keep=keep, ranks=join_ranks(0, 1))

    def write(folder):
        assert folder.name.startswith(".")
        (folder / "policy.bin").write_bytes(content)

    checkpoints.save(step, epoch=3, updates=2 * step, ledger=b"ledger", write=write)
    return checkpoints


def test_what_was_saved_is_opened(tmp_path):
    assert newest_usable(tmp_path / "none", **OF) is None
    _save(tmp_path, 50)
    checkpoint = newest_usable(tmp_path, **OF)
    assert checkpoint.folder == tmp_path / "step-000050"
    assert checkpoint.ledger() == b"ledger"
    manifest = checkpoint.manifest
    assert (manifest.policy, manifest.step, manifest.epoch, manifest.updates) == ("alice", 50, 3, 100)
    assert set(manifest.files) == {"policy.bin", "ledger.bin"}


def test_the_newest_are_kept_and_those_of_others_are_left_alone(tmp_path):
    foreign = tmp_path / "step-000999"
    foreign.mkdir()
    checkpoints = None
    for step in (1, 2, 3):
        checkpoints = _save(tmp_path, step, checkpoints=checkpoints)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003", "step-000999"]


def test_a_checkpoint_cut_short_has_no_name(tmp_path):
    checkpoints = Checkpoints(tmp_path, **OF, keep=2, ranks=join_ranks(0, 1))

    def write(folder):
        (folder / "policy.bin").write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(7, epoch=1, updates=7, ledger=b"", write=write)
    assert newest_usable(tmp_path, **OF) is None
    _save(tmp_path, 7, checkpoints=checkpoints)
    assert open_checkpoint(tmp_path / "step-000007", **OF).manifest.step == 7
    _save(tmp_path, 7, checkpoints=checkpoints, content=b"again")
    assert (tmp_path / "step-000007" / "policy.bin").read_bytes() == b"again"


def test_a_damaged_or_foreign_checkpoint_is_refused(tmp_path):
    _save(tmp_path, 1)
    (folder,) = named_checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match="of job 'job', not of 'other'"):
        open_checkpoint(folder, **OF | {"job": "other"})
    with pytest.raises(CheckpointError, match=r"of policy 'alice', not of 'bob'.*\(policy: alice\)"):
        open_checkpoint(folder, **OF | {"policy": "bob"})
    (folder / "policy.bin").write_bytes(b"weightz")
    with pytest.raises(CheckpointError, match=r"policy\.bin is missing or damaged"):
        open_checkpoint(folder, **OF)
    (folder / "policy.bin").unlink()
    with pytest.raises(CheckpointError, match=r"policy\.bin is missing or damaged"):
        open_checkpoint(folder, **OF)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"no readable manifest\.json"):
        open_checkpoint(folder, **OF)
    (folder / "manifest.json").write_text('{"schema": 1, "job": "job", "step": 1}')
    with pytest.raises(CheckpointError, match="schema 1; this version reads 2: finish the run with the"):
        open_checkpoint(folder, **OF)


def test_a_version_published_again_with_equal_weights_is_recognised(tmp_path):
    first = PublishedVersions(tmp_path)
    assert first.add(VersionTag("policy", 1, 4), "a") == []
    assert first.add(VersionTag("policy", 1, 5), "b") == []
    second = PublishedVersions(tmp_path)
    assert second.add(VersionTag("policy", 2, 4), "a") == [1]
    assert second.add(VersionTag("policy", 2, 5), "other") == []
    assert second.add(VersionTag("alice", 2, 4), "a") == []
    assert PublishedVersions(tmp_path).add(VersionTag("policy", 3, 4), "a") == [1, 2]


def test_what_a_checkpoint_covers_is_forgotten_and_a_torn_line_is_skipped(tmp_path):
    published = PublishedVersions(tmp_path)
    for version in range(4):
        published.add(VersionTag("policy", 1, version), str(version))
    published.forget_before(2)
    with published.path.open("ab") as file:
        file.write(b'{"epoch":1,"ver')
    again = PublishedVersions(tmp_path)
    assert again.add(VersionTag("policy", 2, 1), "1") == []
    assert again.add(VersionTag("policy", 2, 2), "2") == [1]
