"""A chat tokenizer, an engine whose words a test writes, and a gateway around them."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import msgspec
import numpy as np
import openai

from areal_async.base.http_server import HttpServer
from areal_async.base.versions import VersionTag
from areal_async.config.rollout import GatewaySection
from areal_async.launch.one_host import make_host
from areal_async.models.answers import Detokenizer
from areal_async.rpc.secret import RunSecret
from areal_async.trajectory import EpisodeBuilder, Sampling
from rollout_service.engines.base import GenerateRequest, GenerateResult, trim
from rollout_service.gateway import Gateway
from rollout_service.gateway.access import GatewaySetup, ServedModel
from rollout_service.gateway.server import Front
from rollout_service.workflows import Context, PolicyEngine, Renderer
from tests.waiting import deadline_s

DEADLINE_S = deadline_s(120)
ROUTE = "/v1/chat/completions"
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

SPECIALS = ["<pad>", "<|im_start|>", "<|im_end|>"]
CHARACTERS = [chr(c) for c in range(32, 127)] + ["\n", "é"]
PAIRS = ((1, 2), (3, 4), (20, 22), (5, 5), (6, 1), (7, 7), (8, 2), (9, 9))
CALLS = [f'<tool_call>{{"name":"add","arguments":{{"a":{a},"b":{b}}}}}</tool_call>' for a, b in PAIRS]
"""Whole tool calls, each one token: a random model calls tools, and spelling one out gives other ids."""
VOCAB = [*SPECIALS, *CHARACTERS, *CALLS]
EOS = VOCAB.index("<|im_end|>")

TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text()
KEEPING = TEMPLATE.replace("CONTENT", "m.content")
FORGETFUL = TEMPLATE.replace("CONTENT", "(m.content if loop.last else m.content.split('</think>')[-1])")
"""Drops earlier thinking, as templates of reasoning models do."""
SHORTENING = TEMPLATE.replace("CONTENT", "m.content.split('</think>')[-1]")
"""Drops thinking even in the newest answer."""


def make_tokenizer(template: str = KEEPING) -> Any:
    # Imported where they are needed, so that a folder is collected without them.
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({t: i for i, t in enumerate(VOCAB)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
    )


def write_chat_model(folder: Path, *, hidden_size: int = 32) -> None:
    """A random model with the chat tokenizer, as a Hugging Face directory.

    No Qwen2: `AutoTokenizer` reads and writes text for that family by its own rules, whatever the file of the
    tokenizer says, and an engine's "é" would be another text than the gateway's."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(11)
    sizes = {"vocab_size": len(VOCAB), "hidden_size": hidden_size, "intermediate_size": 2 * hidden_size}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    how = {"initializer_range": 0.05, "tie_word_embeddings": False, "pad_token_id": 0, "eos_token_id": EOS}
    config = LlamaConfig(max_position_embeddings=16_384, **sizes, **how)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Ids as the model writes them: a tool call is one token."""
    ids: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, CALLS)) + ")", text):
        ids += (
            [VOCAB.index(part)] if part in CALLS else tokenizer(part, add_special_tokens=False)["input_ids"]
        )
    return ids


class Scripted:
    """An engine that says what it is told to, in order; `{END}` in a script is the end token. Each unit gets
    a log-prob and a version of its own, so that a mix-up shows."""

    def __init__(self, tokenizer: Any, script: Iterable[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.script = list(script)
        self.version = VersionTag("policy", 0, 0)
        self.log: list[tuple[GenerateRequest, GenerateResult]] = []
        self.begun: list[GenerateRequest] = []
        self.cancelled = 0
        self.gate: Callable[[GenerateRequest], Coroutine[Any, Any, None]] | None = None
        self.fail: Exception | None = None
        self._units = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        said = self.script.pop(0) if self.script else "fine{END}"
        self.begun.append(request)
        try:
            await (self.gate(request) if self.gate else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.fail is not None:
            raise self.fail
        return self.result(request, said)

    def result(self, request: GenerateRequest, said: str) -> GenerateResult:
        text, end, _ = said.partition("{END}")
        ids = encoded(self.tokenizer, text) + ([EOS] if end else [])
        limit = request.sampling.max_new_tokens
        ended = bool(end) or text.endswith("<pad>") or any(stop in text for stop in request.sampling.stop)
        reason = "stop" if ended and len(ids) <= limit else "length"
        ids = ids[:limit]
        n, text = len(ids), trim(Detokenizer(self.tokenizer, [EOS]).text(ids), request.sampling.stop)
        result = GenerateResult(
            np.asarray(ids, np.int32),
            -(np.arange(self._units, self._units + n) % 97 + 1).astype(np.float32) / 128,
            (np.arange(self._units, self._units + n) % 5).astype(np.int32),
            np.zeros(n, np.int32),
            reason,
            text,
        )
        self._units += n
        self.log.append((request, result))
        return result


def make_context(engine: Any, tokenizer: Any, gateway: Any, *, tokens: int = 128, **how: Any) -> Context:
    sample, attempt = how.setdefault("sample", 0), how.setdefault("attempt", 0)
    builder = how.pop("builder", None) or EpisodeBuilder("job", "t", "t#0", sample, attempt)
    lead = PolicyEngine(engine, Renderer(tokenizer), Sampling(max_new_tokens=tokens))
    engines = {builder.policies[0]: lead} | how.pop("others", {})
    return Context(engines, builder, episode_id=f"t#{attempt}.{sample}", seed=5, agents=gateway, **how)


def http_of(session: Any) -> httpx.AsyncClient:
    """A plain client that has the session's key."""
    headers = {"authorization": f"Bearer {session.api_key}"}
    return httpx.AsyncClient(base_url=session.origin, headers=headers, trust_env=False)


