"""What every trainer of a run has published since the newest checkpoint: the hash of each version's weights.

A trainer that redoes steps compares what it publishes with what its predecessors had: units sampled from
equal weights are still true. The file is one JSON line per version; a line that a crash cut short is a
version that counts as different, which costs generation and nothing else.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from areal_async.rpc.schema import VersionTag

FILE = "published.jsonl"


class PublishedVersion(msgspec.Struct, frozen=True):
    epoch: int
    version: int
    weights_hash: str


def hashes_of(run_dir: Path) -> dict[int, str]:
    """The hash that each version was last published with, as far as it is still written down."""
    return {entry.version: entry.weights_hash for entry in PublishedVersions(run_dir).entries}


class PublishedVersions:
    """Belongs to rank 0."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE
        self.entries: list[PublishedVersion] = []
        for line in self.path.read_bytes().splitlines() if self.path.exists() else ():
            try:
                self.entries.append(msgspec.json.decode(line, type=PublishedVersion))
            except msgspec.DecodeError:
                continue

    @property
    def last_epoch(self) -> int:
        """The newest epoch that published anything; 0 before the first."""
        return max((entry.epoch for entry in self.entries), default=0)

    def add(self, tag: VersionTag, weights_hash: str) -> list[int]:
        """Write down a version that was published; returns the earlier epochs that had published it alike."""
        same = [
            entry.epoch
            for entry in self.entries
            if (entry.version, entry.weights_hash) == (tag.version, weights_hash) and entry.epoch != tag.epoch
        ]
        entry = PublishedVersion(tag.epoch, tag.version, weights_hash)
        self.entries.append(entry)
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")
        return same

    def forget_before(self, version: int) -> None:
        """A checkpoint of `version` is on disk: no earlier one is published again."""
        self.entries = [entry for entry in self.entries if entry.version >= version]
        unfinished = self.path.with_suffix(".tmp")
        unfinished.write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in self.entries))
        unfinished.replace(self.path)
