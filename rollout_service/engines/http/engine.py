"""A real inference server as an engine, whichever kind it is (`adapter.py`).

Promises what `engines/base.py` asks. The server is a child of this process, in an environment of its own, or
one that runs already and is attached by URL; either way it is an unpatched release. In particular:

- Nothing that the server would die of is sent to it: ids, lengths and directories are checked here.
- A unit's version is what the server says of that unit. After a load that failed the old weights are loaded
  again where the server can do that, or the engine is lost: no unit carries a version that did not sample it.
- Once lost the engine stays lost until `start`: its process is killed, and every call ends in `EngineLost`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from collections import deque
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, replace
from typing import Any

from areal_async.base.log import get_logger
from areal_async.base.versions import VersionTag
from areal_async.trajectory.routes import stored_routes
from rollout_service import metrics
from rollout_service.engines.base import (
    EngineError,
    EngineLost,
    EngineStats,
    GenerateRequest,
    GenerateResult,
    Tell,
    Weights,
    checked_request,
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
from rollout_service.engines.http.calls import Account, Calls
from rollout_service.engines.http.client import ServerClient
from rollout_service.engines.http.process import Liveness, ServerProcess, attached, started

log = get_logger("engine")

MAX_CACHED_VERSIONS = 1024
"""Versions whose sessions find their cache in mode `session`."""


@dataclass(frozen=True, slots=True)
class _Server:
    client: ServerClient
    process: ServerProcess | None  # None for one that is attached
    liveness: Liveness


UNIT_ARRAYS = ("token_ids", "logprobs", "versions", "epochs")


class HttpEngine:
    """One replica of the policy in a server. Implements `engines.base.Engine`."""

    def __init__(self, adapter: ServerAdapter) -> None:
        self._adapter, self._settings = adapter, adapter.settings
        self._account, self._calls = Account(adapter.settings.activity), Calls(self._abort)
        self._prefix = ""
        self._numbers = itertools.count()
        self._server: _Server | None = None
        self._layout: Layout = {}
        self._served: Directory | None = None
        self._was_served: deque[VersionTag] = deque(maxlen=MAX_CACHED_VERSIONS)
        """What this start of the server has served, the newest last."""
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
        """The server's address."""
        return self._client().url

    def alive(self) -> bool:
        """False once the server was lost; true while it starts."""
        if self._stopping or self._lost is not None:
            return False
        return self._server is None or not self._server.liveness.ended()

    async def start(self, snapshot: Weights) -> None:
        """Start or attach the server. May be called again after the engine was lost."""
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
        self._was_served.clear()
        self._was_served.append(served.tag)
        self._watcher = asyncio.create_task(self._watch(self._server))
        log.info(
            "engine serves",
            engine=adapter.name,
            release=release,
            url=self.url,
            version=served.tag.version,
            max_model_len=adapter.max_model_len,
        )

    async def generate(self, request: GenerateRequest, tell: Tell | None = None) -> GenerateResult:
        self._check_serving()
        adapter = self._adapter
        ids, room = checked_request(
            request, vocab_size=adapter.facts.vocab_size, max_model_len=adapter.max_model_len
        )
        # A server may abort by prefix: of equal length, no id begins another.
        rid = f"{self._prefix}-{next(self._numbers):012d}"

        async def answer() -> GenerateResult:
            # Called under this version; a request that waited for the update is of the version after it.
            body = adapter.body(rid, ids.tolist(), request, room, self._cache_of(request))
            said = await self._ask(body, tell)
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
            self._account.sampled(result.token_ids.size)
            if result.cached_tokens is not None:
                metrics.PROMPT_TOKENS.inc(ids.size)
                metrics.CACHED_TOKENS.inc(result.cached_tokens)
            return result

        with self._account.call():
            return await self._calls.run(request, rid, answer)

    async def pause(self) -> None:
        """The server stops between two steps: units of a step under way are still the old version's, and are
        told so."""
        self._check_serving()
        self._calls.hold()
        self._paused = True
        self._account.paused(True)
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
        self._account.paused(False)
        self._calls.let_go()

    async def abort(self, request_ids: Iterable[str]) -> None:
        self._calls.abort(request_ids)

    def stats(self) -> EngineStats:
        waiting = min(self._load.waiting, self._account.in_flight)
        return EngineStats(
            running=self._account.in_flight - waiting,
            waiting=waiting,
            capacity=self._adapter.capacity,
            kv_used=self._load.kv_used,
            tokens_total=self._account.tokens_total,
            requests_total=self._account.requests_total,
            busy_s=self._account.busy_s,
            decoded=self._load.decoded,
        )

    async def stop(self) -> None:
        self._stopping = True
        self._calls.fail(EngineError("the engine has stopped"))
        await self._close_server()
        await self._adapter.close()
        self._account.close()

    # --- requests ------------------------------------------------------------------------------------

    def _cache_of(self, request: GenerateRequest) -> VersionTag:
        """The version under which the prefixes of a request are cached: the one served, or in mode `session`
        the one that its session began under. Where this start of the server has not served that, it is the
        first one after it: the session's prefix is computed once more, not again at each update."""
        if self._settings.update_mode == "session" and request.began is not None:
            epoch, version = request.began
            began = VersionTag(self.version.policy, epoch, version)
            return next((tag for tag in self._was_served if tag >= began), self.version)
        return self.version

    def _routed(
        self, result: GenerateResult, said: Any, request: GenerateRequest, prompt: int
    ) -> GenerateResult:
        """The result with its routes, where they are wanted and the answer has them."""
        mixture, start = self._settings.mixture, request.routes_from
        found = None if mixture is None or start is None else self._adapter.expert_ids(said)
        if found is None or mixture is None or start is None:
            return result
        if found.shape[1] <= mixture.layers[-1]:
            raise EngineError(f"the server gave experts of {found.shape[1]} layers, of a model that has more")
        # An answer that was aborted may have been cut since.
        fed = prompt + max(0, result.token_ids.size - 1) - start
        return replace(result, routes=stored_routes(found[:fed, mixture.layers], mixture.experts))

    async def _ask(self, body: dict[str, Any], tell: Tell | None) -> Any:
        """Post a request and return its answer; `tell` is given its units as they come."""
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
            # Was it this request, its connection, or the server?
            if self._lost is None and self._server is not None and await self._server.liveness.confirmed():
                raise
            raise self._lose(str(error)) from error

    async def _abort(self, rid: str) -> None:
        await self._adapter.abort(self._client(), rid)

    # --- the server ----------------------------------------------------------------------------------

    async def _connect(self, weights: Directory) -> _Server:
        """A server that answers: the attached one, or one that is started."""
        adapter, settings, process = self._adapter, self._settings, None
        if settings.python is None:
            # Another client may have left it paused: then it is not ready, but it is there.
            client = await attached(adapter.title, settings, path=adapter.alive_path)
        else:
            folder = await adapter.prepare(None, weights)
            launch = Launch(settings, adapter.model, folder, adapter.max_model_len)
            process, client = await started(
                adapter.title,
                lambda port: adapter.command(replace(launch, port=port)),
                adapter.environment(launch, os.environ),
                settings,
                path=adapter.ready_path,
            )
        alive = adapter.alive_path
        return _Server(client, process, Liveness(lambda: client.serves(alive), process, settings.patience))

    async def _command(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what changes the server's state. Its failure leaves that state unknown: the engine is lost."""
        try:
            await work
        except EngineError as error:
            raise self._lose(str(error)) from error

    async def _restore(self, error: EngineError) -> None:
        """After a failed load nobody knows which tensors the server holds, so the old ones are loaded again.
        Raises `EngineLost` where that fails too."""
        assert self._served is not None
        try:
            if isinstance(error, EngineLost):
                raise error
            await self._adapter.restore(self._client(), self._served)
            if not await asyncio.to_thread(self._served.path.is_dir):
                # Nobody holds it any more: it went while it was read, and its memory may have been refilled.
                raise EngineError(f"{self._served.path} was removed meanwhile")
        except EngineError as second:
            raise self._lose(
                f"it holds unknown weights after a failed load ({error}), and the old ones could not be "
                f"loaded again ({second})"
            ) from error

    async def _watch(self, server: _Server) -> None:
        """Keep the load known; when the server is gone, end what is in flight."""
        while True:
            await asyncio.sleep(self._adapter.watch_s)
            if server.liveness.ended():
                break
            try:
                self._load = await self._adapter.read_load(server.client)
            except EngineError:
                # No reading is not yet no server.
                if not await server.liveness.confirmed():
                    break
        self._lose(f"{server.client.name} ended or does not answer any more")

    def _lose(self, why: str) -> EngineLost:
        """Give the server up. Returns the error to raise."""
        if self._lost is None and not self._stopping:
            process = self._server.process if self._server is not None else None
            if process is not None:
                why = f"{why}. The end of {process.log_path}:\n{process.tail()}"
                process.kill()
            log.error("engine is lost", engine=self._adapter.name, error=why)
            self._lost = EngineLost(f"the engine {self._adapter.name} is lost: {why}")
            self._calls.fail(self._lost)
            self._account.paused(False)
        return EngineLost(str(self._lost or why))

    def _check_serving(self) -> None:
        if self._stopping:
            raise EngineError("the engine has stopped")
        if self._lost is not None:
            raise EngineLost(str(self._lost))
        if self._served is None:
            raise EngineError("the engine has not started")

    def _client(self) -> ServerClient:
        if self._server is None:
            raise EngineLost("the engine is not connected")
        return self._server.client

    async def _close_server(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        server, self._server = self._server, None
        if server is not None:
            server.liveness.close()
            if server.process is not None:
                await server.process.stop()
        await self._calls.settle()
        if server is not None:
            await server.client.close()
