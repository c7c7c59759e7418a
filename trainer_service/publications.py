"""Published versions since the newest checkpoint, with the hashes of their weights, in `published.jsonl`.

A trainer that repeats steps compares its publications with those of earlier trainers, because units sampled
from equal weights are still valid. If a crash has cut off a line of the file, the version in that line counts
as different. The only cost is that more episodes must be generated again.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import msgspec

from areal_async.base.own_files import write_whole
from areal_async.base.versions import VersionTag

PUBLISHED = "published.jsonl"


class PublishedVersion(msgspec.Struct, frozen=True):
    tag: VersionTag
    weights_hash: str


class PublishedVersions:
    """Record of published versions. It belongs to rank 0; any of its threads may call it."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / PUBLISHED
        self._lock = threading.Lock()
        self.entries: list[PublishedVersion] = []
        for line in self.path.read_bytes().splitlines() if self.path.exists() else ():
            with suppress(msgspec.DecodeError):
                self.entries.append(msgspec.json.decode(line, type=PublishedVersion))

    @property
    def last_epoch(self) -> int:
        """The newest epoch with a publication; 0 if there is none."""
        return max((entry.tag.epoch for entry in self.entries), default=0)

    def add(self, tag: VersionTag, weights_hash: str) -> list[int]:
        """Record a published version. Returns the earlier epochs that published it with equal weights."""
        with self._lock:
            same = [
                entry.tag.epoch
                for entry in self.entries
                if entry.weights_hash == weights_hash
                and (entry.tag.policy, entry.tag.version) == (tag.policy, tag.version)
                and entry.tag.epoch != tag.epoch
            ]
            entry = PublishedVersion(tag, weights_hash)
            self.entries.append(entry)
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(entry) + b"\n")
            return same

    def forget_before(self, version: int) -> None:
        """Forget versions before `version`. Its checkpoint is on disk, so they will not be published
        again."""
        with self._lock:
            self.entries = [entry for entry in self.entries if entry.tag.version >= version]
            write_whole(self.path, b"".join(msgspec.json.encode(entry) + b"\n" for entry in self.entries))
