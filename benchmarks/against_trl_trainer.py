"""TRL's side of `against_trl.py`: one training by `GRPOTrainer`, in TRL's own environment (`make trl-env`).

    .trl-env/bin/python benchmarks/against_trl_trainer.py SETTINGS.json

The settings are `against_trl_runs.trl_settings`. In `out` it writes `record.json` (unix times of the call of
`train` and of every step's end, and the seconds spent on saving until then) and `step-000025.safetensors` …
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from against_trl_judge import Judge
from safetensors.torch import save_file
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback


def rewards_of(judge: Judge) -> Callable[..., list[float]]:
    """The function that TRL calls. A completion is a text, or for a chat a list of one message."""

    def rewards(completions: list[Any], prompts: list[Any], truth: list[str], **_: Any) -> list[float]:
        answers = [each if isinstance(each, str) else each[0]["content"] for each in completions]
        return [judge(*each) for each in zip(prompts, answers, truth, strict=True)]

    return rewards


def scheduler_of(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> LambdaLR:
    """Gives every update the job's rate; TRL's own schedules warm up one update later."""
    peak = optimizer.param_groups[0]["lr"]
    return LambdaLR(optimizer, lambda update: rates[min(update, len(rates) - 1)] / peak)


def require_same_prompts(trainer: Any, settings: Mapping[str, Any]) -> None:
    """Raise SystemExit unless `trainer` gives its model the token ids that our side gives."""
    ids, *_ = trainer._tokenize_prompts([task["prompt"] for task in settings["tasks"]])
    for task, theirs, ours in zip(settings["tasks"], ids, settings["prompt_ids"], strict=True):
        if theirs != ours:
            raise SystemExit(f"TRL's tokens of {task['prompt']!r} are {theirs}, and ours are {ours}")


class Record(TrainerCallback):
    """Saves what is trained every `every_steps` steps and notes when each step ended."""

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
            weights = {
                name: value.detach() for name, value in model.named_parameters() if value.requires_grad
            }
            save_file(weights, self.out / f"step-{state.global_step:06d}.safetensors")
            self._saved_s += time.perf_counter() - begun_s

    def write(self, **more: float) -> None:
        record = {"began_s": self.began_s, "ended_s": self.ended_s, "saving_s": self.saving_s, **more}
        (self.out / "record.json").write_text(json.dumps(record))


def main() -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["threads"])
    record = Record(Path(settings["out"]), settings["every_steps"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=rewards_of(Judge(tokenizer, **settings["reward"])),
        args=GRPOConfig(
            output_dir=settings["out"],
            **settings["config"],
            # What only costs time (saving, reports, checkpointing) is off.
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            use_vllm=False,
            save_strategy="no",
            eval_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=25,
        ),
        train_dataset=Dataset.from_list(settings["tasks"]),
        peft_config=LoraConfig(**settings["lora"]) if settings["lora"] else None,
        callbacks=[record],
    )
    trainer.lr_scheduler = scheduler_of(trainer.create_optimizer(), settings["rates"])
    record.began_s = time.time()
    trainer.train()
    require_same_prompts(trainer, settings)  # on nobody's clock
    record.write(tokens=trainer.state.num_input_tokens_seen / len(record.ended_s))


if __name__ == "__main__":
    main()
