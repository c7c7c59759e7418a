"""A base for small fakes of an RPC client, and a put with a real one.

A fake answers a request by the method that has its name in lower case, with the fields as arguments. A method
returns the reply, `(reply, attachments)`, or None for `Ok`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import asdict
from typing_extensions import Buffer

from areal_async.rpc.client import Client
from areal_async.rpc.messages import GroupSamples, OpenTrainer, PutEpisodes, StoredGroup
from areal_async.rpc.schema import Request


def _begin(fake: object, request: Request[Any], attachments: Sequence[Any]) -> Any:
    fields = asdict(request)
    if isinstance(request, PutEpisodes):
        left = iter(attachments)
        fields["puts"] = [
            (
                put,
                {sample: next(left) for sample in put.samples},
                {sample: next(left) for sample in put.routes},
                {digest: next(left) for digest in put.media},
            )
            for put in fields.pop("groups")
        ]
    elif isinstance(request, OpenTrainer):
        fields["ledger"] = bytes(attachments[0]) if attachments else b""
    return getattr(fake, re.sub(r"(?<!^)(?=[A-Z])", "_", type(request).__name__).lower())(**fields)


def _both(answer: Any) -> tuple[Any, Sequence[Any]]:
    return answer if isinstance(answer, tuple) else (answer, [])


class FakeCaller:
    async def exchange(self, request: Request[Any], *, timeout_s: float = 0, attachments: Any = ()) -> Any:
        return _both(await _begin(self, request, attachments))

    async def call(self, request: Request[Any], *, timeout_s: float = 0, attachments: Any = ()) -> Any:
        return _both(await _begin(self, request, attachments))[0]


async def put(client: Client, lease_id: str, group_id: str, episodes: Mapping[int, Buffer]) -> StoredGroup:
    """Store codec blobs of one group by sample."""
    request = PutEpisodes([GroupSamples(lease_id, group_id, list(episodes))])
    return (await client.call(request, attachments=list(episodes.values()))).groups[0]
