"""The names of a job's keys in Redis, and a write set as the commands on them.

    areal:{job}:meta       hash: schema, front, owner, revision, alive_ms, state (the `Meta` record)
    areal:{job}:groups     hash: group id → `Group`
    areal:{job}:leases     hash: lease id → `Lease`
    areal:{job}:claims     hash: claim id → `Claim`
    areal:{job}:batches    hash: step → `BatchPlan`
    areal:{job}:e:<group>  hash: sample → codec blob of the episode
    areal:{job}:large      hash: episode id → where a large one lies (`large.py`)
    areal:{job}:b:<n>      string: a chunk of a large episode
    areal:{job}:staged     set: chunks written, and not referred to yet

The job's name is the hash tag of every key: a job lives on one shard of a Redis Cluster, several jobs spread.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import msgspec

from replay_buffer.ledger.index import WriteSet
from replay_buffer.redis.connection import Argument

MOST_ARGUMENTS = 2000
"""Per command: Lua can unpack some thousand at once."""

_encode = msgspec.msgpack.Encoder().encode

Bytes = bytes | memoryview


class Keys:
    def __init__(self, job: str) -> None:
        self.prefix = f"areal:{{{job}}}:"
        self.meta = self.prefix + "meta"
        self.groups = self.prefix + "groups"
        self.leases = self.prefix + "leases"
        self.claims = self.prefix + "claims"
        self.batches = self.prefix + "batches"
        self.large = self.prefix + "large"
        self.staged = self.prefix + "staged"

    def blobs(self, group_id: str) -> str:
        return f"{self.prefix}e:{group_id}"

    def chunk(self, stem: str, number: int) -> str:
        return f"{self.prefix}b:{stem}.{number}"


class Commands:
    """The keys and arguments of one call of the write script."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self.keys: list[str] = [keys.meta]
        self.arguments: list[Argument] = []
        self._number: dict[str, int] = {keys.meta: 1}

    def add(self, name: str, key: str, arguments: Sequence[Argument] = ()) -> None:
        number = self._number.get(key)
        if number is None:
            self.keys.append(key)
            number = self._number[key] = len(self.keys)
        self.arguments += (name, number, len(arguments), *arguments)

    def before_all(self, name: str, arguments: Sequence[Argument]) -> None:
        """A command on the meta hash, in front of all others."""
        self.arguments[:0] = (name, 1, len(arguments), *arguments)

    def table(self, key: str, records: Mapping[Any, Any]) -> None:
        """The records of one hash: those to set and those to delete."""
        gone = [name for name, record in records.items() if record is None]
        held: list[Argument] = []
        for name, record in records.items():
            if record is not None:
                held += (name, _encode(record))
        for start in range(0, len(gone), MOST_ARGUMENTS):
            self.add("HDEL", key, gone[start : start + MOST_ARGUMENTS])
        for start in range(0, len(held), MOST_ARGUMENTS):
            self.add("HSET", key, held[start : start + MOST_ARGUMENTS])


def commands_of(
    keys: Keys,
    writes: WriteSet,
    attachments: Sequence[Any],
    elsewhere: Container[tuple[str, int]] = (),
    into: Commands | None = None,
) -> Commands:
    """`writes` as commands, behind those in `into`; blobs are taken from the message's attachments, but for
    those (group id, sample) that are kept `elsewhere`.

    What frees memory comes first: a Redis at its limit then lets the whole script pass."""
    commands = Commands(keys) if into is None else into
    for group_id, samples in writes.freed.items():
        if samples is None:
            commands.add("UNLINK", keys.blobs(group_id))
        else:
            commands.add("HDEL", keys.blobs(group_id), samples)
    for group_id, kept in writes.blobs.items():
        pairs: list[Argument] = []
        for sample, attachment in kept.items():
            if (group_id, sample) in elsewhere:
                continue
            pairs += (sample, attachments[attachment])
        for start in range(0, len(pairs), MOST_ARGUMENTS):
            commands.add("HSET", keys.blobs(group_id), pairs[start : start + MOST_ARGUMENTS])
    commands.table(keys.groups, writes.groups)
    commands.table(keys.leases, writes.leases)
    commands.table(keys.claims, writes.claims)
    batches = {f"{policy}:{step}": plan for (policy, step), plan in writes.batches.items()}
    commands.table(keys.batches, batches)
    commands.add("HSET", keys.meta, ("state", _encode(writes.meta)))
    return commands
