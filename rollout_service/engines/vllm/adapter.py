"""The engine `vllm`: an unpatched vLLM server.

The server is paused with its requests in it, reloads from the snapshot's directory, is told the new label and
goes on. It stamps each unit with the label under which it was sampled. `recompute` also preempts the requests
and drops the whole cache, so that they begin again from their ids under the new weights; `keep` leaves them
their KV. Requests sent later have a cache salt of their own, so that none of them meets KV of older weights.

What was reloaded half is never served: should anything fail once a reload has begun, the engine is lost.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from areal_async.rpc.schema import VersionTag
from areal_async.trajectory import Sampling
from rollout_service.engines.base import (
    EngineError,
    GenerateRequest,
    GenerateResult,
    RequestError,
    Tell,
)
from rollout_service.engines.http.adapter import Directory, Launch, ServerAdapter, ServerLoad
from rollout_service.engines.http.client import CONTROL_TIMEOUT_S, ServerClient
from rollout_service.engines.http.settings import ServerSettings
from rollout_service.engines.text import Detokenizer, trim
from rollout_service.engines.vllm.arguments import command, variables
from rollout_service.engines.vllm.messages import ID_PREFIX, Answer, VllmStream, generate_body, label, parse
from rollout_service.engines.vllm.probe import Paused, probe
from rollout_service.engines.vllm.weights import is_tied, untied

T = TypeVar("T")

LEAST_TEMPERATURE = 0.01
"""vLLM raises a smaller temperature above 0 to this one."""
RELOAD_TIMEOUT_S = 600.0
TRIAL = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=1, stop=(), seed=0)
WAITING = "vllm:num_requests_waiting"
KV_USED = "vllm:kv_cache_usage_perc"
GENERATED = "vllm:generation_tokens_total"


class VllmStatus(msgspec.Struct):
    status: str


class Success(msgspec.Struct):
    success: bool


class Results(msgspec.Struct):
    results: list[msgspec.Raw]


class VllmAdapter(ServerAdapter):
    name = "vllm"
    title = "vLLM"
    ready_path = alive_path = "/health"
    generate_path = "/inference/v1/generate"
    answer_type = Answer
    watch_s = 1.0

    def __init__(self, model: Path, settings: ServerSettings, *, scratch: Path) -> None:
        """`scratch` is a folder of this engine's own, best in shared memory."""
        super().__init__(model, settings)
        self._scratch = scratch
        self._owner = ""

    def command(self, launch: Launch) -> list[str]:
        return command(launch)

    def environment(self, launch: Launch, inherited: Mapping[str, str]) -> dict[str, str]:
        return variables(launch, inherited)

    async def open(self, client: ServerClient, weights: Directory) -> str:
        self._owner = secrets.token_hex(4)
        release = await probe(client, max_model_len=self.max_model_len, tied=is_tied(weights.path))
        if self.settings.url is not None:
            # Whatever it did before, it is this engine's now.
            await _control(client, "/pause?mode=abort&clear_cache=true", VllmStatus)
            await self.load(client, await self.prepare(client, weights))
            await self.resume(client)
        else:
            self._tidy()
            await self._name(client, weights.tag)
        await asyncio.to_thread(lambda: self._text)
        # The first request is the slowest, and its answer shows whether units are stamped.
        trial = GenerateRequest("trial", [0], TRIAL)
        body = self.body("trial", [0], trial, 1, weights.tag)
        found = self.parse(await client.post(self.generate_path, body, Answer), TRIAL)
        if (found.versions.tolist(), found.epochs.tolist()) != ([weights.tag.version], [weights.tag.epoch]):
            raise EngineError(f"the server stamps other weights than {label(weights.tag, self._owner)}")
        return release

    def body(
        self, rid: str, prompt: list[int], request: GenerateRequest, room: int, tag: VersionTag
    ) -> dict[str, Any]:
        if 0 < request.sampling.temperature < LEAST_TEMPERATURE:
            raise RequestError(
                f"sampling.temperature is {request.sampling.temperature}; with vLLM it is 0 or at least "
                f"{LEAST_TEMPERATURE}"
            )
        return generate_body(
            rid,
            prompt,
            request.sampling,
            room,
            cache_salt=label(tag, self._owner),
            priority=request.priority,
        )

    def heard(self, tell: Tell) -> VllmStream:
        return VllmStream(tell)

    def parse(self, answer: Answer, sampling: Sampling) -> GenerateResult:
        def decode(ids: list[int]) -> str:
            text = self._text.decode([ids])[0]
            return trim(text, sampling.stop) if sampling.stop else text

        return parse(
            answer,
            self._owner,
            decode=decode,
            logprobs_of="raw" if sampling.temperature == 0 else "sampled",
        )

    async def abort(self, client: ServerClient, rid: str) -> None:
        await client.request("POST", "/abort_requests", {"request_ids": [ID_PREFIX + rid]})

    async def pause(self, client: ServerClient) -> None:
        # It returns once no step is under way: what comes out later is sampled after `resume`.
        await _control(client, "/pause?mode=keep&clear_cache=false", VllmStatus)

    async def resume(self, client: ServerClient) -> None:
        await _control(client, "/resume", VllmStatus)

    async def prepare(self, client: ServerClient | None, weights: Directory) -> Directory:
        if client is not None and not (await client.get("/is_paused", Paused)).is_paused:
            raise EngineError("the server is not paused any more: something else resumed it")
        if self.settings.device == "cpu" and is_tied(weights.path):
            return replace(weights, path=await asyncio.to_thread(untied, weights.path, self._scratch))
        return weights

    async def load(self, client: ServerClient, weights: Directory) -> None:
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.path)}}
        try:
            await _control(client, "/collective_rpc", Results, call, timeout_s=RELOAD_TIMEOUT_S)
        finally:
            self._tidy()
        if self.settings.update_mode == "recompute":
            reset = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
            if not (await _control(client, reset, Success)).success:
                raise EngineError("the server could not drop its cache")
        await self._name(client, weights.tag)

    async def read_load(self, client: ServerClient) -> ServerLoad:
        status, content = await client.request("GET", "/metrics")
        if status != 200:
            raise EngineError(f"{client.name} answered /metrics with {status}")
        return parse_load(content.decode())

    async def close(self) -> None:
        self._tidy()

    @cached_property
    def _text(self) -> Detokenizer:
        from transformers import AutoTokenizer  # takes seconds to import

        return Detokenizer(AutoTokenizer.from_pretrained(self.model))

    async def _name(self, client: ServerClient, tag: VersionTag) -> None:
        name = {"new_version": label(tag, self._owner)}
        if not (await _control(client, "/update_weight_version", Success, name)).success:
            raise EngineError("the server did not take the name of its weights")

    def _tidy(self) -> None:
        """What was made for a load is in the server's memory by now."""
        shutil.rmtree(self._scratch, ignore_errors=True)


async def _control(
    client: ServerClient,
    path: str,
    answer: type[T],
    body: object = None,
    *,
    timeout_s: float = CONTROL_TIMEOUT_S,
) -> T:
    """A POST that is no request for units: a refusal is the engine's failure, not a request's."""
    try:
        return await client.post(path, body, answer, timeout_s=timeout_s)
    except RequestError as error:
        raise EngineError(str(error)) from error


def parse_load(text: str) -> ServerLoad:
    """The load in a server's `/metrics`, summed over its engines; the KV's share (the server's name for it
    says per cent) is that of the fullest. What is not there is 0."""
    values: dict[str, list[float]] = {WAITING: [], KV_USED: [], GENERATED: []}
    for line in text.splitlines():
        name, _, rest = line.partition("{")
        if name in values:
            values[name].append(float(rest.rpartition(" ")[2]))
    return ServerLoad(
        waiting=int(sum(values[WAITING])),
        kv_used=max(values[KV_USED], default=0.0),
        decoded=int(sum(values[GENERATED])),
    )
