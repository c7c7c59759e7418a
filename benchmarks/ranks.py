"""One job on 1, 2 and 4 ranks: the same batches must give the same losses, gradient norms and weights.

    python benchmarks/ranks.py --out benchmarks/results/ranks.json

First the quickstart's two jobs run as they are, the second for `--steps` steps with `record_batches`:
generation differs from run to run, so what is compared is the training on its batches. Then the second job's
file is run once for each number of ranks by the real supervisor with real trainer processes (`trainer.ranks`,
gloo), while a stand-in for the buffer serves the recorded batches over its socket
(`benchmarks/recorded_services.py`).

`loss` and `grad_norm` are the largest differences of a step from those of one rank; of the gradient norm the
relative one, also that of the first step alone, whose weights are the same. `weights` is the largest
difference of any weight of the final model, `weights_relative` the norm of all differences over that of what
training has changed.

`one_rank_packed_otherwise` is the same of one rank against itself with smaller micro-batches: what another
order of fp32 sums does, without further ranks. `--warm DIR` begins with the model of an earlier first job
(`quickstart-warm`) and runs the second alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from recorded_services import MODULES, VARIABLE
from rich.console import Console
from safetensors.torch import load_file

from areal_async.cli.quickstart.main import prepare, quickstart
from areal_async.config.load import load_job
from areal_async.runner.run_job import run_job
from areal_async.service.record import read_run_log

HERE = Path(__file__).resolve().parent
SMALL_MICRO_BATCH = 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warm", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    with tempfile.TemporaryDirectory(prefix="areal-equal-") as folder:
        result = compare(Path(folder), given.ranks, given.steps, given.seed, given.warm)
    command = f"python benchmarks/ranks.py --ranks {' '.join(map(str, given.ranks))} --steps {given.steps}"
    command += f" --warm {given.warm.name}" if given.warm else ""
    result = {"what": __doc__.splitlines()[0], "command": command} | result
    print(json.dumps(result, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def compare(folder: Path, worlds: list[int], steps: int, seed: int, warm: Path | None) -> dict[str, Any]:
    overrides = [f"trainer.steps={steps}", "trainer.record_batches=true", "observe.metrics_port=0"]
    if warm is None:
        recorded = quickstart(seed=seed, out=folder, plain=True, overrides=overrides).run_dir
    else:
        shutil.copytree(warm / "model", folder / "quickstart-warm" / "model")
        prepare(folder / "quickstart-files", seed)
        job = load_job(folder / "quickstart-files" / "train.yaml", [f"seed={seed}", *overrides])
        recorded = run_job(job, plain=True, console=Console()).run_dir
    os.environ[VARIABLE] = str(recorded)
    start = load_file(folder / "quickstart-warm" / "model" / "model.safetensors")
    runs = {world: _on(folder, world, steps, seed) for world in (1, *worlds)}
    one, before = runs[1], _figures(recorded)
    moved = _norm({name: one["model"][name] - start[name] for name in one["model"]})
    result: dict[str, Any] = {
        "steps": steps,
        "one_rank_equals_the_recorded_run": _largest(one["loss"], before["loss"]) == 0.0,
        "ranks": {},
    }
    others = {world: runs[world] for world in worlds}
    floor = _on(folder, 1, steps, seed, [f"trainer.micro_batch_tokens={SMALL_MICRO_BATCH}"])
    for world, run in [*others.items(), (None, floor)]:
        differences = {name: run["model"][name] - one["model"][name] for name in one["model"]}
        norms = [abs(a - b) / b for a, b in zip(run["grad_norm"], one["grad_norm"], strict=True)]
        figures = {
            "loss": _largest(run["loss"], one["loss"]),
            "grad_norm": max(norms),
            "grad_norm_of_first_step": norms[0],
            "weights": max(float(each.abs().max()) for each in differences.values()),
            "weights_relative": _norm(differences) / moved,
            "step_s": round(statistics.median(run["step_s"]), 4),
            "step_s_of_one_rank": round(statistics.median(one["step_s"]), 4),
        }
        if world is None:
            result["one_rank_packed_otherwise"] = {"micro_batch_tokens": SMALL_MICRO_BATCH} | figures
        else:
            result["ranks"][world] = figures
    return result


def _on(folder: Path, world: int, steps: int, seed: int, more: Sequence[str] = ()) -> dict[str, Any]:
    """The figures of the quickstart's second job on `world` ranks, on the recorded batches."""
    name = f"{world}{'-otherwise' if more else ''}"
    files = folder / f"files-{name}"
    prepare(files, seed)
    changes = ["job=replayed", f"seed={seed}", f"trainer.ranks={world}", f"trainer.steps={steps}"]
    changes += [f"run_dir={folder / name}", f"model={folder / 'quickstart-warm' / 'model'}"]
    changes += ["observe.metrics_port=0", "tasks.evaluation=null", "trainer.self_check.action=warn"]
    job = load_job(files / "train.yaml", [*changes, *more])
    modules: Any = MODULES | {"trainer": "trainer_service"}
    return _figures(run_job(job, plain=True, console=Console(), modules=modules).run_dir)


def _figures(run_dir: Path) -> dict[str, Any]:
    records = [record for record in read_run_log(run_dir / "metrics.jsonl") if record["kind"] == "step"]
    figures = {name: [record[name] for record in records] for name in ("loss", "grad_norm", "step_s")}
    return figures | {"model": load_file(run_dir / "model" / "model.safetensors")}


def _largest(some: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(some, others, strict=True))


def _norm(tensors: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([each.double().square().sum() for each in tensors.values()]).sum().sqrt())


if __name__ == "__main__":
    sys.exit(main())
