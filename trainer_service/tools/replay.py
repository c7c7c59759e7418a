"""`areal-async buffer replay`: a recorded run through the real trainer, with no generation.

The trainer is the process that a run has, started on a run folder of its own; its buffer is a stand-in that
has only the recording. As long as nothing is overridden each step must come out bit by bit as recorded, and
the first that does not ends the replay with an error. With overrides the differences are what is wanted.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
from rich.console import Console

from areal_async.cli.tools import ReplayRequest, run_tool, step_range
from areal_async.config.job import JobConfig
from areal_async.config.load import dump_job
from areal_async.launch.failure import last_lines
from areal_async.launch.folders import RunFolders, claim_folders
from areal_async.launch.plan import MODULES, thread_count
from areal_async.launch.runs import Run, find_run
from areal_async.rpc.server import Server
from areal_async.runtime.context import RunPlaces, ServicePlace
from areal_async.runtime.process import ChildProcess, exit_text, service_environment, start_service
from areal_async.weights.manifest import MANIFEST_FILE
from trainer_service.checkpoint import Checkpoint, named_checkpoints, open_checkpoint
from trainer_service.data.recording import RecordedStep, read_results
from trainer_service.errors import BatchError, TrainerError
from trainer_service.published import hashes_of
from trainer_service.recordings import FolderRecording, ParquetRecording, Recording
from trainer_service.tools.compare import HEAD, Figures, Outcome, difference, line
from trainer_service.tools.stand_in import StandIn

LOOK_S = 0.05
STOP_LIMIT_S = 10.0
"""How long the trainer may take to end when told to."""


class ReplayDiffers(TrainerError):
    """A step of a replay without overrides did not come out as recorded."""


def main(request: ReplayRequest) -> None:
    console = Console(soft_wrap=True, highlight=False)
    run = find_run(Path(request.run), request.overrides)
    recording: Recording = (
        FolderRecording(run.folder) if request.source is None else ParquetRecording(Path(request.source))
    )
    with ExitStack() as stack:
        kept = Path(request.out) if request.out is not None else None
        if kept is not None and kept.exists() and any(kept.iterdir()):
            raise TrainerError(f"{kept} is not empty: give --out a new folder.")
        steps = wanted_steps(recording, step_range(request.steps), run.job.trainer.steps)
        start = start_of(run, recording, steps)
        out = kept or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="areal-replay-")))
        folders = claim_folders(replayed_job(run, out), overwrite=False)
        stack.callback(folders.release)
        replay = Replay(run, folders, recording, exact=not request.overrides, console=console)
        replay.run(steps[-1], start)
        if kept is not None:
            console.print(f"Model, log and replay.json are in {folders.run_dir}.")


def wanted_steps(recording: Recording, wanted: range, end: int) -> list[int]:
    """The recorded steps among `wanted`, before the job's end. Raises `BatchError` when there is none."""
    steps = [step for step in recording.steps if step in wanted and step < end]
    if not steps:
        recorded = f"{recording.steps[0]} to {recording.steps[-1]}"
        raise BatchError(
            f"--steps: no such step can be replayed: {recorded} are recorded, of a job of {end}."
        )
    return steps


def start_of(run: Run, recording: Recording, steps: Sequence[int]) -> Checkpoint | None:
    """The newest checkpoint from which `steps` can be reached; None to begin with the model. Raises
    `BatchError` when a step on the way is not recorded, `CheckpointError` for a damaged checkpoint."""
    folders = named_checkpoints(run.folder / "checkpoints")
    usable = [path for path in folders if int(path.name.removeprefix("step-")) <= steps[0]]
    start = open_checkpoint(usable[-1], job=run.job.job) if usable else None
    first = start.manifest.step if start is not None else 0
    missing = sorted(set(range(first, steps[-1] + 1)) - set(recording.steps))
    if missing:
        raise BatchError(
            f"step {missing[0]} is not recorded, and without it step {steps[-1]} cannot be reached. Name "
            "others with --steps: those from a kept checkpoint on, without gaps."
        )
    return start


def replayed_job(run: Run, out: Path) -> JobConfig:
    """The recorded job as the trainer is to run it: below `out`, with nobody but the trainer."""
    job = run.job
    changes = {
        "run_dir": out.resolve(),
        "tasks": job.tasks.model_copy(update={"evaluation": None}),
        "trainer": job.trainer.model_copy(update={"record_batches": True}),
        "checkpoint": job.checkpoint.model_copy(update={"every_steps": job.trainer.steps}),
        "observe": job.observe.model_copy(update={"metrics_port": 0, "event_log": False}),
    }
    return job.model_copy(update=changes)


