"""`areal-async buffer replay`: train recorded batches again with the trainer's own step, without generation.

Without overrides, each step must equal the recording bit by bit, and the first difference ends the replay
with an error. With overrides, differences are expected. Several ranks sum in another order than the replay's
single process, so their recordings are compared within `NEAR`.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from areal_async.base.versions import POLICY, VersionTag
from areal_async.cli.tools import ReplayRequest, print_json, run_tool, step_range
from areal_async.config.content import materialise
from areal_async.config.devices import first_threads, rank_device
from areal_async.config.job import JobConfig
from areal_async.launch.run_handle import Run, find_run
from areal_async.weights.pieces import whole_tensors
from areal_async.weights.snapshot import write_snapshot
from trainer_service.backends.base import TRAINED_MODEL, TrainingBackend
from trainer_service.checkpoint import Checkpoint, CheckpointReader, named_checkpoints, step_of
from trainer_service.checkpoint_store import name_of
from trainer_service.data.recording import RecordedStep, Recording
from trainer_service.durable_files import companion_files
from trainer_service.errors import BatchError, TrainerError
from trainer_service.loop.faults import states_folder
from trainer_service.loop.learner import Learner, load_backend
from trainer_service.ranks import join_ranks
from trainer_service.trained_model import companions_of, write_trained

NEAR = 1e-6
"""Largest difference, absolute or relative, between losses and norms of one rank and of several."""


def main(request: ReplayRequest) -> None:
    console = Console(soft_wrap=True, highlight=False, stderr=request.as_json)
    run = find_run(request.run, request.overrides or ())
    materialise(run.job)
    recording = Recording(run.folder)
    out = Path(request.out) if request.out is not None else None
    if out is not None and out.exists() and any(out.iterdir()):
        raise TrainerError(f"{out} is not empty: give --out a new folder.")
    wanted, end = step_range(request.steps), run.job.trainer.steps
    steps = [step for step in recording.steps if step in wanted and step < end]
    if not steps:
        recorded = f"{recording.steps[0]} to {recording.steps[-1]}"
        raise BatchError(
            f"--steps: no such step can be replayed: {recorded} are recorded, of a job of {end}."
        )
    start = start_of(run, recording, steps)
    if start is not None:
        console.print(f"From the checkpoint of step {start.manifest.step}.")
    kept = out / run.job.job if out is not None else None
    exact = not request.overrides
    differing = replay(run, recording, start, steps[-1], exact=exact, out=kept, console=console)
    if kept is not None:
        console.print(f"The model is in {kept}.")
    if request.as_json:
        print_json({"steps": steps, "differing": differing, "model": kept})


def start_of(run: Run, recording: Recording, steps: Sequence[int]) -> Checkpoint | None:
    """Return the newest checkpoint from which `steps` can be reached; None to start with the model.

    Raises `BatchError` if a step on the way is not recorded, and `CheckpointError` for a damaged
    checkpoint."""
    roots = (states_folder(run.folder), run.folder / "checkpoints")
    usable = [path for root in roots for path in named_checkpoints(root) if step_of(path) <= steps[0]]
    newest = max(usable, key=step_of, default=None)
    start = CheckpointReader(run.job.job, run.job.policy).open(newest) if newest else None
    first = start.manifest.step if start is not None else 0
    missing = sorted(set(range(first, steps[-1] + 1)) - set(recording.steps))
    if missing:
        raise BatchError(
            f"step {missing[0]} is not recorded, and without it step {steps[-1]} cannot be reached. Name "
            "others with --steps: those from a kept checkpoint on, without gaps."
        )
    return start


def replay(
    run: Run,
    recording: Recording,
    start: Checkpoint | None,
    last: int,
    *,
    exact: bool,
    out: Path | None,
    console: Console,
) -> list[int]:
    """Train from `start` (None: the model) to step `last`, print each step, and write the model to `out`.

    Returns the steps that differ. Raises the errors of training. With `exact`, raises `TrainerError` at the
    first difference."""
    section = run.job.trainer
    torch.set_num_threads(first_threads(section.torch_threads))
    torch.manual_seed(run.job.seed)
    ranks = join_ranks(0, 1, device=rank_device(section.device, 0))
    backend = load_backend(run.job, ranks)
    learner = Learner(run.job, ranks, backend)
    first = start.manifest.step if start is not None else 0
    if start is not None:
        learner.load(start.folder, start.manifest.updates)
    known, differing, states = 0, [], states_folder(run.folder)
    most = 1  # largest number of ranks that recorded a step
    for step in range(first, last + 1):
        found = recording.read(step)
        # The kept state of a faulty step includes the minibatches before the fault.
        begun = found.begun if start is not None and start.folder == states / name_of(step) else 0
        blobs, routes = (
            {name: memoryview(blob) for name, blob in kept.items()} for kept in (found.blobs, found.routes)
        )
        plan = learner.plan(found.batch, step)
        result = learner.train(found.batch, plan, blobs, routes=routes, begun=begun)
        losses, norms = (
            [*before[:begun], *now[begun:]]
            for before, now in ((found.losses, result.losses), (found.grad_norms, result.grad_norms))
        )
        text = difference(found, losses, norms, hash_of_weights(run.job, backend))
        figures = f"loss {result.loss:.8f}  gradient norm {result.grad_norm:.6f}"
        console.print(f"{step:>6}  {figures}  {text or '='}")
        most = max(most, found.ranks)
        if text and exact:
            raise _not_the_recording(step, text, most)
        differing += [step] if text else []
        known += bool(found.weights_hash)
    steps = last + 1 - first
    if differing:
        console.print(f"{len(differing)} of {steps} steps differ.")
    elif most > 1:
        console.print(
            f"All steps are within {NEAR:g} of the recording of {most} ranks: losses and gradient norms. One "
            "rank adds up in another order; weights are not compared."
        )
    else:
        weights = "weights" if known == steps else f"the weights of {known} steps"
        console.print(f"All steps are bit by bit as recorded: losses, gradient norms and {weights}.")
    if out is not None:
        write_trained(out, run.job, backend, ranks, companion_files(run.job.model, section.dtype))
    return differing


def _not_the_recording(step: int, text: str, ranks: int) -> TrainerError:
    several = (
        f"{ranks} ranks recorded it and one replays it, in another order of sums, which counts for more than "
        f"{NEAR:g} after many steps or in bfloat16; or the recording"
    )
    return TrainerError(
        f"the replay is not the recording: step {step} differs first, in {text}. "
        f"{several if ranks > 1 else 'The recording'}, the model, the number of torch threads or the version "
        "of this program or of torch is another than that of the run, or it ran on a device that does not "
        "repeat its sums in one order."
    )


def hash_of_weights(job: JobConfig, backend: TrainingBackend) -> str:
    """Return the hash with which a job publishes these weights."""
    with tempfile.TemporaryDirectory(prefix="areal-replay-") as folder:
        tensors = whole_tensors(backend.export(TRAINED_MODEL))
        tag, files = VersionTag(POLICY, 1, 0), companions_of(job, backend, {})
        return write_snapshot(Path(folder), tag, tensors, files=files, tied=backend.tied).weights_hash


def difference(
    recorded: RecordedStep, losses: Sequence[float], grad_norms: Sequence[float], weights_hash: str
) -> str:
    """Return a text on the first figure of a replayed step that differs; empty if all recorded figures are
    equal.

    For a recording of several ranks, figures are compared within `NEAR`, and weights are not compared."""
    several = recorded.ranks > 1
    for field, now in (("losses", losses), ("grad_norms", grad_norms)):
        before: Sequence[float] = getattr(recorded, field)
        if before and len(before) != len(now):  # nothing is recorded for a step that ended the job
            return f"{field}: {len(before)} minibatches are recorded, {len(now)} were trained"
        for number, (old, new) in enumerate(zip(before, now)):  # noqa: B905
            near = several and math.isclose(old, new, rel_tol=NEAR, abs_tol=NEAR)
            if not near and old.hex() != new.hex():  # bit by bit, so that NaN equals NaN
                return f"{field}[{number}]: {old!r} is recorded, {new!r} came out"
    old_hash, new_hash = (each.partition(":")[2] for each in (recorded.weights_hash, weights_hash))
    if recorded.weights_hash and not several and old_hash != new_hash:
        return f"weights: {old_hash[:10]} is recorded, {new_hash[:10]} came out"
    return ""


if __name__ == "__main__":
    run_tool(ReplayRequest, main)
