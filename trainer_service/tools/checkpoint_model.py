"""`areal-async export`: write the weights of a checkpoint as a Hugging Face directory.

The weights have the job's dtype and the names in the model's files, as in `<run>/model`. Trained adapters are
merged into the model, or on request only the adapter is written. `best` is the checkpoint with the highest
known held-out accuracy. If several have it, `best` is the newest of them. The optimizer's state is not read.
"""

from __future__ import annotations

from pathlib import Path

from areal_async.base.mistakes import ConfigError, Mistake
from areal_async.cli.tools import CheckpointRequest, run_tool, show
from areal_async.config.content import materialise
from areal_async.config.trainings import FILE_KINDS
from areal_async.launch.run_handle import Run, find_run
from areal_async.service.record import read_run_log
from areal_async.show.progress import progress
from trainer_service.checkpoint import (
    CheckpointReader,
    accuracies,
    epoch_of,
    measured_in,
    named_checkpoints,
    step_of,
)
from trainer_service.checkpoint_store import CheckpointStore, name_of
from trainer_service.durable_files import companion_files
from trainer_service.loop.learner import load_backend
from trainer_service.ranks import join_ranks
from trainer_service.trained_model import write_adapter, write_whole


def write_checkpoint_model(target: str | Path, step: str, out: Path, *, adapter: bool = False) -> int:
    """Write the model, or only its `adapter`, of a checkpoint of the run at `target`. Returns the
    checkpoint's step.

    `step` is a number, `newest` or `best`. Raises `ConfigError` if the checkpoint does not exist, and
    `CheckpointError` if it is damaged."""
    run = find_run(target, kinds=("rl", *FILE_KINDS))
    if adapter and not run.job.trainer.lora.rank:
        raise _mistake("--adapter", "this job trains no adapters (trainer.lora)", "Leave it out")
    if out.exists():
        raise _mistake("--out", f"{out} is there already", "Name a new folder")
    store = CheckpointStore.of(run.job)
    chosen = _chosen(run, step, store)
    folder = run.folder / "checkpoints" / name_of(chosen)
    if store is not None and not folder.exists():
        store.bring(chosen, folder)
    checkpoint = CheckpointReader(run.job.job, run.job.policy).open(folder)
    with progress("reading the checkpoint"):
        materialise(run.job)
        ranks = join_ranks(0, 1)
        backend = load_backend(run.job, ranks, policy_alone=True)
        backend.load(folder, {})
    write = write_adapter if adapter else write_whole
    values = run.job.kind == "reward_model"
    files = companion_files(run.job.model, run.job.trainer.resolved_dtype, values=values)
    with progress("writing the model"):
        write(out, run.job, backend, files, ranks)
    return checkpoint.manifest.step


def _chosen(run: Run, step: str, store: CheckpointStore | None) -> int:
    there = store.epochs() if store is not None else {}
    there |= {step_of(folder): epoch_of(folder) for folder in named_checkpoints(run.folder / "checkpoints")}
    known = accuracies(there, measured_in(read_run_log(run.folder / "metrics.jsonl"), run.job.policy))
    if step == "newest" and there:
        return max(there)
    if step == "best" and known:
        return max(known, key=lambda each: (known[each], each))
    if step.isdecimal() and int(step) in there:
        return int(step)
    what = "no checkpoint there has been evaluated" if step == "best" else f"there is no checkpoint {step}"
    told = ", ".join(f"{each} ({known[each]:.3f})" if each in known else str(each) for each in sorted(there))
    raise _mistake("--step", what, f"Name one of: {told or 'none'}")


def _mistake(option: str, problem: str, fix: str) -> ConfigError:
    return ConfigError("the command line", [Mistake(option, problem, fix)])


def main(request: CheckpointRequest) -> None:
    step = write_checkpoint_model(request.run, request.step, Path(request.out), adapter=request.adapter)
    text = f"The {'adapter' if request.adapter else 'model'} after {step} steps is in {request.out}."
    show({"out": request.out, "step": step}, text, request.as_json)


if __name__ == "__main__":
    run_tool(CheckpointRequest, main)
