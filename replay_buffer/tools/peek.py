"""`areal-async buffer peek`: which groups a buffer holds, or one group or episode of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.console import Console

from areal_async.cli.tools import PeekRequest, run_tool
from areal_async.launch.runs import find_run
from replay_buffer.ledger.records import GroupRecord, GroupState
from replay_buffer.tools.details import episode_page, group_page
from replay_buffer.tools.reader import Look, open_reader
from replay_buffer.tools.tables import NotFound, chosen, near, state_of, table_of


def main(request: PeekRequest) -> None:
    state = state_of(request.state)
    if request.name is None:
        asyncio.run(_list(request, state, Console()))
    else:
        asyncio.run(_one(request, request.name, Console()))


async def _list(request: PeekRequest, state: GroupState | None, console: Console) -> None:
    async with open_reader(find_run(Path(request.run))) as reader:
        look = await reader.look()
    groups = chosen(look.index, state)
    if not groups:
        console.print(f"the buffer holds no group{f' in state {state.name}' if state is not None else ''}.")
        return
    console.print(table_of(groups[: request.limit], look.now_ms))
    if len(groups) > request.limit:
        console.print(f"{request.limit} of {len(groups)} groups, the oldest first; --limit shows more.")


async def _one(request: PeekRequest, name: str, console: Console) -> None:
    async with open_reader(find_run(Path(request.run))) as reader:
        look = await reader.look()
        group, sample = find(look, name)
        if sample is None:
            console.print(group_page(look, group))
        else:
            blob = (await reader.blobs(group)).get(sample)
            console.print(episode_page(look, group, sample, blob))


def find(look: Look, name: str) -> tuple[GroupRecord, int | None]:
    """The group called `name`, or that of the episode called so and its sample. Raises `NotFound`."""
    groups = look.index.groups
    if name in groups:
        return groups[name], None
    group_id, _, sample = name.rpartition(".")
    group = groups.get(group_id)
    if group is not None and sample.isdecimal() and int(sample) < len(group.episodes):
        return group, int(sample)
    if group is not None:
        raise NotFound(
            f"group {group_id} has no sample {sample!r}: it has {len(group.episodes)}, counted from 0."
        )
    raise NotFound(
        f"the buffer holds no group or episode {name!r}; what was dropped has left it, and so has "
        f"what was trained and is in a checkpoint.{near(name, groups)}"
    )


if __name__ == "__main__":
    run_tool(PeekRequest, main)
