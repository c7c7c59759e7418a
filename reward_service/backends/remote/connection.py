"""One reward server as its client sees it: what it offers, whether it may be asked, and one request.

`RemoteServer.keep` runs as long as the client lives: it looks at the server every `LOOK_S`, after a loss with
growing pauses. A server that cannot be used (another protocol, another reward, a
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
from typing import TypeVar

import aiohttp
import msgspec

from areal_async.errors import ArealError
from areal_async.rewards import RewardSpec
from areal_async.runtime.log import get_logger
from reward_service import metrics
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
from reward_service.backends.servers import ServerState, pause_s

T = TypeVar("T")

log = get_logger("reward")

CONNECT_LIMIT_S = 5.0
KEEPALIVE_S = 15.0
MAX_ANSWER_BYTES = 64 << 20
GATEWAY_STATUSES = (502, 503, 504)
"""What a proxy says when the server behind it is away."""
LOOK_S = 2.0
"""Between two looks at a server that answers: it may be about to end, or another one by now."""
ASK_LIMIT_S = 5.0
NOTICE_S = 0.5
"""Beyond the deadline of an input, for the server to end what is late and to start what waited behind it."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
"""Between two looks at a server that does not answer."""
TOLERATED = 2
"""Failures of a server in a row after which it is still asked as before."""


class RemoteError(ArealError):
    """Base of what asking a server raises."""

    outcome = ""


class ServerGone(RemoteError):
    """The server is not reachable, or was lost under the request: whether it was run is not known."""

    outcome = "gone"


class ServerLate(RemoteError):
    """No answer came in time, from a server whose connection stands."""

    outcome = "late"


class ServerBroken(RemoteError):
    """The server answers, and cannot be used: outside the protocol, or another reward than the one wanted."""

    outcome = "broken"


class ServerRefused(RemoteError):
    """The server says that it did not carry out the request."""

    outcome = "refused"

    def __init__(self, refusal: RequestRefusal) -> None:
        super().__init__(f"{refusal.kind}: {refusal.message}")
        self.refusal = refusal


