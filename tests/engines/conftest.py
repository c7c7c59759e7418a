"""A tiny model, snapshots of any version of it on disk, and what `transformers` says about them; and a server
of each engine.

A start takes up to half a minute, so tests share servers: those of `sglang/` and `vllm/` the one of their
own folder, the others the one that `endless_server` gives, to which they attach. Tests that share one are
one group, which one worker of xdist runs. A server is used from one event loop by the engine that started
it; a test leaves no request in flight.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import secrets
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
import torch
from agreement import Snapshots, job_for, write_sharp_model
from transformers import AutoModelForCausalLM
from xdist.scheduler import LoadScopeScheduling

from areal_async.quickstart.model import write_model
from areal_async.rpc.schema import VersionTag
from areal_async.trajectory import Sampling
from areal_async.weights.snapshot import Snapshot, open_snapshot, write_snapshot
from rollout_service.engines import make_engine
from rollout_service.engines.base import GenerateRequest, GenerateResult
from rollout_service.engines.http.keyed import VARIABLE

# Of every server of the tests, so that they can attach to each other's.
os.environ[VARIABLE] = secrets.token_hex(32)

T = TypeVar("T")
DEADLINE_S = 600.0
START_S = 900.0
"""Most for the start of a server, also on a machine that is busy."""
SLOTS, LENGTH = 16, 1032
"""Of the servers of `endless_server`."""

torch.set_num_threads(1)

GROUPS = ("test_jobs", "engines", "vllm", "sglang", "test_judge", "test_zz_nccl_job")
"""Folders and files whose tests share servers, the longest first: no worker is left with it at the end."""


def group_of(path: str) -> str:
    folder, file = Path(path).with_suffix("").parts[-2:]
    return file if file in GROUPS else folder


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """One worker has all tests of a group. (xdist's own `loadgroup` knows no groups under this pytest.)"""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    return GroupScheduling(config, log) if config.getoption("markexpr") == "engine" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("markexpr") == "engine":
        items.sort(key=lambda item: GROUPS.index(group_of(str(item.path))))


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
    """Tasks of so many requests `<name>0`, `<name>1` …"""
    requests = [GenerateRequest(f"{name}{n}", list(prompt), sampling) for n in range(count)]
    return [asyncio.create_task(engine.generate(request)) for request in requests]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    root = tmp_path_factory.mktemp("model")
    write_model(root / "model", seed=0, positions=512)
    # What a server would take from here for its defaults would make every answer greedy.
    path = root / "model" / "generation_config.json"
    misleading = {"do_sample": True, "temperature": 0.01, "top_k": 1, "top_p": 0.1}
    path.write_text(json.dumps(json.loads(path.read_text()) | misleading))
    return Model(root / "model", root / "snapshots")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in the loop that the engines belong to."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    run = pyfuncitem.funcargs["run"]
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}), None)  # bounded by its mark
    return True


@pytest.fixture(scope="session", autouse=True)
def run() -> Iterator[Callable[..., Any]]:
    """Runs a coroutine in the loop that the engines belong to."""
    with asyncio.Runner() as runner:

        def run(work: Coroutine[Any, Any, T], deadline_s: float | None = DEADLINE_S) -> T:
            async def bounded() -> T:
                return await asyncio.wait_for(work, deadline_s)

            return runner.run(bounded())

        yield run


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
            engine: Any = make_engine(job, slots=SLOTS, activity="shared")
            first = Snapshots(endless, tmp_path_factory.mktemp(name)).write(VersionTag("policy", 0, 0))
            run(engine.start(first), START_S)
            started[name] = engine
        url: str = started[name].url
        return url

    yield url_of
    for engine in started.values():
        run(engine.stop())


@pytest.fixture(params=["sglang", "vllm"])
def server_of(request: pytest.FixtureRequest, endless_server: Callable[[str], str]) -> tuple[str, str]:
    """The name of an engine and the url of its server, which is on the model `endless`."""
    return request.param, endless_server(request.param)
