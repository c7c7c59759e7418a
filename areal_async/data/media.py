"""Fetching of media from the buffer, in as many requests as their size needs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from areal_async.base.errors import FaultError, ProtocolError, RpcTimeout
from areal_async.data.images import digest_of
from areal_async.rpc.client import Client, wait_out
from areal_async.rpc.messages import FetchedMedia, FetchMedia


class MediaFetch:
    """Media to fetch, as digests by group, and those that have come. Call `request`, send the request and
    pass its reply to `take`, until there is no request."""

    def __init__(self, wanted: Mapping[str, Iterable[str]]) -> None:
        self.found: dict[str, memoryview] = {}
        self.lost: set[str] = set()
        """Digests whose bytes the buffer does not have, or has only with changes."""
        self._wanted = {group_id: [*dict.fromkeys(digests)] for group_id, digests in wanted.items()}

    def request(self) -> FetchMedia | None:
        known = self.found.keys() | self.lost
        left = {
            group_id: [one for one in some if one not in known] for group_id, some in self._wanted.items()
        }
        left = {group_id: some for group_id, some in left.items() if some}
        return FetchMedia(left) if left else None

    def take(self, reply: FetchedMedia, attachments: Sequence[memoryview]) -> None:
        if not (reply.digests or reply.lost) or len(reply.digests) != len(attachments):
            raise ProtocolError(f"{len(attachments)} media came for {len(reply.digests)} digests")
        for digest, data in zip(reply.digests, attachments, strict=True):
            if digest_of(data) == digest:
                self.found[digest] = data
            else:
                self.lost.add(digest)
        self.lost.update(reply.lost)


async def fetch_media(
    buffer: Client, wanted: Mapping[str, Iterable[str]], *, retry_pause_s: float | None = None
) -> MediaFetch:
    """Fetch media, as digests by group. With `retry_pause_s`, wait out an outage of the buffer (`wait_out`).
    Raises the errors of the client's calls."""
    fetch = MediaFetch(wanted)
    while (request := fetch.request()) is not None:
        try:
            reply = await buffer.exchange(request)
        except (RpcTimeout, FaultError) as error:
            if retry_pause_s is None:
                raise
            await wait_out(error, "media", retry_pause_s)
        else:
            await asyncio.to_thread(fetch.take, *reply)
    return fetch
