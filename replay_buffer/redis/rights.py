"""What each role may do in Redis: its commands, and nothing but the keys of its job.

    python -m replay_buffer.redis.rights JOB      the two `ACL SETUSER` lines of a job

Only the buffer service writes. The rights of its user are tried out at start, one harmless command each: a
missing one is known by name before the job runs, on every version of Redis and without the right to ask.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import hiredis

from replay_buffer.errors import StoreUnusable, refusal
from replay_buffer.redis.address import RedisServer
from replay_buffer.redis.connection import RedisConnection
from replay_buffer.redis.keys import Keys

PROBE = "e:probe"
"""The key that the trial writes to and deletes, beside those of the episodes."""
NOTHING = "-no-such-field"
KEY = object()
"""Stands for the probe's key in a trial."""

LOOK: dict[str, tuple[Any, ...]] = {
    "hget": (KEY, NOTHING),
    "hmget": (KEY, NOTHING),
    "hgetall": (KEY,),
    "hexists": (KEY, NOTHING),
    "ping": (),
    "time": (),
    "info": ("server",),
}
"""The rights of both roles, as ACL rules name them, each with arguments to try it with."""
FRONT = LOOK | {
    "hset": (KEY, "a", 1),
    "hdel": (KEY, "a"),
    "unlink": (KEY,),
    "set": (KEY, "a"),
    "mget": (KEY,),
    "exists": (KEY,),
    "sadd": (KEY, "a"),
    "srem": (KEY, "a"),
    "smembers": (KEY,),
    "evalsha": ("0" * 40, 1, KEY),
    "script|load": ("return 1",),
    "config|get": ("appendfsync",),
    "select": (),
}
READER = (*LOOK, "multi", "exec", "mget", "hlen", "hkeys", "hscan", "hstrlen", "exists", "type", "select")


def acl_rules(job: str, role: str, *, read_only_keys: bool = True) -> str:
    """The rules of `ACL SETUSER` for the `front` or a `reader` of a job, without its password.

    `read_only_keys` gives the reader a key pattern for reading alone, which Redis knows since version 7."""
    commands = FRONT if role == "front" else READER
    pattern = "%R~" if role == "reader" and read_only_keys else "~"
    return " ".join(
        ["resetchannels", "resetkeys", f"{pattern}{Keys(job).prefix}*", "-@all", *(f"+{c}" for c in commands)]
    )


async def check_rights(redis: RedisConnection, place: RedisServer, keys: Keys) -> None:
    """Try every right that a front needs. Raises `StoreUnusable` naming all that are missing."""
    trials = list(_trials(keys))
    answers = await asyncio.gather(*[redis.call(*command) for _, command, _ in trials])
    commands, patterns = [], []
    for (right, _, key), answer in zip(trials, answers, strict=True):
        if not isinstance(answer, hiredis.ReplyError):
            continue
        text = str(answer)
        if text.startswith(("MOVED", "ASK")):
            raise moved(place, keys, text)
        if text.startswith(("MISCONF", "LOADING", "CLUSTERDOWN")):
            raise refusal(text)
        if not text.startswith("NOPERM"):
            continue  # at its memory limit, a Redis refuses the trial write, and the user may have the right
        if "keys" in text:
            patterns.append(key)
        else:
            commands.append(f"+{right}")
    if not (commands or patterns):
        return
    missing = sorted(set(commands)) + ([f"~{keys.prefix}*"] if patterns else [])
    about = f" (it cannot use {patterns[0]})" if patterns else ""
    raise StoreUnusable(
        f"the user {place.user!r} of Redis at {place} lacks rights{about}. Give them with: "
        f"ACL SETUSER {place.user} {' '.join(missing)}"
    )


def moved(place: RedisServer, keys: Keys, answer: str) -> StoreUnusable:
    """A node of a Redis Cluster that does not serve this job's slot."""
    words = answer.split()
    where = f"slot {words[1]} is served by {words[2]}" if words[0] == "MOVED" and len(words) > 2 else answer
    return StoreUnusable(
        f"Redis at {place} is a cluster node that does not serve the keys {keys.prefix}*: {where}. Set "
        "buffer.redis to that node: a job lives on one shard"
    )


def _trials(keys: Keys) -> Iterator[tuple[str, list[Any], str]]:
    """Each right with a harmless command that needs it, and the key that the command is about."""
    probe = keys.prefix + PROBE
    for right, arguments in FRONT.items():
        if right == "select":
            continue  # it is needed with a database in the URL alone, and asked for at the login
        yield right, [*right.split("|"), *(probe if one is KEY else one for one in arguments)], probe
        if right in ("hset", "set"):
            yield "unlink", ["unlink", probe], probe
    for key in (keys.meta, keys.groups, keys.leases, keys.claims, keys.batches):
        yield "hdel", ["hdel", key, NOTHING], key
        yield "hget", ["hget", key, NOTHING], key


def main(arguments: Sequence[str]) -> int:
    """Print the users of a job, each with a password to fill in."""
    if len(arguments) != 1:
        print("usage: python -m replay_buffer.redis.rights JOB", file=sys.stderr)
        return 2
    (job,) = arguments
    for role in ("front", "reader"):
        print(f"ACL SETUSER areal-{role} on >PASSWORD {acl_rules(job, role)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
