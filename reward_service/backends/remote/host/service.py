"""The reference server's work: what it offers, told from the rewards' files without running them; admission,
scoring, deadline.

Promises: a request that is taken is answered within its deadline, with one verdict for each input; an input
that has none by then is an error that says so, and is no timeout: it may never have begun. What is under way
is bounded: a request is refused as `busy` beyond `max_waiting` inputs, or when its turn would come too late,
with the time after which to come again. No request sees another's verdicts.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import msgspec

from areal_async.config.reward import Scope
from areal_async.config.rewardcheck import marked_scope, part_of, runs_in_pool, scopes_of
from areal_async.registry import REWARDS
from areal_async.rewards import RewardSpec
from areal_async.rpc.verdicts import Failure, Score, Verdict, kind_of
from reward_service import metrics
from reward_service.backends import Call
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
    from_wire,
)
from reward_service.pool.pool import WorkerPool
from reward_service.pool.queue import own_file
from reward_service.sdk import RewardLoadError

MOST_VARIANTS = 32
"""Sets of arguments that are loaded at a time, besides those in use."""
LONGEST_DEADLINE_S = 3600.0
SHORTEST_REST_S = 0.05
LONGEST_REST_S = 5.0
LOCKED = ("parts", "of", "sandbox", "dataset_args")
"""Arguments of built-in rewards that name code to run, how well programs are shut in, or (data sets of
reasoning_gym) a file to read. Who may have episodes scored may not choose them."""


@dataclass(frozen=True)
class ServedReward:
    """One reward. `target` is what it is loaded by: a built-in name, or `path.py:function`."""

    name: str
    target: str
    scope: Scope = "episode"
    wants: tuple[Extra, ...] = ()
    description: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)
    """What it takes, where a request says nothing else."""

    def locked(self, args: Mapping[str, Any]) -> list[str]:
        """Which of a request's `args` only the server may set. What a reward of one's own takes is its
        author's matter."""
        if own_file(self.target) is not None:
            return []
        return [
            key for key in LOCKED if key in args and (key not in self.args or args[key] != self.args[key])
        ]

    def spec(self, args: Mapping[str, Any], timeout_s: float) -> RewardSpec:
        return RewardSpec(self.target, {**self.args, **args}, self.scope, timeout_s)

    def info(self) -> RewardInfo:
        return RewardInfo(self.name, version_of(self.target), self.scope, self.wants, self.description)


def read_offers(
    targets: Sequence[str], wants: tuple[Extra, ...] = (), args: Mapping[str, Any] | None = None
) -> list[ServedReward]:
    """The offers that the command line names; `args` are those of the only one. Raises `RewardLoadError`."""
    if args and len(targets) > 1:
        raise RewardLoadError("--args are those of one reward: serve the others by a server of their own")
    offers: dict[str, ServedReward] = {}
    for target in targets:
        offer = replace(_offer(target, wants), args=dict(args or {}))
        if offer.name in offers:
            raise RewardLoadError(f"two rewards are called {offer.name!r}: a server has one of each name")
        offers[offer.name] = offer
    return list(offers.values())


def version_of(target: str) -> str:
    """Changes when the code behind `target` does: the hash of its own file, or our version."""
    file = own_file(target)
    if file is None:
        return package_version("areal-async")
    try:
        return blake2b(file.read_bytes(), digest_size=8).hexdigest()
    except OSError:
        return ""


def _offer(target: str, wants: tuple[Extra, ...]) -> ServedReward:
    file = own_file(target)
    if file is None:
        part = part_of(target)
        if part is None or not runs_in_pool(part):
            names = ", ".join(name for name in REWARDS.names if runs_in_pool(part_of(name)))
            raise RewardLoadError(
                f"there is no reward {target!r}. Write path.py:function, or one of {names}."
            )
        scope: Scope = "episode" if "episode" in scopes_of(part) else "group"
        return ServedReward(target, target, scope, wants)
    name = target.rpartition(":")[2]
    definition = _definition(target, file, name)
    described = (ast.get_docstring(definition) or "").strip().split("\n")[0] if definition else ""
    scope = "group" if definition and marked_scope(definition) == "group" else "episode"
    return ServedReward(name, f"{file.resolve()}:{name}", scope, wants, described)


