"""Base classes of a weights channel and of its two ends; the package docstring has the rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_async.base.mistakes import Mistake
from areal_async.base.versions import VersionTag
from areal_async.config.base import Section
from areal_async.config.job import JobConfig
from areal_async.rpc.schema import Message
from areal_async.rpc.weights_messages import SnapshotNotice

if TYPE_CHECKING:
    import torch

    from areal_async.rpc.client import Client
    from areal_async.rpc.server import Answer
    from areal_async.service.context import ServiceContext


class PublishingEnd:
    """The trainer's end. This one leaves the files where they are."""

    node_id = ""
    """Name of the trainer's host."""
    takes_tensors = False
    """Whether `offer` is called, which takes a trainer of one rank: it wants all tensors at once."""

    async def start(self) -> None:
        """Begin to serve. Raises `ArealError`."""

    async def close(self) -> None:
        """Leave no thread and no socket behind."""

    def offer(self, tag: VersionTag, tensors: Mapping[str, torch.Tensor]) -> None:
        """Announce that these tensors, on the trainer's device, are about to be published as `tag`. They may
        change as soon as this returns."""

    def add(self, directory: Path, manifest_hash: str) -> None:
        """Serve the complete `directory`, of a snapshot or of a delta, from now on."""

    def remove(self, manifest_hash: str) -> bool:
        """Serve it no more; return whether its files may be overwritten, since nobody reads them."""
        return True

    async def answer(self, message: Message) -> Answer | None:
        """Return the answer to a receiver; None for a message that is not for this channel. Raises
        `FaultError`."""
        return None


class ReceivingEnd:
    """The end of one receiver. This one reads where the trainer wrote."""

    makes_deltas = False
    """Whether the snapshot that was brought last is held here, so that the next can be made of it."""

    async def bring(self, notice: SnapshotNotice, publisher: Client) -> Path:
        """Return the path of the announced snapshot on this host. `publisher` is the receiver's connection to
        it. Raises `SnapshotError` for what cannot be brought."""
        return Path(notice.path)

    def served(self, tag: VersionTag, *, failed: bool = False) -> None:
        """Note that the receiver uses `tag` now, or `failed` to: files that it no longer needs may go."""

    def distrust(self, notice: SnapshotNotice) -> None:
        """Forget the files that were brought, which did not open: the next try must not find them."""

    async def close(self) -> None:
        """Leave no socket behind."""


class Channel:
    """Declarations of a channel, and its ends. All members are static; the module that holds it must not
    import torch, since a job file is checked with it."""

    class Arguments(Section):
        """The arguments of the channel, which the job file has in `weights.channel_args`."""

    deltas = False
    """Whether `weights.codec: auto` makes deltas: only where they save the bytes of a network."""
    one_host = False
    """Whether it reaches none but the processes of the trainer's host."""
    from_device = False
    """Whether `offer` wants the tensors on the trainer's device."""

    @staticmethod
    def check_job(job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        """Yield the mistakes of a job that uses this channel with these arguments, which stand in `field`."""
        yield from ()

    @staticmethod
    def check_files(arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        """Yield the mistakes in the files that the arguments name."""
        yield from ()

    @staticmethod
    def directory(job: JobConfig) -> Path | None:
        """Return the folder of snapshots, which is emptied at the end; None for the shared memory of the
        run."""
        return None

    @staticmethod
    def publishing_end(ctx: ServiceContext) -> PublishingEnd:
        return PublishingEnd()

    @staticmethod
    def receiving_end(ctx: ServiceContext, name: str) -> ReceivingEnd:
        """`name` is that of the receiver."""
        return ReceivingEnd()
