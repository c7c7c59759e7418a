"""A tiny model, snapshots of any version of it on disk, and what `transformers` says about them; and a server
of each engine.

A start takes up to half a minute, so tests share servers: those of `sglang/` and `vllm/` the one of their own
folder, the others the one that `endless_server` gives, to which they attach. A server is used from one event
loop by the engine that started it; a test leaves no request in flight.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import secrets
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from agreement import Snapshots, job_for, write_sharp_model
from transformers import AutoModelForCausalLM

from areal_async.quickstart.model import write_model
from areal_async.rpc.schema import VersionTag
from areal_async.weights.snapshot import Snapshot, open_snapshot, write_snapshot
from rollout_service.engines import make_engine
from rollout_service.engines.base import Engine, EngineError, GenerateResult
from rollout_service.engines.http.keyed import VARIABLE

# Of every server of the tests, so that they can attach to each other's.
os.environ[VARIABLE] = secrets.token_hex(32)

T = TypeVar("T")
DEADLINE_S = 120.0
START_S = 330.0
"""Most for the start of a server, also on a machine that is busy."""
SLOTS, LENGTH = 16, 136
"""Of the servers of `endless_server`."""

torch.set_num_threads(1)


@dataclass(frozen=True)
class Model:
    """The quickstart's model (16 ids, 64 positions, eos 1), with weights unlike for each version."""

    directory: Path
    root: Path

    def snapshot(self, version: int, epoch: int = 0) -> Snapshot:
        """Written to disk and opened."""
        return self._snapshot(VersionTag("policy", epoch, version))

    @functools.cache  # noqa: B019 - a handful of tiny models, for as long as the tests run
    def _snapshot(self, tag: VersionTag) -> Snapshot:
        noise = torch.Generator().manual_seed(1000 * tag.epoch + tag.version)
        state = AutoModelForCausalLM.from_pretrained(self.directory).state_dict()
        tensors = {
            name: tensor + 0.1 * torch.randn(tensor.shape, generator=noise)
            for name, tensor in state.items()
            if name != "lm_head.weight"
        }
        written = write_snapshot(
            self.root,
            tag,
            tensors,
            files={path.name: path for path in self.directory.glob("*.json")},
            tied={"lm_head.weight": "model.embed_tokens.weight"},
        )
        return open_snapshot(written.path)

    @functools.cache  # noqa: B019
    def _reference(self, tag: VersionTag) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.snapshot(tag.version, tag.epoch).path).eval()

    def logits(self, tag: VersionTag, ids: Sequence[int]) -> np.ndarray:
        """`[T, V]` of a full forward pass with the weights of `tag`."""
        with torch.inference_mode():
            logits: np.ndarray = self._reference(tag)(input_ids=torch.tensor([list(ids)])).logits[0].numpy()
        return logits.astype(np.float64)

    def logprobs(self, prompt: Sequence[int], result: GenerateResult, temperature: float = 1.0) -> np.ndarray:
        """Log-probs of the answer's units, each by a full pass with the weights of its own version."""
        ids = [*prompt, *map(int, result.token_ids)]
        found = np.empty(len(result.token_ids))
        for epoch, version in sorted(set(zip(result.epochs.tolist(), result.versions.tolist(), strict=True))):
            rows = log_softmax(
                self.logits(VersionTag("policy", epoch, version), ids)[len(prompt) - 1 : -1] / temperature
            )
            mine = (result.epochs == epoch) & (result.versions == version)
            found[mine] = rows[np.arange(len(found)), result.token_ids][mine]
        return found


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    normalised: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normalised


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    root = tmp_path_factory.mktemp("model")
    write_model(root / "model", seed=0)
    # What a server would take from here for its defaults would make every answer greedy.
    path = root / "model" / "generation_config.json"
    settings = json.loads(path.read_text()) | {
        "do_sample": True,
        "temperature": 0.01,
        "top_k": 1,
        "top_p": 0.1,
    }
    path.write_text(json.dumps(settings))
    return Model(root / "model", root / "snapshots")


@pytest.fixture(scope="session")
def run() -> Iterator[Callable[..., Any]]:
    """Runs a coroutine in the loop that the engines belong to."""
    with asyncio.Runner() as runner:

        def run(work: Coroutine[Any, Any, T], deadline_s: float = DEADLINE_S) -> T:
            async def bounded() -> T:
                return await asyncio.wait_for(work, deadline_s)

            return runner.run(bounded())

        yield run


async def update(engine: Engine, snapshot: Snapshot) -> None:
    """One exchange of weights."""
    await engine.pause()
    try:
        await engine.load(snapshot)
    finally:
        await engine.resume()


@pytest.fixture(scope="session")
def exchange() -> Callable[[Engine, Snapshot], Coroutine[Any, Any, None]]:
    return update


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without an end of sequence: answers are as long as was asked for."""
    return write_sharp_model(tmp_path_factory.mktemp("endless"), endless=True)


@pytest.fixture(scope="session")
def endless_server(
    endless: Path, run: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], str | None]]:
    """`endless_server(engine)` is the url of a server on the model `endless`, started when it is first asked
    for, and again where a test has killed it. None for the engine `local`, which needs none."""
    started: dict[str, Any] = {}

    def url_of(name: str) -> str | None:
        if name == "local":
            return None
        if name not in started or not started[name].alive():
            if name in started:
                run(started[name].stop())
            job = job_for(name, endless, max_model_len=LENGTH)
            try:
                engine: Any = make_engine(job, slots=SLOTS, activity="shared")
            except EngineError as error:  # no environment
                pytest.skip(str(error))
            first = Snapshots(endless, tmp_path_factory.mktemp(name)).write(VersionTag("policy", 0, 0))
            run(engine.start(first), START_S)
            started[name] = engine
        url: str = started[name].url
        return url

    yield url_of
    for engine in started.values():
        run(engine.stop())
