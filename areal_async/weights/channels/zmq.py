"""Channel `zmq`: receivers on other hosts fetch snapshots in chunks, and hand chunks on to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_async.weights.channels import Channel, PublishingEnd, ReceivingEnd

if TYPE_CHECKING:
    from areal_async.rpc.endpoints import Access
    from areal_async.runtime.context import ServiceContext


class Zmq(Channel):
    deltas = True

    @staticmethod
    def publishing_end(ctx: ServiceContext) -> PublishingEnd:
        """Raises `EndpointError`."""
        from areal_async.weights.channels.snapshot_server import SnapshotServer

        fan_out = ctx.job.weights.relay_fan_out
        return SnapshotServer(_listen(ctx), job=ctx.job.job, access=_access(ctx), fan_out=fan_out)

    @staticmethod
    def receiving_end(ctx: ServiceContext, name: str) -> ReceivingEnd:
        """Raises `EndpointError`."""
        from areal_async.weights.channels.fetcher import SnapshotFetcher

        return SnapshotFetcher(
            ctx.shm_dir / "weights" / ctx.node_id,
            node_id=ctx.node_id,
            name=name,
            job=ctx.job.job,
            listen=_listen(ctx),
            access=_access(ctx),
            patience_s=ctx.job.weights.patience_s,
            give_up_s=ctx.job.weights.give_up_s,
        )


def _listen(ctx: ServiceContext) -> str:
    return f"tcp://{ctx.job.weights.addresses.get(ctx.node_id, '127.0.0.1')}:0"


def _access(ctx: ServiceContext) -> Access:
    """What chunks are fetched with: the keys that the job's hosts share, else the secret of the run."""
    from areal_async.weights.keys import read_keys

    key_file = ctx.job.weights.key_file
    return read_keys(key_file) if key_file is not None else ctx.secret
