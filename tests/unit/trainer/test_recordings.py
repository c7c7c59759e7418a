"""Recorded batches read back, from the run folder and from a parquet file, and damage found."""

from __future__ import annotations

import msgspec
import pyarrow.parquet as pq
import pytest

from areal_async.status.record import RunLog
from areal_async.trajectory.parquet import (
    PARTS,
    EpisodeWriter,
    ExportedEpisode,
    ExportError,
    read_episodes,
    read_facts,
)
from trainer_service.data.recording import write_step
from trainer_service.errors import BatchError
from trainer_service.recordings import FolderRecording, ParquetRecording, exported_rows, facts_of
from trainer_service.tools.compare import HEAD, Figures, Outcome, difference, line

STEPS = 3


@pytest.fixture
def run_dir(tmp_path, make_batch):
    """The folder of a run of three steps, whose weights' hashes are in its log."""
    folder = tmp_path / "run"
    folder.mkdir()
    with RunLog(folder / "metrics.jsonl") as log:
        for step in range(STEPS):
            batch, blobs = make_batch(step, max_staleness=1, groups=3)
            write_step(folder / "batches", batch, blobs, losses=[0.1 * step, -1 / 3], grad_norms=[1.5, 2.5])
            log.write("step", step=step, version=step + 1, weights_hash=f"blake3:{step}")
    return folder


@pytest.fixture
def parquet(run_dir, tmp_path):
    recording = FolderRecording(run_dir)
    with EpisodeWriter(tmp_path / "batches.parquet", "job") as file:
        for step in recording.steps:
            recorded = recording.read(step)
            for row in exported_rows(recorded):
                file.add(row)
            file.step(facts_of(recorded))
    return tmp_path / "batches.parquet"


def test_a_parquet_file_of_batches_gives_back_every_step_as_it_was_recorded(run_dir, parquet):
    folder, file = FolderRecording(run_dir), ParquetRecording(parquet)
    assert file.steps == folder.steps == [0, 1, 2]
    for step in file.steps:
        assert file.read(step) == folder.read(step)


def test_an_export_made_before_there_were_rewards_of_parts_is_read_without(parquet, tmp_path):
    table = pq.read_table(parquet)
    older = tmp_path / "older.parquet"
    pq.write_table(table.drop_columns(list(PARTS)), older)
    assert {episode.parts for episode in read_episodes(older)} == {None}
    assert any(episode.parts for episode in read_episodes(parquet))


def test_a_parquet_file_can_be_read_from_a_later_step_on(run_dir, parquet):
    assert ParquetRecording(parquet).read(2) == FolderRecording(run_dir).read(2)


def test_the_weights_of_each_step_come_from_the_run_log(run_dir):
    assert FolderRecording(run_dir).read(1).weights_hash == "blake3:1"


@pytest.mark.parametrize("place", [0, 40, 300, -1])
def test_a_changed_byte_of_an_episode_is_found_when_its_step_is_read(run_dir, place):
    path = run_dir / "batches" / "step-000001" / "episodes-0.bin"
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    recording = FolderRecording(run_dir)
    recording.read(0)
    with pytest.raises(BatchError, match=r"the recording of step 1 is damaged: episode data0000"):
        recording.read(1)


def test_a_manifest_that_says_something_else_of_an_episode_is_damaged(run_dir, make_batch):
    batch, blobs = make_batch(1, max_staleness=1, groups=3)
    batch.groups[0].episodes[0] = msgspec.structs.replace(batch.groups[0].episodes[0], n_sampled=99)
    write_step(run_dir / "batches", batch, blobs, losses=[0.0], grad_norms=[0.0])
    with pytest.raises(BatchError, match="step 1 is damaged: its manifest says"):
        FolderRecording(run_dir).read(1)


def test_a_step_that_a_crash_cut_short_is_not_recorded(run_dir):
    (run_dir / "batches" / "step-000002" / "step-0.msgpack").rename(
        run_dir / "batches" / "step-000002" / "step-0.tmp"
    )
    assert FolderRecording(run_dir).steps == [0, 1]


def test_a_run_without_recorded_batches_is_told_how_to_record_them(tmp_path):
    with pytest.raises(BatchError, match=r"set trainer\.record_batches: true"):
        FolderRecording(tmp_path)


