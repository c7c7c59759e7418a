"""An engine that uses an inference server of any kind (`adapter.py`).

It keeps the promises of `engines/base.py`. The server is a child of this process with its own environment, or
a running server that is attached by URL. Either way, it is an unpatched release. In particular:

- Inputs that would crash the server are never sent: ids, lengths and directories are checked here.
- A unit's version is the version that the server reports for it. After a failed load, the old weights are
  loaded again if the server can do that. Otherwise the engine is lost. So no unit is ever labelled with the
  version of weights that did not sample it.
- A lost engine stays lost until `start`. Its process is killed, and every call raises `EngineLost`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from areal_async.base.log import get_logger
from areal_async.base.metrics import busy
from areal_async.base.versions import VersionTag
from areal_async.trajectory.routes import stored_routes
from rollout_service import metrics
from rollout_service.engines.base import (
    EngineError,
    EngineLost,
    EngineStats,
    GenerateRequest,
    GenerateResult,
    RequestError,
    Tell,
    Weights,
    check_images,
    checked_request,
    nothing_sampled,
)
from rollout_service.engines.http.adapter import (
    Directory,
    Launch,
    Layout,
    ServerAdapter,
    ServerLoad,
    check_folder,
    read_layout,
)
from rollout_service.engines.http.client import ServerClient
from rollout_service.engines.http.images import encoded
from rollout_service.engines.http.process import Liveness, ServerProcess, attached, started, used_bytes

log = get_logger("engine")

MAX_CACHED_VERSIONS = 1024
"""Largest number of versions whose sessions can still use their cache in mode `session`."""


ABORT_AGAIN_S = 0.25  # Pause before an abort that found no request in the server is repeated
SETTLE_S = 5.0
_HELD_BACK = EngineError("aborted before it was sent")


@dataclass(eq=False, slots=True)
class _Call:
    rid: str
    task: asyncio.Task[GenerateResult] = field(init=False)
    sent: bool = False
    ending: bool = False
    error: EngineError | None = None


Answering = Callable[[], Coroutine[Any, Any, GenerateResult]]


class Calls:
    """Requests of a server engine in flight. This class counts them, holds them back, aborts them and makes
    them fail.

    Promises: each `run` ends with the answer or a typed error. A request can be aborted at any time: while it
    is held here, on its way, or in the server. A server ignores an abort that arrives before the request
    itself, so the abort is repeated until the request ends. A cancelled caller leaves nothing running. While
    requests are held, the engine computes nothing and does not count as busy. Counters never decrease."""

    def __init__(self, abort_rid: Callable[[str], Awaitable[None]], activity: str = "rollout") -> None:
        """`abort_rid` asks the server to end a request by its `rid`. `activity` is the name of the busy time
        in the metrics."""
        self.tokens_total = self.requests_total = 0
        self._abort_rid, self._activity, self._computing = abort_rid, activity, False
        self._calls: dict[str, _Call] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._open = asyncio.Event()
        self._open.set()

    def __len__(self) -> int:
        return len(self._calls)

    async def run(self, request: GenerateRequest, rid: str, answer: Answering) -> GenerateResult:
        """Return the result of `answer()`, which asks the server. The call waits while requests are held.

        A request aborted before its start returns no units. Raises errors of `answer` and errors passed to
        `fail`."""
        if request.request_id in self._calls:
            raise EngineError(f"request {request.request_id!r} is in flight already")
        call = _Call(rid)
        call.task = asyncio.create_task(self._sent(call, answer))
        self._calls[request.request_id] = call
        self._keep_time()
        try:
            result = await asyncio.shield(call.task)
        except asyncio.CancelledError:
            if not call.task.cancelled() or call.error is None:
                # The caller was cancelled, so its request is ended in the background.
                self._end(call)
                raise
            if call.error is _HELD_BACK:
                return nothing_sampled()
            raise call.error from None
        finally:
            del self._calls[request.request_id]
            self.requests_total += 1
            self._keep_time()
        if result.finish_reason == "abort" and not call.ending:
            raise EngineLost("the server ended a request that nobody aborted: send it again")
        return result

    def hold(self) -> None:
        """Start no request until `let_go`."""
        self._open.clear()
        self._keep_time()

    def let_go(self) -> None:
        self._open.set()
        self._keep_time()

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests. Unknown ids have already finished."""
        for request_id in request_ids:
            if call := self._calls.get(request_id):
                self._end(call)

    def fail(self, error: EngineError) -> None:
        """End all requests in flight with `error`, and stop holding requests."""
        for call in list(self._calls.values()):
            call.error = error
            call.task.cancel()
        self.let_go()

    async def settle(self) -> None:
        """Wait for the aborts that run in the background."""
        for task in self._background:
            task.cancel()
        if self._background:
            await asyncio.wait({*self._background}, timeout=SETTLE_S)

    def _keep_time(self) -> None:
        computing = bool(self._calls) and self._open.is_set()
        if computing != self._computing:
            (busy.begin if computing else busy.end)(self._activity)
            self._computing = computing

    async def _sent(self, call: _Call, answer: Answering) -> GenerateResult:
        await self._open.wait()
        call.sent = True
        return await answer()

    def _end(self, call: _Call) -> None:
        if call.task.done() or call.ending:
            return
        call.ending = True
        if not call.sent:
            call.error = _HELD_BACK
            call.task.cancel()
            return
        task = asyncio.create_task(self._abort_until_done(call))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _abort_until_done(self, call: _Call) -> None:
        while not call.task.done():
            # The request itself, or the watch over the server, detects a lost connection.
            with suppress(EngineLost):
                await self._abort_rid(call.rid)
            await asyncio.wait({call.task}, timeout=ABORT_AGAIN_S)
        if not call.task.cancelled():
            call.task.exception()  # marks it as retrieved: its caller may be gone


