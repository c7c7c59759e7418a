"""The client's view of one reward server: its offered rewards, its availability, and its requests.

`RemoteServer.keep` runs for the life of the client. It checks the server every `LOOK_S`, or with growing
pauses after the server was lost. It also keeps checking an unusable server (another protocol, another reward,
a wrong token), because a usable server may be started at the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import secrets
import time
from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec

from areal_async.base.errors import ArealError
from areal_async.base.log import get_logger
from areal_async.base.retry import pause_s
from areal_async.config.reward_routing import RewardSpec
from reward_service import metrics
from reward_service.backends import set_within
from reward_service.backends.remote import ANSWER_GRACE_S, RemoteArguments
from reward_service.backends.remote.schema import (
    PROTOCOL,
    STATUS_OF,
    Health,
    Info,
    RefusalKind,
    RequestLimits,
    RequestRefusal,
    RewardInfo,
    ScoreRequest,
    Verdicts,
)
from reward_service.backends.servers import (
    ClientLimits,
    HttpAnswer,
    HttpClient,
    NoAnswer,
    ServerState,
    retry_after_s,
)

T = TypeVar("T")

log = get_logger("reward")

LIMITS = ClientLimits(most_bytes=64 << 20, connect_s=5.0, keepalive_s=15.0)
GATEWAY_STATUSES = (502, 503, 504)  # statuses of a proxy whose server is unavailable
LOOK_S = 2.0  # seconds between checks of a server that answers: it may stop or be replaced
ASK_LIMIT_S = 5.0
NOTICE_S = 0.5
"""Seconds that the server may take, after an input's deadline, to end late inputs and start waiting ones."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0  # longest pause between checks of a server that does not answer
OUTCOMES = ("gone", "late", "broken")  # kinds of a `RemoteError` that is not a refusal
TOLERATED = 2  # tolerated consecutive failures of a server


