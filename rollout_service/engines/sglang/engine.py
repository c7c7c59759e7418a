"""A real SGLang server as an engine.

Promises what `engines/base.py` asks. The server is a child of this process, in an environment of its own, or
one that runs already and is attached by URL; either way it is an unpatched release. In particular:

- Nothing that the server would die of is sent to it: ids and lengths are checked here.
- `recompute`: requests in flight are retracted, and every KV is computed anew under the new weights. `keep`:
  requests in flight go on with the KV they have; a request of a later call never uses KV of older weights,
  because prefixes are cached under the version that the request was called under.
- A unit's version is what the server says of that unit. A load after which the server does not name the new
  version is undone, or the engine is lost: no unit carries a version that did not sample it.

Not promised: `Sampling.seed` (the server ignores it). A request aborted before its first units were handed
over returns fewer units than were sampled, or none.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal_async.rpc.messages import VersionTag
from areal_async.runtime.log import get_logger
from rollout_service.engines.base import (
    Capabilities,
    EngineError,
    EngineLost,
    EngineStats,
    GenerateRequest,
    GenerateResult,
    Weights,
    nothing_sampled,
)
from rollout_service.engines.server.account import Account
from rollout_service.engines.server.calls import Calls, HeldBack
from rollout_service.engines.server.checks import answer_room, checked_prompt, logprobs_of
from rollout_service.engines.server.http import ServerClient
from rollout_service.engines.server.liveness import Liveness
from rollout_service.engines.server.model import read_model
from rollout_service.engines.server.process import ServerProcess
from rollout_service.engines.server.settings import ServerSettings
from rollout_service.engines.server.spans import format_tag
from rollout_service.engines.server.start import attached, started
from rollout_service.engines.server.tensors import Layout, read_layout
from rollout_service.engines.sglang.distributed import TensorFeed
from rollout_service.engines.sglang.launch import Launch, server_argv, server_environment
from rollout_service.engines.sglang.probe import PAUSE_MODES, ServerInfo, probe
from rollout_service.engines.sglang.update import Directory, check_directory, load_directory
from rollout_service.engines.sglang.watch import Load, watch
from rollout_service.engines.sglang.wire import Generated, Heard, generate_body, parse
from rollout_service.engines.streaming import Piece, Tell, stream_of

log = get_logger("engine")

NAME = "the SGLang server"
ALIVE = "/model_info"
"""Answered at once, also by a server that is paused: `/health` is not."""


class SGLangEngine:
    """One replica of the policy in a server. Implements `engines.base.Engine`."""

    def __init__(
        self,
        model: Path,
        settings: ServerSettings,
        *,
        feed: TensorFeed | None = None,
    ) -> None:
        """`model` gives tokenizer and sizes, snapshots give the weights. `feed` brings the tensors of
        updates, where it can."""
        self._model, self._settings, self._feed = model, settings, feed
        self._load_weights = feed.load if feed is not None else load_directory
        self._account, self._calls = Account(settings.activity), Calls(self._abort_rid)
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._server: ServerProcess | None = None
        self._client: ServerClient | None = None
        self._capabilities: Capabilities | None = None
        self._info: ServerInfo | None = None
        self._layout: Layout = {}
        self._served: Directory | None = None
        self._paused = self._stopping = False
        self._lost: EngineLost | None = None
        self._liveness: Liveness | None = None
        self._load = Load()
        self._watcher: asyncio.Task[None] | None = None

    # --- the protocol --------------------------------------------------------------------------------

    @property
    def version(self) -> VersionTag:
        if self._served is None:
            raise EngineError("the engine has not started")
        return self._served.tag

    @property
    def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            raise EngineError("the engine has not started")
        return self._capabilities

    @property
    def url(self) -> str:
        """Of the server."""
        return self._ready_client().url

    def alive(self) -> bool:
        """False once the server was lost; true while it starts."""
        if self._stopping or self._lost is not None:
            return False
        return self._server is None or self._server.alive()

    async def start(self, snapshot: Weights) -> None:
        settings, facts = self._settings, read_model(self._model)
        max_model_len = min(settings.max_model_len, facts.positions or settings.max_model_len)
        try:
            if settings.url is None:
                await self._launch(snapshot, max_model_len)
            else:
                await self._attach()
            self._capabilities, self._info = await probe(
                self._ready_client(),
                update_mode=settings.update_mode,
                max_model_len=max_model_len,
                vocab_size=facts.vocab_size,
                dtype=settings.dtype,
            )
            if self._feed is not None:
                await self._feed.opened(self._ready_client(), settings.python)
            # What start-up left behind is not looked through by every later garbage collection.
            await self._ready_client().request("POST", "/freeze_gc")
            self._layout = await asyncio.to_thread(read_layout, snapshot.path)
            served = Directory(snapshot.tag, snapshot.path)
            if settings.url is not None:
                await self._take_over(served)
        except BaseException:
            await self._close_server()
            raise
        self._served = served
        self._watcher = asyncio.create_task(self._watch())
        log.info(
            "SGLang serves",
            release=self._capabilities.release,
            url=self._ready_client().url,
            version=snapshot.tag.version,
            max_model_len=max_model_len,
        )

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return await self._generated(request, None)

    def stream(self, request: GenerateRequest) -> AsyncIterator[Piece | GenerateResult]:
        return stream_of(lambda tell: self._generated(request, tell))

    async def _generated(self, request: GenerateRequest, tell: Tell | None) -> GenerateResult:
        self._check_serving()
        capabilities = self.capabilities
        prompt = checked_prompt(
            request.prompt_ids,
            vocab_size=capabilities.vocab_size,
            max_model_len=capabilities.max_model_len,
        )
        room = answer_room(request.sampling, len(prompt), capabilities.max_model_len)
        # The server aborts by prefix: of equal length, no id begins another.
        rid = f"{self._prefix}-{next(self._numbers):012d}"

        async def answer() -> GenerateResult:
            # Called under this version; a request that waited for the update is of the version after it.
            key = format_tag(self.version) if self._settings.update_mode == "keep" else None
            body = generate_body(rid, prompt, request.sampling, room, cache_key=key)
            generated = await self._asked(body, tell)
            result = parse(generated, logprobs_of(request.sampling))
            self._account.sampled(result.token_ids.size)
            return result

        with self._account.call():
            try:
                return await self._calls.run(request, rid, answer)
            except HeldBack:
                return nothing_sampled()
            except EngineLost as error:
                raise await self._confirmed(error) from error

    async def _asked(self, body: dict[str, Any], tell: Tell | None) -> Generated:
        client = self._ready_client()
        if tell is None:
            return await client.post("/generate", body, Generated, timeout_s=None)
        heard = Heard(self._info is not None and self._info.incremental_streaming_output, tell)
        await client.stream("/generate", body | {"stream": True}, Generated, heard.take)
        return heard.answer()

    async def pause(self) -> None:
        """The server stops between two steps: units of a step under way are still the old version's, and are
        told so."""
        self._check_serving()
        self._calls.hold()
        self._paused = True
        self._account.paused(True)
        await self._command("/pause_generation", {"mode": PAUSE_MODES[self._settings.update_mode]})

    async def load(self, snapshot: Weights) -> None:
        self._check_serving()
        if not self._paused or self._served is None:
            raise EngineError("weights are exchanged while the engine is paused")
        await asyncio.to_thread(check_directory, self._layout, snapshot.path)
        flush = self._settings.update_mode == "recompute"
        offered = Directory(snapshot.tag, snapshot.path)
        try:
            await self._load_weights(
                self._ready_client(), offered, flush=flush, timeout_s=self._settings.ready_s
            )
        except EngineError as error:
            await self._undo(error, flush)
            raise EngineError(
                f"version {snapshot.tag.version} was not taken, the old one is served: {error}"
            ) from error
        self._served = offered

    async def resume(self) -> None:
        self._check_serving()
        await self._command("/continue_generation", {"torch_empty_cache": False})
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
            capacity=(self._info.max_running_requests if self._info else None) or self._settings.slots,
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
        if self._feed is not None:
            await self._feed.close()
        self._account.close()

    # --- the server ----------------------------------------------------------------------------------

    async def _launch(self, snapshot: Weights, max_model_len: int) -> None:
        settings = self._settings
        assert settings.python is not None
        launch = Launch(
            python=settings.python,
            tokenizer=self._model,
            port=0,
            slots=settings.slots,
            max_model_len=max_model_len,
            update_mode=settings.update_mode,
            device=settings.device,
            dtype=settings.dtype,
            arguments=settings.arguments,
        )
        server, client = await started(
            NAME,
            lambda port: server_argv(replace(launch, port=port), snapshot.path, snapshot.tag),
            server_environment(os.environ, settings.device, settings.gpus),
            settings,
            ready="/ready",
        )
        self._connected(client, server)

    async def _attach(self) -> None:
        # Another client may have left it paused: then it is not /ready, but it is there.
        self._connected(await attached(NAME, self._settings, ready=ALIVE))
        # What a client before us left paused would hold the probe's requests for ever.
        await self._command("/continue_generation", {"torch_empty_cache": False})

    def _connected(self, client: ServerClient, server: ServerProcess | None = None) -> None:
        self._client, self._server = client, server
        self._liveness = Liveness(lambda: client.serves(ALIVE), server, self._settings.patience)

    async def _take_over(self, snapshot: Directory) -> None:
        """Load the first snapshot into a server that was started with whatever weights. Its cache is of
        those."""
        await self._command("/pause_generation", {"mode": "retract"})
        try:
            await load_directory(self._ready_client(), snapshot, flush=True, timeout_s=self._settings.ready_s)
        finally:
            await self._command("/continue_generation", {"torch_empty_cache": False})

    async def _undo(self, error: EngineError, flush: bool) -> None:
        """After a failed load: nobody knows which tensors the server holds, so the old ones are loaded again.
        Where that fails too the engine is lost. Raises `EngineLost`."""
        assert self._served is not None
        try:
            if isinstance(error, EngineLost):
                raise error
            await load_directory(
                self._ready_client(), self._served, flush=flush, timeout_s=self._settings.ready_s
            )
            if not await asyncio.to_thread(self._served.path.is_dir):
                # Nobody holds it any more: it went while it was read, and its memory may have been refilled.
                raise EngineError(f"{self._served.path} was removed meanwhile")
        except EngineError as second:
            lost = EngineLost(
                f"the SGLang server holds unknown weights after a failed load ({error}), and the old ones "
                f"could not be loaded again ({second})"
            )
            self._lose(lost)
            await self._close_server()
            raise lost from error

    async def _command(self, path: str, body: object) -> None:
        """A POST that changes the server's state. Its failure leaves that state unknown: the engine is lost
        then."""
        try:
            status, content = await self._ready_client().request("POST", path, body)
            if status != 200:
                raise EngineLost(f"the SGLang server answered {path} with {status}: {content[:300]!r}")
        except EngineLost as error:
            lost = self._explained(error)
            self._lose(lost)
            raise EngineLost(str(lost)) from error

    async def _abort_rid(self, rid: str) -> None:
        await self._ready_client().request("POST", "/abort_request", {"rid": rid})

    async def _watch(self) -> None:
        """Keep the load known; when the server is gone, end what is in flight."""
        assert self._liveness is not None
        await watch(self._ready_client(), self._liveness, self._load)
        self._lose(self._explained(EngineLost("the SGLang server does not answer any more")))

    def _lose(self, error: EngineLost) -> None:
        if self._lost is None and not self._stopping:
            log.error("SGLang is lost", error=str(error))
            self._lost = error
            self._calls.fail(error)
            self._account.paused(False)

    def _explained(self, error: EngineLost) -> EngineLost:
        """With the server's last words, where it was started here."""
        if self._server is None:
            return error
        return EngineLost(f"{error}. The end of {self._settings.log_path}:\n{self._server.tail()}")

    async def _confirmed(self, error: EngineLost) -> EngineLost:
        """What to say of a request whose connection broke: was it the connection, or the server?"""
        known = self._lost is not None
        if not known and self._liveness is not None and not await self._liveness.confirmed():
            self._lose(self._explained(error))
        return EngineLost(str(self._lost or error))

    def _check_serving(self) -> None:
        if self._stopping:
            raise EngineError("the engine has stopped")
        if self._lost is not None:
            raise EngineLost(str(self._lost))
        if self._served is None:
            raise EngineError("the engine has not started")

    def _ready_client(self) -> ServerClient:
        if self._client is None:
            raise EngineLost("the engine is not connected")
        return self._client

    async def _close_server(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None and watcher is not asyncio.current_task():
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        if self._liveness is not None:
            self._liveness.close()
        client, self._client = self._client, None
        server, self._server = self._server, None
        if server is not None:
            await server.stop()
        await self._calls.settle()
        if client is not None:
            await client.close()
