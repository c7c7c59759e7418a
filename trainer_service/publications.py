"""The versions that a run's trainers have published since the newest checkpoint, with the hashes of their
weights: `published.jsonl`.

A trainer that redoes steps compares what it publishes with what its predecessors had: units sampled from
equal weights are still true. A line that a crash cut short is a version that counts as different, which costs
generation and nothing else.
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
    """Belongs to rank 0; any of its threads may call."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / PUBLISHED
        self._lock = threading.Lock()
        self.entries: list[PublishedVersion] = []
        for line in self.path.read_bytes().splitlines() if self.path.exists() else ():
            with suppress(msgspec.DecodeError):
                self.entries.append(msgspec.json.decode(line, type=PublishedVersion))

    @property
    def last_epoch(self) -> int:
        """Return the newest epoch that published anything; 0 before the first."""
        return max((entry.tag.epoch for entry in self.entries), default=0)

    def add(self, tag: VersionTag, weights_hash: str) -> list[int]:
        """Record a published version. Returns the earlier epochs that had published it alike."""
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
        """Forget the publications before `version`, whose checkpoint is on disk, so they are never
        repeated."""
        with self._lock:
            self.entries = [entry for entry in self.entries if entry.tag.version >= version]
            write_whole(self.path, b"".join(msgspec.json.encode(entry) + b"\n" for entry in self.entries))
