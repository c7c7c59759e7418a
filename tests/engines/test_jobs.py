"""The quickstart's job, shortened, with a server as its engine and otherwise the same file: it learns,
nothing is lost or too old, and what it stored says truly which weights sampled each unit."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_async.cli.quickstart.main import prepare
from areal_async.trajectory import Episode, unpack
from tests.e2e.conftest import FinishedRun, Workspace
from tests.waiting import deadline_s
from trainer_service.data.recording import read_step

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

STEPS = 50
FAR = 20
"""From this version on the weights differ enough from the first for a wrong version to show."""
GROUPS, GROUP_SIZE, STALENESS = 64, 8, 1
"""The job file's own."""
SHORTENED = (
    f"trainer.steps={STEPS}",
    "trainer.record_batches=true",
    "checkpoint.every_steps=1",  # a worker may skip any version, so the weights of each are kept
    f"checkpoint.keep={STEPS}",
    f"evaluation.every_steps={STEPS}",
)
CERTAIN = 4.0
"""Standard errors by which the sampled reward must rise over the steps; 9 measured with either engine."""


def run_job(job_file: Path, *overrides: str) -> Path:
    """Run it from the command line, as a user would. Returns the run's folder."""
    words = [sys.executable, "-m", "areal_async.cli.main", "run", str(job_file), "--plain"]
    words += ["observe.metrics_port=0", *overrides]
    done = subprocess.run(words, capture_output=True, text=True, timeout=deadline_s(1500), check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return job_file.parent.parent


class Run(FinishedRun):
    def episodes(self, step: int) -> list[Episode]:
        return [unpack(blob) for blob in read_step(self.folder / "batches", step).blobs.values()]

    def network(self, version: int) -> Any:
        """A plain model with the weights after so many steps."""
        model = AutoModelForCausalLM.from_pretrained(self.weights(0), dtype=torch.float32).eval()
        for shard in self.weights(version).glob("policy-*.safetensors"):
            missing, unexpected = model.load_state_dict(load_file(shard), strict=False)
            assert not unexpected
            assert set(missing) <= {"lm_head.weight"}  # tied
        return model


@pytest.fixture(scope="session")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's folder with its data and its warm model: made once for all engines, and faster than
    the quickstart does, by looking at its accuracy half as often."""
    root = tmp_path_factory.mktemp("quickstart")
    prepare(root / "quickstart-files", seed=0)
    shortened = ("seed=0", "sft.evaluate_every=2", "sft.stop_between=[0.40, 0.55]")
    return run_job(root / "quickstart-files" / "warm_start.yaml", *shortened)


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def job(request: pytest.FixtureRequest, warm_start: Path) -> Run:
    engine = str(request.param)
    overrides = ("seed=0", f"job={engine}", f"rollout.engine={engine}", *SHORTENED)
    run_job(warm_start / "quickstart-files" / "train.yaml", *overrides)
    return Run(warm_start / engine, Workspace(warm_start / "quickstart-warm"))


@torch.inference_mode()
def gaps(model: Any, episode: Episode) -> np.ndarray:
    """f32 [T]: how far the stored log-prob of each unit is from that under `model`, in nats."""
    ids = torch.tensor(episode.units.token_id).long()
    temperature = episode.header.calls[0].sampling.temperature
    logits = model(input_ids=ids[None], use_cache=False).logits[0] / temperature
    found = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
    gap: np.ndarray = np.abs(np.concatenate([[0.0], found]) - episode.units.logprob)
    return gap


def test_it_learns(job: Run) -> None:
    rewards = [step["reward_mean"] for step in job.records("step")]
    (slope, _), spread = np.polyfit(range(STEPS), rewards, 1, cov=True)
    assert slope > CERTAIN * spread[0, 0] ** 0.5, rewards


def test_nothing_is_lost_and_nothing_is_too_old(job: Run) -> None:
    assert job.summary["steps"] == STEPS
    assert job.summary["episodes_trained"] == STEPS * GROUPS * GROUP_SIZE
    assert job.summary["episodes_dropped"] == 0
    assert job.summary["restarts"] == {}, job.logs()
    assert job.summary["max_staleness_seen"] <= STALENESS
    assert max(step["staleness_max"] for step in job.records("step")) <= STALENESS


def test_the_start_and_an_update_were_checked_against_the_trainer(job: Run) -> None:
    start, *updated = job.records("self_check")
    assert start["version"] == 0
    assert len(updated) <= 1  # none where no batch held units of the version that its step starts from
    assert all(check["version"] > 0 for check in updated)
    assert all(check["passed"] and check["max"] < 1e-3 for check in (start, *updated))


def test_stored_versions_are_true(job: Run) -> None:
    kept: Counter[int] = Counter()
    episodes = []
    for step in range(FAR, FAR + 10):
        for episode in job.episodes(step)[::4]:
            versions = episode.units.version[episode.units.mask == 1]
            assert (versions <= step).all()
            assert (step - versions <= STALENESS).all()
            assert {epoch for _, epoch in episode.header.epochs} == {job.records("step")[0]["epoch"]}
            kept.update(version for version in versions.tolist() if version >= FAR)
            episodes.append(episode)
    ((version, _),) = kept.most_common(1)
    marked, other = job.network(version), job.network(0)
    own, foreign = [], []
    for episode in episodes:
        if (units := (episode.units.mask == 1) & (episode.units.version == version)).any():
            own.append(gaps(marked, episode)[units])
            foreign.append(gaps(other, episode)[units])
    worst = np.concatenate(own)
    assert len(worst) > 100
    assert worst.max() < 1e-3
    assert np.median(np.concatenate(foreign)) > 1e-2  # else a wrong version would not show
