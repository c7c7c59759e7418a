"""The work of the reference server: offers, admission, scoring and deadlines.

The server's own process reads what a reward's file declares without executing the file.

Promises: an accepted request is answered within its deadline, with one verdict for each input. An input that
has no verdict at the deadline gets an error of the kind `NOT_RUN`. This is not a timeout, because the scoring
of the input may never have begun. Work in progress is bounded: a request is refused as `busy` if more than
`max_waiting` inputs would wait, or if its turn would come too late. The refusal says when to retry. A request
never gets the verdicts of another request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from importlib.metadata import version as package_version
from typing import Any, NamedTuple

import msgspec

from areal_async.base.verdicts import Failure, Verdict
from areal_async.config.registry import REWARDS
from areal_async.config.reward import Scope
from areal_async.config.reward_routing import RewardSpec
from areal_async.config.rewardcheck import part_of, runs_in_pool, scope_in_file, scopes_of
from reward_service import metrics
from reward_service.backends import Call, set_within
from reward_service.backends.remote.schema import (
    NOT_RUN,
    PROTOCOL,
    Extra,
    Health,
    Info,
    Input,
    RefusalKind,
    RequestLimits,
    RequestRefusal,
    RewardInfo,
    ScoreRequest,
    Status,
)
from reward_service.pool.pool import WorkerPool
from reward_service.sdk import RewardInput, RewardLoadError, own_file

LONGEST_DEADLINE_S = 3600.0
SHORTEST_REST_S = 0.05
LONGEST_REST_S = 5.0


class ServedReward(NamedTuple):
    """One offered reward."""

    name: str
    spec: RewardSpec
    """The data from which the reward is loaded, with its arguments and the deadline of a call."""
    wants: tuple[Extra, ...] = ()

    def info(self) -> RewardInfo:
        version = version_of(self.spec.name)
        return RewardInfo(self.name, version, self.spec.scope, self.wants)


def read_offers(
    targets: Sequence[str],
    wants: tuple[Extra, ...] = (),
    args: Mapping[str, Any] | None = None,
    timeout_s: float = 10.0,
) -> list[ServedReward]:
    """Return the rewards to offer that the command line names. Raises `RewardLoadError`.

    `args` are the arguments of the reward if there is only one.
    """
    if args and len(targets) > 1:
        raise RewardLoadError("--args are those of one reward: serve the others by a server of their own")
    offers: dict[str, ServedReward] = {}
    for target in targets:
        offer = _offer(target, wants, dict(args or {}), timeout_s)
        if offer.name in offers:
            raise RewardLoadError(f"two rewards are called {offer.name!r}: a server has one of each name")
        offers[offer.name] = offer
    return list(offers.values())


def version_of(target: str) -> str:
    """Return a text that changes with the code of `target`: the hash of the user's file, or the version of
    this package."""
    if (file := own_file(target)) is None:
        return package_version("areal-async")
    try:
        return blake2b(file.read_bytes(), digest_size=8).hexdigest()
    except OSError:
        return ""


def _offer(target: str, wants: tuple[Extra, ...], args: dict[str, Any], timeout_s: float) -> ServedReward:
    file = own_file(target)
    if file is None:
        part = part_of(target)
        if part is None or not runs_in_pool(part):
            names = ", ".join(name for name in REWARDS.names if runs_in_pool(part_of(name)))
            raise RewardLoadError(f"there is no reward {target!r}. Use path.py:function, or one of {names}.")
        scope: Scope = "episode" if "episode" in scopes_of(part) else "group"
        return ServedReward(target, RewardSpec(target, args, scope, timeout_s), wants)
    name = target.rpartition(":")[2]
    target = f"{file.resolve()}:{name}"
    scope = "group" if scope_in_file(target) == "group" else "episode"
    return ServedReward(name, RewardSpec(target, args, scope, timeout_s), wants)


class RequestRefused(Exception):
    """A refusal of a request, with its kind and reason."""

    def __init__(self, kind: RefusalKind, message: str, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.refusal = RequestRefusal(kind, message, retry_after_ms)


class ScoringService:
    """The scoring of the reference server. The caller must enter `pool`, and its queue must have room for
    `max_waiting` calls."""

    def __init__(
        self, pool: WorkerPool, offers: Sequence[ServedReward], *, limits: RequestLimits, max_waiting: int
    ) -> None:
        self._pool = pool
        self._offers = {offer.name: offer for offer in offers}
        self.limits = limits
        self._max_waiting = max_waiting
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    def info(self) -> Info:
        return Info(
            protocol=PROTOCOL,
            rewards=tuple(offer.info() for offer in self._offers.values()),
            server="areal-async",
            limits=self.limits,
        )

    def health(self) -> Health:
        status: Status = "draining" if self._draining else "ready" if self._pool.alive else "starting"
        return Health(status, self._in_flight, self._max_waiting)

    async def drain(self, limit_s: float) -> None:
        """Refuse new requests, and wait at most `limit_s` for work in progress."""
        self._draining = True
        await set_within(self._idle, limit_s)

    async def score(self, request: ScoreRequest) -> list[Verdict]:
        """Return one verdict for each input. Raises `RequestRefused`.

        A request without inputs only checks whether the server would serve the client.
        """
        arrived_s = asyncio.get_running_loop().time()
        spec = self._check(request)
        if not request.inputs:
            return []
        inputs: list[RewardInput] = [_read(raw, at) for at, raw in enumerate(request.inputs)]
        self._admit(len(inputs), request.deadline_ms / 1000)
        self._in_flight += len(inputs)
        self._idle.clear()
        deadline_s = arrived_s + min(request.deadline_ms / 1000, LONGEST_DEADLINE_S)
        unknown = Failure(NOT_RUN, f"no verdict within {request.deadline_ms} ms of the request's arrival")
        verdicts: list[Verdict] = [unknown] * len(inputs)
        calls: list[Call] = [inputs] if spec.scope == "group" else list(inputs)
        unanswered, done = set(range(len(calls))), asyncio.Event()

        def take(index: int, given: list[Verdict], elapsed_ms: float) -> None:
            metrics.CALL_SECONDS.labels(spec.label).observe(elapsed_ms / 1000)
            for verdict in given:
                metrics.count(spec.label, verdict)
            verdicts[index : index + len(given)] = given
            self._in_flight -= len(given)
            if self._in_flight == 0:
                self._idle.set()
            unanswered.discard(index)
            if not unanswered:
                done.set()

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline_s):
                await self._pool.submit(calls, take, spec=spec)
                await done.wait()
        return list(verdicts)  # later verdicts are only counted and then dropped

    # --- admission -----------------------------------------------------------------------------------

    def _check(self, request: ScoreRequest) -> RewardSpec:
        name, given, limit = request.reward, request.inputs, self.limits.max_inputs
        spec = self._offers[name].spec if name in self._offers else RewardSpec(name)
        own = spec.args
        others = [key for key, value in request.args.items() if key not in own or value != own[key]]
        mend = "leave it out, and give it to the server (`--args`)"
        kind: RefusalKind = "invalid"
        why = ""
        if request.protocol != PROTOCOL:
            kind, why = "protocol", f"the request speaks version {request.protocol}, this server {PROTOCOL}"
        elif name not in self._offers:
            kind, why = "unknown_reward", f"there is no reward {name!r} here, only {', '.join(self._offers)}"
        elif request.scope != spec.scope:
            why = f"the reward {name!r} has the scope {spec.scope}, not {request.scope}"
        elif others:
            why = f"only the server may set {', '.join(others[:10])} of the reward {name!r}: {mend}"
        elif request.deadline_ms <= 0 or request.timeout_ms <= 0:
            why = "timeout_ms and deadline_ms are milliseconds: at least 1"
        elif len(given) > limit:
            kind, why = "too_large", f"{len(given)} inputs in one request; the most are {limit}"
        if why:
            raise RequestRefused(kind, why)
        return spec

    def _admit(self, n_inputs: int, deadline_s: float) -> None:
        if self._draining:
            raise RequestRefused("unavailable", "this server is about to end")
        ahead_s = self._in_flight * self._pool.call_seconds / max(1, self._pool.alive)
        full = self._in_flight + n_inputs > self._max_waiting
        # A request whose turn would come too late is better refused than scored in vain.
        if self._in_flight and (full or ahead_s > deadline_s / 2):
            rest_ms = round(1000 * min(LONGEST_REST_S, max(SHORTEST_REST_S, ahead_s / 2)))
            raise RequestRefused("busy", f"{self._in_flight} inputs are under way already", rest_ms)


def _read(raw: msgspec.Raw, at: int) -> Input:
    try:
        return msgspec.json.decode(raw, type=Input)
    except (ValueError, RecursionError) as error:
        raise RequestRefused("invalid", f"inputs[{at}]: {error}") from error
