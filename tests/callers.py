"""A base for small fakes of an RPC client, and what tests send with a real one.

A fake answers a request by the method that has its name in lower case, with the fields as arguments. A method
returns the reply, `(reply, attachments)`, or None for `Ok`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import asdict
from typing_extensions import Buffer

from areal_async.rpc.messages import OpenTrainer, PutEpisodes
from areal_async.rpc.schema import Request


def _begin(fake: object, request: Request[Any], attachments: Sequence[Any]) -> Any:
    fields = asdict(request)
    if isinstance(request, PutEpisodes):
        samples, routed = fields.pop("samples"), fields.pop("routes")
        fields["episodes"] = dict(zip(samples, attachments, strict=not routed))
        if routed:
            fields["routes"] = dict(zip(routed, attachments[len(samples) :], strict=True))
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


def put(client: Any, lease_id: str, group_id: str, episodes: Mapping[int, Buffer]) -> Any:
    """Store codec blobs by sample, with a `Client` or a `SyncClient`."""
    return client.call(PutEpisodes(lease_id, group_id, list(episodes)), attachments=list(episodes.values()))
