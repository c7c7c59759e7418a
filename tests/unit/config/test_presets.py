"""Presets fill in what the job file leaves out."""

import pytest
import yaml

from areal_async.config.load import dump_job, load_job
from areal_async.config.presets import PRESETS
from trainer_service.algorithms.objective import Objective


def preset(name):
    return f"trainer.objective.preset={name}"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_job_that_trains_and_loads_as_it_was_dumped(folder, name):
    """Asynchronously, as everything is by default: an uncorrected one would be refused."""
    job = load_job(folder / "job.yaml", [preset(name), "buffer.max_staleness=4"])
    Objective(job.trainer.objective, job)
    again = load_job(yaml.safe_load(dump_job(job)), source="dumped", base=folder)
    assert again == job


@pytest.mark.parametrize(
    ("text", "overrides", "loss"),
    [
        ("trainer: {objective: grpo}\n", [], "ppo"),
        ("", ["trainer.objective=gspo"], "gspo"),
        ("trainer: {objective: grpo}\n", ["trainer.objective=sapo"], "sapo"),
        ("trainer: {objective: grpo}\n", ["trainer.objective.loss=gspo"], "gspo"),
        ("", ["trainer.objective=grpo", "trainer.objective.loss=gspo"], "gspo"),
    ],
)
def test_a_word_as_the_objective_is_the_name_of_a_preset(folder, text, overrides, loss):
    path = folder / "job.yaml"
    path.write_text(path.read_text() + text)
    job = load_job(path, overrides)
    word = overrides[0].partition("objective=")[2] if overrides and text == "" else "grpo"
    assert job.trainer.objective.loss == loss
    assert job.trainer.objective.preset == ("sapo" if loss == "sapo" else word)


def test_what_the_job_file_and_its_overrides_say_stays(folder):
    (folder / "job.yaml").write_text(
        (folder / "job.yaml").read_text()
        + "trainer: {objective: {preset: dapo, loss_args: {clip_low: 0.1}, normaliser: rollout}}\n"
    )
    job = load_job(folder / "job.yaml", ["buffer.dynamic_filtering=false"])
    objective = job.trainer.objective
    assert objective.loss_args == {"clip_low": 0.1, "clip_high": 0.28}
    assert (objective.normaliser, job.buffer.dynamic_filtering) == ("rollout", False)


def test_arguments_of_a_part_go_with_the_part(folder):
    job = load_job(folder / "job.yaml", [preset("dapo"), "trainer.objective.loss=kimi"])
    assert (job.trainer.objective.loss, job.trainer.objective.loss_args) == ("kimi", {})


def test_presets_reach_beyond_the_objective_and_read_other_fields(folder):
    assert load_job(folder / "job.yaml", [preset("remax")]).rollout.greedy_baseline
    job = load_job(folder / "job.yaml", [preset("dr_grpo"), "rollout.sampling.max_new_tokens=99"])
    assert job.trainer.objective.normaliser_args == {"length": 99}


def test_a_preset_of_a_job_with_a_named_policy(folder):
    text = (folder / "job.yaml").read_text().replace("model: model\n", "")
    (folder / "job.yaml").write_text(
        text + "policies: {solver: {model: model, trainer: {objective: {preset: gspo}}}}\n"
    )
    assert load_job(folder / "job.yaml").trainer.objective.loss == "gspo"
