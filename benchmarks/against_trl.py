"""Time to the same held-out accuracy: this system against TRL's synchronous GRPOTrainer on the same cores.

    make trl-env
    python benchmarks/against_trl.py --sweep         TRL's settings and both learning rates, into the results
    python benchmarks/against_trl.py                 three seeds of each in turns: tables and picture
    python benchmarks/against_trl.py --ours-only --ours eta=0,eta=1,eta=4 --pacing full
    python benchmarks/against_trl.py --report        the tables and the picture of the results that are there
    python benchmarks/against_trl.py --model smollm2 with another row of `MODELS`; --sweep first

Needs the row's files: run `make quickstart` or `make smollm2` first. Both start from the job file's model,
train on its tasks with its chat template, reward, group and batch sizes, temperature, optimizer, schedule,
loss and adapters, in fp32, and differ in who computes them. Their learning rates come from one sweep, or are
the job file's where the row has no rates; TRL's threads and passes are those found fastest.
One run at a time; the order changes with every seed. Weights saved every `--every` steps are evaluated after
the run by one function, so evaluation is on nobody's clock: ours runs without its evaluator.

Seconds count from the beginning of training, and beside it from the start of the process; the head of
`against_trl_runs.py` says from which moment on exactly.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from against_trl_report import draw, learned_better, tables
from against_trl_runs import ROOT, HeldOut, Run, Setting, run_ours, run_trl

from areal_async.config.load import load_job

SWEEP_SEED = 1000
"""Of the sweep, so that no measured seed has chosen its own learning rate."""
MOST_BUSY = 0.3
"""Cores that other programs may have before a run."""
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Model:
    """The settings of one of the trainings that are compared."""

    job: Path
    out: str
    """Its results, in `results`."""
    picture: str | None
    """Its name in docs/images, if it has one."""
    ours: str
    """Variants of ours."""
    thresholds: tuple[float, ...]
    """Held-out accuracies to which seconds and steps are counted."""
    every: int
    """Steps between two evaluated weights."""
    warmup_steps: int
    """Left out of seconds and CPU per step."""
    rates: str
    """Learning rates of the sweep; none keeps the job file's."""
    threads: tuple[int, ...]
    batches: tuple[int, ...]
    """Threads of TRL and episodes of its passes that are tried; the last where no sweep has found others."""
    timed_steps: int
    """Steps of a run that only times TRL's settings."""


MODELS = {
    "quickstart": Model(
        job=Path("runs/quickstart-files/train.yaml"),
        out="against_trl.json",
        picture="against_trl.png",
        ours="eta=4",
        thresholds=(0.70, 0.80, 0.88),
        every=25,
        warmup_steps=10,
        rates="6e-5,9e-5,1.2e-4,1.8e-4",
        threads=tuple(sorted({1, CORES})),
        batches=(128, 256, 512),
        timed_steps=30,
    ),
    "smollm2": Model(
        job=Path("recipes/smollm2/job.yaml"),
        out="against_trl_smollm2.json",
        picture=None,
        ours="eta=2",
        thresholds=(0.60, 0.70, 0.80),
        every=5,
        warmup_steps=2,
        rates="",
        threads=(CORES,),
        batches=(16, 32, 64),
        timed_steps=4,
    ),
}


@dataclass(frozen=True)
class System:
    """`trl`, or a variant of ours: the job file with `overrides`."""

    name: str
    overrides: tuple[str, ...] = ()

    @property
    def is_trl(self) -> bool:
        return self.name == "trl"


def variants(text: str, pacing: str, overrides: Sequence[str]) -> list[System]:
    """The systems of `eta=0,eta=4:full`: a bound of staleness, and how far generation runs ahead in it."""
    found = []
    for name in text.split(","):
        bound, _, paced = name.removeprefix("eta=").partition(":")
        paced = paced or pacing
        own = [f"buffer.max_staleness={int(bound)}", *([f"buffer.pacing={paced}"] if paced else [])]
        found.append(System(f"eta={bound}{f', {paced}' if paced else ''}", (*overrides, *own)))
    return found