class RemoteError(ArealError):
    """A request to a server failed.

    `kind` is the kind of the server's refusal, or one of these:
    - `gone`: the server is not reachable, or was lost during the request, so the request may have run.
    - `late`: the connection is intact, but no answer came in time.
    - `broken`: the answer violates the protocol, or the server offers another reward than the wanted one.
    """

    def __init__(
        self, kind: RefusalKind | Literal["gone", "late", "broken"], message: str, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(message if kind in OUTCOMES else f"{kind}: {message}")
        self.kind = kind
        self.retry_after_s = retry_after_s


class RemoteServer:
    """The server with the root `url`: `http://host:port`, possibly with a path before `/v1`.

    `changed` is called whenever the server's capacity may have changed.
    """

    def __init__(
        self,
        url: str,
        arguments: RemoteArguments,
        spec: RewardSpec,
        *,
        token: str,
        rng: random.Random,
        changed: Callable[[], None],
    ) -> None:
        self.url = url
        self.state = ServerState(url, rng, tolerated=TOLERATED)
        self.trouble = "it was not asked yet"
        self.unfit = False  # it answers but needs a change by a person before it can be used
        self.limits = RequestLimits()
        self.reward = RewardInfo("")
        self._arguments = arguments
        self._spec = spec
        self._rng = rng
        self._changed = changed
        self._ready = False
        self._lost = asyncio.Event()
        self._prefix = secrets.token_hex(6)
        self._numbers = itertools.count(1)
        self._http = HttpClient(token, LIMITS, arguments.ca_file)

    async def close(self) -> None:
        """Close the session. Call it once, after all requests have ended."""
        self._ready = False
        with contextlib.suppress(KeyError):
            metrics.REMOTE_READY.remove(self.url)
        await self._http.close()

    def ready(self, now_s: float) -> bool:
        """Return whether further calls may be sent to the server."""
        return self._ready and self.state.rests_s(now_s) <= 0

    @property
    def slots(self) -> int:
        """Return the number of requests that the server may have in flight."""
        return max(1, min(self._arguments.max_in_flight, self.limits.max_in_flight))

    def has_room(self, now_s: float) -> bool:
        """Return whether the server may get another request now."""
        return self._ready and self.state.takes(now_s) and self.state.in_flight < self.slots

    async def score(self, inputs: list[msgspec.Raw]) -> list[msgspec.Raw]:
        """Return the verdicts of one request, after `state.begin()`.

        Returns at most `ANSWER_GRACE_S` after the reward's deadline. Raises `RemoteError`.
        """
        began_s = time.monotonic()
        outcome = "ok"
        try:
            verdicts = await self._score(inputs, self._spec.timeout_s + ANSWER_GRACE_S)
            self.state.answered(time.monotonic())
            return verdicts
        except RemoteError as error:
            outcome = error.kind if error.kind in OUTCOMES else "refused"
            self._failed(error, began_s)
            raise
        except BaseException:
            self.state.in_flight -= 1
            raise
        finally:
            metrics.REMOTE_REQUESTS.labels(self.url, outcome).inc()
            metrics.REMOTE_REQUEST_SECONDS.labels(self.url).observe(time.monotonic() - began_s)
            self._changed()

    async def _score(self, inputs: list[msgspec.Raw], limit_s: float) -> list[msgspec.Raw]:
        timeout_s = self._spec.timeout_s
        request = ScoreRequest(
            protocol=PROTOCOL,
            request_id=f"{self._prefix}-{next(self._numbers)}",
            reward=self.reward.name,
            scope=self._spec.scope,
            args=self._arguments.args,
            timeout_ms=max(1, round(timeout_s * 1000)),
            deadline_ms=max(1, round((timeout_s + NOTICE_S) * 1000)),
            inputs=inputs,
        )
        answer = await self._ask("score", Verdicts, limit_s, msgspec.json.encode(request))
        if (found := len(answer.verdicts)) != len(inputs):
            raise RemoteError("broken", f"the server answered {len(inputs)} inputs with {found} verdicts")
        if answer.request_id not in ("", request.request_id):
            raise RemoteError("broken", "the server's answer is that to another request")
        return answer.verdicts

    def _failed(self, error: RemoteError, began_s: float) -> None:
        now_s = time.monotonic()
        if error.kind in ("busy", "too_large", "invalid"):
            self.state.answered(now_s)  # the server works and refused only this request
            return
        if error.kind not in ("late", "broken", "internal"):
            self._set_ready(False, str(error))
        if self.state.failed(began_s, now_s):
            log.warning("reward server fails and rests for a while", server=self.url, error=str(error))

    def _set_ready(self, ready: bool, trouble: str = "") -> None:
        if not ready:
            if self._ready:
                log.warning("reward server lost", server=self.url, reason=trouble)
            self._lost.set()
        self._ready, self.trouble = ready, trouble
        metrics.REMOTE_READY.labels(self.url).set(ready)
        self._changed()

    # --- whether it can be used ----------------------------------------------------------------------

    async def keep(self) -> None:
        """Check repeatedly whether the server can be used, until cancelled."""
        tries = 0
        while True:
            self._lost.clear()
            try:
                await self._look()
                self.unfit = False
                self._set_ready(True)
            except RemoteError as error:
                self.unfit = error.kind in ("broken", "unauthorized", "protocol")
                # A server with one thread cannot answer while it scores, so this is not a loss.
                if not (error.kind == "late" and self.state.in_flight):
                    self._set_ready(False, str(error))
            except Exception as error:  # a bug of ours must not end the watch over the server
                log.exception("a reward server cannot be checked", server=self.url)
                self._set_ready(False, f"{type(error).__name__}: {error}")
            if self._ready:
                tries = 0
                await set_within(self._lost, LOOK_S)
            else:
                tries += 1
                pause = pause_s(tries, self._rng, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
                await asyncio.sleep(pause)

    async def _look(self) -> None:
        """Check the server. Raises `RemoteError` if it cannot be used now."""
        info = await self._ask("info", Info, ASK_LIMIT_S)
        self.reward, self.limits = self._fitting(info), info.limits
        try:
            health = await self._ask("health", Health, ASK_LIMIT_S)
            if health.status != "ready":
                raise RemoteError("gone", f"it says that it is {health.status}")
        except RemoteError as error:
            if error.kind not in ("invalid", "unknown_reward", "busy"):
                raise  # otherwise it does not know this request
        if self._ready:
            return
        try:  # A request without inputs shows whether the server accepts the reward's arguments.
            await self._score([], ASK_LIMIT_S)
        except RemoteError as error:
            if error.kind == "invalid":
                told = f"it refuses the request, most likely reward.args.args: {error}"
                raise RemoteError("broken", told) from error
            if error.kind != "busy":
                raise
        log.info("reward server ready", server=self.url, reward=self.reward.name, version=self.reward.version)

    def _fitting(self, info: Info) -> RewardInfo:
        """Return the wanted reward among those that the server offers. Raises `RemoteError`."""
        name, version = self._arguments.reward, self._arguments.version
        names = ", ".join(reward.name for reward in info.rewards) or "none"
        found = [reward for reward in info.rewards if name in ("", reward.name)]
        told = ""
        if info.protocol != PROTOCOL:
            told = f"it speaks version {info.protocol} of the reward protocol, this side {PROTOCOL}"
        elif not name and len(found) != 1:
            told = f"it offers several rewards or none ({names}): name one in args.reward"
        elif not found:
            told = f"it has no reward {name!r}; it offers: {names}"
        elif (scope := found[0].scope) != self._spec.scope:
            told = f"its reward {found[0].name!r} has the scope {scope}: set that in the job file too"
        elif version and found[0].version != version:
            told = f"its reward {found[0].name!r} has the version {found[0].version!r}, not {version!r}"
        if told:
            raise RemoteError("broken", told)
        return found[0]

    # --- over HTTP -----------------------------------------------------------------------------------

    async def _ask(self, path: str, kind: type[T], limit_s: float, body: bytes | None = None) -> T:
        try:
            answer = await self._http.ask(f"{self.url}/v1/{path}", body, limit_s)
        except NoAnswer as error:
            raise RemoteError(error.kind, str(error)) from error
        return read_answer(answer, kind)


def read_answer(answer: HttpAnswer, kind: type[T]) -> T:
    """Return the content of an answer as a `kind`.

    Raises `RemoteError` for a refusal and for any other content. The error of a refusal has the protocol's
    own reason if there is one, and otherwise the HTTP status.
    """
    status, headers, content = answer
    asked_s = retry_after_s(headers) or 0.0
    try:
        refusal = msgspec.json.decode(content, type=_MayBeRefused).error
        if refusal is not None:
            wait_s = max(min(refusal.retry_after_ms, 10**9) / 1000, asked_s)
            raise RemoteError(refusal.kind, refusal.message, wait_s)
        if status == 200:
            return msgspec.json.decode(content, type=kind)
    except (ValueError, RecursionError) as error:
        if status == 200:
            raise RemoteError("broken", f"the server's answer is none of the protocol: {error}") from error
    # The body is a proxy's page or the server's own error format, so only the status counts.
    told = content[:200].decode(errors="replace").strip()
    message = f"status {status}" + (f": {told}" if told else "")
    if 300 <= status < 400:
        raise RemoteError("broken", f"it redirects ({message}): give the address it points to")
    refused: RefusalKind = "unavailable" if status in GATEWAY_STATUSES else "internal"
    if 400 <= status < 500:
        refused = next((kind for kind, code in STATUS_OF.items() if code == status), "invalid")
        refused = "unauthorized" if status == 403 else refused
    raise RemoteError(refused, message, asked_s)


class _MayBeRefused(msgspec.Struct):
    error: RequestRefusal | None = None
