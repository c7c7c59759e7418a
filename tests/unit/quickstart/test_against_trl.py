"""What `benchmarks/against_trl.py` makes of the runs that it measured."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from against_trl import MODELS, variants
from against_trl_held_out import HeldOut, whole
from against_trl_judge import Judge
from against_trl_report import crossed_at, draw, first_at, learned_better, tables
from against_trl_runs import trl_settings
from against_trl_trainer import require_same_prompts, rewards_of, scheduler_of
from metered import CpuMeter, Run, Setting, followed
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_async.config.job import JobConfig
from areal_async.config.load import load_job
from areal_async.weights.adapter import PREFIX
from reward_service.sdk import RewardInput, load_reward
from tests.unit.quickstart.conftest import CHATS, CURVE, row_of

THRESHOLDS = MODELS["quickstart"].thresholds


def run_of(system: str, seed: int, pace: float, reaches: float = 0.81) -> Run:
    points = [(step, seconds * pace, min(accuracy, reaches)) for step, seconds, accuracy in CURVE]
    return Run(
        system, seed, 1e-4, start_s=5.0, s_per_step=0.4 * pace, cpu_per_step={system: 0.5}, points=points
    )


def test_a_threshold_counts_from_the_first_checkpoint_above_it_or_from_an_even_rise_between_two() -> None:
    assert [first_at(CURVE, share) for share in (0.70, 0.75, 0.82)] == [(50, 20.0), (50, 20.0), None]
    assert crossed_at(CURVE, 0.70) == pytest.approx((37.5, 15.0))
    assert [crossed_at(CURVE, share) for share in (0.45, 0.82)] == [(0, 0.0), None]


def test_the_better_learning_rate_comes_farther_and_then_sooner() -> None:
    soon_but_low = [(0, 0.0, 0.45), (25, 10.0, 0.79)]
    late = [(0, 0.0, 0.45), (100, 40.0, 0.69), (125, 50.0, 0.81)]
    assert max([soon_but_low, late, CURVE], key=lambda points: learned_better(points, THRESHOLDS)) is CURVE


def rows_of(text: str, *begins: str) -> list[list[str]]:
    """Return the further cells of the rows that begin so, of all tables."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [row[len(begins) :] for row in rows if row[: len(begins)] == list(begins)]


def test_ratios_are_of_the_means_and_of_each_seed() -> None:
    text = tables(
        [run_of("eta=4", 0, 1.0), run_of("trl", 0, 2.0), run_of("trl", 1, 4.0), run_of("eta=4", 1, 2.0)],
        THRESHOLDS,
    )
    seconds, ratios = rows_of(text, "0.70", "interpolated, from the start of training")
    assert (seconds, ratios) == (["22.5", "45.0"], ["0.50 (trl)", "0.50 (0.50, 0.50)"])
    seconds, ratios = rows_of(text, "0.70", "at the first checkpoint, from the start of training")
    assert (seconds, ratios) == (["30.0", "60.0"], ["0.50 (trl)", "0.50 (0.50, 0.50)"])
    assert rows_of(text, "0.70", "interpolated, from the start of the process")[0] == ["27.5", "50.0"]
    assert row_of(text, "0.70", "interpolated")[2:] == ["37", "37", "1.00 (1.00, 1.00)"]


def test_a_system_of_which_a_run_fell_short_has_no_mean() -> None:
    text = tables(
        [run_of("eta=4", 0, 1.0), run_of("eta=4", 1, 1.0, reaches=0.78), run_of("trl", 0, 1.0)], THRESHOLDS
    )
    seconds, ratios = rows_of(text, "0.80", "interpolated, from the start of training")
    assert (seconds, ratios) == (["1 of 2 came there", "38.9"], ["– (trl)", "–"])