class Measurement:
    """Runs, evaluates and keeps the results in their file, which is whole after every run."""

    def __init__(self, options: argparse.Namespace, model: Model) -> None:
        self.options, self.model = options, model
        job = load_job(options.job)
        steps = options.steps or job.trainer.steps
        self.setting = Setting(
            options.job.resolve(), options.work.resolve(), steps, options.every, model.warmup_steps
        )
        self.setting.work.mkdir(parents=True, exist_ok=True)
        if job.trainer.resolved_dtype != "float32":
            raise SystemExit(f"TRL's side trains in fp32, and the job file in {job.trainer.resolved_dtype}")
        self.begun = False
        self.job_rate = job.trainer.optimizer.lr
        self.held_out = HeldOut(job)
        self.start = self.held_out.accuracy(Path(job.model) / "model.safetensors")
        self.results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}

    def rate(self, system: System) -> float:
        """As the command says, else as the sweep chose, else the job file's."""
        given: float | None = self.options.trl_lr if system.is_trl else self.options.lr
        swept = self.results.get("sweep", {}).get("rates", {}).get(system.name, {})
        return given or swept.get("lr", self.job_rate)

    def run(self, system: System, seed: int, lr: float) -> Run:
        self.wait_for_quiet()
        run = Run(system.name, seed, lr)
        if system.is_trl:
            untried = {"threads": self.model.threads[-1], "batch": self.model.batches[-1]}
            chosen = self.results.get("sweep", {}).get("trl", {}).get("fastest", untried)
            run, saved = run_trl(self.setting, run, chosen)
        else:
            run, saved = run_ours(self.setting, run, system.overrides)
        evaluated = [(each.step, each.seconds, self.held_out.accuracy(each.weights)) for each in saved]
        run.points = [(0, 0.0, self.start), *evaluated]
        print(
            f"{run.system}, seed {run.seed}, lr {run.lr:g}: {run.s_per_step:.3f} s and "
            f"{sum(run.cpu_per_step.values()):.2f} core-seconds a step, "
            f"{run.points[-1][2]:.3f} after {run.points[-1][1]:.0f} s",
            flush=True,
        )
        return run

    def wait_for_quiet(self, limit_s: float = 60.0) -> None:
        """Before the first run, raise SystemExit where other programs are at work, unless that is allowed.
        Later ones wait a while for quiet and then go on: their results say how busy the others were."""
        deadline_s = time.monotonic() + limit_s
        while (busy := psutil.cpu_percent(interval=3.0) / 100 * (os.cpu_count() or 1)) > MOST_BUSY:
            if self.options.loaded or (self.begun and time.monotonic() > deadline_s):
                break
            if not self.begun:
                raise SystemExit(
                    f"other programs have {busy:.1f} cores (load {os.getloadavg()[0]:.1f}): times would say "
                    "nothing. Wait for them, or say --loaded"
                )
        self.begun = True

    def save(self, **found: Any) -> None:
        commands = dict.fromkeys([*self.results.get("commands", []), shlex.join(["python", *sys.argv])])
        self.results.update(found, steps=self.setting.steps, start=self.start, commands=list(commands))
        self.options.out.write_text(json.dumps(rounded(self.results), indent=1) + "\n")

    def measure(self, systems: Sequence[System], seeds: Sequence[int]) -> None:
        """Beside what is measured, the results keep the runs of systems that are left out."""
        named = {system.name for system in systems}
        runs = [Run(**row) for row in self.results.get("runs", []) if row["system"] not in named]
        for turn, seed in enumerate(seeds):
            for system in systems if turn % 2 == 0 else reversed(systems):
                runs.append(self.run(system, seed, self.rate(system)))
                self.save(runs=[asdict(run) for run in runs])

    def sweep(self, systems: Sequence[System], rates: Sequence[float]) -> None:
        """Time TRL's settings, then train each system at each rate, and note what was best of both."""
        sweep = self.results.setdefault("sweep", {"rates": {}})
        if any(system.is_trl for system in systems):
            sweep["trl"] = self.fastest()
            self.save()
        for system in systems if rates else ():
            runs = [self.run(system, SWEEP_SEED, lr) for lr in rates]
            best = max(runs, key=lambda run: learned_better(run.points, self.model.thresholds))
            sweep["rates"][system.name] = {"lr": best.lr, "runs": [asdict(run) for run in runs]}
            self.save()
            print(f"{system.name}: {best.lr:g} learned best", flush=True)

    def fastest(self) -> dict[str, Any]:
        """Which threads and passes give TRL the shortest step."""
        tried = [
            {"threads": threads, "batch": batch}
            for threads in self.model.threads
            for batch in self.model.batches
        ]
        steps = self.model.timed_steps
        short = replace(self.setting, steps=steps, every_steps=steps)
        timed = []
        for chosen in tried:
            self.wait_for_quiet()
            run, _ = run_trl(short, Run("trl", SWEEP_SEED, self.job_rate), chosen)
            timed.append({**chosen, "s_per_step": run.s_per_step})
            print(f"trl with {chosen}: {run.s_per_step:.3f} s a step", flush=True)
        best = min(range(len(tried)), key=lambda n: timed[n]["s_per_step"])
        return {"fastest": tried[best], "timed": timed}


