"""Time, CPU and memory to the same held-out accuracy: this system against three rivals on the same cores.

    make trl-env
    python benchmarks/against_trl.py                    the quickstart's model, three seeds (60 to 100 min)
    python benchmarks/against_trl.py --model smollm2    SmolLM2-135M with adapters, one seed (75 minutes)
    python benchmarks/against_trl.py --model long       28M parameters, 8 x 512 tokens, timings (25 to 50 min)
    python benchmarks/against_trl.py --seeds 0          one seed; --rivals plain --ours eta=1: some systems
    python benchmarks/against_trl.py --report           the tables and the picture of the results that exist

The rivals are `trl`, the synchronous `GRPOTrainer` of TRL 1.16; `trl-async`, its `AsyncGRPOTrainer` with
stand-ins for the parts that need a GPU (`against_trl_async.py`); and `plain`, a loop of our own parts
without services (`plain_loop.py`). A run that is in the results is not repeated, so a stopped command can be
started again; `--again` repeats all.

Needs the row's files: run `make quickstart` or `make smollm2` first. All start from the job file's model,
train on its tasks with its chat template, reward, group and batch sizes, temperature, optimizer, schedule,
loss and adapters, in fp32, and differ in who computes them. Learning rates are the job file's, or with
`--sweep --rates 1.4e-4,2e-4` those that learned best; threads and passes of each rival are the fastest of a
few that are timed first. One run at a time; the order changes with every seed. Weights saved every `--every`
steps are evaluated after the run by one function, so evaluation is on nobody's clock: ours runs without its
evaluator.

The least that the cores allow is computed from the mathematics alone: the engine's forward passes and the
trainer's forward, backward and optimizer, as the plain loop measures them with one thread and with all.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from against_trl_held_out import HeldOut
from against_trl_long import EPISODES, LONG_JOB, write_long_files
from against_trl_report import draw, learned_better, mathematics_of, tables
from against_trl_runs import CORES, RIVALS, run_ours, run_rival
from metered import ROOT, Run, Setting

from areal_async.config.load import load_job

SWEEP_SEED = 1000
"""Of the sweep, so that no measured seed has chosen its own learning rate."""
MOST_BUSY = 0.3
"""Cores that other programs may have before a run."""
Settings = dict[str, int]
"""Threads, and episodes of a pass."""


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
    seeds: str
    thresholds: tuple[float, ...]
    """Held-out accuracies to which seconds and steps are counted; none where a run is only timed."""
    every: int
    """Steps between two evaluated weights."""
    warmup_steps: int
    """Left out of seconds and CPU per step."""
    tried: Mapping[str, Sequence[Settings]]
    """Settings of each rival of which the fastest is used."""
    timed_steps: int
    """Steps of a run that only times settings or the mathematics."""
    make: Callable[[], None] | None = None
    """Writes the job's files if they are missing."""


def tried(threads: Sequence[int], batches: Sequence[int]) -> dict[str, list[Settings]]:
    """Return the settings to try: threads, episodes of a pass, and splits of the cores between TRL's
    asynchronous trainer, which computes a batch in one pass, and its generator."""
    return {
        "trl": [{"threads": n, "batch": batch} for n in threads for batch in batches],
        "trl-async": [
            {"threads": n, "generate_threads": m, "batch": batches[-1]} for n in threads for m in threads
        ],
        "plain": [{"threads": n} for n in threads],
    }


