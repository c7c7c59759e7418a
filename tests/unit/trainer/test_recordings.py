"""Recorded batches and exported episodes read back, damage found."""

from types import SimpleNamespace

import msgspec
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from areal_async.base.verdicts import Parts
from areal_async.cli.tools import ExportRequest
from areal_async.data.images import digest_of
from areal_async.rpc.messages import BatchEpisode
from areal_async.trajectory.parquet import EpisodeWriter, ExportedEpisode, ExportError
from tests.scoring import episode_blob
from trainer_service.data.recording import Recording, read_step, write_step
from trainer_service.errors import BatchError
from trainer_service.tools import export

STEPS = 3


@pytest.fixture
def run_dir(tmp_path, make_batch):
    """The folder of a run with three recorded steps."""
    folder = tmp_path / "run"
    for step in range(STEPS):
        batch, blobs = make_batch(step, max_staleness=1, groups=3)
        write_step(folder / "batches", batch, blobs, minibatches=[(0.1 * step, 1.5), (-1 / 3, 2.5)])
    return folder


def test_exported_episodes_have_their_bytes_and_what_was_said_of_them_in_row_groups(
    tmp_path, make_batch, monkeypatch
):
    monkeypatch.setattr("areal_async.trajectory.parquet.ROW_GROUP_BYTES", 2000)
    _, blobs = make_batch()
    parts = Parts(segments={1: 0.5}, agents={"main": -1.0}, units=[0.25])
    with EpisodeWriter(tmp_path / "x.parquet", "job") as file:
        for place, blob in enumerate(blobs.values()):
            verdict = {"reward": 1.5, "components": {"a": 1.0}, "parts": parts} if place else {"reward": None}
            file.add(ExportedEpisode(blob, "sums", "SCORED", "VERDICT", [3], **verdict))
            assert file.held_bytes < 2000
    found = pq.read_table(tmp_path / "x.parquet").to_pylist()
    assert [row["blob"] for row in found] == list(blobs.values())
    assert [row["episode_id"] for row in found] == list(blobs)
    assert (found[0]["reward"], found[0]["parts"]) == (None, None)
    assert (found[1]["reward"], found[1]["components"], found[1]["steps"]) == (1.5, [("a", 1.0)], [3])
    assert msgspec.json.decode(found[1]["parts"], type=Parts) == parts
    assert pq.read_metadata(tmp_path / "x.parquet").num_row_groups > 3


def test_images_count_in_a_row_group_and_lost_ones_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("areal_async.trajectory.parquet.ROW_GROUP_BYTES", 3000)
    one, lost = b"x" * 2000, b"lost"
    blob, media = episode_blob(media=[one, lost]), {digest_of(one): one}
    with EpisodeWriter(tmp_path / "x.parquet", "job") as file:
        for _ in range(4):
            file.add(ExportedEpisode(blob, "sums", "SCORED", "VERDICT", [3], None, media=media))
    (row, *_) = pq.read_table(tmp_path / "x.parquet").to_pylist()
    found = [(one, digest_of(one)), (None, digest_of(lost))]
    assert row["images"] == [{"bytes": data, "path": name} for data, name in found]
    assert pq.read_metadata(tmp_path / "x.parquet").num_row_groups == 2


def test_recorded_batches_are_exported_with_their_images(tmp_path, monkeypatch, capsys):
    one = b"an image"
    entry = BatchEpisode("t#0.0", 0, 3, 1, 0, 0, 0.5)
    batch = SimpleNamespace(groups=[SimpleNamespace(data_source="sums", episodes=[entry])])
    recorded = SimpleNamespace(
        batch=batch, blobs={"t#0.0": episode_blob(media=[one])}, media={digest_of(one): one}
    )
    recording = SimpleNamespace(steps=[0], read=lambda step: recorded)
    monkeypatch.setattr(export, "Recording", lambda folder: recording)
    run = SimpleNamespace(folder=tmp_path, job=SimpleNamespace(job="job"))
    monkeypatch.setattr(export, "find_run", lambda name: run)
    export.main(ExportRequest("run", str(tmp_path / "x.parquet"), batches=True))
    (row,) = pq.read_table(tmp_path / "x.parquet").to_pylist()
    assert row["images"] == [{"bytes": one, "path": digest_of(one)}]


