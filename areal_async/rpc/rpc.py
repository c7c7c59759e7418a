"""The RPC of every service: requests and replies of `messages.py` over ROUTER/DEALER.

    server = Server("ipc:///run/job/buffer", service="buffer", job="job", access=secret, handler=handle)
    await server.start()
    …
    async with Client("ipc:///run/job/buffer", job="job", role="…", name="…", access=secret) as client:
        leases = await client.call(Lease(…), timeout_s=5.0)

`SyncClient` is the blocking one. The promises are in `server.py` and `client.py`; the bytes in `frames.py`.
"""

from areal_async.rpc.client import Caller, Client
from areal_async.rpc.endpoints import Access
from areal_async.rpc.secret import CurveKeys, RunSecret
from areal_async.rpc.server import Answer, Handler, Peer, RpcCounters, Server, by_type
from areal_async.rpc.sync_client import SyncCaller, SyncClient

__all__ = [
    "Access",
    "Answer",
    "Caller",
    "Client",
    "CurveKeys",
    "Handler",
    "Peer",
    "RpcCounters",
    "RunSecret",
    "Server",
    "SyncCaller",
    "SyncClient",
    "by_type",
]