def report(model: Model, out: Path, picture: Path | None) -> None:
    """Print the tables of the results in `out`, write them beside it and draw the picture."""
    runs = [Run(**row) for row in json.loads(out.read_text())["runs"]]
    text = tables(runs, model.thresholds)
    print(text)
    out.with_suffix(".md").write_text(text)
    if picture:
        draw(runs, model.thresholds, picture)


def rounded(value: Any) -> Any:
    """Floats to five significant digits, which is more than any of them is good for."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="quickstart", help="which of `MODELS`")
    parser.add_argument("--job", type=Path, help="instead of the model's")
    parser.add_argument("--steps", type=int, help="of every run, and of its schedule; else the job file's")
    parser.add_argument("--every", type=int, help="steps between two evaluated weights")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--ours", help="variants of ours, such as eta=0,eta=4:full")
    parser.add_argument("--pacing", default="", help="of all variants that name none; else the job file's")
    parser.add_argument(
        "--set", action="append", default=[], help="key=value for our job file; may be repeated"
    )
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("--trl-only", action="store_true")
    parser.add_argument("--sweep", action="store_true", help="choose TRL's settings and the learning rates")
    parser.add_argument("--rates", help="that the sweep tries")
    parser.add_argument("--lr", type=float, help="of ours, instead of the sweep's")
    parser.add_argument("--trl-lr", type=float, help="of TRL, instead of the sweep's")
    parser.add_argument("--loaded", action="store_true", help="run though other programs are at work")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--work", type=Path, default=Path("runs/against-trl"), help="what the runs write")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    known, _ = parser.parse_known_args()
    model = MODELS[known.model]
    parser.set_defaults(job=model.job, every=model.every, ours=model.ours, rates=model.rates)
    parser.set_defaults(out=ROOT / "benchmarks" / "results" / model.out)
    if model.picture:
        parser.set_defaults(picture=ROOT / "docs" / "images" / model.picture)
    options = parser.parse_args()
    systems = [] if options.trl_only else variants(options.ours, options.pacing, options.set)
    systems += [] if options.ours_only else [System("trl")]
    if not options.report:
        measurement = Measurement(options, model)
        if options.sweep:
            measurement.sweep(systems, [float(rate) for rate in options.rates.split(",") if rate])
            return
        measurement.measure(systems, [int(seed) for seed in options.seeds.split(",")])
    report(model, options.out, options.picture)


if __name__ == "__main__":
    main()
