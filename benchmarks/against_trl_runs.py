"""Running each system of `against_trl.py` once.

All start from one model, train on one task file with one reward, and save their weights every few steps;
nothing is evaluated while they run. A `Run` has times from the beginning of training: of TRL's, the call of
`train` on a trainer that is built; of ours, the beginning of step 0, which waits for its first samples; of
the plain loop, the first sampling. What came before, from the start of the process on (imports, loading, for
ours the start of every service), is `start_s`. Seconds that the rivals spent on saving weights are taken off;
ours saves beside its steps.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from against_trl_held_out import rows_of
from metered import ROOT, Run, Saved, Setting, followed, measured
from transformers import AutoTokenizer

from areal_async.config.job import JobConfig
from areal_async.config.load import load_job
from areal_async.models.prompts import prompt_ids
from areal_async.service.record import as_it_became, read_run_log
from rollout_service.engines.local.engine import NO_PASSES, TERMS
from trainer_service.backends.base import learning_rate

Seconds = dict[str, tuple[float, float]]
"""Wall and core-seconds by part of the mathematics."""
TRL_PYTHON = ROOT / ".trl-env" / "bin" / "python"
MAX_STALENESS = 2
"""Bound of staleness of TRL's asynchronous trainer."""
CORES = len(os.sched_getaffinity(0))


def run_ours(setting: Setting, run: Run, overrides: Sequence[str]) -> tuple[Run, list[Saved]]:
    """Train by `areal-async run`, without an evaluator, with every checkpoint kept."""
    overrides = [
        *overrides,
        "job=against-trl",
        f"run_dir={setting.work}",
        f"seed={run.seed}",
        f"trainer.steps={setting.steps}",
        f"trainer.optimizer.lr={run.lr}",
        "tasks.evaluation=null",
        f"checkpoint.every_steps={setting.every_steps}",
        "checkpoint.keep=10000",
        "observe.metrics_port=0",
    ]
    command = [sys.executable, "-m", "areal_async.cli.main", "run", str(setting.job_file), *overrides]
    meter, started_s = followed(
        [*command, "--plain", "--overwrite"], setting.work / "ours.log", "launcher", PYTHONPATH=str(ROOT)
    )
    folder = setting.work / "against-trl"
    records = [r for r in as_it_became(read_run_log(folder / "metrics.jsonl")) if r["kind"] == "step"]
    ended_s = [record["time_s"] for record in records]
    began_s = ended_s[0] - records[0]["step_s"]
    counted = records[setting.warmup_steps :]
    run.staleness_mean = fmean(record["staleness_mean"] for record in counted)
    run.tokens_per_step = fmean(record["units"] for record in records)
    run.mathematics = own_mathematics(counted, read_run_log(folder / "metrics.jsonl"))
    saved = [
        Saved(step, ended_s[step - 1] - began_s, weights)
        for weights in sorted((folder / "checkpoints").glob("step-*/policy-00000-of-00001.safetensors"))
        for step in [int(weights.parent.name.removeprefix("step-"))]
    ]
    return measured(setting, run, meter, started_s, began_s, ended_s), saved


def own_mathematics(steps: Sequence[Mapping[str, Any]], log: Sequence[Mapping[str, Any]]) -> Seconds:
    """Return the mathematics of our own services per step: the engines' passes in CPU seconds of their
    threads, and the trainer's `update` by the clock. Each stands for both kinds of seconds."""
    update_s = fmean(record["phases"]["update"] for record in steps)
    loads = [record for record in log if record["kind"] == "load" and "rollout-0" in record["services"]]
    spent = [
        (load["steps"], sum(sum_of_passes(told) for told in load["services"].values()))
        for load in loads
        if load["steps"] >= steps[0]["step"]
    ]
    found = {"trainer": (update_s, update_s)}
    if len(spent) > 1 and spent[-1][0] > spent[0][0]:
        engine_s = (spent[-1][1] - spent[0][1]) / (spent[-1][0] - spent[0][0])
        found["engine"] = (engine_s, engine_s)
    return found


def sum_of_passes(service: Mapping[str, Any]) -> float:
    """Return the CPU seconds of a service's engine passes (`with_pass` of the local engine)."""
    passes: Sequence[float] = service.get("passes") or NO_PASSES
    return float(passes[-TERMS])