SOME_THREADS = tuple(sorted({1, CORES}))
MODELS = {
    "quickstart": Model(
        job=Path("runs/quickstart-files/train.yaml"),
        out="against_trl.json",
        picture="against_trl.png",
        ours="eta=1,eta=4",
        seeds="0,1,2",
        thresholds=(0.70, 0.80, 0.88),
        every=20,
        warmup_steps=10,
        tried=tried(SOME_THREADS, (128, 256, 512)),
        timed_steps=30,
    ),
    "smollm2": Model(
        job=Path("recipes/smollm2/job.yaml"),
        out="against_trl_smollm2.json",
        picture=None,
        ours="eta=2",
        seeds="0",
        thresholds=(0.60, 0.70, 0.80),
        every=5,
        warmup_steps=2,
        tried={**tried(SOME_THREADS, (64,)), "trl": [{"threads": CORES, "batch": n} for n in (16, 32, 64)]},
        timed_steps=4,
    ),
    "long": Model(
        job=LONG_JOB,
        out="against_trl_long.json",
        picture=None,
        ours="eta=1",
        seeds="0",
        thresholds=(),
        every=1000,
        warmup_steps=2,
        tried=tried(SOME_THREADS, (EPISODES,)),
        timed_steps=4,
        make=write_long_files,
    ),
}