def openai_of(session: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=session.openai_base_url, api_key=session.api_key, max_retries=0)


class InLoop:
    """A gateway in the test's own loop, where a job has a process. `front` is its HTTP side."""

    def __init__(self, tokenizer: Any, setup: GatewaySetup) -> None:
        setup = msgspec.structs.replace(setup, listening_fd=os.dup(setup.listening_fd))
        self.front = Front(setup, dict.fromkeys(setup.models, tokenizer))
        self._task = asyncio.ensure_future(self.front.serve())

    async def wait(self) -> int:
        await asyncio.wait([self._task])
        return -9

    async def stop(self, grace_s: float = 0.0) -> int:
        self._task.cancel()
        return await self.wait()


class Started:
    """Gateways with this tokenizer, and those that were started of them."""

    def __init__(self, tokenizer: Any, **section: Any) -> None:
        self.tokenizer, self.section = tokenizer, section
        self.all: list[InLoop] = []

    def start(self, setup: GatewaySetup) -> InLoop:
        self.all.append(InLoop(self.tokenizer, setup))
        return self.all[-1]

    @property
    def server(self) -> HttpServer:
        return self.all[-1].front.server


@contextmanager
def made_gateway(tokenizer: Any, **how: Any) -> Iterator[Gateway]:
    """A gateway that starts in this loop; `how` is of its section and its own."""
    names = ("trains", "header_s", "max_model_len", "start", "model")
    own = {name: how.pop(name) for name in names if name in how}
    address, started = how.pop("address", "127.0.0.1"), Started(tokenizer)
    with TemporaryDirectory(prefix="areal-") as folder:
        place = Path(folder)
        host = make_host("local", run_dir=place, socket_dir=place, shm_dir=place, address=address)
        keys = RunSecret.generate().of("rollout")
        model = ServedModel(str(own.pop("model", Path())), own.pop("max_model_len", 4096))
        models = dict.fromkeys(how.pop("policies", ("policy",)), model)
        start = own.pop("start", started.start)
        section = GatewaySection(**how).model_dump(mode="json")
        gateway = Gateway(GatewaySetup("job", "w", host, keys, section, models, **own), start=start)
        gateway.started = started  # type: ignore[attr-defined]
        yield gateway


@asynccontextmanager
async def serving(engine: Any, tokenizer: Any, **how: Any) -> AsyncIterator[Any]:
    """A gateway, a context and an open session, within a deadline."""
    with made_gateway(tokenizer, **how) as gateway:
        ctx = make_context(engine, tokenizer, gateway)
        try:
            async with asyncio.timeout(DEADLINE_S), ctx.gateway() as session:
                yield gateway, ctx, session
        finally:
            await gateway.close()


def assert_recorded_is_what_the_engine_said(episode: Any, log: list[Any]) -> None:
    """Every call's path, log-probs and versions are the engine's, bit by bit, each exactly once."""
    left = [
        ([*map(int, q.prompt_ids)], *(c.tolist() for c in (r.token_ids, r.logprobs, r.versions)), q.sampling)
        for q, r in log
    ]
    units = episode.units
    for call in episode.header.calls:
        start, n = episode.segments.offset[call.segment], episode.segments.length[call.segment]
        own = (c[start : start + n].tolist() for c in (units.token_id, units.logprob, units.version))
        left.remove((episode.token_ids(call.segment)[:-n].tolist(), *own, call.sampling))
    assert not left
