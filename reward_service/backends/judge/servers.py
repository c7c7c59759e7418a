"""Which of several servers gets the next request, and when one that failed is tried again. Pure.

The one with the fewest requests under way. A server that failed rests, longer each time and not always
equally long; when its rest is over it gets one request, and the others only once that was answered. A server
that said how long to wait (Retry-After) rests so long."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

FIRST_REST_S = 0.5
LONGEST_REST_S = 30.0
LONGEST_TOLD_REST_S = 120.0
"""A server that asks for more is asked again after this."""


@dataclass
class Server:
    url: str
    in_flight: int = 0
    failures: int = 0
    """In a row; those of requests that were under way together count once."""
    failed_s: float = float("-inf")
    answered_s: float = float("-inf")
    resting_until_s: float = float("-inf")
    told_until_s: float = float("-inf")
    """End of the wait that the server asked for; a success of another request does not shorten it."""

    def rests_s(self, now_s: float) -> float:
        """How long it is not to be asked."""
        return max(self.resting_until_s, self.told_until_s) - now_s


class Servers:
    """The replicas at `urls`. `rng` spreads rests, so that many clients do not return together."""

    def __init__(self, urls: Sequence[str], rng: random.Random) -> None:
        self.all = [Server(url) for url in urls]
        self._rng = rng

    def choose(self, now_s: float) -> Server | float | None:
        """The server for a request that begins now; or, if none may take it, the seconds until one may; or
        None, when that depends on the answers to requests under way."""
        ready = [s for s in self.all if s.rests_s(now_s) <= 0 and not (s.failures and s.in_flight)]
        if ready:
            # One that failed and has rested goes first: it gets this one request to show that it is back.
            return min(ready, key=lambda server: (server.failures == 0, server.in_flight))
        rests = [rest_s for server in self.all if (rest_s := server.rests_s(now_s)) > 0]
        return min(rests, default=None)

    def begin(self, server: Server) -> None:
        server.in_flight += 1

    def answered(self, server: Server, now_s: float) -> None:
        """With what was asked for, or with a refusal that has to do with the request alone."""
        server.in_flight -= 1
        server.answered_s = now_s
        server.failures = 0
        server.resting_until_s = float("-inf")

    def failed(self, server: Server, began_s: float, now_s: float, told_s: float | None = None) -> None:
        """A request that began at `began_s` failed; `told_s`: the wait that the server asked for."""
        server.in_flight -= 1
        if told_s is not None:
            server.told_until_s = max(server.told_until_s, now_s + min(told_s, LONGEST_TOLD_REST_S))
        if began_s <= server.failed_s:
            return
        server.failures += 1
        server.failed_s = now_s
        if told_s is None:
            rest_s = min(LONGEST_REST_S, FIRST_REST_S * 2 ** (server.failures - 1))
            server.resting_until_s = now_s + rest_s * self._rng.uniform(0.5, 1.0)

    def abandoned(self, server: Server, began_s: float, now_s: float) -> None:
        """A request that began at `began_s` was given up without an answer: a failure, unless the server
        answered others meanwhile."""
        if server.answered_s < began_s:
            self.failed(server, began_s, now_s)
        else:
            server.in_flight -= 1
