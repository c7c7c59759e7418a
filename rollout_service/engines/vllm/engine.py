"""The engine `vllm`: an unpatched vLLM server behind the engine protocol.

Promises what `engines/base.py` asks, and of an update in particular: the server is paused with its requests
in it, reloads from the snapshot's directory, is told the new label and goes on. It stamps each unit with the
label under which it was sampled. `recompute` also preempts the requests and drops the whole cache, so that
they begin again from their ids under the new weights; `keep` leaves them their KV. Requests sent later have
a cache salt of their own, so that none of them meets KV of older weights.

What was reloaded half is never served: should anything fail once a reload has begun, the server is killed
(one that was attached is given up) and the engine lost.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import msgspec
from transformers import AutoTokenizer

from areal_async.rpc.messages import VersionTag
from areal_async.runtime.log import get_logger
from areal_async.trajectory import Sampling
from rollout_service.engines.base import (
    Capabilities,
    EngineError,
    EngineLost,
    EngineStats,
    GenerateRequest,
    GenerateResult,
    RequestError,
    Weights,
    nothing_sampled,
)
from rollout_service.engines.local.text import Detokenizer, trim
from rollout_service.engines.server.account import Account
from rollout_service.engines.server.calls import Calls, HeldBack
from rollout_service.engines.server.checks import answer_room, checked_prompt
from rollout_service.engines.server.model import read_model
from rollout_service.engines.server.settings import ServerSettings
from rollout_service.engines.server.start import attached, started
from rollout_service.engines.server.tensors import Layout, check_same, read_layout
from rollout_service.engines.streaming import Piece, Tell, stream_of
from rollout_service.engines.vllm.answer import ID_PREFIX, Answer, Sampled, body, label, sampled
from rollout_service.engines.vllm.argv import Launch, command, variables
from rollout_service.engines.vllm.folder import is_tied, untied
from rollout_service.engines.vllm.gauges import Gauges
from rollout_service.engines.vllm.link import Link, Status
from rollout_service.engines.vllm.probe import Paused, probe

log = get_logger("engine")

LEAST_TEMPERATURE = 0.01
"""vLLM raises a smaller temperature above 0 to this one."""
RELOAD_TIMEOUT_S = 600.0
NAME = "vLLM"
TRIAL = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=1, stop=(), seed=0)


class Success(msgspec.Struct):
    success: bool


class Results(msgspec.Struct):
    results: list[msgspec.Raw]


class VllmEngine:
    """One replica of the policy in a vLLM server. Implements `engines.base.Engine`."""

    def __init__(
        self,
        directory: Path,
        settings: ServerSettings,
        *,
        scratch: Path,
    ) -> None:
        """`directory` gives configuration and tokenizer, snapshots give the weights. `scratch` is a folder of
        this engine's own, best in shared memory."""
        self._directory = directory
        self._settings = settings
        self._facts = read_model(directory)
        self._max_model_len = min(settings.max_model_len, self._facts.positions or settings.max_model_len)
        self._scratch = scratch
        self._account = Account(settings.activity)
        self._calls = Calls(self._abort_in_server)
        self._numbers = itertools.count()
        self._tag = VersionTag(0, 0)
        self._owner = ""
        self._paused = False
        self._tokens_before = self._tokens_total = 0
        self._layout: Layout = {}
        self._link: Link | None = None
        self._text: Detokenizer | None = None
        self._capabilities: Capabilities | None = None

    # --- the protocol --------------------------------------------------------------------------------

    @property
    def version(self) -> VersionTag:
        return self._tag

    @property
    def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            raise EngineError("the engine has not started")
        return self._capabilities

    @property
    def url(self) -> str:
        """Of the server."""
        return self._started().server.url

    def alive(self) -> bool:
        return self._link is not None and self._link.alive()

    async def start(self, snapshot: Weights) -> None:
        """May be called again after the engine was lost."""
        await self.stop()
        try:
            await self._start(snapshot)
        except BaseException:
            await self.stop()
            raise

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return await self._generated(request, None)

    def stream(self, request: GenerateRequest) -> AsyncIterator[Piece | GenerateResult]:
        return stream_of(lambda tell: self._generated(request, tell))

    async def _generated(self, request: GenerateRequest, tell: Tell | None) -> GenerateResult:
        sampling = request.sampling
        prompt = checked_prompt(
            request.prompt_ids, vocab_size=self._facts.vocab_size, max_model_len=self._max_model_len
        )
        room = answer_room(sampling, len(prompt), self._max_model_len)
        if 0 < sampling.temperature < LEAST_TEMPERATURE:
            raise RequestError(
                f"sampling.temperature is {sampling.temperature}; with vLLM it is 0 or at least "
                f"{LEAST_TEMPERATURE}"
            )
        link = self._started()
        # The server's ids of requests are this start's own, so that no abort meets another's.
        rid = f"{self._owner}-{next(self._numbers)}"

        async def answer() -> GenerateResult:
            # Begun after an update that it was held for: the tag and so the salt are those of that update.
            content = body(
                rid,
                prompt,
                sampling,
                max_new_tokens=room,
                cache_salt=label(self._tag, self._owner),
                priority=request.priority,
            )
            return self._result(sampling, await link.ask(content, tell))

        with self._account.call():
            try:
                return await self._calls.run(request, rid, answer)
            except HeldBack:
                return nothing_sampled()

    async def pause(self) -> None:
        link = self._started()
        self._calls.hold()
        self._account.paused(True)
        # It returns once no step is under way: what comes out later is sampled after `resume`.
        await link.control("/pause?mode=keep&clear_cache=false", Status)
        self._paused = True

    async def load(self, snapshot: Weights) -> None:
        link = self._started()
        if not self._paused:
            raise EngineError("weights are exchanged while the engine is paused")
        try:
            folder = await asyncio.to_thread(self._prepared, snapshot)
            if not (await link.server.get("/is_paused", Paused)).is_paused:
                raise EngineError("the server is not paused any more: something else resumed it")
            try:
                await self._reload(link, folder, snapshot.tag)
            except EngineError as error:
                raise link.lose(f"it failed while it took {snapshot.path}: {error}") from error
            except asyncio.CancelledError:
                link.lose("an update of its weights was broken off")
                raise
        finally:
            self._tidy()

    async def resume(self) -> None:
        link = self._started()
        try:
            await link.control("/resume", Status)
        finally:
            self._paused = False
            self._account.paused(False)
            self._calls.let_go()

    async def abort(self, request_ids: Iterable[str]) -> None:
        self._calls.abort(request_ids)

    def stats(self) -> EngineStats:
        gauges = self._link.gauges if self._link is not None else Gauges()
        # The server's own count goes on while answers are long and none is finished.
        generated = self._link.generated if self._link is not None else 0
        self._tokens_total = max(
            self._tokens_total, self._account.tokens_total, self._tokens_before + generated
        )
        waiting = min(gauges.waiting, self._account.in_flight)
        return EngineStats(
            running=self._account.in_flight - waiting,
            waiting=waiting,
            capacity=self._settings.slots,
            kv_used=gauges.kv_used,
            tokens_total=self._tokens_total,
            requests_total=self._account.requests_total,
            busy_s=self._account.busy_s,
        )

    async def stop(self) -> None:
        self._calls.fail(EngineLost("the engine has stopped"))
        if self._link is not None:
            await self._link.close()
        await self._calls.settle()
        self._paused = False
        self._account.paused(False)
        self._account.close()
        self._tidy()

    # --- starting ------------------------------------------------------------------------------------

    async def _start(self, snapshot: Weights) -> None:
        self._owner = secrets.token_hex(4)
        self._tokens_before = self._tokens_total
        self._text = Detokenizer(await asyncio.to_thread(AutoTokenizer.from_pretrained, self._directory))
        self._layout = read_layout(snapshot.path)
        link = await self._connected(snapshot)
        release = await probe(link.server, max_model_len=self._max_model_len, tied=is_tied(snapshot.path))
        if self._settings.url is not None:
            # Whatever it did before, it is this engine's now.
            await link.control("/pause?mode=abort&clear_cache=true", Status)
            self._paused = True
            await self.load(snapshot)
            await self.resume()
        else:
            await self._name(link, snapshot.tag)
            self._tidy()
        found = await self._try_out(link)
        if found.versions.tolist() != [self._tag.version] or found.epochs.tolist() != [self._tag.epoch]:
            raise EngineError(f"the server stamps other weights than {label(self._tag, self._owner)}")
        self._capabilities = Capabilities(
            name="vllm",
            release=release,
            update_modes=frozenset(("recompute", "keep")),
            logprobs_of="sampled",
            needs="directory",
            max_model_len=self._max_model_len,
            vocab_size=self._facts.vocab_size,
        )
        link.watch()
        log.info(
            "vLLM serves",
            release=release,
            url=link.server.url,
            version=snapshot.tag.version,
            max_model_len=self._max_model_len,
        )

    async def _connected(self, snapshot: Weights) -> Link:
        """The link to a server that answers: the attached one, or one that was started."""
        settings, process = self._settings, None
        if settings.url is not None:
            client = await attached(NAME, settings, ready="/health")
        else:
            folder = await asyncio.to_thread(self._prepared, snapshot)
            process, client = await started(
                NAME,
                lambda port: command(self._launch(folder, port)),
                variables(self._launch(folder, 0), os.environ),
                settings,
                ready="/health",
            )
        self._link = Link(client, process, self._calls.fail, settings.patience)
        return self._link

    def _launch(self, folder: Path, port: int) -> Launch:
        settings = self._settings
        assert settings.python is not None
        return Launch(
            python=settings.python,
            model=folder,
            tokenizer=self._directory,
            port=port,
            slots=settings.slots,
            max_model_len=self._max_model_len,
            device=settings.device,
            dtype=settings.dtype,
            torch_threads=settings.torch_threads,
            gpus=settings.gpus,
            arguments=settings.arguments,
        )

    async def _try_out(self, link: Link) -> Sampled:
        """One unit: the first request is the slowest, and its answer shows whether units are stamped."""
        salt = label(self._tag, self._owner)
        content = body("trial", [0], TRIAL, max_new_tokens=1, cache_salt=salt, priority=0)
        return sampled(await link.ask(content), self._owner)

    # --- weights -------------------------------------------------------------------------------------

    def _prepared(self, snapshot: Weights) -> Path:
        """The directory that the server loads. Raises `EngineError` for one that it must not."""
        check_same(self._layout, read_layout(snapshot.path), snapshot.path)
        if self._settings.device == "cpu" and is_tied(snapshot.path):
            return untied(snapshot.path, self._scratch)
        return snapshot.path

    async def _reload(self, link: Link, folder: Path, tag: VersionTag) -> None:
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await link.control("/collective_rpc", Results, call, timeout_s=RELOAD_TIMEOUT_S)
        if self._settings.update_mode == "recompute":
            reset = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
            if not (await link.control(reset, Success)).success:
                raise EngineError("the server could not drop its cache")
        await self._name(link, tag)

    async def _name(self, link: Link, tag: VersionTag) -> None:
        name = {"new_version": label(tag, self._owner)}
        if not (await link.control("/update_weight_version", Success, name)).success:
            raise EngineError("the server did not take the name of its weights")
        self._tag = tag

    def _tidy(self) -> None:
        """What was made for a load is in the server's memory by now."""
        shutil.rmtree(self._scratch, ignore_errors=True)

    # --- answers -------------------------------------------------------------------------------------

    def _started(self) -> Link:
        """Raises `EngineError` before the start, `EngineLost` after the loss."""
        if self._link is None:
            raise EngineError("the engine has not started")
        self._link.check()
        return self._link

    async def _abort_in_server(self, rid: str) -> None:
        # Never without an id: that would end every request in the server.
        await self._started().server.request("POST", "/abort_requests", {"request_ids": [ID_PREFIX + rid]})

    def _result(self, sampling: Sampling, answer: Answer) -> GenerateResult:
        try:
            found = sampled(answer, self._owner)
        except EngineLost as error:
            raise self._started().lose(str(error)) from error
        self._account.sampled(found.token_ids.size)
        assert self._text is not None
        text = self._text.decode([found.token_ids.tolist()])[0]
        return GenerateResult(
            found.token_ids,
            found.logprobs,
            found.versions,
            found.epochs,
            found.finish_reason,
            trim(text, sampling.stop) if sampling.stop else text,
            logprobs_of="raw" if sampling.temperature == 0 else "sampled",
        )