def test_steps_are_compared_with_synchronous_training_where_it_ran() -> None:
    text = tables([run_of("eta=4", 0, 1.0), run_of("eta=0", 0, 1.0)], THRESHOLDS)
    assert "| held-out accuracy | steps | eta=4 | eta=0 | eta=4 over eta=0 |" in text


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "images" / "against.png"
    draw([run_of("eta=4", 0, 1.0), run_of("eta=0", 0, 1.5), run_of("trl", 0, 2.0)], THRESHOLDS, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_variants_name_their_bound_and_their_pacing() -> None:
    first, second = variants("eta=0,eta=4:full", "fresh", ["rollout.torch_threads=2"])
    assert first.overrides == ("rollout.torch_threads=2", "buffer.max_staleness=0", "buffer.pacing=fresh")
    assert (second.name, second.overrides[-1]) == ("eta=4, full", "buffer.pacing=full")


def test_cpu_is_counted_by_process_with_that_of_children_that_ended() -> None:
    meter = CpuMeter(os.getpid(), "test")
    meter.samples = [
        (100.0, {"machine": 10.0, "trainer": 1.0}),
        (102.0, {"machine": 14.0, "trainer": 3.0, "late": 1.0}),
    ]
    assert meter.between(101.0, 102.0) == {"machine": 2.0, "trainer": 1.0, "late": 0.5}


def test_a_run_that_fails_ends_the_measurement(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="failed with status 3"):
        followed([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log", "trl")


def settings_of(job: JobConfig) -> dict[str, Any]:
    setting = Setting(Path("job.yaml"), Path("work"), steps=6, every_steps=3, warmup_steps=1)
    return trl_settings(setting, job, Run("trl", 3, 2e-4), {"threads": 2, "batch": 8})


def test_both_systems_and_the_evaluation_give_the_model_the_same_prompts(chats: JobConfig) -> None:
    settings = settings_of(chats)
    tokenizer = AutoTokenizer.from_pretrained(chats.model)
    texts = [tokenizer.decode(ids) for ids in settings["prompt_ids"]]
    assert texts == ["user=7+6=;assistant=", "system=add;user=11-2=;assistant=", "1+1="]
    assert HeldOut(chats).prompt_ids == settings["prompt_ids"]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_prompt_with_another_token_is_refused(chats: JobConfig, place: int) -> None:
    settings = settings_of(chats)
    ids = [list(each) for each in settings["prompt_ids"]]
    trl = SimpleNamespace(_tokenize_prompts=lambda prompts: (ids, None, {}))
    require_same_prompts(trl, settings)
    ids[place].append(1)
    with pytest.raises(SystemExit, match="TRL's tokens of"):
        require_same_prompts(trl, settings)


@pytest.mark.parametrize(
    ("name", "args", "answer", "value"),
    [
        ("gsm8k", {"flexible": True}, "The answer is 13.", 1.0),
        ("gsm8k", {"flexible": True}, "13 or 14", 0.0),
        ("gsm8k", {}, "The answer is 13.", 0.0),
        ("gsm8k", {}, "#### 13", 1.0),
        ("arithmetic", {}, "7 + 6 = 13", 1.0),
        ("exact_match", {}, "12", 0.0),
    ],
)
def test_trl_scores_texts_and_chats_by_the_reward_of_the_job(
    chats: JobConfig, name: str, args: dict[str, Any], answer: str, value: float
) -> None:
    given = RewardInput(response=answer, ground_truth="13")
    assert load_reward(name)(given, **args) == value  # type: ignore[call-arg]
    rewards = rewards_of(Judge(AutoTokenizer.from_pretrained(chats.model), name, args))
    spoken = [{"role": "assistant", "content": answer}]
    assert rewards([spoken, answer], [CHATS[0], CHATS[2]], ["13", "13"], trainer_state=None) == [value] * 2


def test_every_update_of_trl_has_the_rate_of_the_job(chats: JobConfig) -> None:
    settings = settings_of(chats)
    assert settings["rates"] == pytest.approx([5e-5, 1e-4, 1.5e-4, 2e-4, 2e-4, 0.0])
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=settings["config"]["learning_rate"])
    scheduler, seen = scheduler_of(optimizer, settings["rates"]), []
    for _ in settings["rates"]:
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert seen == pytest.approx(settings["rates"])


def test_the_recipe_of_smollm2_is_given_to_trl_as_it_is(chats: JobConfig) -> None:
    recipe = load_job(MODELS["smollm2"].job, files=False)
    settings = settings_of(recipe.model_copy(update={"model": chats.model, "tasks": chats.tasks}))
    config = settings["config"]
    assert (config["num_generations"], config["generation_batch_size"]) == (8, 64)
    assert config["per_device_train_batch_size"] * config["gradient_accumulation_steps"] == 64
    assert (config["max_completion_length"], config["temperature"]) == (32, 1.0)
    assert (config["max_grad_norm"], config["weight_decay"], config["adam_beta2"]) == (0.5, 0.0, 0.999)
    assert settings["reward"] == {"name": "gsm8k", "args": {"flexible": True}}
    assert settings["lora"]["lora_alpha"] / settings["lora"]["r"] == 2.0


def test_adapters_begin_and_count_the_same_in_trl(chats: JobConfig) -> None:
    base = AutoModelForCausalLM.from_pretrained(chats.model)
    theirs = get_peft_model(base, LoraConfig(**settings_of(chats)["lora"]))
    trained = {name: value for name, value in theirs.named_parameters() if value.requires_grad}
    assert not [name for name in trained if "lm_head" in name]
    for name, value in trained.items():
        bound = 0.0 if ".lora_B." in name else 1 / math.sqrt(value.shape[1])
        assert value.abs().max() <= bound
        torch.nn.init.normal_(value)
    named = {name: value.detach().clone() for name, value in trained.items()}
    merged = theirs.merge_and_unload().state_dict()
    for tensors in (named, {name.removeprefix(PREFIX): value for name, value in named.items()}):
        ours = whole(chats, tensors)
        assert ours.keys() == merged.keys() - {"lm_head.weight"}
        for name, value in ours.items():
            torch.testing.assert_close(value, merged[name])


def test_weights_without_adapters_are_evaluated_as_they_are(chats: JobConfig) -> None:
    weights = {"model.norm.weight": torch.ones(2)}
    assert whole(chats, weights) is weights
    assert HeldOut(chats).accuracy(Path(chats.model) / "model.safetensors") == 0.0
