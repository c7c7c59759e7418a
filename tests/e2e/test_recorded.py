"""The buffer's tools on finished runs."""

import json

import pyarrow.parquet as pq
import pytest

from tests.e2e.conftest import told_by

pytestmark = pytest.mark.slow


def test_recorded_batches_of_a_run_are_exported(finished, tmp_path):
    file = tmp_path / "batches.parquet"
    told_by("buffer", "export", finished("synchronous").folder, file, "--batches", "--steps", "3:6")
    assert pq.read_metadata(file).num_rows == 3 * 32


def test_a_finished_run_can_be_looked_at(finished):
    run = finished("synchronous").folder
    stats = json.loads(told_by("buffer", "stats", run, "--json"))["stats"]["policies"]["policy"]
    assert (stats["v_train"], stats["checkpoint"], stats["episodes_trained"]) == (10, 10, 320)
    assert "the buffer holds no group" in told_by("buffer", "peek", run)
