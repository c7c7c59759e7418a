"""A real vLLM server for the tests of the engine, on one small model."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from areal_async.config.engines import find_engine_python
from areal_async.quickstart.model import make_tokenizer
from areal_async.rpc.schema import VersionTag
from areal_async.trajectory import Sampling
from rollout_service.engines.base import GenerateRequest, GenerateResult
from rollout_service.engines.http.adapter import ServerSettings
from rollout_service.engines.http.client import ServerClient
from rollout_service.engines.http.engine import HttpEngine
from rollout_service.engines.http.keyed import VARIABLE
from rollout_service.engines.vllm.adapter import VllmAdapter
from rollout_service.replicas import exchange
from tests.engines.conftest import Model, logprobs_under

MAX_MODEL_LEN = 4096
PROMPT = (3, 13, 4)
MISLEADING = {"temperature": 0.2, "top_k": 2, "repetition_penalty": 1.8, "eos_token_id": 1}
"""Defaults in the model's generation_config.json, of which none may take part."""


def write_model(root: Path) -> Model:
    """The output layer is tied to the embedding."""
    torch.manual_seed(11)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=16,
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_MODEL_LEN,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
            initializer_range=0.2,
        )
    ).eval()
    with torch.no_grad():
        # What the other ids have in common, and so the hidden states too, makes the end of an answer rare.
        embedding = model.model.embed_tokens.weight
        common = 0.15 * torch.randn(embedding.shape[1])
        embedding += common
        embedding[1] -= common
    directory = root / "model"
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps(MISLEADING))
    return Model(directory, root / "published", noise=0.05, grows=True)


class Served:
    """An engine on a server of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = write_model(root)
        self.engine = self.make_engine(python=find_engine_python("vllm"))
        self._numbers = itertools.count()

    def make_engine(self, **arguments: Any) -> HttpEngine:
        defaults = {
            "slots": 64,
            "max_model_len": 2 * MAX_MODEL_LEN,
            "log_path": self.root / "server.log",
            "arguments": {"block-size": 32},
        }
        scratch = arguments.pop("scratch", self.root / "scratch")
        settings = ServerSettings(**(defaults | arguments))
        return HttpEngine(VllmAdapter(self.model.directory, settings, scratch=scratch))

    def request(self, prompt: Sequence[int] = PROMPT, **given: Any) -> GenerateRequest:
        """A request with an id of its own; sampling parameters and the request's fields mixed by name."""
        fields = {name: given.pop(name) for name in ("priority",) if name in given}
        sampling = Sampling(**({"max_new_tokens": 32, "seed": 0} | given))
        return GenerateRequest(f"request-{next(self._numbers)}", list(prompt), sampling, **fields)

    def endless(self) -> GenerateRequest:
        """A request that is under way for seconds, whatever a test has to wait for meanwhile: the likeliest
        next id never is the end (`test_an_answer_ends_at_the_model_s_last_position`)."""
        return self.request(temperature=0.0, max_new_tokens=MAX_MODEL_LEN)

    def tasks(
        self, n: int, engine: HttpEngine | None = None, **given: Any
    ) -> list[asyncio.Task[GenerateResult]]:
        """Of `n` requests, with the seeds 0 to n - 1."""
        requests = [self.request(**{"seed": seed} | given) for seed in range(n)]
        return [asyncio.create_task((engine or self.engine).generate(request)) for request in requests]

    async def many(self, n: int, **given: Any) -> list[GenerateResult]:
        return await asyncio.gather(*self.tasks(n, **given))

    @asynccontextmanager
    async def client(self) -> AsyncIterator[ServerClient]:
        client = ServerClient("vLLM", self.engine.url, key=os.environ[VARIABLE])
        try:
            yield client
        finally:
            await client.close()

    async def gauge(self, name: str) -> float:
        """A number of the server's `/metrics`, summed over its labels."""
        async with self.client() as client:
            _, content = await client.request("GET", "/metrics")
        lines = [line for line in content.decode().splitlines() if line.startswith(f"vllm:{name}{{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def running(self, n: int) -> None:
        """Until `n` requests are in the server's batch."""
        await self._until(lambda found: found == n, "num_requests_running")

    async def sampled(self) -> float:
        """Units that the server has sampled in all."""
        return await self.gauge("generation_tokens_total")

    async def progress(self, n_units: int, *, since: float) -> None:
        """Until the server has sampled so many units more than `since`, which is read before they are asked
        for: short answers may be finished when it is read later."""
        await self._until(lambda found: found >= since + n_units, "generation_tokens_total")

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def _until(self, holds: Callable[[float], bool], name: str) -> None:
        while not holds(await self.gauge(name)):  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    async def update(self, version: int, engine: HttpEngine | None = None) -> None:
        await exchange(engine or self.engine, self.model.snapshot(version, epoch=1))

    def text(self, ids: Sequence[int]) -> str:
        return str(make_tokenizer().decode(list(ids), skip_special_tokens=True))


@torch.no_grad()
def kept_logits(model: Model, prompt: Sequence[int], result: GenerateResult) -> torch.Tensor:
    """As `Model.logits`, of an answer whose KV survived its updates: what was fed stays as it was made."""
    ids = result.token_ids.tolist()
    cuts = [0, *(np.flatnonzero(np.diff(result.versions)) + 1).tolist(), len(ids)]
    past, rows = None, []
    for start, stop in itertools.pairwise(cuts):
        fed = [*prompt, *ids[: stop - 1]] if start == 0 else ids[start - 1 : stop - 1]
        network = model.network(tag(int(result.versions[start])))
        out = network(torch.tensor([fed]), past_key_values=past, use_cache=True)
        past = out.past_key_values
        rows.append(out.logits[0, -(stop - start) :].double())
    return torch.cat(rows)


def tag(version: int) -> VersionTag:
    return VersionTag("policy", 1, version)


def worst(result: GenerateResult, expected: torch.Tensor, units: Any = slice(None)) -> float:
    """Largest distance in nats between the engine's log-probs and those under logits `[n, vocabulary]`, over
    all units or those of a mask `[n]`."""
    return float(np.abs(logprobs_under(expected, result) - result.logprobs)[units].max(initial=0.0))