def test_a_recording_of_another_schema_is_refused(run_dir):
    path = run_dir / "batches" / "step-000000" / "step-0.msgpack"
    record = msgspec.msgpack.decode(path.read_bytes())
    path.write_bytes(msgspec.msgpack.encode(record | {"schema": 9}))
    with pytest.raises(BatchError, match="has schema 9; this version reads 1"):
        FolderRecording(run_dir).read(0)


def test_a_file_of_single_episodes_is_no_recording(tmp_path, make_batch):
    _, blobs = make_batch()
    with EpisodeWriter(tmp_path / "some.parquet", "job") as file:
        file.add(ExportedEpisode(next(iter(blobs.values())), "", "SCORED", "STORED", [], None))
    with pytest.raises(BatchError, match="export with --batches"):
        ParquetRecording(tmp_path / "some.parquet")
    assert [row.reward for row in read_episodes(tmp_path / "some.parquet")] == [None]


def test_a_file_that_is_no_export_is_refused(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"not parquet")
    with pytest.raises(ExportError, match="cannot be read as parquet"):
        read_facts(tmp_path / "x.parquet")


def test_an_export_that_fails_leaves_nothing_and_replaces_nothing(tmp_path):
    path = tmp_path / "out.parquet"
    path.write_bytes(b"before")
    with pytest.raises(ExportError, match="add --overwrite"):
        EpisodeWriter(path, "job")
    with pytest.raises(ZeroDivisionError), EpisodeWriter(path, "job", overwrite=True):
        _ = 1 / 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.parquet"]
    assert path.read_bytes() == b"before"


def test_row_groups_are_written_as_they_fill_so_that_memory_stays_bounded(tmp_path, make_batch, monkeypatch):
    import pyarrow.parquet as pq

    _, blobs = make_batch()
    monkeypatch.setattr("areal_async.trajectory.parquet.ROW_GROUP_BYTES", 2000)
    with EpisodeWriter(tmp_path / "x.parquet", "job") as file:
        for blob in blobs.values():
            file.add(ExportedEpisode(blob, "", "SCORED", "STORED", [], None))
            assert file.held_bytes < 2000
    assert pq.ParquetFile(tmp_path / "x.parquet").metadata.num_row_groups > 3
    assert [row.blob for row in read_episodes(tmp_path / "x.parquet")] == list(blobs.values())


# --- comparing ---


def test_the_same_figures_do_not_differ_and_nan_is_nan():
    figures = Figures([0.1, float("nan")], [1.0, 2.0], "blake3:aa")
    assert difference(figures, Figures([0.1, float("nan")], [1.0, 2.0], "blake3:aa")) == ""
    assert difference(Figures([0.1], [1.0]), Figures([0.1], [1.0], "blake3:aa")) == "", "nothing was recorded"


def test_the_first_field_that_differs_is_named_with_all_its_digits():
    recorded = Figures([0.1, 0.2], [1.0, 2.0], "blake3:aa")
    nearly = 0.2 + 2**-54 * 1.0000001 + 2**-55
    assert difference(recorded, Figures([0.1, nearly], [1.0, 3.0], "blake3:bb")).startswith(
        "losses[1]: 0.2 is"
    )
    assert difference(recorded, Figures([0.1, 0.2], [1.0, 3.0])) == (
        "grad_norms[1]: 2.0 is recorded, 3.0 came out"
    )
    assert difference(recorded, Figures([0.1, 0.2], [1.0, 2.0], "blake3:bb")) == (
        "weights: aa is recorded, bb came out"
    )
    assert "2 minibatches are recorded, 1 were trained" in difference(recorded, Figures([0.1], [1.0]))


def test_a_line_shows_what_is_the_same_as_a_sign_of_equality():
    old = Figures([0.5], [2.0], "blake3:0123456789abcdef")
    same = line(Outcome(7, 32, old, old))
    assert same.split() == ["7", "32", "0.50000000", "=", "2.000000", "=", "0123456789", "="]
    other = line(Outcome(7, 32, old, Figures([0.25], [2.0], "blake3:ff")))
    assert other.split() == ["7", "32", "0.25000000", "0.50000000", "2.000000", "=", "ff", "0123456789"]
    assert len(HEAD.split()) == 8 + 1
