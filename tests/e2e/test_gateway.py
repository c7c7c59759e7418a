"""A job whose episodes are made by an agent that knows nothing but a base URL."""

import numpy as np
import pytest

from areal_async.trajectory import training_rows, unpack
from tests.e2e.kinds import AGENT_STEPS
from trainer_service.data.recording import read_step

pytestmark = pytest.mark.slow


def test_a_job_is_trained_on_what_an_agent_function_sampled(finished):
    run = finished("agent")
    calls = roots = 0
    versions = []
    for step in range(AGENT_STEPS):
        for blob in read_step(run.folder / "batches", step).blobs.values():
            episode = unpack(blob)
            metadata = episode.header.metadata
            calls += metadata["gateway_calls"]
            roots += metadata["roots"]
            assert metadata["gateway_calls"] == 6
            rows = training_rows(episode)
            assert sum(row.mask.sum() for row in rows) == episode.n_sampled
            versions += np.unique(episode.units.version[episode.units.mask == 1]).tolist()
    assert calls == AGENT_STEPS * 3 * 2 * 6
    assert roots >= AGENT_STEPS * 3 * 2
    assert len(set(versions)) > 1
    assert {record["n"] for record in run.records("evaluation")} == {4}
