"""Evaluation of saved weights, by one function for every system of `against_trl.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from against_trl_judge import Judge
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_async.config.job import JobConfig
from areal_async.models.prompts import prompt_ids
from areal_async.weights.adapter import PREFIX, BaseWeights
from trainer_service.backends.fsdp.lora import ADAPTER


def rows_of(tasks: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(tasks).read_text().splitlines()]


class HeldOut:
    """Greedy answers to the held-out tasks, scored by the job's reward."""

    def __init__(self, job: JobConfig) -> None:
        assert job.tasks.evaluation is not None
        self._rows = rows_of(job.tasks.evaluation)
        self._tokenizer = AutoTokenizer.from_pretrained(job.model, padding_side="left")
        self.prompt_ids = [prompt_ids(self._tokenizer, row["prompt"]) for row in self._rows]
        self._judge = Judge(self._tokenizer, job.reward.name, job.reward.args)
        self._job = job
        self._model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32).eval()

    def accuracy(self, weights: Path) -> float:
        """Share of right answers with the weights in a safetensors file: adapters, or the whole model, of
        which a tied output layer may be left out. It names tensors as the model does, or as peft."""
        loaded = self._model.load_state_dict(whole(self._job, load_file(weights)), strict=False)
        if loaded.unexpected_keys or set(loaded.missing_keys) - {"lm_head.weight"}:
            raise SystemExit(f"{weights} is of another model: {loaded}")
        self._model.tie_weights()
        given = self._tokenizer.pad({"input_ids": self.prompt_ids}, return_tensors="pt")
        with torch.inference_mode():
            answered = self._model.generate(
                input_ids=given["input_ids"],
                attention_mask=given["attention_mask"],
                do_sample=False,
                max_new_tokens=self._job.rollout.sampling.max_new_tokens,
            )
        answers = self._tokenizer.batch_decode(
            answered[:, given["input_ids"].shape[1] :], skip_special_tokens=True
        )
        scored = zip(self._rows, answers, strict=True)
        return fmean(
            self._judge(row["prompt"], answer, row["reward_model"]["ground_truth"]) for row, answer in scored
        )


def whole(job: JobConfig, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """`tensors`, or where they are adapters the job's model merged with them, in fp32."""
    lora = job.trainer.lora
    if not any(".lora_A." in name for name in tensors):
        return tensors
    adapter = {
        PREFIX + name.removeprefix(PREFIX).replace(f".{ADAPTER}.weight", ".weight"): tensor
        for name, tensor in tensors.items()
    }
    base = BaseWeights(Path(job.model), torch.float32)
    try:
        return dict(base.merged(adapter, lora.alpha / lora.rank))
    finally:
        base.close()
