"""`areal-async buffer export --batches`: write recorded batches to a parquet file."""

from __future__ import annotations

from pathlib import Path

from areal_async.base.mistakes import ConfigError, Mistake
from areal_async.cli.tools import ExportRequest, run_tool, show, step_range
from areal_async.launch.run_handle import find_run
from areal_async.show.progress import track
from areal_async.trajectory.parquet import EpisodeWriter, ExportedEpisode
from trainer_service.data.recording import Recording
from trainer_service.errors import BatchError


def main(request: ExportRequest) -> None:
    """Write the file in the order of training, with one step in memory at a time, and print a summary."""
    if request.state is not None:
        mistake = Mistake("--state", "recorded batches have no states: they are trained", "Leave it out")
        raise ConfigError("the command line", [mistake])
    wanted = step_range(request.steps)
    run = find_run(request.run)
    recording = Recording(run.folder)
    steps = [step for step in recording.steps if step in wanted]
    if not steps:
        raise BatchError(
            f"none of the steps {request.steps} is recorded: {run.folder} has {recording.steps[0]} to "
            f"{recording.steps[-1]}."
        )
    out = Path(request.out)
    with EpisodeWriter(out, run.job.job, overwrite=request.overwrite) as file:
        for step in track(steps, "steps"):
            recorded = recording.read(step)
            for group in recorded.batch.groups:
                for entry in group.episodes:
                    file.add(
                        ExportedEpisode(
                            blob=recorded.blobs[entry.episode_id],
                            data_source=group.data_source,
                            group_state="TRAINED",
                            episode_state="VERDICT",
                            steps=[step],
                            reward=entry.reward,
                            components=entry.components,
                            parts=entry.parts,
                            media=recorded.media,
                        )
                    )
    size_bytes = out.stat().st_size
    text = f"{file.rows} episodes of {len(steps)} steps in {out} ({size_bytes / 1024:.0f} KiB)."
    answer = {"out": out, "episodes": file.rows, "steps": len(steps), "size_bytes": size_bytes}
    show(answer, text, request.as_json)


if __name__ == "__main__":
    run_tool(ExportRequest, main)
