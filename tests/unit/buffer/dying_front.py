"""A front that is killed in a put with an image, between the file and the ledger: `dying_front.py URL JOB
FOLDER`."""

import asyncio
import sys
from pathlib import Path

from areal_async.base.events import arm
from areal_async.data.images import digest_of
from replay_buffer.attachments import AttachmentFiles
from replay_buffer.coordinator import GroupBytes
from replay_buffer.ledger.leasing import Arrival, GroupArrivals, StoreEpisodes
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.records import Versions
from replay_buffer.ledger.rules import Rules
from tests.unit.buffer.conftest import front_of, lease

IMAGE = b"an image of a tool"
RULES = Rules.alone(group_size=2, batch_groups=1, max_staleness=1, durability="memory")


def front(url, job, folder):
    return front_of(url, job, RULES, attachments=AttachmentFiles(Path(folder), grace_s=0.0))


async def put(a_front, group, samples):
    arrivals = tuple(Arrival(sample, 10, 8, 4, {"policy": Versions(0, 0, 1)}) for sample in samples)
    command = StoreEpisodes((GroupArrivals(group.lease_id, group.group_id, arrivals),))
    given = GroupBytes([b"episode..."] * len(arrivals), media={digest_of(IMAGE): IMAGE})
    return (await a_front.store(command, [given])).reply.groups[0]


async def main(url, job, folder):
    async with front(url, job, folder) as a_front:
        await a_front.execute(OpenedWith("policy", "t", 0, None))
        (group,) = await lease(a_front)
        print(group.group_id, group.lease_id, flush=True)
        arm("buffer.after_attachments")
        await put(a_front, group, (0,))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
