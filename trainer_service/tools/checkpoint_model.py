"""`python -m trainer_service.tools.checkpoint_model`: the weights of a checkpoint as a Hugging Face folder.

They are in the job's dtype, under the names of the model's files, as `<run>/model` is. `best` is the
checkpoint of the highest held-out accuracy that is known, of equal ones the newer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from areal_async.config.errors import ConfigError, Mistake
from areal_async.errors import ArealError
from areal_async.launch.runs import Run, find_run
from trainer_service.checkpoint import (
    accuracies,
    epoch_of,
    measured_in,
    named_checkpoints,
    open_checkpoint,
    step_of,
)
from trainer_service.disk import companion_files
from trainer_service.loop.learner import load_backend
from trainer_service.ranks import join_ranks
from trainer_service.trained import write_whole


def write_checkpoint_model(target: Path, step: str, out: Path) -> int:
    """Write the model of the checkpoint `step` (a number, `newest` or `best`) of the run at `target`; returns
    its step. Raises `ConfigError` for one that is not there, `CheckpointError` for a damaged one."""
    run = find_run(target, kinds=("rl", "sft"))
    if out.exists():
        mistake = Mistake("--out", f"{out} is there already", "Name a new folder")
        raise ConfigError("the command line", [mistake])
    folder = run.folder / "checkpoints" / f"step-{_chosen(run, step):06d}"
    checkpoint = open_checkpoint(folder, job=run.job.job, policy=run.job.policy)
    ranks = join_ranks(0, 1)
    backend = load_backend(run.job, ranks)
    backend.load(folder, checkpoint.manifest.updates)
    write_whole(out, run.job, backend, companion_files(run.job.model, run.job.trainer.dtype), ranks)
    return checkpoint.manifest.step


def _chosen(run: Run, step: str) -> int:
    there = {step_of(folder): epoch_of(folder) for folder in named_checkpoints(run.folder / "checkpoints")}
    known = accuracies(there, measured_in(run.folder / "metrics.jsonl", run.job.policy))
    if step == "newest" and there:
        return max(there)
    if step == "best" and known:
        return max(known, key=lambda each: (known[each], each))
    if step.isdecimal() and int(step) in there:
        return int(step)
    what = "no checkpoint there has been evaluated" if step == "best" else f"there is no checkpoint {step}"
    told = ", ".join(f"{each} ({known[each]:.3f})" if each in known else str(each) for each in sorted(there))
    raise ConfigError("the command line", [Mistake("--step", what, f"Name one of: {told or 'none'}")])


def main() -> None:
    parser = argparse.ArgumentParser(description="The weights of a checkpoint as a Hugging Face directory.")
    parser.add_argument("run", type=Path, help="the run folder, or its job file")
    parser.add_argument("--step", default="best", help="number of the checkpoint, `newest` or `best`")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    asked = parser.parse_args()
    try:
        step = write_checkpoint_model(asked.run, asked.step, asked.out)
    except ArealError as error:
        raise SystemExit(str(error)) from error
    print(f"The model after {step} steps is in {asked.out}.")


if __name__ == "__main__":
    main()