@pytest.mark.parametrize("place", [0, 40, 300, -1])
def test_a_changed_byte_of_an_episode_is_found_when_its_step_is_read(run_dir, place):
    path = run_dir / "batches" / "step-000001" / "episodes-0.bin"
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    recording = Recording(run_dir)
    assert recording.read(0).batch.step == 0
    with pytest.raises(BatchError, match=r"the recording of step 1 is damaged: episode data0000"):
        recording.read(1)


def test_a_manifest_that_says_something_else_of_an_episode_is_damaged(run_dir, make_batch):
    batch, blobs = make_batch(1, max_staleness=1, groups=3)
    batch.groups[0].episodes[0] = replace(batch.groups[0].episodes[0], n_sampled=99)
    write_step(run_dir / "batches", batch, blobs, minibatches=[(0.0, 0.0)])
    with pytest.raises(BatchError, match="step 1 is damaged: the batch names"):
        Recording(run_dir).read(1)


def test_a_step_that_a_crash_cut_short_is_not_recorded(run_dir):
    (run_dir / "batches" / "step-000002" / "step-0.msgpack").rename(
        run_dir / "batches" / "step-000002" / "step-0.tmp"
    )
    assert Recording(run_dir).steps == [0, 1]


def test_a_run_without_recorded_batches_is_told_how_to_record_them(tmp_path):
    with pytest.raises(BatchError, match=r"set trainer\.record_batches: true"):
        Recording(tmp_path)


def test_a_recording_of_another_schema_is_refused(run_dir):
    path = run_dir / "batches" / "step-000000" / "step-0.msgpack"
    record = msgspec.msgpack.decode(path.read_bytes())
    del record["batch"]["policy"]
    path.write_bytes(msgspec.msgpack.encode(record | {"schema": 1}))
    with pytest.raises(BatchError, match="has schema 1; this version reads 3: use it with the version"):
        Recording(run_dir).read(0)


def test_an_export_that_fails_leaves_nothing_and_replaces_nothing(tmp_path):
    path = tmp_path / "out.parquet"
    path.write_bytes(b"before")
    with pytest.raises(ExportError, match="add --overwrite"):
        EpisodeWriter(path, "job")
    with pytest.raises(ZeroDivisionError), EpisodeWriter(path, "job", overwrite=True):
        _ = 1 / 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.parquet"]
    assert path.read_bytes() == b"before"


def test_a_recorded_step_is_read_back_from_all_ranks(tmp_path, make_batch):
    batch, blobs = make_batch(2, max_staleness=2)
    ids = list(blobs)
    for rank, mine in enumerate((ids[::2], ids[1::2])):
        views = {name: memoryview(blobs[name]) for name in mine}
        more = {"media": {"blake3:aa": b"of both", f"blake3:{rank}": b"%d" % rank}, "rank": rank}
        write_step(tmp_path, batch, views, minibatches=[(0.5, 1.0), (-0.25, 2.0)], **more)
    step = read_step(tmp_path, 2)
    assert step.media == {"blake3:aa": b"of both", "blake3:0": b"0", "blake3:1": b"1"}
    assert step.batch == batch
    assert step.blobs == blobs
    assert (step.losses, step.grad_norms) == ([0.5, -0.25], [1.0, 2.0])


def test_an_incomplete_record_is_refused(tmp_path, make_batch):
    with pytest.raises(BatchError, match="no step is recorded"):
        read_step(tmp_path, 0)
    batch, blobs = make_batch(0)
    first = dict(list(blobs.items())[:3])
    write_step(tmp_path, batch, first, minibatches=[(0.0, 0.0)])
    with pytest.raises(BatchError, match=f"lacks {len(blobs) - 3} of its episodes"):
        read_step(tmp_path, 0)
    (tmp_path / "step-000000" / "step-0.msgpack").write_bytes(b"\xc1")
    with pytest.raises(BatchError, match="cannot be read"):
        read_step(tmp_path, 0)
