"""Base classes of a weights channel and of its two ends. The package docstring has the rules."""

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
    """The trainer's end. This base class does nothing, so receivers read the files where the trainer wrote
    them."""

    node_id = ""
    """Name of the trainer's host."""
    takes_tensors = False
    """Whether the publisher calls `offer`. This requires a trainer with one rank, because `offer` gets all
    tensors at once."""

    async def start(self) -> None:
        """Begin to serve. Raises `ArealError`."""

    async def close(self) -> None:
        """Stop serving and end all threads and sockets."""

    def offer(self, tag: VersionTag, tensors: Mapping[str, torch.Tensor]) -> None:
        """Announce that these tensors, on the trainer's device, are about to be published as `tag`.

        The trainer may change the tensors as soon as this method returns.
        """

    def add(self, directory: Path, manifest_hash: str) -> None:
        """Serve the complete `directory` of a snapshot or a delta from now on."""

    def remove(self, manifest_hash: str) -> bool:
        """Stop serving the snapshot. Return True if nobody reads its files any more, so that they may be
        overwritten."""
        return True

    async def answer(self, message: Message) -> Answer | None:
        """Return the answer to a receiver, or None for a message that this channel does not handle.

        Raises `FaultError`.
        """
        return None


class ReceivingEnd:
    """The end of one receiver. This base class reads the files where the trainer wrote them."""

    makes_deltas = False
    """Whether this end keeps the last snapshot, so that a delta can turn it into the next."""

    async def bring(self, notice: SnapshotNotice, publisher: Client) -> Path:
        """Bring the announced snapshot to this host, and return its path.

        `publisher` is the receiver's connection to the publisher. Raises `SnapshotError` if the snapshot
        cannot be brought.
        """
        return Path(notice.path)

    def served(self, tag: VersionTag, *, failed: bool = False) -> None:
        """Record that the receiver now uses `tag`, or, with `failed`, that it could not. Files that are no
        longer needed may then be removed."""

    def distrust(self, notice: SnapshotNotice) -> None:
        """Remove files that `bring` returned but that could not be opened, so that the next try fetches them
        again."""

    async def close(self) -> None:
        """Close all sockets."""


class Channel:
    """Declarations of a channel, and its ends.

    All members are static. The channel's module must not import torch, because it is used to check a job
    file.
    """

    class Arguments(Section):
        """The arguments of the channel: `weights.channel_args` of the job file."""

    deltas = False
    """Whether deltas are made under `weights.codec: auto`. Deltas are worth their cost only if they save
    network traffic."""
    one_host = False
    """Whether the channel reaches only processes of the trainer's host."""
    from_device = False
    """Whether `offer` needs the tensors on the trainer's device."""

    @staticmethod
    def check_job(job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        """Yield the mistakes of a job that uses this channel with these arguments. `field` names the
        arguments."""
        yield from ()

    @staticmethod
    def check_files(arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        """Yield the mistakes in files that the arguments name."""
        yield from ()

    @staticmethod
    def directory(job: JobConfig) -> Path | None:
        """Return the folder of snapshots, or None for the shared memory of the run. The folder is emptied at
        the end."""
        return None

    @staticmethod
    def publishing_end(ctx: ServiceContext) -> PublishingEnd:
        return PublishingEnd()

    @staticmethod
    def receiving_end(ctx: ServiceContext, name: str) -> ReceivingEnd:
        """Return the end of receiver `name`."""
        return ReceivingEnd()
