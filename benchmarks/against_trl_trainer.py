"""TRL's side of `against_trl.py`: one training by `GRPOTrainer`, in TRL's own environment (`make trl-env`).

    .trl-env/bin/python benchmarks/against_trl_trainer.py SETTINGS.json

The settings are `against_trl_runs.trl_settings`. In `out` it writes `record.json` (unix times of the call of
`train` and of every step's end, and the seconds spent on saving until then) and `step-000025.safetensors` …
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from reward_service.sdk import RewardInput
from reward_service.verifiers.arithmetic import arithmetic

SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def rewards(completions: list[str], prompts: list[str], truth: list[str], **_: Any) -> list[float]:
    return [
        arithmetic(RewardInput(prompt=prompt, response=response, ground_truth=wanted))
        for prompt, response, wanted in zip(prompts, completions, truth, strict=True)
    ]


class Record(TrainerCallback):
    """Saves the weights every `every_steps` steps and notes when each step ended."""

    def __init__(self, out: Path, every_steps: int) -> None:
        self.out, self.every_steps = out, every_steps
        self.began_s = 0.0
        self.ended_s: list[float] = []
        self.saving_s: list[float] = []
        """Seconds of saving before the end of each step."""
        self._saved_s = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.ended_s.append(time.time())
        self.saving_s.append(self._saved_s)
        if state.global_step % self.every_steps == 0 or state.global_step == state.max_steps:
            begun_s = time.perf_counter()
            weights = {name: value.detach() for name, value in model.named_parameters()}
            save_file(weights, self.out / f"step-{state.global_step:06d}.safetensors")
            self._saved_s += time.perf_counter() - begun_s

    def write(self) -> None:
        record = {"began_s": self.began_s, "ended_s": self.ended_s, "saving_s": self.saving_s}
        (self.out / "record.json").write_text(json.dumps(record))


def config_of(settings: dict[str, Any]) -> GRPOConfig:
    """The same step as the job file's; what only costs time (saving, reports, checkpointing) is off."""
    optimizer, batch = settings["optimizer"], settings["groups"] * settings["group_size"]
    return GRPOConfig(
        output_dir=settings["out"],
        seed=settings["seed"],
        max_steps=settings["steps"],
        # One update a step on fresh samples of the whole batch.
        num_generations=settings["group_size"],
        generation_batch_size=batch,
        per_device_train_batch_size=settings["batch"],
        gradient_accumulation_steps=batch // settings["batch"],
        num_iterations=1,
        max_completion_length=settings["max_new_tokens"],
        temperature=settings["temperature"],
        # The clipped ratio loss, averaged over the tokens of the update; no reference model.
        loss_type="dapo",
        scale_rewards="group",
        beta=0.0,
        learning_rate=optimizer["lr"],
        adam_beta1=optimizer["betas"][0],
        adam_beta2=optimizer["betas"][1],
        adam_epsilon=optimizer["eps"],
        weight_decay=optimizer["weight_decay"],
        max_grad_norm=optimizer["clip_grad_norm"],
        lr_scheduler_type=SCHEDULES[optimizer["schedule"]],
        warmup_steps=optimizer["warmup_steps"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        use_vllm=False,
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=25,
    )


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["threads"])
    rows = [json.loads(line) for line in Path(settings["tasks"]).read_text().splitlines()]
    tasks = [{"prompt": row["prompt"], "truth": row["reward_model"]["ground_truth"]} for row in rows]
    record = Record(Path(settings["out"]), settings["every_steps"])
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        reward_funcs=rewards,
        args=config_of(settings),
        train_dataset=Dataset.from_list(tasks),
        callbacks=[record],
    )
    record.began_s = time.time()
    trainer.train()
    record.write()


if __name__ == "__main__":
    main()