# --- the engine --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Server:
    client: ServerClient
    process: ServerProcess | None  # None for an attached server
    liveness: Liveness


UNIT_ARRAYS = ("token_ids", "logprobs", "versions", "epochs")


class HttpEngine:
    """One replica of the policy in a server. Implements `engines.base.Engine`."""

    def __init__(self, adapter: ServerAdapter) -> None:
        self._adapter, self._settings = adapter, adapter.settings
        self._calls = Calls(lambda rid: adapter.abort(self._client(), rid), adapter.settings.activity)
        self._prefix = ""
        self._numbers = itertools.count()
        self._server: _Server | None = None
        self._layout: Layout = {}
        self._served: Directory | None = None
        self._was_served: deque[VersionTag] = deque(maxlen=MAX_CACHED_VERSIONS)
        """Versions that the server has served since this start, newest last."""
        self._paused = self._stopping = False
        self._lost: EngineLost | None = None
        self._load = ServerLoad()
        self._watcher: asyncio.Task[None] | None = None

    # --- the protocol --------------------------------------------------------------------------------

    @property
    def version(self) -> VersionTag:
        if self._served is None:
            raise EngineError("the engine has not started")
        return self._served.tag

    @property
    def url(self) -> str:
        """Address of the server."""
        return self._client().url

    def alive(self) -> bool:
        """False once the server is lost, true while it starts."""
        if self._stopping or self._lost is not None:
            return False
        return self._server is None or not self._server.liveness.ended()

    async def start(self, snapshot: Weights) -> None:
        """Start or attach the server. May be called again after a loss."""
        await self._close_server()
        self._lost, self._paused, self._stopping = None, False, False
        self._prefix = secrets.token_hex(4)
        self._calls.let_go()
        adapter, served = self._adapter, Directory(snapshot.tag, snapshot.path)
        try:
            await asyncio.to_thread(lambda: adapter.reader)
            self._layout = await asyncio.to_thread(read_layout, served.path)
            self._server = await self._connect(served)
            release = await adapter.open(self._server.client, served)
        except BaseException:
            await self._close_server()
            raise
        self._served = served
        self._was_served = deque([served.tag], MAX_CACHED_VERSIONS)
        self._watcher = asyncio.create_task(self._watch(self._server))
        facts = {"engine": adapter.name, "release": release, "url": self.url, "version": served.tag.version}
        log.info("engine serves", **facts, max_model_len=adapter.max_model_len)

    async def generate(self, request: GenerateRequest, tell: Tell | None = None) -> GenerateResult:
        self._check_serving()
        adapter = self._adapter
        ids, room = checked_request(
            request, vocab_size=adapter.facts.vocab_size, max_model_len=adapter.max_model_len
        )
        if adapter.facts.image_token is not None:
            check_images(ids, request.media, adapter.facts.image_token)
        elif request.media:
            raise RequestError(f"the model reads no images: {adapter.model} has no vision_config")
        if request.media:
            request = replace(request, media=await asyncio.to_thread(encoded, request.media))
        # A server may abort by prefix. Ids of equal length are never prefixes of each other.
        rid = f"{self._prefix}-{next(self._numbers):012d}"

        async def answer() -> GenerateResult:
            # The request counts from this version. A request that waited for the update counts from the
            # version after it.
            body = adapter.body(rid, ids.tolist(), request, room, self._cache_of(request))
            said = await self._ask(body, tell)
            if request.media and (count := adapter.prompt_tokens(said)) != ids.size:
                raise RequestError(
                    f"{adapter.title} expanded a prompt with images to {count} tokens, but it has "
                    f"{ids.size}: {adapter.image_fix}"
                )
            try:
                result = adapter.parse(said, request.sampling)
            except EngineLost as error:
                raise self._lose(str(error)) from error
            sampled, stop = result.token_ids.tolist(), request.sampling.stop
            if stop and (n := adapter.reader.n_until_stop(sampled, stop)) < len(sampled):
                cut: dict[str, Any] = {name: getattr(result, name)[:n] for name in UNIT_ARRAYS}
                if result.finish_reason == "length":
                    cut["finish_reason"] = "stop"
                result = replace(result, **cut)
            result = replace(result, text=adapter.reader.text(sampled, stop))
            result = self._routed(result, said, request, ids.size)
            self._calls.tokens_total += result.token_ids.size
            if result.cached_tokens is not None:
                metrics.PROMPT_TOKENS.inc(ids.size)
                metrics.CACHED_TOKENS.inc(result.cached_tokens)
            return result

        return await self._calls.run(request, rid, answer)

    async def pause(self) -> None:
        """Pause the server, which stops between two steps. Units of a running step still belong to the old
        version, and are reported with that version."""
        self._check_serving()
        self._calls.hold()
        self._paused = True
        await self._command(self._adapter.pause(self._client()))

    async def load(self, snapshot: Weights) -> None:
        self._check_serving()
        if not self._paused:
            raise EngineError("weights are exchanged while the engine is paused")
        adapter, client = self._adapter, self._client()
        offered = Directory(snapshot.tag, snapshot.path)
        await asyncio.to_thread(check_folder, self._layout, offered.path)
        folder = await adapter.prepare(client, offered)
        try:
            await adapter.load(client, folder)
        except EngineError as error:
            await self._restore(error)
            raise EngineError(
                f"version {offered.tag.version} was not taken, the old one is served: {error}"
            ) from error
        except asyncio.CancelledError:
            self._lose("an update of its weights was broken off")
            raise
        self._served = offered
        self._was_served.append(offered.tag)

    async def resume(self) -> None:
        self._check_serving()
        await self._command(self._adapter.resume(self._client()))
        self._paused = False
        self._calls.let_go()

    async def sleep(self) -> None:
        """Make the paused server release its memory. If it fails, the engine is lost and the server is
        killed, so the memory is free in any case."""
        self._check_serving()
        await self._command(self._adapter.sleep(self._client()))

    async def wake(self) -> None:
        self._check_serving()
        await self._command(self._adapter.wake(self._client()))

    async def device_bytes(self) -> int | None:
        """Return the memory in use on the server's GPUs, by all processes there, as the driver reports it. On
        a CPU, return the resident memory of the server's processes. None for an attached server."""
        process = self._server.process if self._server is not None else None
        return None if process is None else await asyncio.to_thread(used_bytes, process, self._settings.gpus)

    async def abort(self, request_ids: Iterable[str]) -> None:
        self._calls.abort(request_ids)

    def stats(self) -> EngineStats:
        waiting = min(self._load.waiting, len(self._calls))
        return EngineStats(
            running=len(self._calls) - waiting,
            waiting=waiting,
            capacity=self._adapter.capacity,
            kv_used=self._load.kv_used,
            tokens_total=self._calls.tokens_total,
            requests_total=self._calls.requests_total,
            busy_s=busy.seconds(self._settings.activity),
            decoded=self._load.decoded,
        )

    async def stop(self) -> None:
        self._stopping = True
        self._calls.fail(EngineError("the engine has stopped"))
        await self._close_server()
        await self._adapter.close()

    # --- requests ------------------------------------------------------------------------------------

    def _cache_of(self, request: GenerateRequest) -> VersionTag:
        """Return the version under which the request's prefixes are cached. Normally it is the served
        version. In mode `session` it is the version at which the session began. If the server has not served
        that version since its start, the first later version is used. Then the session's prefix is computed
        once more, but not at each update."""
        if self._settings.update_mode == "session" and request.began is not None:
            epoch, version = request.began
            began = VersionTag(self.version.policy, epoch, version)
            return next((tag for tag in self._was_served if tag >= began), self.version)
        return self.version

    def _routed(
        self, result: GenerateResult, said: Any, request: GenerateRequest, prompt: int
    ) -> GenerateResult:
        """Return the result with its routes, if they are requested and the answer has them."""
        mixture, start = self._settings.mixture, request.routes_from
        found = None if mixture is None or start is None else self._adapter.expert_ids(said)
        if found is None or mixture is None or start is None:
            return result
        if found.shape[1] <= mixture.layers[-1]:
            raise EngineError(f"the server gave experts of {found.shape[1]} layers, of a model that has more")
        # An aborted answer may have been truncated since.
        fed = prompt + max(0, result.token_ids.size - 1) - start
        return replace(result, routes=stored_routes(found[:fed, mixture.layers], mixture.experts))

    async def _ask(self, body: dict[str, Any], tell: Tell | None) -> Any:
        """Post a request and return its answer. `tell` gets its units as they arrive."""
        adapter, client = self._adapter, self._client()
        try:
            if tell is None:
                return await client.post(adapter.generate_path, body, adapter.answer_type, timeout_s=None)
            heard = adapter.heard(tell)
            await client.stream(
                adapter.generate_path, body | {"stream": True}, adapter.answer_type, heard.take
            )
            return heard.answer()
        except EngineError as error:
            # Find out what failed: this request, its connection, or the server.
            if self._lost is None and self._server is not None and await self._server.liveness.confirmed():
                raise
            raise self._lose(str(error)) from error

    # --- the server ----------------------------------------------------------------------------------

    async def _connect(self, weights: Directory) -> _Server:
        """Return a server that answers: the attached one, or a new one."""
        adapter, settings, process = self._adapter, self._settings, None
        if settings.python is None:
            # Another client may have left it paused. It is then not ready, but alive.
            client = await attached(adapter.title, settings, path=adapter.alive_path)
        else:
            first = await asyncio.to_thread(adapter.first_folder, weights.path)
            folder = await adapter.prepare(None, replace(weights, path=first))
            launch = Launch(settings, adapter.model, folder, adapter.max_model_len, facts=adapter.facts)
            process, client = await started(
                adapter.title,
                lambda port: adapter.command(replace(launch, port=port)),
                adapter.environment(launch, os.environ),
                settings,
                adapter.ready_path,
            )
        alive = adapter.alive_path
        return _Server(client, process, Liveness(lambda: client.serves(alive), process, settings.patience))

    async def _command(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a change of the server's state. If the change fails, the server's state is unknown, so the
        engine is lost."""
        try:
            await work
        except EngineError as error:
            raise self._lose(str(error)) from error

    async def _restore(self, error: EngineError) -> None:
        """Load the old weights again after a failed load, because the server's tensors are unknown. Raises
        `EngineLost` if this fails too."""
        assert self._served is not None
        try:
            if isinstance(error, EngineLost):
                raise error
            await self._adapter.restore(self._client(), self._served)
            if not await asyncio.to_thread(self._served.path.is_dir):
                # The snapshot was released while it was read, so its memory may have new content.
                raise EngineError(f"{self._served.path} was removed meanwhile")
        except EngineError as second:
            raise self._lose(
                f"it holds unknown weights after a failed load ({error}), and the old ones could not be "
                f"loaded again ({second})"
            ) from error

    async def _watch(self, server: _Server) -> None:
        """Update the load regularly. If the server is lost, end the requests in flight."""
        while True:
            await asyncio.sleep(self._adapter.watch_s)
            if server.liveness.ended():
                break
            try:
                self._load = await self._adapter.read_load(server.client)
            except EngineError:
                # A missing reading does not yet mean a lost server.
                if not await server.liveness.confirmed():
                    break
        self._lose(f"{server.client.name} ended or does not answer any more")

    def _lose(self, why: str) -> EngineLost:
        """Give up the server. Return the error to raise."""
        if self._lost is None and not self._stopping:
            process = self._server.process if self._server is not None else None
            if process is not None:
                why = f"{why}. {process.tail()}"
                process.kill()
            log.error("engine is lost", engine=self._adapter.name, error=why)
            self._lost = EngineLost(f"the engine {self._adapter.name} is lost: {why}")
            self._calls.fail(self._lost)
        return EngineLost(str(self._lost or why))

    def _check_serving(self) -> None:
        if self._lost is not None and not self._stopping:
            raise EngineLost(str(self._lost))
        if self._stopping or self._served is None:
            raise EngineError(f"the engine has {'stopped' if self._stopping else 'not started'}")

    def _client(self) -> ServerClient:
        if self._server is None:
            raise EngineLost("the engine is not connected")
        return self._server.client

    async def _close_server(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        server = self._server
        if server is not None:
            server.liveness.close()
            if server.process is not None:
                await server.process.end()  # if this is cancelled, the next call waits for the end
        self._server = None
        await self._calls.settle()
        if server is not None:
            await server.client.close()
