"""Rewards that are models: their files and limits are checked before anything is started."""

import json

import pytest

from areal_async.config.errors import ConfigError
from areal_async.config.load import load_job

JUDGE = {"name": "judge", "args": {"base_url": "http://127.0.0.1:8000/v1", "model": "m"}}


@pytest.fixture
def load(folder):
    def run(reward):
        path = folder / "job.yaml"
        path.write_text(path.read_text() + f"reward: {json.dumps(reward)}\n")
        return load_job(path)

    return run


@pytest.fixture
def grader(folder):
    model = folder / "grader"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForSequenceClassification"]}))
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "tokenizer.json").write_text("{}")
    return model


def test_files_are_beside_the_job_file_and_other_names_are_of_the_hub(load, grader, folder):
    job = load(
        {
            "name": "reward_model",
            "args": {"model": "grader"},
            "routes": [{"name": "reward_model", "args": {"model": "someone/some-reward-model"}}],
        }
    )
    assert job.reward.args["model"] == str(grader)
    assert job.reward.routes[0].args["model"] == "someone/some-reward-model"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda model: (model / "config.json").unlink(), "no readable config.json"),
        (lambda model: (model / "model.safetensors").unlink(), "pickled .bin files are never loaded"),
        (lambda model: (model / "tokenizer.json").unlink(), "has no tokenizer"),
        (
            lambda model: (model / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}'),
            "is no reward model",
        ),
    ],
)
def test_a_folder_that_is_no_reward_model_is_said(load, grader, spoil, says):
    spoil(grader)
    with pytest.raises(ConfigError, match=r"reward\.args\.model: ") as found:
        load({"name": "reward_model", "args": {"model": "./grader"}})
    assert says in str(found.value)
