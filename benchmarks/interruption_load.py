"""The load of `interruption.py`: requests of given lengths, and the model and snapshots that they run on."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from areal_async.base.versions import VersionTag
from areal_async.cli.quickstart.model import write_model
from areal_async.trajectory import Sampling
from areal_async.weights.snapshot import open_snapshot
from rollout_service.engines.base import Engine, GenerateRequest, Weights
from tests.snapshots import write_snapshot

PROMPT_TOKENS = 16
FIRST_ID, LAST_ID = 3, 14


class Load:
    """A closed loop of requests: as one ends its lane sends the next."""

    def __init__(self, engine: Engine, lengths: Sequence[int], lanes: int) -> None:
        self._engine = engine
        self._lengths = lengths
        self._lanes = lanes
        self._number = 0
        self._began: dict[int, float] = {}
        self._ended: list[tuple[float, float, int]] = []
        """Begin, end and tokens of each request."""
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self.broken: list[str] = []
        """Requests that were lost or are not as long as was asked for."""

    async def run(self) -> None:
        await asyncio.gather(*(self._lane() for _ in range(self._lanes)))

    async def drain(self) -> None:
        """Begin nothing more, and return when nothing runs."""
        self._open.clear()
        while self._began:
            self._idle.clear()
            await self._idle.wait()

    def go_on(self) -> None:
        self._open.set()

    def tokens_between(self, begin_s: float, end_s: float) -> tuple[float, int]:
        """Tokens, and requests that ended. To be asked when what ran at `end_s` has ended."""
        tokens, requests = 0.0, 0
        for began_s, ended_s, n in self._ended:
            inside = min(end_s, ended_s) - max(begin_s, began_s)
            if inside > 0:
                tokens += n * inside / (ended_s - began_s)
                requests += begin_s <= ended_s < end_s
        return tokens, requests

    async def _lane(self) -> None:
        while True:
            await self._open.wait()
            number, self._number = self._number, self._number + 1
            n = self._lengths[number % len(self._lengths)]
            rng = np.random.default_rng(number)
            prompt = rng.integers(FIRST_ID, LAST_ID, PROMPT_TOKENS).astype(np.int32)
            self._began[number] = began_s = time.monotonic()
            try:
                sampling = Sampling(temperature=1.0, max_new_tokens=n, seed=number)
                result = await self._engine.generate(GenerateRequest(f"r{number}", prompt, sampling))
            except Exception as error:
                self.broken.append(f"r{number}: {type(error).__name__}: {error}")
                raise
            finally:
                del self._began[number]
                if not self._began:
                    self._idle.set()
            if len(result.token_ids) != n:
                self.broken.append(f"r{number}: {len(result.token_ids)} of {n} tokens")
            self._ended.append((began_s, time.monotonic(), len(result.token_ids)))


def draw_lengths(options: argparse.Namespace) -> list[int]:
    rng = np.random.default_rng(options.seed)
    drawn = options.median * np.exp(options.sigma * rng.standard_normal(4096))
    return [int(n) for n in np.clip(np.rint(drawn), 1, options.longest)]


def prepare(folder: Path, options: argparse.Namespace) -> tuple[Path, list[Weights]]:
    """A model without an end-of-sequence token, and two snapshots of it."""
    model = folder / "model"
    if options.model is None:
        write_model(model, seed=options.seed)
    else:
        for source in options.model.iterdir():
            if source.is_file():
                (model / source.name).parent.mkdir(exist_ok=True)
                (model / source.name).write_bytes(source.read_bytes())
    longest = PROMPT_TOKENS + options.longest
    for name in ("config.json", "generation_config.json"):
        if (model / name).exists():
            content = json.loads((model / name).read_text())
            content["eos_token_id"] = None
            if name == "config.json":
                content["max_position_embeddings"] = max(longest, content["max_position_embeddings"])
            (model / name).write_text(json.dumps(content))
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    tokenizer["eos_token"] = None
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    tensors = AutoModelForCausalLM.from_pretrained(model).state_dict()
    files = {path.name: path for path in model.iterdir() if path.suffix == ".json"}
    snapshots: list[Weights] = []
    noise = torch.Generator().manual_seed(options.seed)
    root = folder / "snapshots"
    root.mkdir()
    for version in range(2):
        changed: dict[int, torch.Tensor] = {}  # names that share a tensor go on sharing one
        for tensor in tensors.values():
            if tensor.data_ptr() not in changed:
                change = 1e-4 * version * torch.randn(tensor.shape, generator=noise)
                changed[tensor.data_ptr()] = tensor + change.to(tensor.dtype)
        named = {name: changed[tensor.data_ptr()] for name, tensor in tensors.items()}
        written = write_snapshot(root, VersionTag("policy", 0, version), named, files=files)
        snapshots.append(open_snapshot(written.path, manifest_hash=written.manifest_hash))
    return model, snapshots
