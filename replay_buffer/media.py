"""Media of groups, such as the images of tasks and of tools: checks of puts, replies to clients, and loss.

Promises: a sample is stored only if all its media are on disk and hash to their digests. A group is dropped
as `bytes_lost` if the files have lost media of one of its episodes, so that no trainer waits for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from areal_async.base.errors import FaultError
from areal_async.base.log import get_logger
from areal_async.base.records import ImageFile
from areal_async.data.images import MOST_BYTES, digest_of
from areal_async.data.tasks import TaskFileError
from areal_async.rpc.messages import FetchedMedia, FetchMedia
from areal_async.rpc.server import Answer, Peer
from areal_async.trajectory import read_header
from areal_async.trajectory.layout import Media
from replay_buffer.attachments import AttachmentFiles, media_key
from replay_buffer.coordinator import Coordinator, GroupBytes, not_written
from replay_buffer.ledger.decide import BytesLost
from replay_buffer.ledger.leasing import GroupArrivals
from replay_buffer.ledger.records import GroupRecord, GroupState

REPLY_BYTES = 128 << 20  # Size of a reply with media from which no further ones are added
MOST_EPISODE_BYTES = 512 << 20  # Most bytes of the media of one episode
MOST_EPISODE_MEDIA = 1024

log = get_logger("buffer")


class GroupMedia:
    """The media of all groups. Without `files`, no group has any."""

    def __init__(self, coordinator: Coordinator, files: AttachmentFiles | None) -> None:
        self._coordinator = coordinator
        self._files = files

    def size(self, group_id: str, digest: str) -> int | None:
        """Return the bytes of a group's medium, or None if its files do not have it."""
        return None if self._files is None else self._files.size_of(group_id, media_key(digest))

    def may_have(self, group_id: str) -> bool:
        """Return whether episodes of the group may have media."""
        return bool(self._task_images(group_id)) or (
            self._files is not None and self._files.has_media(group_id)
        )

    def _group(self, group_id: str) -> GroupRecord | None:
        index = self._coordinator.index
        return None if index is None else index.groups.get(group_id)

    def _task_images(self, group_id: str) -> tuple[ImageFile, ...]:
        """Return the images of a group's task without their bytes."""
        index, group = self._coordinator.index, self._group(group_id)
        return () if index is None or group is None else index.tasks.task(group.row, group.pass_index).images

    async def keep_task_images(self, group_id: str) -> None:
        """Write the images of the group's task into its files, unless they are there already. A later change
        of the task file does not change them. Raises `FaultError`."""
        index, group = self._coordinator.index, self._group(group_id)
        sizes = [self.size(group_id, each.facts.digest) for each in self._task_images(group_id)]
        if index is None or group is None or self._files is None or None not in sizes:
            return
        try:
            images = await asyncio.to_thread(index.tasks.images, group.row)
            given = {media_key(each.facts.digest): each.data for each in images}
            self._coordinator.settle(group_id, await self._files.write(group_id, given), None)
        except TaskFileError as error:
            raise FaultError("invalid", str(error)) from error
        except OSError as error:
            raise not_written(error) from error

    async def checked(
        self, put: GroupArrivals, given: GroupBytes, of_samples: Mapping[int, Sequence[Media]]
    ) -> tuple[GroupArrivals, GroupBytes]:
        """Return a group's part of a put with the problems of its media, and with the media to write."""
        group = self._group(put.group_id)
        if group is None or group.state != GroupState.LEASED or group.leases[-1] != put.lease_id:
            return put, given._replace(media={})  # the ledger refuses new samples, and knows the others
        told = {sample: why for sample, some in of_samples.items() if (why := _too_much(some))}
        good = [some for sample, some in of_samples.items() if sample not in told]
        wanted = {media.digest for some in good for media in some}
        sent = {digest: given.media[digest] for digest in wanted & given.media.keys()}
        actual = await asyncio.to_thread(lambda: {digest: digest_of(data) for digest, data in sent.items()})
        if any(self.size(put.group_id, digest) is None for digest in wanted - sent.keys()):
            await self.keep_task_images(put.group_id)
        problems, sizes = dict[str, str](), dict[str, int]()
        for digest in wanted:
            size = len(sent[digest]) if digest in sent else self.size(put.group_id, digest)
            if actual.get(digest, digest) != digest:
                problems[digest] = f"the bytes that came as {digest:.80} are {actual[digest]}"
            elif size is None:
                problems[digest] = f"no bytes of its medium {digest:.80} have come"
            else:
                sizes[digest] = size
        for sample, some in of_samples.items():
            for media in some if sample not in told else ():
                why = problems.get(media.digest, "")
                if not why and (size := sizes[media.digest]) != media.size_bytes:
                    why = f"{media.digest} has {size} bytes, and the episode says {media.size_bytes}"
                if why:
                    told[sample] = why
                    break
        arrivals = [replace(each, problem=each.problem or told.get(each.sample, "")) for each in put.arrivals]
        kept = {media.digest for sample, some in of_samples.items() if sample not in told for media in some}
        new = {digest: sent[digest] for digest in kept & sent.keys() if not self.size(put.group_id, digest)}
        return replace(put, arrivals=tuple(arrivals)), given._replace(media=new)

    async def fetch(self, peer: Peer, message: FetchMedia, attachments: list[memoryview]) -> Answer:
        """Answer with the bytes of media, up to about `REPLY_BYTES`, and with those that are lost."""
        wanted: dict[str, str] = {}
        lost: dict[str, str] = {}
        size_bytes = 0
        for group_id, digests in message.groups.items():
            await self._look_for(group_id, digests)
            for digest in digests:
                size = self.size(group_id, digest)
                if size is None:
                    lost[digest] = group_id
                elif digest not in wanted and size_bytes < REPLY_BYTES:
                    wanted[digest] = group_id
                    size_bytes += size
            if size_bytes >= REPLY_BYTES:
                break
        named = [(group_id, media_key(digest)) for digest, group_id in wanted.items()]
        read = await self._coordinator.attachments(named)
        if None in read:  # of these files only the names were left: look for them as for unknown ones
            return await self.fetch(peer, message, attachments)
        lost = {digest: group_id for digest, group_id in lost.items() if digest not in wanted}
        for group_id in {*lost.values()}:
            await self._lose(group_id, {digest for digest, owner in lost.items() if owner == group_id})
        return FetchedMedia([*wanted], [*lost]), [data for data in read if data is not None]

    async def _look_for(self, group_id: str, digests: Sequence[str]) -> None:
        """Read the images of the group's task again if any of these media is missing. Raises `FaultError`,
        unless the group has episodes, which have then lost their images."""
        if all(self.size(group_id, digest) is not None for digest in digests):
            return
        try:
            await self.keep_task_images(group_id)
        except FaultError as error:
            group = self._group(group_id)
            if error.kind != "invalid" or group is None or not group.held:
                raise
            log.error("images are lost", group_id=group_id, error=str(error))

    async def _lose(self, group_id: str, digests: Collection[str]) -> None:
        """Drop the group if one of its episodes names one of these lost media."""
        group = self._group(group_id)
        places = [(group_id, sample) for sample in (() if group is None else group.held)]
        blobs = zip(places, await self._coordinator.blobs(places), strict=True)
        without = [
            place
            for place, blob in blobs
            if blob is not None and any(media.digest in digests for media in read_header(blob)[0].media)
        ]
        if without:
            log.error("a group has lost media, and its task is tried again", group_id=group_id)
            await self._coordinator.execute(BytesLost(tuple(without)))


def _too_much(some: Sequence[Media]) -> str:
    """Return why an episode may not have these media, or an empty string."""
    sizes: dict[str, int] = {}
    for media in some:
        if (size := sizes.setdefault(media.digest, media.size_bytes)) != media.size_bytes:
            return f"it says that {media.digest:.80} has {size} bytes, and {media.size_bytes} bytes"
    if len(sizes) > MOST_EPISODE_MEDIA:
        return f"it has {len(sizes)} media, and at most {MOST_EPISODE_MEDIA} are stored"
    if sum(sizes.values()) > MOST_EPISODE_BYTES:
        return f"its media have more than {MOST_EPISODE_BYTES} bytes"
    large = next((digest for digest, size in sizes.items() if size > MOST_BYTES), None)
    return f"{large:.80} has more than {MOST_BYTES} bytes" if large else ""
