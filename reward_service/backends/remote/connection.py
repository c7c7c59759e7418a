"""One reward server as its client sees it: the connection, the handshake, its health, its load, whether it
may be asked.

`RemoteServer.keep` runs as long as the client lives: it shakes hands, again after every loss with growing
pauses, and asks for the health in between. A server that cannot be used (another protocol, another reward, a
wrong token) is asked again too: it may come back as what it should be.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import secrets
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from areal_async.config.reward import Scope
from areal_async.errors import ArealError
from areal_async.runtime.log import get_logger
from reward_service import metrics
from reward_service.backends.remote import ANSWER_GRACE_S
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
from reward_service.backends.servers import ServerState, pause_s

T = TypeVar("T")

log = get_logger("reward")

CONNECT_LIMIT_S = 5.0
KEEPALIVE_S = 15.0
MAX_ANSWER_BYTES = 64 << 20
GATEWAY_STATUSES = (502, 503, 504)
"""What a proxy says when the server behind it is away."""
HEALTH_S = 2.0
"""Between two looks at a server's health."""
INFO_S = 30.0
"""Between two handshakes with a server that answers: it may have loaded another version of its reward."""
ASK_LIMIT_S = 5.0
"""For the answer to a handshake or a look at the health."""
NOTICE_S = 0.5
"""Beyond the deadline of an input, for the server to end what is late and to start what waited behind it."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
"""Between two handshakes with a server that does not answer."""
TOLERATED = 2
"""Failures of a server in a row after which it is still asked as before."""
SHARE = 0.25
"""A request holds at most as many inputs as took this share of the deadline of late: so that one slow input
does not make those beside it late, on a server that runs them one after another."""
WEIGHT = 0.2


class RemoteError(ArealError):
    """Base of what a connection raises."""


class ServerGone(RemoteError):
    """The server is not reachable, or was lost under the request: whether it was run is not known."""


class ServerLate(RemoteError):
    """No answer came in time, from a server whose connection stands."""


class ServerBroken(RemoteError):
    """An answer is none of the protocol."""


class ServerRefused(RemoteError):
    """The server says that it did not carry out the request."""

    def __init__(self, refusal: RequestRefusal) -> None:
        super().__init__(f"{refusal.kind}: {refusal.message}")
        self.refusal = refusal


class RewardConnection:
    """Asks one reward server over HTTP or HTTPS. `url` is the server's root: `http://host:port`, also with a
    path before `/v1`. `ca_file` holds the certificates that an https server's is checked against, where the
    system's do not do."""

    def __init__(self, url: str, *, token: str = "", ca_file: Path | None = None) -> None:
        self._root = url.rstrip("/")
        secure: ssl.SSLContext | bool = ssl.create_default_context(cafile=ca_file) if ca_file else True
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=secure),
            headers={"Authorization": f"Bearer {token}"} if token else {},
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            auto_decompress=False,
        )

    async def info(self, timeout_s: float) -> Info:
        return await self._request("GET", "info", Info, None, timeout_s)

    async def health(self, timeout_s: float) -> Health:
        return await self._request("GET", "health", Health, None, timeout_s)

    async def score(self, request: ScoreRequest, timeout_s: float) -> Verdicts:
        return await self._request("POST", "score", Verdicts, msgspec.json.encode(request), timeout_s)

    async def close(self) -> None:
        await self._session.close()

    async def _request(
        self, method: str, path: str, kind: type[T], body: bytes | None, timeout_s: float
    ) -> T:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_LIMIT_S)
        headers = {"Content-Type": "application/json"} if body is not None else None
        url = f"{self._root}/v1/{path}"
        try:
            async with self._session.request(
                method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                content = await answer.content.read(MAX_ANSWER_BYTES + 1)
                while len(content) <= MAX_ANSWER_BYTES and (more := await answer.content.readany()):
                    content += more
        except aiohttp.ClientConnectorCertificateError as error:
            raise ServerGone(f"its certificate is not to be trusted: {error.certificate_error}") from error
        except aiohttp.ClientConnectorError as error:
            raise ServerGone(f"cannot connect: {error.os_error.strerror or error.os_error}") from error
        except aiohttp.ConnectionTimeoutError as error:
            raise ServerGone(f"cannot connect within {CONNECT_LIMIT_S:g} s") from error
        except TimeoutError as error:
            raise ServerLate(f"no answer to {path} within {timeout_s:.1f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerGone(f"the connection was lost: {str(error) or type(error).__name__}") from error
        except RuntimeError as error:  # the session was closed under the request
            raise ServerGone("the connection was closed") from error
        if len(content) > MAX_ANSWER_BYTES:
            raise ServerBroken(f"its answer is above {MAX_ANSWER_BYTES} bytes")
        if answer.status != 200:
            raise _failure(answer.status, content, answer.headers.get("Retry-After", ""))
        return read_answer(content, kind)


def _failure(status: int, content: bytes, retry_after: str) -> RemoteError:
    """What a status other than 200 means. The body says it better where it is a refusal of the protocol."""
    asked_ms = int(float(retry_after) * 1000) if retry_after.replace(".", "", 1).isdigit() else 0
    try:
        read_answer(content, dict)
    except ServerRefused as refused:
        refusal = refused.refusal
        return ServerRefused(
            msgspec.structs.replace(refusal, retry_after_ms=max(refusal.retry_after_ms, asked_ms))
        )
    except ServerBroken:
        pass  # a proxy's page, or a server's own way to fail: the status has to do
    told = content[:200].decode(errors="replace").strip()
    message = f"status {status}" + (f": {told}" if told else "")
    if 300 <= status < 400:
        return ServerBroken(f"it answers with a redirection ({message}): give the address it points to")
    kind: RefusalKind = "unavailable" if status in GATEWAY_STATUSES else "internal"
    if 400 <= status < 500:
        kind = next((kind for kind, code in STATUS_OF.items() if code == status), "invalid")
        kind = "unauthorized" if status == 403 else kind
    return ServerRefused(RequestRefusal(kind, message, asked_ms))


def read_answer(content: bytes, kind: type[T]) -> T:
    """The answer `content`, which is a `kind` or a refusal. Raises `ServerRefused`, `ServerBroken`."""
    try:
        refusal = msgspec.json.decode(content, type=_MayBeRefused).error
        if refusal is not None:
            raise ServerRefused(refusal)
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise ServerBroken(f"the server's answer is none of the protocol: {error}") from error


class _MayBeRefused(msgspec.Struct):
    error: RequestRefusal | None = None


class RequestPace:
    """A running mean of the seconds that a request takes for each of its inputs."""

    def __init__(self, most: int, deadline_s: float) -> None:
        self.most = most
        self._deadline_s = deadline_s
        self.input_s = 0.0
        self.request_s = 0.05
        """Of a whole request: a guess until the first."""

    def note(self, elapsed_s: float, n_inputs: int) -> None:
        self.input_s += WEIGHT * (elapsed_s / n_inputs - self.input_s)
        self.request_s += WEIGHT * (elapsed_s - self.request_s)

    @property
    def inputs(self) -> int:
        """For the next request; at least 1."""
        fitting = int(SHARE * self._deadline_s / self.input_s) if self.input_s > 0 else self.most
        return max(1, min(self.most, fitting))


class Unfit(Exception):
    """The server answers, and cannot be used: why, and what to do."""


class Wanted(msgspec.Struct, frozen=True):
    """The reward that a client is after."""

    reward: str
    """Empty: the only one."""
    scope: Scope
    version: str
    """Empty: any."""
    args: dict[str, Any]
    timeout_s: float


class RemoteServer:
    """`changed` is called whenever it may take more than before, or less."""

    def __init__(
        self,
        url: str,
        connection: RewardConnection,
        wanted: Wanted,
        pace: RequestPace,
        *,
        max_in_flight: int,
        rng: random.Random,
        changed: Callable[[], None],
    ) -> None:
        self.url = url
        self.connection = connection
        self.pace = pace
        self.state = ServerState(url, rng, tolerated=TOLERATED)
        self.trouble = "it was not asked yet"
        """Why it is not ready."""
        self.unfit = False
        """It answered the handshake, and cannot be used."""
        self.limits = RequestLimits()
        self.reward = RewardInfo("")
        self._wanted = wanted
        self._max_in_flight = max_in_flight
        self._rng = rng
        self._changed = changed
        self._ready = False
        self._greeted_s = 0.0
        self._health = Health()
        self._lost = asyncio.Event()
        self._prefix = secrets.token_hex(6)
        self._numbers = itertools.count(1)
        metrics.watch_ready(url, self._ready_now)

    async def close(self) -> None:
        """Once, when nothing is under way any more."""
        self._ready = False
        metrics.unwatch_ready(self.url, self._ready_now)
        await self.connection.close()

    def _ready_now(self) -> bool:
        return self.ready(time.monotonic())

    def ready(self, now_s: float) -> bool:
        """Whether calls may be sent to it, apart from those that it has."""
        return self._ready and self.state.rests_s(now_s) <= 0

    @property
    def slots(self) -> int:
        """Requests that it may have at a time."""
        return max(1, min(self._max_in_flight, self.limits.max_in_flight))

    def has_room(self, now_s: float) -> bool:
        """Whether it may get a request now."""
        return self._ready and self.state.takes(now_s) and self.state.in_flight < self.slots

    @property
    def load(self) -> float:
        """How full it would be with one request more, as a share: by our requests, and by what others keep
        busy of it, as it last said."""
        others = max(0, self._health.in_flight - self.state.in_flight * self.pace.inputs)
        busy = min(1.0, others / self._health.capacity) if self._health.capacity else 0.0
        return (self.state.in_flight + 1) / self.slots + busy

    async def score(self, inputs: list[msgspec.Raw]) -> Verdicts:
        """One request, after `state.begin()`. Raises `RemoteError`; ends within the reward's
        deadline and `ANSWER_GRACE_S`."""
        request = self._request(inputs)
        began_s = time.monotonic()
        outcome = "ok"
        try:
            answer = await self.connection.score(request, self._wanted.timeout_s + ANSWER_GRACE_S)
            if len(answer.verdicts) != len(inputs):
                raise ServerBroken(
                    f"the server answered {len(inputs)} inputs with {len(answer.verdicts)} verdicts"
                )
            if answer.request_id not in ("", request.request_id):
                raise ServerBroken("the server's answer is that to another request")
        except RemoteError as error:
            outcome = OUTCOMES[type(error)]
            self._failed(error, began_s)
            raise
        except BaseException:
            self.state.in_flight -= 1
            raise
        else:
            self.state.answered(time.monotonic())
            return answer
        finally:
            elapsed_s = time.monotonic() - began_s
            if outcome in ("ok", "late"):
                self.pace.note(elapsed_s, len(inputs))
            metrics.REMOTE_REQUESTS.labels(self.url, outcome).inc()
            metrics.REMOTE_REQUEST_SECONDS.labels(self.url).observe(elapsed_s)
            self._changed()

    def _request(self, inputs: list[msgspec.Raw]) -> ScoreRequest:
        return ScoreRequest(
            protocol=PROTOCOL,
            request_id=f"{self._prefix}-{next(self._numbers)}",
            reward=self.reward.name,
            scope=self._wanted.scope,
            args=self._wanted.args,
            timeout_ms=max(1, round(self._wanted.timeout_s * 1000)),
            deadline_ms=max(1, round((self._wanted.timeout_s + NOTICE_S) * 1000)),
            inputs=inputs,
        )

    def _failed(self, error: RemoteError, began_s: float) -> None:
        now_s = time.monotonic()
        if isinstance(error, ServerRefused) and error.refusal.kind in ("busy", "too_large", "invalid"):
            self.state.answered(now_s)  # it works; it is this request that it did not take
            return
        if isinstance(error, ServerGone) or (
            isinstance(error, ServerRefused)
            and error.refusal.kind in ("unauthorized", "unknown_reward", "protocol", "unavailable")
        ):
            self._lose(str(error))
        if self.state.failed(began_s, now_s):
            metrics.REMOTE_BREAKS.labels(self.url).inc()
            log.warning(
                "reward server fails and is left alone for a while", server=self.url, error=str(error)
            )

    def _lose(self, why: str) -> None:
        if self._ready:
            log.warning("reward server lost", server=self.url, reason=why)
        self._ready = False
        self.trouble = why
        self._lost.set()
        self._changed()

    # --- handshake and health ------------------------------------------------------------------------

    async def keep(self) -> None:
        """Until cancelled."""
        tries = 0
        while True:
            self._lost.clear()
            try:
                if not self._ready or time.monotonic() - self._greeted_s > INFO_S:
                    self._greet(await self.connection.info(ASK_LIMIT_S))
                await self._look()
                if not self._ready:
                    await self._try_out()
                self._ready, self.unfit, self.trouble = True, False, ""
                self._changed()
            except (RemoteError, Unfit) as error:
                self.unfit = isinstance(error, Unfit) or _is_definite(error)
                # A server of one thread cannot answer while it scores: that is no loss.
                if not (isinstance(error, ServerLate) and self.state.in_flight):
                    self._lose(str(error))
            if self._ready:
                tries = 0
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HEALTH_S):
                        await self._lost.wait()
            else:
                tries += 1
                await asyncio.sleep(
                    pause_s(tries, self._rng, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
                )

    def _greet(self, info: Info) -> None:
        if info.protocol != PROTOCOL:
            raise Unfit(f"it speaks version {info.protocol} of the reward protocol, this side {PROTOCOL}")
        reward = self._select(info)
        if reward.scope != self._wanted.scope:
            raise Unfit(
                f"its reward {reward.name!r} has the scope {reward.scope}: set that in the job file too"
            )
        if self._wanted.version and reward.version != self._wanted.version:
            raise Unfit(
                f"its reward {reward.name!r} has the version {reward.version!r}, not {self._wanted.version!r}"
            )
        if self.reward.name and self.reward.version != reward.version:
            log.warning(
                "a reward server's reward has changed",
                server=self.url,
                before=self.reward.version,
                after=reward.version,
            )
        if not self._ready:
            log.info(
                "reward server ready",
                server=self.url,
                software=info.server,
                reward=reward.name,
                version=reward.version,
            )
        self.reward, self.limits = reward, info.limits
        self._greeted_s = time.monotonic()

    def _select(self, info: Info) -> RewardInfo:
        names = ", ".join(reward.name for reward in info.rewards) or "none"
        if not self._wanted.reward:
            if len(info.rewards) == 1:
                return info.rewards[0]
            raise Unfit(f"it offers several rewards or none ({names}): name one in args.reward")
        for reward in info.rewards:
            if reward.name == self._wanted.reward:
                return reward
        raise Unfit(f"it has no reward {self._wanted.reward!r}; it offers: {names}")

    async def _look(self) -> None:
        try:
            self._health = await self.connection.health(ASK_LIMIT_S)
        except ServerRefused as refused:
            if refused.refusal.kind not in ("invalid", "unknown_reward", "busy"):
                raise
            return  # a server that knows no such question
        if self._health.status != "ready":
            raise ServerGone(f"it says that it is {self._health.status}")

    async def _try_out(self) -> None:
        """A request without inputs: it shows whether the server takes the reward's arguments."""
        try:
            await self.connection.score(self._request([]), ASK_LIMIT_S)
        except ServerRefused as refused:
            if refused.refusal.kind == "invalid":
                raise Unfit(f"it refuses the request, most likely reward.args.args: {refused}") from refused
            if refused.refusal.kind != "busy":
                raise


def _is_definite(error: Exception) -> bool:
    """Whether asking again is of no use before somebody changes something."""
    return isinstance(error, ServerBroken) or (
        isinstance(error, ServerRefused) and error.refusal.kind in ("unauthorized", "protocol")
    )


OUTCOMES = {ServerGone: "gone", ServerLate: "late", ServerBroken: "broken", ServerRefused: "refused"}
