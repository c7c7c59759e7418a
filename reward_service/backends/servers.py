"""When a server is asked again: the one retry policy of reward servers and judges. Pure: the clock and the
chance are the caller's.

A server that fails more often in a row than is tolerated rests, longer each time and not always equally long,
so that many clients do not return together. When its rest is over it gets one request, and others only once
that was answered. A server that says how long to wait (Retry-After) rests so long."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from areal_async.base.retry import pause_s

LONGEST_TOLD_REST_S = 120.0  # A server that asks for more is asked again after this


@dataclass
class ServerState:
    """What is known of one server by how requests to it ended."""

    url: str
    rng: random.Random
    tolerated: int = 0
    in_flight: int = 0
    failures: int = 0
    """Failures in a row; those of requests that were under way together count once."""
    failed_s: float = float("-inf")
    answered_s: float = float("-inf")
    resting_until_s: float = float("-inf")
    told_until_s: float = float("-inf")
    """End of the wait that the server asked for; a success of another request does not shorten it."""

    def rests_s(self, now_s: float) -> float:
        """How long it is not to be asked; at most 0: it may be."""
        return max(self.resting_until_s, self.told_until_s) - now_s

    def takes(self, now_s: float) -> bool:
        """Whether a request may begin now."""
        return self.rests_s(now_s) <= 0 and not (self.failures > self.tolerated and self.in_flight)

    def begin(self) -> None:
        self.in_flight += 1

    def answered(self, now_s: float) -> None:
        """A request ended with what was asked for, or with a refusal that has to do with it alone."""
        self.in_flight -= 1
        self.answered_s = now_s
        self.failures = 0
        self.resting_until_s = float("-inf")

    def failed(self, began_s: float, now_s: float, told_s: float | None = None) -> bool:
        """A request that began at `began_s` failed; `told_s`: the wait that the server asked for. Returns
        whether the server begins to rest by it."""
        self.in_flight -= 1
        if told_s is not None:
            self.rest(told_s, now_s)
        if began_s <= self.failed_s:
            return False
        self.failures += 1
        self.failed_s = now_s
        if told_s is not None or self.failures <= self.tolerated:
            return False
        self.resting_until_s = now_s + pause_s(self.failures - self.tolerated, self.rng)
        return True

    def abandoned(self, began_s: float, now_s: float) -> None:
        """A request that began at `began_s` was given up without an answer: a failure, unless the server
        answered others meanwhile."""
        if self.answered_s < began_s:
            self.failed(began_s, now_s)
        else:
            self.in_flight -= 1

    def rest(self, told_s: float, now_s: float) -> None:
        """Ask it nothing for so long, as it said."""
        self.told_until_s = max(self.told_until_s, now_s + min(told_s, LONGEST_TOLD_REST_S))


def choose(servers: Sequence[ServerState], now_s: float) -> ServerState | float | None:
    """The server for a request that begins now, the one with the fewest under way; or, if none may take it,
    the seconds until one may; or None, when that depends on the answers to requests under way."""
    ready = [server for server in servers if server.takes(now_s)]
    if ready:
        # One that failed and has rested goes first: it gets this one request to show that it is back.
        return min(ready, key=lambda server: (server.failures == 0, server.in_flight))
    return min((rest_s for server in servers if (rest_s := server.rests_s(now_s)) > 0), default=None)