@dataclass(frozen=True)
class System:
    """A rival, or a variant of ours: the job file with `overrides`."""

    name: str
    overrides: tuple[str, ...] = ()

    @property
    def is_rival(self) -> bool:
        return self.name in RIVALS


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
            raise SystemExit(f"the rivals train in fp32, and the job file in {job.trainer.resolved_dtype}")
        self.begun = False
        self.job_rate = job.trainer.optimizer.lr
        self.held_out = HeldOut(job) if model.thresholds else None
        self.start = self.held_out.accuracy(Path(job.model) / "model.safetensors") if self.held_out else None
        self.results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
        self.sweeps: dict[str, Any] = self.results.setdefault("sweep", {})
        if options.again:
            self.results.pop("mathematics", None)
            self.results["sweep"] = self.sweeps = {"rates": self.sweeps.get("rates", {})}

    def rate(self, system: System) -> float:
        """As the command says, else as the sweep chose, else the job file's."""
        given: float | None = self.options.rival_lr if system.is_rival else self.options.lr
        swept = self.sweeps.get("rates", {}).get(system.name, {})
        return given or swept.get("lr", self.job_rate)

    def run(self, system: System, seed: int, lr: float) -> Run:
        self.wait_for_quiet()
        run = Run(system.name, seed, lr)
        if system.is_rival:
            run, saved = run_rival(self.setting, run, self.fastest(system.name))
        else:
            run, saved = run_ours(self.setting, run, system.overrides)
        if self.held_out is not None and self.start is not None:
            accuracy = self.held_out.accuracy
            run.points = [(0, 0.0, self.start), *((s.step, s.seconds, accuracy(s.weights)) for s in saved)]
        print(
            f"{run.system}, seed {run.seed}, lr {run.lr:g}: {run.s_per_step:.3f} s and "
            f"{run.core_s:.3f} core-seconds a step, first step after {run.first_step_s:.1f} s, "
            f"{sum(run.peak_mib.values()):.0f} MiB, {run.points[-1][2] if run.points else math.nan:.3f}",
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
        self.results["cores"] = CORES
        self.options.out.write_text(json.dumps(rounded(self.results), indent=1) + "\n")

    def measure(self, systems: Sequence[System], seeds: Sequence[int]) -> None:
        """Run what the results lack. They keep the runs of systems that are left out."""
        for system in systems:
            if system.is_rival:
                self.fastest(system.name)
        self.least()
        runs = [Run(**row) for row in self.results.get("runs", []) if row.get("steps") == self.setting.steps]
        if self.options.again:
            runs = [run for run in runs if run.system not in {system.name for system in systems}]
        there = {(run.system, run.seed) for run in runs}
        for turn, seed in enumerate(seeds):
            for system in systems if turn % 2 == 0 else reversed(systems):
                if (system.name, seed) not in there:
                    runs.append(self.run(system, seed, self.rate(system)))
                    self.save(runs=[asdict(run) for run in runs])

    def sweep(self, systems: Sequence[System], rates: Sequence[float]) -> None:
        """Train each system at each rate, and note what was best."""
        for system in systems:
            runs = [self.run(system, SWEEP_SEED, lr) for lr in rates]
            best = max(runs, key=lambda run: learned_better(run.points, self.model.thresholds))
            found = {"lr": best.lr, "runs": [asdict(run) for run in runs]}
            self.sweeps.setdefault("rates", {})[system.name] = found
            self.save()
            print(f"{system.name}: {best.lr:g} learned best", flush=True)

    def timed(self, rival: str, settings: Settings) -> Run:
        """Run a rival for a few steps."""
        self.wait_for_quiet()
        steps = self.options.timed_steps or self.model.timed_steps
        short = replace(self.setting, steps=steps, every_steps=steps)
        run, _ = run_rival(short, Run(rival, SWEEP_SEED, self.job_rate), settings)
        print(f"{rival} with {settings}: {run.s_per_step:.3f} s a step", flush=True)
        return run

    def fastest(self, rival: str) -> Settings:
        """Return which of the settings to try give the rival the shortest step. They are timed once."""
        if rival not in self.sweeps:
            tried = self.model.tried[rival]
            timed = [{**each, "s_per_step": self.timed(rival, each).s_per_step} for each in tried]
            best = min(range(len(tried)), key=lambda n: timed[n]["s_per_step"])
            self.sweeps[rival] = {"fastest": tried[best], "timed": timed}
            self.save()
        chosen: Settings = self.sweeps[rival]["fastest"]
        return chosen

    def least(self) -> None:
        """Measure the mathematics of a step with one thread and with all."""
        if "mathematics" not in self.results:
            runs = [self.timed("plain", {"threads": n}) for n in SOME_THREADS]
            self.save(mathematics=[mathematics_of(run) for run in runs])


def report(model: Model, out: Path, picture: Path | None) -> None:
    """Print the tables of the results in `out`, write them beside it and draw the picture."""
    results = json.loads(out.read_text())
    runs = [Run(**row) for row in results["runs"]]
    text = tables(runs, model.thresholds, results.get("mathematics", []), results.get("cores", CORES))
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
    parser.add_argument("--timed-steps", type=int, help="of runs that only time settings")
    parser.add_argument("--every", type=int, help="steps between two evaluated weights")
    parser.add_argument("--seeds", help="such as 0,1,2")
    parser.add_argument("--ours", help="variants of ours, such as eta=0,eta=4:full; may be empty")
    parser.add_argument("--rivals", default=",".join(RIVALS), help="may be empty")
    parser.add_argument("--pacing", default="", help="of all variants that name none; else the job file's")
    parser.add_argument(
        "--set", action="append", default=[], help="key=value for our job file; may be repeated"
    )
    parser.add_argument(
        "--again", action="store_true", help="repeat runs, and timings of settings, that the results have"
    )
    parser.add_argument("--sweep", action="store_true", help="choose the learning rates among --rates")
    parser.add_argument("--rates", default="", help="that the sweep tries")
    parser.add_argument("--lr", type=float, help="of ours, instead of the sweep's")
    parser.add_argument("--rival-lr", type=float, help="of the rivals, instead of the sweep's")
    parser.add_argument("--loaded", action="store_true", help="run though other programs are at work")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--work", type=Path, default=Path("runs/against-trl"), help="what the runs write")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    known, _ = parser.parse_known_args()
    model = MODELS[known.model]
    parser.set_defaults(job=model.job, every=model.every, ours=model.ours, seeds=model.seeds)
    parser.set_defaults(out=ROOT / "benchmarks" / "results" / model.out)
    if model.picture:
        parser.set_defaults(picture=ROOT / "docs" / "images" / model.picture)
    options = parser.parse_args()
    systems = variants(options.ours, options.pacing, options.set) if options.ours else []
    systems += [System(name) for name in options.rivals.split(",") if name]
    if not options.report:
        if model.make is not None:
            model.make()
        measurement = Measurement(options, model)
        if options.sweep:
            measurement.sweep(systems, [float(rate) for rate in options.rates.split(",") if rate])
            return
        measurement.measure(systems, [int(seed) for seed in options.seeds.split(",")])
    report(model, options.out, options.picture)


if __name__ == "__main__":
    main()
