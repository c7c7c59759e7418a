"""Models for the servers of the tests, weights unlike for each version of them, and what `transformers` says
about the answers."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from areal_async.base.versions import VersionTag
from areal_async.cli.quickstart.model import make_tokenizer
from areal_async.cli.quickstart.model import write_model as write_quickstart_model
from areal_async.config.engines import find_engine_python
from areal_async.trajectory import Sampling
from areal_async.weights.snapshot import Snapshot, open_snapshot
from rollout_service.engines.base import GenerateRequest, GenerateResult
from rollout_service.engines.http.adapter import ServerSettings
from rollout_service.engines.http.engine import HttpEngine
from rollout_service.engines.http.keyed import VARIABLE
from rollout_service.engines.sglang.adapter import SGLangAdapter
from rollout_service.engines.vllm.adapter import VllmAdapter
from tests.snapshots import write_snapshot
from tests.waiting import deadline_s

KEY = os.environ.setdefault(VARIABLE, secrets.token_hex(32))
"""Key of every server of the tests, so that they can attach to each other's."""
START_S = deadline_s(900)
"""Limit for the start of a server, also on a busy machine."""
TEXT = "0123456789+-="
"""Texts of the ids from 3 on, in both models."""


@dataclass(frozen=True)
class Model:
    """A model directory, and weights unlike for each version of it."""

    directory: Path
    root: Path
    noise: float = 0.1
    grows: bool = False
    """Whether version 0 is the model itself, and each later one further from it."""

    def snapshot(self, version: int, epoch: int = 0) -> Snapshot:
        """Written to disk and opened."""
        return self._snapshot(VersionTag("policy", epoch, version))

    @functools.cache  # noqa: B019 - a handful of tiny models, for as long as the tests run
    def _snapshot(self, tag: VersionTag) -> Snapshot:
        noise = torch.Generator().manual_seed(1000 * tag.epoch + tag.version)
        state = AutoModelForCausalLM.from_pretrained(self.directory).state_dict()
        scale = self.noise * (tag.version if self.grows else 1)
        tensors = {
            name: tensor + scale * torch.randn(tensor.shape, generator=noise)
            for name, tensor in state.items()
            if name != "lm_head.weight"
        }
        files = {path.name: path for path in self.directory.glob("*.json")}
        tied = {"lm_head.weight": "model.embed_tokens.weight"}
        return open_snapshot(write_snapshot(self.root, tag, tensors, files=files, tied=tied).path)

    @functools.cache  # noqa: B019
    def network(self, tag: VersionTag) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.snapshot(tag.version, tag.epoch).path).eval()

    @torch.no_grad()
    def logits(self, tag: VersionTag, prompt: Sequence[int], result: GenerateResult) -> torch.Tensor:
        """f64 `[n, V]`: what each unit of an answer is drawn from under a version, at temperature 1."""
        ids = torch.tensor([[*prompt, *map(int, result.token_ids)]])
        return self.network(tag)(input_ids=ids).logits[0].double()[len(prompt) - 1 : -1]

    def logprobs(self, prompt: Sequence[int], result: GenerateResult, temperature: float = 1.0) -> np.ndarray:
        """Log-probs of the answer's units, each by a full pass with the weights of its own version."""
        found = np.empty(len(result.token_ids))
        for epoch, version in set(zip(result.epochs.tolist(), result.versions.tolist(), strict=True)):
            logits = self.logits(VersionTag("policy", epoch, version), prompt, result) / temperature
            mine = (result.epochs == epoch) & (result.versions == version)
            found[mine] = logprobs_under(logits, result)[mine]
        return found

    def assert_true(self, prompt: Sequence[int], result: GenerateResult, temperature: float = 1.0) -> None:
        np.testing.assert_allclose(result.logprobs, self.logprobs(prompt, result, temperature), atol=1e-4)


def logprobs_under(logits: torch.Tensor, result: GenerateResult) -> np.ndarray:
    """f64 [n] of the answer's ids, under logits `[n, V]`."""
    rows = logits.log_softmax(-1).numpy()
    found: np.ndarray = rows[np.arange(len(rows)), result.token_ids]
    return found


@dataclass(frozen=True)
class Offer:
    """A snapshot's directory, whatever is in it. Nothing else of a snapshot may be needed."""

    path: Path
    tag: VersionTag

    @property
    def tensors(self) -> dict[str, Any]:
        raise AssertionError("the tensors would be read while the engine is paused")


def write_short_model(root: Path) -> Model:
    """The quickstart's model, of 512 positions."""
    write_quickstart_model(root / "model", seed=0, positions=512)
    # What a server would take from here for its defaults would make every answer greedy.
    path = root / "model" / "generation_config.json"
    misleading = {"do_sample": True, "temperature": 0.01, "top_k": 1, "top_p": 0.1}
    path.write_text(json.dumps(json.loads(path.read_text()) | misleading))
    return Model(root / "model", root / "snapshots")


def write_long_model(root: Path) -> Model:
    """A model of 4096 positions, whose output layer is tied to the embedding."""
    torch.manual_seed(11)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=16,
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
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
    # Defaults of which none may take part.
    misleading = {"temperature": 0.2, "top_k": 2, "repetition_penalty": 1.8, "eos_token_id": 1}
    (directory / "generation_config.json").write_text(json.dumps(misleading))
    return Model(directory, root / "published", noise=0.05, grows=True)


@dataclass(frozen=True)
class Kind:
    """An engine, and what its server of the tests is started with."""

    name: str
    write: Callable[[Path], Model]
    length: int
    """Positions of the model."""
    slots: int
    prompt: tuple[int, ...]
    epoch: int
    most: int
    """`max_model_len` asked for."""
    block: int
    """Tokens of a block of the prefix cache."""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def make(self, model: Model, root: Path, **settings: Any) -> HttpEngine:
        """An engine on a server that runs at the `url` of the settings, else on one of its own."""
        given: dict[str, Any] = {"slots": self.slots, "max_model_len": self.most} | settings
        if "url" not in given:
            given |= {
                "python": find_engine_python(self.name),
                "arguments": self.arguments,
                "ready_s": START_S,
            }
        found = ServerSettings(log_path=root / f"{self.name}.log", **given)
        if self.name == "sglang":
            return HttpEngine(SGLangAdapter(model.directory, found))
        scratch = root / secrets.token_hex(4) / "scratch"
        return HttpEngine(VllmAdapter(model.directory, found, scratch=scratch))


SGLANG = Kind("sglang", write_short_model, 512, 32, (5, 14, 7, 9), 0, 512, 1)
VLLM = Kind("vllm", write_long_model, 4096, 64, (3, 13, 4), 1, 8192, 32, {"block-size": 32})
KINDS = {"sglang": SGLANG, "vllm": VLLM}


def processes(url: str) -> list[psutil.Process]:
    """The server at `url` and all its children."""
    port = int(url.rpartition(":")[2])
    owner = next(
        psutil.Process(connection.pid)
        for connection in psutil.net_connections("tcp")
        if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN
    )
    return [owner, *owner.children(recursive=True)]


def ask(engine: Any, count: int, prompt: Sequence[int], sampling: Sampling, name: str = "r") -> list[Any]:
    """Tasks of so many requests `<name>0`, `<name>1` …, with the seeds 0, 1 …"""
    requests = [GenerateRequest(f"{name}{n}", list(prompt), replace(sampling, seed=n)) for n in range(count)]
    return [asyncio.create_task(engine.generate(request)) for request in requests]