def _definition(target: str, file: Path, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The function, where the file itself defines it (it may also import it)."""
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (OSError, SyntaxError, ValueError) as error:
        raise RewardLoadError(f"the reward {target!r}: {file} cannot be read: {error}") from None
    found = (n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == name)
    return next(found, None)


class RequestRefused(Exception):
    """The request is not carried out."""

    def __init__(self, kind: RefusalKind, message: str, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.refusal = RequestRefusal(kind, message, retry_after_ms)


class ScoringService:
    """`pool` is entered by the caller; its queue must hold `max_waiting` calls. `name` is what the server
    calls itself. `timeout_s` is the deadline of one call, past which its process is killed."""

    def __init__(
        self,
        pool: WorkerPool,
        offers: Sequence[ServedReward],
        *,
        name: str,
        timeout_s: float,
        limits: RequestLimits,
        max_waiting: int,
    ) -> None:
        self._pool = pool
        self._offers = {offer.name: offer for offer in offers}
        self._name = name
        self._timeout_s = timeout_s
        self.limits = limits
        self._max_waiting = max_waiting
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._specs: OrderedDict[str, RewardSpec] = OrderedDict()
        """Loaded for a request's arguments, the one used last at the end."""
        self._users: dict[str, int] = {}
        self._loading = asyncio.Lock()
        self._acquiring: set[asyncio.Task[RewardSpec]] = set()

    async def load(self) -> None:
        """Load every offer with the arguments it has here. Raises `RewardLoadError`."""
        for offer in self._offers.values():
            self._release(await self._acquire(offer, {}, self._timeout_s))

    def info(self) -> Info:
        return Info(
            protocol=PROTOCOL,
            rewards=tuple(offer.info() for offer in self._offers.values()),
            server=self._name,
            limits=self.limits,
        )

    def health(self) -> Health:
        status: Status = "draining" if self._draining else "ready" if self._pool.alive else "starting"
        return Health(status, self._in_flight, self._max_waiting)

    async def drain(self, limit_s: float) -> None:
        """Take nothing more, and wait for what is under way, at most `limit_s`."""
        self._draining = True
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return

    async def score(self, request: ScoreRequest) -> list[Verdict]:
        """One verdict for each input. Raises `RequestRefused`. Without inputs it only loads the reward,
        however long that takes: so a client sees whether its arguments are right."""
        arrived_s = asyncio.get_running_loop().time()
        offer = self._check(request)
        inputs = [from_wire(_read(raw, at)) for at, raw in enumerate(request.inputs)]
        self._admit(len(inputs), request.deadline_ms / 1000)
        self._begin(len(inputs))
        deadline_s = arrived_s + min(request.deadline_ms / 1000, LONGEST_DEADLINE_S)
        try:
            timeout_s = min(self._timeout_s, request.timeout_ms / 1000)
            spec = await self._acquire_by(offer, request.args, timeout_s, deadline_s if inputs else None)
        except RewardLoadError as error:
            self._end(len(inputs))
            raise RequestRefused("invalid", str(error)) from error
        except BaseException:
            self._end(len(inputs))
            raise
        unknown = Failure(NOT_RUN, f"no verdict within {request.deadline_ms} ms of the request's arrival")
        verdicts: list[Verdict] = [unknown] * len(inputs)
        if spec is None:
            self._end(len(inputs))
            return verdicts
        if not inputs:
            self._release(spec)
            return []
        calls: list[Call] = [inputs] if offer.scope == "group" else list(inputs)
        unanswered, done = len(calls), asyncio.Event()

        def take(index: int, given: list[Verdict], elapsed_ms: float) -> None:
            nonlocal unanswered
            _count(spec.label, given, elapsed_ms)
            verdicts[index : index + len(given)] = given
            self._end(len(given))
            unanswered -= 1
            if unanswered == 0:
                self._release(spec)
                done.set()

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline_s):
                await self._pool.submit(calls, take, spec=spec)
                await done.wait()
        return list(verdicts)  # what comes later is counted off, and nobody's any more

    # --- admission -----------------------------------------------------------------------------------

    def _check(self, request: ScoreRequest) -> ServedReward:
        if request.protocol != PROTOCOL:
            raise RequestRefused(
                "protocol", f"the request speaks version {request.protocol}, this server {PROTOCOL}"
            )
        offer = self._offers.get(request.reward)
        if offer is None:
            names = ", ".join(self._offers)
            raise RequestRefused(
                "unknown_reward", f"there is no reward {request.reward!r} here; there is: {names}"
            )
        if request.scope != offer.scope:
            raise RequestRefused(
                "invalid", f"the reward {offer.name!r} has the scope {offer.scope}, not {request.scope}"
            )
        if locked := offer.locked(request.args):
            raise RequestRefused(
                "invalid",
                f"only the server may set {', '.join(locked)} of the reward {offer.name!r}: leave it out",
            )
        if request.deadline_ms <= 0 or request.timeout_ms <= 0:
            raise RequestRefused("invalid", "timeout_ms and deadline_ms are milliseconds: at least 1")
        if len(request.inputs) > self.limits.max_inputs:
            raise RequestRefused(
                "too_large",
                f"{len(request.inputs)} inputs in one request; the most are {self.limits.max_inputs}",
            )
        return offer

    def _admit(self, n_inputs: int, deadline_s: float) -> None:
        if self._draining:
            raise RequestRefused("unavailable", "this server is about to end")
        ahead_s = self._in_flight * self._pool.call_seconds / max(1, self._pool.alive)
        full = self._in_flight + n_inputs > self._max_waiting
        # What would not get its turn in time is better refused than scored for nobody.
        if self._in_flight and (full or ahead_s > deadline_s / 2):
            rest_ms = round(1000 * min(LONGEST_REST_S, max(SHORTEST_REST_S, ahead_s / 2)))
            raise RequestRefused("busy", f"{self._in_flight} inputs are under way already", rest_ms)

    def _begin(self, n_inputs: int) -> None:
        self._in_flight += n_inputs
        self._idle.clear()

    def _end(self, n_inputs: int) -> None:
        self._in_flight -= n_inputs
        if self._in_flight == 0:
            self._idle.set()

    # --- arguments -----------------------------------------------------------------------------------

    async def _acquire_by(
        self, offer: ServedReward, args: dict[str, Any], timeout_s: float, deadline_s: float | None
    ) -> RewardSpec | None:
        """As `_acquire`; None when it is not loaded by then. Loading goes on, for the next that asks."""
        acquiring = asyncio.create_task(self._acquire(offer, args, timeout_s))
        self._acquiring.add(acquiring)
        acquiring.add_done_callback(self._acquiring.discard)
        try:
            async with asyncio.timeout_at(deadline_s):
                return await asyncio.shield(acquiring)
        except TimeoutError:
            acquiring.add_done_callback(self._not_waited_for)
            return None
        except asyncio.CancelledError:
            acquiring.add_done_callback(self._not_waited_for)
            raise

    def _not_waited_for(self, acquiring: asyncio.Task[RewardSpec]) -> None:
        if not acquiring.cancelled() and acquiring.exception() is None:
            self._release(acquiring.result())

    async def _acquire(self, offer: ServedReward, args: dict[str, Any], timeout_s: float) -> RewardSpec:
        """The reward with these arguments, loaded, and kept so until `_release`. Raises `RewardLoadError`."""
        spec = offer.spec(args, timeout_s)
        if spec.key in self._specs:  # no wait behind others that are being loaded
            return self._use(spec)
        async with self._loading:
            if spec.key not in self._specs:
                await self._pool.add(spec)
                self._specs[spec.key] = spec
            self._use(spec)
            unused = [key for key in self._specs if not self._users.get(key)]
            for key in unused[: max(0, len(self._specs) - MOST_VARIANTS)]:
                self._pool.discard(self._specs.pop(key))
            return spec

    def _use(self, spec: RewardSpec) -> RewardSpec:
        self._specs.move_to_end(spec.key)
        self._users[spec.key] = self._users.get(spec.key, 0) + 1
        return spec

    def _release(self, spec: RewardSpec) -> None:
        self._users[spec.key] -= 1
        if not self._users[spec.key]:
            del self._users[spec.key]


def _count(label: str, verdicts: list[Verdict], elapsed_ms: float) -> None:
    """The same series as a job's reward service has."""
    metrics.CALL_SECONDS.labels(label).observe(elapsed_ms / 1000)
    for verdict in verdicts:
        metrics.VERDICTS.labels(label, kind_of(verdict)).inc()
        metrics.sandboxed(label, verdict.sandbox)
        if isinstance(verdict, Score):
            metrics.SCORE.labels(label).observe(verdict.value)
        elif isinstance(verdict, Failure):
            metrics.failed(label, verdict.kind)


def _read(raw: msgspec.Raw, at: int) -> Input:
    try:
        return msgspec.json.decode(raw, type=Input)
    except msgspec.MsgspecError as error:
        raise RequestRefused("invalid", f"inputs[{at}]: {error}") from error
