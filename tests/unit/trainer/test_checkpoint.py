"""A checkpoint is complete or not there; a damaged one is refused."""

import signal
import threading

import pytest

from areal_async.base.versions import VersionTag
from tests.unit.trainer.forked_ranks import run_script
from tests.unit.trainer.saving import OF, made, save, steps_in
from tests.waiting import LIMIT_S
from trainer_service.checkpoint import (
    CheckpointReader,
    Measured,
    TrainerState,
    named_checkpoints,
    to_keep,
)
from trainer_service.errors import CheckpointError
from trainer_service.publications import PublishedVersions


def test_what_was_saved_is_opened(tmp_path):
    assert CheckpointReader(**OF).newest(tmp_path / "none") is None
    save(made(tmp_path), 50)
    checkpoint = CheckpointReader(**OF).newest(tmp_path)
    assert checkpoint.folder == tmp_path / "step-000050"
    assert checkpoint.ledger() == b"ledger"
    manifest = checkpoint.manifest
    named = (manifest.policy, manifest.step, manifest.epoch, manifest.updates)
    assert named == ("alice", 50, 3, {"policy": 100})
    assert set(manifest.files) == {"policy.bin", "ledger.bin"}


def test_the_newest_are_kept_and_those_of_others_are_left_alone(tmp_path):
    foreign = tmp_path / "step-000999"
    foreign.mkdir()
    save(made(tmp_path), 1, 2, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003", "step-000999"]


def test_the_best_are_kept_beside_the_newest_once_their_accuracy_is_known(tmp_path):
    measured, pending = [Measured(3, 1, 0.9)], {3}
    best = {"keep": 1, "best": 1, "measured": lambda: measured}
    checkpoints = made(tmp_path, **best, pending=lambda: pending)
    save(checkpoints, 1, 2, 3)
    assert steps_in(tmp_path) == [1, 3]
    save(checkpoints, 4)
    assert steps_in(tmp_path) == [1, 3, 4], "the evaluation of 3 is still to come"
    measured.append(Measured(2, 3, 1.0))
    pending.clear()
    checkpoints.prune()
    assert steps_in(tmp_path) == [1, 4], "an earlier trainer's version 3 had other weights"
    pending.add(5)
    save(checkpoints, 5)
    measured.append(Measured(4, 5, 0.9))
    pending.clear()
    save(checkpoints, 6)
    assert steps_in(tmp_path) == [5, 6], "of equal ones the newer; measured by a trainer that came back at it"
    again = made(tmp_path, **best)
    again.went_on_from(CheckpointReader(**OF).newest(tmp_path))
    save(again, 7)
    assert steps_in(tmp_path) == [5, 7]


@pytest.mark.parametrize(
    ("accuracy", "pending", "kept"),
    [
        ({}, set(), {8}),
        ({1: 0.5, 3: 0.5}, {5}, {1, 3, 5, 8}),
        ({1: 0.5, 3: 0.4, 5: 0.6, 6: 0.1}, {8, 9}, {1, 5, 8}),
    ],
)
def test_what_is_kept_is_bounded(accuracy, pending, kept):
    assert to_keep([1, 3, 5, 6, 8], accuracy, pending, keep=1, keep_best=2) == kept


def test_one_checkpoint_is_written_at_a_time_and_training_goes_on_meanwhile(tmp_path):
    checkpoints = made(tmp_path)
    release, order = threading.Event(), []

    def held(step):
        def copies(folder):
            order.append(f"copy {step}")

            def write():
                assert release.wait(LIMIT_S)
                order.append(f"write {step}")
                return {}

            return write

        return copies

    checkpoints.begin(TrainerState(1, 1, {"policy": 1}, held(1), durable=lambda: order.append("durable 1")))
    assert named_checkpoints(tmp_path) == [], "what is being written has no name"
    threading.Timer(0.05, release.set).start()
    checkpoints.begin(TrainerState(2, 1, {"policy": 2}, held(2)))
    checkpoints.wait()
    assert order == ["copy 1", "write 1", "durable 1", "copy 2", "write 2"]


KILLED = """
import pathlib, sys
from areal_async.base.events import arm
from tests.unit.trainer.saving import made, save
root = pathlib.Path(sys.argv[1])
checkpoints = save(made(root), 1)
arm("trainer.mid_checkpoint")
save(checkpoints, 2)
"""


def test_a_trainer_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    root = tmp_path / "checkpoints"
    run_script(tmp_path / "killed.py", root, status=-signal.SIGKILL)
    assert CheckpointReader(**OF).newest(root).manifest.step == 1
    assert (root / ".step-000002.tmp").exists()
    save(made(root), 2)
    assert sorted(path.name for path in root.iterdir()) == ["step-000001", "step-000002"]


def test_a_checkpoint_cut_short_has_no_name(tmp_path):
    checkpoints = made(tmp_path)

    def half(folder):
        def write():
            (folder / "policy.bin").write_bytes(b"half")
            raise OSError("disk full")

        return write

    checkpoints.begin(TrainerState(7, 1, {"policy": 7}, half))
    for _ in range(2):  # whoever looks after it ends by it
        with pytest.raises(OSError, match="disk full"):
            checkpoints.wait()
    assert CheckpointReader(**OF).newest(tmp_path) is None
    checkpoints = save(made(tmp_path), 7)
    assert CheckpointReader(**OF).open(tmp_path / "step-000007").manifest.step == 7
    save(checkpoints, 7, content=b"again")
    assert (tmp_path / "step-000007" / "policy.bin").read_bytes() == b"again"


def test_a_damaged_or_foreign_checkpoint_is_refused(tmp_path):
    save(made(tmp_path), 1)
    (folder,) = named_checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match="of job 'job', not of 'other'"):
        CheckpointReader(**OF | {"job": "other"}).open(folder)
    with pytest.raises(CheckpointError, match=r"of policy 'alice', not of 'bob'.*\(policy: alice\)"):
        CheckpointReader(**OF | {"policy": "bob"}).open(folder)
    for harm in (lambda file: file.write_bytes(b"weightz"), lambda file: file.unlink()):
        harm(folder / "policy.bin")
        with pytest.raises(CheckpointError, match=r"policy\.bin is missing or damaged"):
            CheckpointReader(**OF).open(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"no readable manifest\.json"):
        CheckpointReader(**OF).open(folder)
    (folder / "manifest.json").write_text('{"schema": 1, "job": "job", "step": 1}')
    with pytest.raises(CheckpointError, match="schema 1; this version reads 3: finish the run with the"):
        CheckpointReader(**OF).open(folder)


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


def test_a_trainer_that_goes_back_counts_no_checkpoint_of_the_steps_that_it_left(tmp_path):
    save(made(tmp_path), 1, 2)
    save(made(tmp_path), 3, 4)
    assert steps_in(tmp_path) == [1, 2, 3, 4]
    back = made(tmp_path)
    back.went_on_from(CheckpointReader(**OF).open(tmp_path / "step-000002"))
    assert back.newest == 2
    assert save(back, 3).newest == 3
    assert steps_in(tmp_path) == [2, 3, 4], "the oldest of two goes"