class RemoteServer:
    """The server at `url`, its root: `http://host:port`, also with a path before `/v1`. `changed` is called
    whenever it may take more than before, or less."""

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
        self.unfit = False
        """It answers, and cannot be used before somebody changes something."""
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
        ca_file = arguments.ca_file
        secure: ssl.SSLContext | bool = ssl.create_default_context(cafile=ca_file) if ca_file else True
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=secure),
            headers={"Authorization": f"Bearer {token}"} if token else {},
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Once, when nothing is under way any more."""
        self._ready = False
        with contextlib.suppress(KeyError):
            metrics.REMOTE_READY.remove(self.url)
        await self._session.close()

    def ready(self, now_s: float) -> bool:
        """Whether calls may be sent to it, apart from those that it has."""
        return self._ready and self.state.rests_s(now_s) <= 0

    @property
    def slots(self) -> int:
        """Requests that it may have at a time."""
        return max(1, min(self._arguments.max_in_flight, self.limits.max_in_flight))

    def has_room(self, now_s: float) -> bool:
        """Whether it may get a request now."""
        return self._ready and self.state.takes(now_s) and self.state.in_flight < self.slots

    async def score(self, inputs: list[msgspec.Raw]) -> Verdicts:
        """One request, after `state.begin()`. Raises `RemoteError`; ends within the reward's deadline and
        `ANSWER_GRACE_S`."""
        request = self._request(inputs)
        began_s = time.monotonic()
        outcome = "ok"
        try:
            answer = await self._score(request, self._spec.timeout_s + ANSWER_GRACE_S)
            if len(answer.verdicts) != len(inputs):
                raise ServerBroken(
                    f"the server answered {len(inputs)} inputs with {len(answer.verdicts)} verdicts"
                )
            if answer.request_id not in ("", request.request_id):
                raise ServerBroken("the server's answer is that to another request")
        except RemoteError as error:
            outcome = error.outcome
            self._failed(error, began_s)
            raise
        except BaseException:
            self.state.in_flight -= 1
            raise
        else:
            self.state.answered(time.monotonic())
            return answer
        finally:
            metrics.REMOTE_REQUESTS.labels(self.url, outcome).inc()
            metrics.REMOTE_REQUEST_SECONDS.labels(self.url).observe(time.monotonic() - began_s)
            self._changed()

    def _request(self, inputs: list[msgspec.Raw]) -> ScoreRequest:
        timeout_s = self._spec.timeout_s
        return ScoreRequest(
            protocol=PROTOCOL,
            request_id=f"{self._prefix}-{next(self._numbers)}",
            reward=self.reward.name,
            scope=self._spec.scope,
            args=self._arguments.args,
            timeout_ms=max(1, round(timeout_s * 1000)),
            deadline_ms=max(1, round((timeout_s + NOTICE_S) * 1000)),
            inputs=inputs,
        )

    def _failed(self, error: RemoteError, began_s: float) -> None:
        now_s = time.monotonic()
        refused = error.refusal.kind if isinstance(error, ServerRefused) else ""
        if refused in ("busy", "too_large", "invalid"):
            self.state.answered(now_s)  # it works; it is this request that it did not take
            return
        if isinstance(error, ServerGone) or refused not in ("", "internal"):
            self._lose(str(error))
        if self.state.failed(began_s, now_s):
            log.warning(
                "reward server fails and is left alone for a while", server=self.url, error=str(error)
            )

    def _lose(self, why: str) -> None:
        if self._ready:
            log.warning("reward server lost", server=self.url, reason=why)
        self._set_ready(False, why)
        self._lost.set()

    def _set_ready(self, ready: bool, trouble: str = "") -> None:
        self._ready, self.trouble = ready, trouble
        metrics.REMOTE_READY.labels(self.url).set(ready)
        self._changed()

    # --- whether it can be used ----------------------------------------------------------------------

    async def keep(self) -> None:
        """Until cancelled."""
        tries = 0
        while True:
            self._lost.clear()
            try:
                await self._look()
                self.unfit = False
                self._set_ready(True)
            except RemoteError as error:
                self.unfit = isinstance(error, ServerBroken) or (
                    isinstance(error, ServerRefused) and error.refusal.kind in ("unauthorized", "protocol")
                )
                # A server of one thread cannot answer while it scores: that is no loss.
                if not (isinstance(error, ServerLate) and self.state.in_flight):
                    self._lose(str(error))
            if self._ready:
                tries = 0
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._lost.wait()
            else:
                tries += 1
                await asyncio.sleep(
                    pause_s(tries, self._rng, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
                )

    async def _look(self) -> None:
        """Raises `RemoteError` where it cannot be used now."""
        info = await self._ask("GET", "info", Info, None, ASK_LIMIT_S)
        self.reward, self.limits = self._fitting(info), info.limits
        try:
            health = await self._ask("GET", "health", Health, None, ASK_LIMIT_S)
            if health.status != "ready":
                raise ServerGone(f"it says that it is {health.status}")
        except ServerRefused as refused:
            if refused.refusal.kind not in ("invalid", "unknown_reward", "busy"):
                raise  # else it knows no such question
        if self._ready:
            return
        try:  # A request without inputs shows whether it takes the reward's arguments.
            await self._score(self._request([]), ASK_LIMIT_S)
        except ServerRefused as refused:
            if refused.refusal.kind == "invalid":
                told = f"it refuses the request, most likely reward.args.args: {refused}"
                raise ServerBroken(told) from refused
            if refused.refusal.kind != "busy":
                raise
        log.info("reward server ready", server=self.url, reward=self.reward.name, version=self.reward.version)

    def _fitting(self, info: Info) -> RewardInfo:
        """The reward that is wanted. Raises `ServerBroken`."""
        name, version = self._arguments.reward, self._arguments.version
        if info.protocol != PROTOCOL:
            raise ServerBroken(
                f"it speaks version {info.protocol} of the reward protocol, this side {PROTOCOL}"
            )
        names = ", ".join(reward.name for reward in info.rewards) or "none"
        found = [reward for reward in info.rewards if name in ("", reward.name)]
        if not name and len(found) != 1:
            raise ServerBroken(f"it offers several rewards or none ({names}): name one in args.reward")
        if not found:
            raise ServerBroken(f"it has no reward {name!r}; it offers: {names}")
        reward = found[0]
        if reward.scope != self._spec.scope:
            raise ServerBroken(
                f"its reward {reward.name!r} has the scope {reward.scope}: set that in the job file too"
            )
        if version and reward.version != version:
            raise ServerBroken(
                f"its reward {reward.name!r} has the version {reward.version!r}, not {version!r}"
            )
        return reward

    # --- over HTTP -----------------------------------------------------------------------------------

    async def _score(self, request: ScoreRequest, timeout_s: float) -> Verdicts:
        return await self._ask("POST", "score", Verdicts, msgspec.json.encode(request), timeout_s)

    async def _ask(self, method: str, path: str, kind: type[T], body: bytes | None, timeout_s: float) -> T:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_LIMIT_S)
        headers = {"Content-Type": "application/json"} if body is not None else None
        url = f"{self.url.rstrip('/')}/v1/{path}"
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
