"""A job whose rewards come from a sequence-classification model: it learns what the model likes, every score
is the model's, and the death of the model's process costs time alone."""

import signal

import numpy as np
import pytest
import torch

from areal_async.trajectory import unpack
from tests.graders import share_of_ones, write_trained_reward_model
from tests.processes import words_of
from tests.unit.reward_models.tiny import bare_scores
from trainer_service.data.recording import read_step

pytestmark = pytest.mark.slow

torch.set_num_threads(1)
STEPS = 24


@pytest.fixture(scope="module")
def job_file(workspace):
    write_trained_reward_model(workspace.folder / "grader")
    return workspace.job(
        "reward-model",
        evaluated=True,
        reward={
            "name": "reward_model",
            "args": {"model": "grader", "template": "={response}", "device": "cpu", "max_batch": 16},
            "timeout_s": 30,
        },
        trainer__steps=STEPS,
        trainer__optimizer={"lr": 2e-3, "clip_grad_norm": 1.0},
        evaluation={"every_steps": STEPS, "sampling": {"temperature": 0.0, "max_new_tokens": 8}},
    )


def model_process(service):
    return next(p for p in service.children() if "reward_service.pool.worker" in words_of(p))


@pytest.mark.nightly
def test_a_job_learns_what_its_reward_model_likes(job_file, running, workspace):
    with running("run", job_file) as job:
        job.wait_for_steps(4)
        model_process(job.service("reward")).send_signal(signal.SIGKILL)
        run = job.end()
    rewards = [step["reward_mean"] for step in job.steps()]
    assert len(rewards) == STEPS
    assert run.summary["episodes_dropped"] == 0
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.05

    given = []
    texts = []
    for step in range(STEPS):
        record = read_step(job.folder / "batches", step)
        for episode in (episode for group in record.batch.groups for episode in group.episodes):
            given.append(episode.reward)
            texts.append(unpack(record.blobs[episode.episode_id]).header.response_text)
    # Every score is the model's own of its episode: none is mixed up, no zero stands for a call that died.
    expected = bare_scores(workspace.folder / "grader", [f"={text}" for text in texts])
    assert given == pytest.approx(expected, abs=1e-3)
    assert np.mean(np.abs(np.array(given) - [share_of_ones(text) for text in texts])) < 0.05