def trl_settings(setting: Setting, job: JobConfig, run: Run, chosen: Mapping[str, int]) -> dict[str, Any]:
    """What `against_trl_trainer.py` is given: the job file's step, and how TRL computes it (`chosen`)."""
    lora = job.trainer.lora
    optimizer = job.trainer.optimizer.model_copy(update={"lr": run.lr})
    episodes = job.buffer.batch_groups * job.rollout.group_size
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    rows = rows_of(job.tasks.train)
    return {
        "model": str(job.model),
        "tasks": [{"prompt": row["prompt"], "truth": row["reward_model"]["ground_truth"]} for row in rows],
        "prompt_ids": [prompt_ids(tokenizer, row["prompt"]) for row in rows],
        "reward": {"name": job.reward.name, "args": job.reward.args},
        "out": str(setting.work / "trl"),
        "threads": chosen["threads"],
        "every_steps": setting.every_steps,
        "rates": [learning_rate(optimizer, update, setting.steps) for update in range(setting.steps)],
        # Values of peft's LoraConfig. Its defaults begin as ours does: A uniform in ± 1/sqrt(in), B zero.
        "lora": lora.rank
        and {
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "target_modules": list(lora.targets) or "all-linear",
            "task_type": "CAUSAL_LM",
        },
        # Values of TRL's GRPOConfig.
        "config": {
            "seed": run.seed,
            "max_steps": setting.steps,
            # One update a step on fresh samples of the whole batch.
            "num_generations": job.rollout.group_size,
            "generation_batch_size": episodes,
            "per_device_train_batch_size": chosen["batch"],
            "gradient_accumulation_steps": episodes // chosen["batch"],
            "num_iterations": 1,
            "max_completion_length": job.rollout.sampling.max_new_tokens,
            "temperature": job.rollout.sampling.temperature,
            # The clipped ratio loss, averaged over the tokens of the update; no reference model.
            "loss_type": "dapo",
            "scale_rewards": "group",
            "beta": 0.0,
            "learning_rate": optimizer.lr,
            "adam_beta1": optimizer.betas[0],
            "adam_beta2": optimizer.betas[1],
            "adam_epsilon": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
            "max_grad_norm": optimizer.clip_grad_norm,
        },
    }


@dataclass(frozen=True)
class Rival:
    """A program that is given its settings as a file, and leaves `record.json` and weights in its folder."""

    program: str
    settings: Callable[[Setting, JobConfig, Run, Mapping[str, int]], dict[str, Any]]
    trl: bool = True
    """Whether it runs in TRL's environment."""


def async_settings(setting: Setting, job: JobConfig, run: Run, chosen: Mapping[str, int]) -> dict[str, Any]:
    """The same for `AsyncGRPOTrainer`. It has one loss, the clipped ratio, and averages it over a pass: only
    a pass of the whole batch gives the mean over the update's tokens."""
    settings = trl_settings(setting, job, run, chosen)
    fixed = ("generation_batch_size", "num_iterations", "loss_type", "scale_rewards", "beta")
    config = {name: value for name, value in settings["config"].items() if name not in fixed}
    config["max_staleness"] = MAX_STALENESS
    return {**settings, "config": config, "generate_threads": chosen["generate_threads"]}


def plain_settings(setting: Setting, job: JobConfig, run: Run, chosen: Mapping[str, int]) -> dict[str, Any]:
    overrides = [
        f"seed={run.seed}",
        f"trainer.steps={setting.steps}",
        f"trainer.optimizer.lr={run.lr}",
        "tasks.evaluation=null",
        "buffer.max_staleness=0",
    ]
    return {
        "job": str(setting.job_file),
        "overrides": overrides,
        "threads": chosen["threads"],
        "every_steps": setting.every_steps,
    }


RIVALS = {
    "trl": Rival("against_trl_trainer.py", trl_settings),
    "trl-async": Rival("against_trl_async.py", async_settings),
    "plain": Rival("plain_loop.py", plain_settings, trl=False),
}


def run_rival(setting: Setting, run: Run, chosen: Mapping[str, int]) -> tuple[Run, list[Saved]]:
    """Train by the rival `run.system`. `chosen` has its threads, and TRL's episodes of a pass."""
    rival = RIVALS[run.system]
    if rival.trl and not TRL_PYTHON.exists():
        raise SystemExit("TRL has no environment yet: run make trl-env")
    out = setting.work / run.system
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    settings = out / "settings.json"
    job = load_job(setting.job_file)
    settings.write_text(json.dumps({**rival.settings(setting, job, run, chosen), "out": str(out)}))
    meter, started_s = followed(
        [
            str(TRL_PYTHON if rival.trl else sys.executable),
            str(ROOT / "benchmarks" / rival.program),
            str(settings),
        ],
        setting.work / f"{run.system}.log",
        run.system,
        PYTHONPATH=str(ROOT),
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        TRL_EXPERIMENTAL_SILENCE="1",
        OMP_NUM_THREADS=str(chosen["threads"]),
    )
    record = json.loads((out / "record.json").read_text())
    began_s, ended_s, saving_s = record["began_s"], record["ended_s"], record["saving_s"]
    run.saving_s, run.settings = saving_s[-1], dict(chosen)
    run.staleness_mean, run.tokens_per_step = record.get("staleness", 0.0), record["tokens"]
    run.mathematics = per_step(record.get("mathematics", []), setting.warmup_steps)
    saved = [
        Saved(step, ended_s[step - 1] - saving_s[step - 1] - began_s, weights)
        for weights in sorted(out.glob("step-*.safetensors"))
        for step in [int(weights.stem.removeprefix("step-"))]
    ]
    return measured(setting, run, meter, started_s, began_s, ended_s), saved


def per_step(spent: Sequence[Mapping[str, Sequence[float]]], warmup: int) -> Seconds:
    """Return the mean wall and core-seconds per step after the warm-up, from sums after each step."""
    if not spent:
        return {}
    first, last, steps = spent[warmup - 1], spent[-1], len(spent) - warmup
    return {
        name: ((wall_s - first[name][0]) / steps, (cpu_s - first[name][1]) / steps)
        for name, (wall_s, cpu_s) in last.items()
    }
