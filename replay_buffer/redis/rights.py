"""What each role may do in Redis: its commands, and nothing but the keys of its job.

    python -m replay_buffer.redis.rights JOB      the two `ACL SETUSER` lines of a job

Only the buffer service writes. The rights of its user are tried out at start, one harmless command each: a
missing one is known by name before the job runs, on every version of Redis and without the right to ask.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hiredis

from replay_buffer.errors import StoreUnusable, refusal
from replay_buffer.redis.address import RedisServer
from replay_buffer.redis.connection import RedisConnection
from replay_buffer.redis.keys import Keys

LOOK = ("hget", "hmget", "hgetall", "hexists", "ping", "time", "info")
"""What both roles may do."""
FRONT = (
    *LOOK,
    "hset",
    "hdel",
    "unlink",
    "set",
    "mget",
    "exists",
    "sadd",
    "srem",
    "smembers",
    "evalsha",
    "script|load",
    "config|get",
    "select",
)
READER = (*LOOK, "multi", "exec", "mget", "hlen", "hkeys", "hscan", "hstrlen", "exists", "type", "select")

PROBE = "e:probe"
"""Key that the trial writes to and deletes, beside those of the episodes."""
NOTHING = "-no-such-field"


@dataclass(frozen=True)
class Trial:
    right: str
    """As an ACL rule names it."""
    command: tuple[Any, ...]
    key: str = ""


def acl_rules(job: str, role: str, *, read_only_keys: bool = True) -> str:
    """The rules of `ACL SETUSER` for the `front` or a `reader` of a job, without its password.

    `read_only_keys` gives the reader a key pattern for reading alone, which Redis knows since version 7."""
    commands = FRONT if role == "front" else READER
    pattern = "%R~" if role == "reader" and read_only_keys else "~"
    return " ".join(
        ["resetchannels", "resetkeys", f"{pattern}{Keys(job).prefix}*", "-@all", *(f"+{c}" for c in commands)]
    )


async def check_rights(pipe: RedisConnection, place: RedisServer, keys: Keys) -> None:
    """Try every right that a front needs. Raises `StoreUnusable` naming all that are missing."""
    trials = _trials(keys)
    answers = await asyncio.gather(*[pipe.call(*trial.command) for trial in trials])
    commands, patterns = [], []
    for trial, answer in zip(trials, answers, strict=True):
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
            patterns.append(trial.key)
        else:
            commands.append(f"+{trial.right}")
    if not (commands or patterns):
        return
    missing = list(dict.fromkeys(commands)) + ([f"~{keys.prefix}*"] if patterns else [])
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


def _trials(keys: Keys) -> list[Trial]:
    probe = keys.prefix + PROBE
    held = (keys.meta, keys.groups, keys.leases, keys.claims, keys.batches)
    return [
        Trial("ping", ("PING",)),
        Trial("time", ("TIME",)),
        Trial("info", ("INFO", "server")),
        Trial("config|get", ("CONFIG", "GET", "appendfsync")),
        Trial("script|load", ("SCRIPT", "LOAD", "return 1")),
        Trial("evalsha", ("EVALSHA", "0" * 40, 1, probe), probe),
        Trial("hset", ("HSET", probe, "a", 1), probe),
        Trial("hget", ("HGET", probe, "a"), probe),
        Trial("hmget", ("HMGET", probe, "a"), probe),
        Trial("hexists", ("HEXISTS", probe, "a"), probe),
        *(Trial("hdel", ("HDEL", key, NOTHING), key) for key in (*held, probe)),
        *(Trial("hgetall", ("HGETALL", key), key) for key in (probe,)),
        *(Trial("hget", ("HGET", key, NOTHING), key) for key in held),
        Trial("unlink", ("UNLINK", probe), probe),
        Trial("set", ("SET", probe, "a"), probe),
        Trial("mget", ("MGET", probe), probe),
        Trial("exists", ("EXISTS", probe), probe),
        Trial("unlink", ("UNLINK", probe), probe),
        Trial("sadd", ("SADD", probe, "a"), probe),
        Trial("srem", ("SREM", probe, "a"), probe),
        Trial("smembers", ("SMEMBERS", probe), probe),
    ]


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
