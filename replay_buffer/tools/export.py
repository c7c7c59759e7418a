"""`areal-async buffer export`: the episodes in a buffer, as a parquet file."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from areal_async.cli.tools import ExportRequest, run_tool, show, step_range
from areal_async.launch.run_handle import find_run
from areal_async.trajectory.parquet import EpisodeWriter, ExportedEpisode
from replay_buffer.ledger.records import EpisodeState, GroupRecord, GroupState
from replay_buffer.ledger.scoring import parts_of
from replay_buffer.tools.peek import chosen, size, state_of, steps_of
from replay_buffer.tools.reader import open_reader


def main(request: ExportRequest) -> None:
    found = asyncio.run(export(request))
    written = Path(request.out).stat().st_size
    left = found["left"]
    gone = f" ({left} more groups left the buffer meanwhile)" if left else ""
    text = (
        f"{found['episodes']} episodes of {found['groups']} groups{gone} in {request.out} ({size(written)})."
    )
    show({"out": request.out, **found, "size_bytes": written}, text, request.as_json)


async def export(request: ExportRequest) -> dict[str, int]:
    """Write the file, with one group in memory at a time. Return the number of episodes and groups in it, and
    the number of groups that left the buffer during the export."""
    state, steps = state_of(request.state), step_range(request.steps)
    run = find_run(request.run)
    found = left = 0
    async with open_reader(run) as reader:
        look = await reader.look()
        groups = [
            group
            for group in chosen(look.index, state)
            if request.steps is None or any(step in steps for step in steps_of(group))
        ]
        with EpisodeWriter(Path(request.out), run.job.job, overwrite=request.overwrite) as file:
            for group in groups:
                held = await reader.blobs(group)
                expected = [s for s, e in enumerate(group.episodes) if e.size_bytes]
                left += any(sample not in held for sample in expected)
                found += bool(held)
                media = await reader.media(group, held.values())
                source = look.index.tasks.task(group.row, group.pass_index).data_source
                for sample in sorted(held):
                    file.add(exported(group, sample, held[sample], source, media))
    return {"episodes": file.rows, "groups": found, "left": left}


def exported(
    group: GroupRecord, sample: int, blob: bytes, data_source: str, media: Mapping[str, bytes]
) -> ExportedEpisode:
    """Return an episode for the file, from the ledger and its bytes."""
    episode = group.episodes[sample]
    judged = episode.state == EpisodeState.VERDICT
    return ExportedEpisode(
        blob=blob,
        data_source=data_source,
        group_state=GroupState(group.least_state).name,
        episode_state=EpisodeState(episode.state).name,
        steps=steps_of(group),
        reward=episode.reward if judged else None,
        components=dict(episode.components or {}) if judged else {},
        parts=parts_of(episode) if judged else None,
        media=media,
    )


if __name__ == "__main__":
    run_tool(ExportRequest, main)
