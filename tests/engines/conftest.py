"""One server of each engine, and the recorded answers of one.

A start takes up to half a minute, so all tests of an engine share one server, and one worker of xdist runs
them. Tests that need a model of their own start another, tests that kill the shared server come last. A
server is used from one event loop by the engine that started it; a test leaves no request in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from agreement import write_sharp_model
from xdist.scheduler import LoadScopeScheduling

from rollout_service.engines.http.client import ServerClient
from rollout_service.engines.http.engine import HttpEngine
from rollout_service.replicas import exchange
from tests.engines.record import FIX, Proxy, Recording, Replay, listening, pins_of, recorded
from tests.engines.servers import KEY, KINDS, SGLANG, START_S, VLLM, Kind, Model
from tests.waiting import deadline_s

T = TypeVar("T")
DEADLINE_S = deadline_s(600)
RECORDS = "AREAL_ASYNC_RECORD" in os.environ
"""Whether the answers of the servers are recorded (`make record-engines`)."""

torch.set_num_threads(1)


def group_of(nodeid: str) -> str:
    """The engine whose server a test uses; jobs on both engines go to the worker of SGLang."""
    return "vllm" if "vllm" in nodeid else "sglang"


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """One worker runs all tests of an engine. (xdist's own `loadgroup` knows no groups under this pytest.)"""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def on_servers(config: pytest.Config) -> bool:
    """Whether the tests on real servers are run."""
    return str(config.getoption("markexpr")).startswith("engine")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    return GroupScheduling(config, log) if on_servers(config) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that kill the shared servers (in files `test_zz_…`) come last."""
    if on_servers(config):
        items.sort(key=lambda item: item.path.name.startswith("test_zz"))


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


class Served:
    """The server of one engine, real or recorded, for one test."""

    def __init__(
        self, kind: Kind, model: Model, root: Path, url: str, owner: HttpEngine | None = None
    ) -> None:
        self.kind = kind
        self.model = model
        self.url = url
        self.owner = owner
        """The engine that started the server; None for a recorded one."""
        self.prompt = list(kind.prompt)
        self._root = root

    @contextlib.asynccontextmanager
    async def engine(self, update_mode: Any = "recompute") -> AsyncIterator[HttpEngine]:
        """An engine that serves version 0, attached to the server."""
        engine = self.kind.make(self.model, self._root, url=self.url, update_mode=update_mode)
        await engine.start(self.model.snapshot(0, self.kind.epoch))
        try:
            yield engine
        finally:
            await engine.stop()


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], Model]:
    """`model_of(kind)` is the model of the server of that kind."""
    found: dict[str, Model] = {}

    def model_of(kind: Kind) -> Model:
        if kind.name not in found:
            found[kind.name] = kind.write(tmp_path_factory.mktemp(kind.name))
        return found[kind.name]

    return model_of


@pytest.fixture(scope="session")
def own_server(
    model_of: Callable[[Kind], Model], run: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Kind], HttpEngine]]:
    """`own_server(kind)` is the engine (`recompute`) that owns the real server of that kind. It is started
    when it is first asked for, and again where a test has killed it."""
    started: dict[str, HttpEngine] = {}

    def own_server(kind: Kind) -> HttpEngine:
        model = model_of(kind)
        engine = started.get(kind.name)
        if engine is None or not engine.alive():
            if engine is not None:
                run(engine.stop())
            engine = started[kind.name] = kind.make(model, tmp_path_factory.mktemp("logs"))
            run(engine.start(model.snapshot(0, kind.epoch)), START_S + 30)
        return engine

    yield own_server
    for engine in started.values():
        run(engine.stop())


@pytest.fixture(scope="session")
def recording(
    own_server: Callable[[Kind], HttpEngine], run: Callable[..., Any]
) -> Iterator[dict[str, Recording]]:
    """The recordings that are being made, by engine. They are written once all tests are over."""
    made: dict[str, Recording] = {}
    yield made
    for each in made.values():
        each.write()


async def release_of(kind: Kind, url: str) -> str:
    client = ServerClient(kind.name, url, key=KEY)
    try:
        found = await client.get("/version" if kind is VLLM else "/server_info", dict)
    finally:
        await client.close()
    return str(found["version"])


RECORDED = [pytest.param((name, False), id=f"{name}-recorded") for name in KINDS]
REAL = [pytest.param((name, True), id=name, marks=pytest.mark.engine) for name in KINDS]


@pytest.fixture(params=REAL if RECORDS else [*RECORDED, *REAL])
def served(
    request: pytest.FixtureRequest, model_of: Callable[[Kind], Model], run: Callable[..., Any], tmp_path: Path
) -> Iterator[Served]:
    """The server of each engine: a recorded one, which knows the requests of this very test alone, or with
    the mark `engine` the real one."""
    name, real = request.param
    kind, test = KINDS[name], request.node.name.replace(f"{name}-recorded", name)
    model = model_of(kind)
    with asyncio_stack(run) as stack:
        if not real:
            exchanges = recorded(name).tests.get(test)
            assert exchanges is not None, f"{test} is not recorded: {FIX}"
            replay = Replay(exchanges, recorded(name).polled)
            yield Served(kind, model, tmp_path, run(stack.enter_async_context(listening(replay))))
            assert not replay.unknown, (
                f"requests that are not recorded ({FIX}, if they are right): {replay.unknown}"
            )
            assert not replay.unused, f"requests that are recorded and did not come ({FIX}): {replay.unused}"
            return
        owner = request.getfixturevalue("own_server")(kind)
        if not RECORDS:
            yield Served(kind, model, tmp_path, owner.url, owner)
            return
        made = request.getfixturevalue("recording")
        proxy = Proxy(owner.url)
        yield Served(kind, model, tmp_path, run(stack.enter_async_context(listening(proxy))), owner)
        if name not in made:
            made[name] = Recording(name, run(release_of(kind, owner.url)), pins_of(name), {})
        made[name].tests[test] = proxy.recorded()


@contextlib.contextmanager
def asyncio_stack(run: Callable[..., Any]) -> Iterator[AsyncExitStack]:
    """A stack of contexts that are left in the loop that the engines belong to."""
    stack = AsyncExitStack()
    try:
        yield stack
    finally:
        run(stack.aclose())


@pytest.fixture(params=[pytest.param("sglang", id="sglang"), pytest.param("vllm", id="vllm")])
def owned(
    request: pytest.FixtureRequest,
    own_server: Callable[[Kind], HttpEngine],
    model_of: Callable[[Kind], Model],
    run: Callable[..., Any],
) -> tuple[Kind, HttpEngine]:
    """The engine that owns the real server of each kind. The server has its weights, whatever engines of
    earlier tests have loaded."""
    kind = KINDS[request.param]
    engine = own_server(kind)
    served = model_of(kind).snapshot(engine.version.version, engine.version.epoch)
    run(exchange(engine, served))
    return kind, engine


@pytest.fixture
def model(model_of: Callable[[Kind], Model]) -> Model:
    """The model of SGLang's server."""
    return model_of(SGLANG)
