"""Running either system once, and evaluating what it saved: the parts of `against_trl.py`.

Both start from one model, train on one task file with one reward, and save their weights every few steps;
nothing is evaluated while they run. A `Run` has times from the beginning of training: of TRL's, the call of
`train` on a trainer that is built; of ours, the beginning of step 0, which waits for its first samples. What
came before, from the start of the process on (imports, loading, for ours the start of every service), is
`start_s`. Seconds that TRL spent on saving weights are taken off; ours saves beside its steps.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import torch
from against_trl_judge import Judge
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_async.config.job import JobConfig
from areal_async.config.load import load_job
from areal_async.models.prompts import prompt_ids
from areal_async.service.record import as_it_became, read_run_log
from areal_async.weights.adapter import PREFIX, BaseWeights
from trainer_service.backends.base import learning_rate
from trainer_service.backends.fsdp.lora import published_name

ROOT = Path(__file__).parent.parent
TRL_PYTHON = ROOT / ".trl-env" / "bin" / "python"
LIMIT_S = 3600.0
SAMPLE_S = 1.0


@dataclass(frozen=True)
class Saved:
    """Weights after `step` steps, `seconds` after the beginning of training."""

    step: int
    seconds: float
    weights: Path


@dataclass
class Run:
    system: str
    """`trl`, or a variant of ours such as `eta=4`."""
    seed: int
    lr: float
    start_s: float = 0.0
    s_per_step: float = 0.0
    saving_s: float = 0.0
    """Seconds taken off for saving."""
    cpu_per_step: dict[str, float] = field(default_factory=dict)
    """Core-seconds by process."""
    cores_elsewhere: float = 0.0
    """Cores that other programs of the machine had meanwhile, on average."""
    staleness_mean: float = 0.0
    points: list[tuple[int, float, float]] = field(default_factory=list)
    """(steps, seconds, held-out accuracy), from step 0 on."""


@dataclass(frozen=True)
class Setting:
    """What both systems are run with."""

    job_file: Path
    work: Path
    steps: int
    every_steps: int
    warmup_steps: int
    """Left out of seconds and CPU per step."""


class CpuMeter(threading.Thread):
    """The CPU time of a process and of all below it, once a second until `end`."""

    def __init__(self, pid: int, root_name: str) -> None:
        super().__init__(daemon=True)
        self._root, self._root_name = psutil.Process(pid), root_name
        self._seen: dict[tuple[int, float], tuple[str, float]] = {}
        self._ended = threading.Event()
        self.samples: list[tuple[float, dict[str, float]]] = []
        """Unix time, and core-seconds so far by process; `machine` is all that the machine did."""

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self._sample()

    def end(self) -> None:
        self._ended.set()
        self.join()

    def _sample(self) -> None:
        names = {self._root.pid: self._root_name}
        with suppress(psutil.Error):
            for process in [self._root, *self._root.children(recursive=True)]:
                with suppress(psutil.Error):
                    line, used = process.cmdline(), process.cpu_times()
                    name = names.get(process.ppid(), self._root_name)  # A parent comes before its children
                    if "--name" in line:
                        name = line[line.index("--name") + 1]
                    elif process.name().endswith("-server"):
                        name = "redis"
                    names[process.pid] = name
                    self._seen[process.pid, process.create_time()] = (name, used.user + used.system)
        cores = psutil.cpu_times()
        total = {"machine": cores.user + cores.nice + cores.system + cores.irq + cores.softirq}
        for name, cpu_s in self._seen.values():
            total[name] = total.get(name, 0.0) + cpu_s
        self.samples.append((time.time(), total))

    def between(self, begin_s: float, end_s: float) -> dict[str, float]:
        """Core-seconds by process from one unix time to another."""
        first, last = self._at(begin_s), self._at(end_s)
        return {name: last[name] - first.get(name, 0.0) for name in last}

    def _at(self, time_s: float) -> dict[str, float]:
        """Between two samples what was used grows evenly."""
        late = next((n for n, (when_s, _) in enumerate(self.samples) if when_s >= time_s), None)
        if late is None or late == 0:
            return self.samples[-1 if late is None else 0][1]
        (before_s, before), (after_s, after) = self.samples[late - 1], self.samples[late]
        share = (time_s - before_s) / (after_s - before_s)
        return {name: before.get(name, 0.0) + share * (after[name] - before.get(name, 0.0)) for name in after}


def measured(
    setting: Setting, run: Run, meter: CpuMeter, started_s: float, began_s: float, ended_s: Sequence[float]
) -> Run:
    """Fill in what the times of a training (unix seconds, `ended_s` of its steps) and its CPU say."""
    first_s, last_s = ended_s[setting.warmup_steps - 1], ended_s[-1]
    steps = len(ended_s) - setting.warmup_steps
    used = meter.between(first_s, last_s)
    machine_s = used.pop("machine")
    run.start_s = began_s - started_s
    run.s_per_step = (last_s - first_s) / steps
    run.cpu_per_step = {name: cpu_s / steps for name, cpu_s in sorted(used.items())}
    run.cores_elsewhere = max(0.0, machine_s - sum(used.values())) / (last_s - first_s)
    return run


def followed(command: Sequence[str], log: Path, name: str, **environment: str) -> tuple[CpuMeter, float]:
    """Run a command to its end with its output in `log`; returns its CPU and the unix time of its start.
    Raises SystemExit where it fails."""
    started_s = time.time()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=ROOT, env={**os.environ, **environment}
        )
        meter = CpuMeter(process.pid, name)
        meter.start()
        try:
            status = process.wait(LIMIT_S)
        finally:
            meter.end()
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(15)
                process.kill()
    if status:
        raise SystemExit(f"{name} failed with status {status}: see {log}")
    return meter, started_s


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
    run.staleness_mean = fmean(record["staleness_mean"] for record in records[setting.warmup_steps :])
    saved = [
        Saved(step, ended_s[step - 1] - began_s, weights)
        for weights in sorted((folder / "checkpoints").glob("step-*/policy-00000-of-00001.safetensors"))
        for step in [int(weights.parent.name.removeprefix("step-"))]
    ]
    return measured(setting, run, meter, started_s, began_s, ended_s), saved


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


def rows_of(tasks: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(tasks).read_text().splitlines()]


def run_trl(setting: Setting, run: Run, chosen: Mapping[str, int]) -> tuple[Run, list[Saved]]:
    """Train by TRL's GRPOTrainer in its own environment. `chosen`: `threads`, and `batch`, the episodes of a
    pass."""
    if not TRL_PYTHON.exists():
        raise SystemExit("TRL has no environment yet: run make trl-env")
    out = setting.work / "trl"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    settings = out / "settings.json"
    settings.write_text(json.dumps(trl_settings(setting, load_job(setting.job_file), run, chosen)))
    meter, started_s = followed(
        [str(TRL_PYTHON), str(ROOT / "benchmarks" / "against_trl_trainer.py"), str(settings)],
        setting.work / "trl.log",
        "trl",
        PYTHONPATH=str(ROOT),
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        OMP_NUM_THREADS=str(chosen["threads"]),
    )
    record = json.loads((out / "record.json").read_text())
    began_s, ended_s, saving_s = record["began_s"], record["ended_s"], record["saving_s"]
    run.saving_s = saving_s[-1]
    saved = [
        Saved(step, ended_s[step - 1] - saving_s[step - 1] - began_s, weights)
        for weights in sorted(out.glob("step-*.safetensors"))
        for step in [int(weights.stem.removeprefix("step-"))]
    ]
    return measured(setting, run, meter, started_s, began_s, ended_s), saved


class HeldOut:
    """The one function that evaluates both: greedy answers to the held-out tasks, scored by the job's
    reward."""

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
    adapter = {published_name(name.removeprefix(PREFIX)): tensor for name, tensor in tensors.items()}
    base = BaseWeights(Path(job.model), torch.float32)
    try:
        return dict(base.merged(adapter, lora.alpha / lora.rank))
    finally:
        base.close()