class Replay:
    """One replay into `folders`, which are a run's own."""

    def __init__(
        self, run: Run, folders: RunFolders, recording: Recording, *, exact: bool, console: Console
    ) -> None:
        self.outcomes: list[Outcome] = []
        self._run = run
        self._job = replayed_job(run, folders.run_dir.parent)
        self._folders = folders
        self._recording = recording
        self._exact = exact
        self._console = console

    def run(self, last: int, start: Checkpoint | None) -> None:
        """Replay from `start` (None: from the model) to step `last`. Raises `ReplayDiffers`, what is wrong
        with the recording, or what the trainer failed with."""
        if start is not None:
            checkpoints = self._folders.run_dir / "checkpoints"
            checkpoints.mkdir()
            (checkpoints / start.folder.name).symlink_to(start.folder.resolve())
            self._console.print(f"From the checkpoint of step {start.manifest.step}.")
        self._stand_in = StandIn(self._recording, last, self._on_commit)
        self._console.print(HEAD)
        asyncio.run(self._train())
        self._write_report()
        self._judge()

    async def _train(self) -> None:
        """The trainer's process, from its start until it has ended."""
        folders, job = self._folders, self._job
        place = ServicePlace("trainer", "trainer", 0, MODULES["trainer"], 0)
        endpoint = f"ipc://{folders.socket_dir}/buffer"
        places = RunPlaces(
            run_id=folders.run_id,
            supervisor_pid=os.getpid(),
            run_dir=str(folders.run_dir),
            socket_dir=str(folders.socket_dir),
            shm_dir=str(folders.shm_dir),
            buffer_endpoint=endpoint,
            weights_endpoint=f"ipc://{folders.socket_dir}/weights",
            services=[place],
            job=job.model_dump(mode="json"),
        )
        folders.context.write_bytes(msgspec.json.format(msgspec.json.encode(places)))
        (folders.run_dir / "job.yaml").write_text(dump_job(job), encoding="utf-8")
        server = Server(
            endpoint, service="buffer", job=job.job, access=folders.secret, handler=self._stand_in.handle
        )
        await server.start()
        log = folders.logs / "trainer.log"
        environment = service_environment(folders.run_id, thread_count(job, "trainer"))
        child = start_service(place, folders.context, log, environment)
        try:
            status = await self._until_over(child)
        finally:
            child.kill()
            child.close()
            await server.stop()
        if status is not None and status != 0:
            said = "".join(f"\n    {text}" for text in last_lines(log)) or " nothing."
            raise TrainerError(f"the trainer of the replay {exit_text(status)}. It said last:{said}")

    async def _until_over(self, child: ChildProcess) -> int | None:
        """The exit status of a trainer that ended by itself; None when it was told to, having had it all."""
        told_s: float | None = None
        while (status := child.poll()) is None:
            if told_s is not None and time.monotonic() - told_s > STOP_LIMIT_S:
                child.kill()
            elif told_s is None and self._stand_in.over:
                told_s = time.monotonic()
                child.terminate()
            await asyncio.sleep(LOOK_S)
        if told_s is None:
            return status
        self._keep_model()
        return None

    def _on_commit(self, recorded: RecordedStep, epoch: int) -> None:
        """A step was trained: compare it while its results are at hand."""
        step = recorded.batch.step
        losses, grad_norms = read_results(self._folders.run_dir / "batches", step)
        before = Figures(recorded.losses, recorded.grad_norms, recorded.weights_hash)
        now = Figures(losses, grad_norms, hashes_of(self._folders.run_dir).get(step + 1, ""))
        episodes = sum(len(group.episodes) for group in recorded.batch.groups)
        outcome = Outcome(step, episodes, before, now, difference(before, now))
        self.outcomes.append(outcome)
        self._console.print(line(outcome))
        # The episodes are those of the recording: a second copy of a long run may not fit.
        shutil.rmtree(self._folders.run_dir / "batches" / f"step-{step:06d}")
        if outcome.difference and self._exact:
            self._stand_in.stop()

    def _keep_model(self) -> None:
        """A trainer that was ended before its last step has written no model; its last snapshot is one."""
        if not self.outcomes:
            return
        for snapshot in self._folders.shm_dir.glob(f"e*-v{self.outcomes[-1].step + 1}"):
            ignored = shutil.ignore_patterns(MANIFEST_FILE)
            shutil.copytree(snapshot, self._folders.run_dir / "model", ignore=ignored)

    def _write_report(self) -> None:
        text = msgspec.json.format(msgspec.json.encode(self.outcomes))
        run_dir = self._folders.run_dir
        (run_dir / "replay.json").write_bytes(text + b"\n")
        shutil.rmtree(run_dir / "batches", ignore_errors=True)
        for link in (run_dir / "checkpoints").glob("*"):
            if link.is_symlink():
                link.unlink()

    def _judge(self) -> None:
        """The last line, or the error that the replay ends with."""
        if self._stand_in.error is not None:
            raise self._stand_in.error
        differing = [outcome for outcome in self.outcomes if outcome.difference]
        if not differing:
            known = sum(1 for outcome in self.outcomes if outcome.recorded.weights_hash)
            weights = "weights" if known == len(self.outcomes) else f"the weights of {known} steps"
            self._console.print(
                f"All steps are bit by bit as recorded: losses, gradient norms and {weights}."
            )
            return
        first = differing[0]
        text = f"step {first.step} differs first, in {first.difference}"
        if self._exact:
            raise ReplayDiffers(
                f"the replay is not the recording: {text}. The recording, the model, the number of torch "
                "threads or the version of this program or of torch is another than that of the run, or it "
                "ran on a device that does not repeat its sums in one order."
            )
        self._console.print(f"{len(differing)} of {len(self.outcomes)} steps differ; {text}.")


if __name__ == "__main__":
    run_tool(ReplayRequest, main)
