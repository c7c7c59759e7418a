"""The engine's half of channel `nccl`: what it tells a server and a trainer, both scripted."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_async.base.errors import RpcTimeout
from areal_async.base.versions import VersionTag
from areal_async.rpc.schema import Ok
from areal_async.rpc.weights_messages import (
    AskBuild,
    AskTensors,
    BreakGroup,
    NoNews,
    SendsNothing,
    SendsTensors,
    TakeBucket,
    TensorBucket,
    TorchBuild,
)
from rollout_service.engines.base import EngineError, EngineLost
from rollout_service.engines.http.adapter import Directory
from rollout_service.engines.sglang.messages import ModelInfo
from rollout_service.engines.sglang.weights import TensorReceiver, build_of, check_builds

BUCKETS = [
    TensorBucket(["a", "b"], ["float32", "bfloat16"], [[2, 3], [4]]),
    TensorBucket(["c"], ["float32"], [[5]]),
]


def sends(group: str = "g0") -> SendsTensors:
    """Of four members, after one of two ranks."""
    return SendsTensors(group, 3, 8, "127.0.0.1", 1234, "gloo", BUCKETS, 1000)


class ScriptedTrainer:
    def __init__(self, *answers: Any) -> None:
        self._answers = iter(answers)
        self.asked: list[AskTensors] = []
        self.steps: list[int] = []
        self.broken: list[str] = []
        self.breaks_at: int | None = None
        """The step that it does not allow."""
        self.late = 0
        """Times that it says that the others are not there yet."""
        self.build: TorchBuild | None = None
        """Its torch; it does not answer while there is none."""

    async def connect(self, timeout_s: float = 0.0) -> object:
        return None

    async def call(self, message: Any, *, timeout_s: float) -> Any:
        if isinstance(message, AskBuild):
            if self.build is None:
                raise RpcTimeout("nobody answers")
            return self.build
        if isinstance(message, BreakGroup):
            self.broken.append(message.group)
            return Ok()
        if isinstance(message, TakeBucket):
            if self.late:
                self.late -= 1
                return NoNews()
            self.steps.append(message.number)
            return SendsNothing("another one died") if message.number == self.breaks_at else Ok()
        self.asked.append(message)
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None: ...


class ScriptedServer:
    """Answers all requests with success, but what `refuses` or `loses` names."""

    name = "the server"

    def __init__(self, **sizes: int) -> None:
        self.journal: list[str] = []
        self.bodies: list[tuple[str, Any]] = []
        self.nameless = False
        """Whether it does not take the name of the version that comes with tensors."""
        self.refuses: set[str] = set()
        self.loses: set[str] = set()
        self.version = "policy-e0-v0"
        self.sizes = sizes

    async def request(
        self, method: str, path: str, body: Any = None, *, timeout_s: float | None = 0
    ) -> tuple[int, bytes]:
        assert timeout_s is not None
        path = path.removeprefix("/")
        self.journal.append(path)
        self.bodies.append((path, body))
        if path in self.loses:
            raise EngineLost("no answer")
        if path in self.refuses:
            return 400, b'{"success": false, "message": "no"}'
        if not (self.nameless and path == ALL[1]):
            self.version = (body or {}).get("weight_version") or self.version
        return 200, b'{"success": true, "message": "yes"}'

    async def get(self, path: str, answer: Any) -> Any:
        if answer is ModelInfo:
            return ModelInfo(self.version)
        return answer(**self.sizes)

    def take(self) -> list[str]:
        journal, self.journal = self.journal, []
        return journal


def load(receiver: TensorReceiver, server: Any, version: int, flush: bool = True) -> None:
    offered = Directory(VersionTag("policy", 0, version), Path("somewhere"))
    asyncio.run(receiver.load(server, offered, flush=flush, timeout_s=9))


ALL = ["begin_weight_update", *["update_weights_from_distributed"] * 2, "end_weight_update"]
JOINS = "init_weights_update_group"
LEAVES = "destroy_weights_update_group"
LOADS = "update_weights_from_disk"


def test_versions_are_true_the_version_comes_with_the_last_bucket() -> None:
    server = ScriptedServer()
    load(TensorReceiver(ScriptedTrainer(sends()), "r/0"), server, 1)
    buckets = [body for path, body in server.bodies if path == ALL[1]]
    assert [body["weight_version"] for body in buckets] == [None, "policy-e0-v1"]
    assert [body["flush_cache"] for body in buckets] == [False, True]
    assert {body["load_format"] for body in buckets} == {"flattened_bucket"}
    assert [body["names"] for body in buckets] == [["a", "b"], ["c"]]
    json.dumps(server.bodies)


def test_a_group_is_formed_once_and_used_again() -> None:
    server = ScriptedServer(tp_size=4)
    trainer = ScriptedTrainer(sends(), sends(), sends("g1"))
    receiver = TensorReceiver(trainer, "r/0")
    asyncio.run(receiver.opened(server, None))  # type: ignore[arg-type]
    server.take()
    load(receiver, server, 1)
    assert server.take() == [JOINS, *ALL]
    assert [dict(server.bodies)[JOINS][name] for name in ("rank_offset", "world_size")] == [3, 8]
    assert trainer.steps == [-1, 0, 1, 2]
    load(receiver, server, 2, flush=False)
    assert server.take() == ALL
    load(receiver, server, 3)  # a trainer that was started again knows no group
    assert server.take() == [LEAVES, JOINS, *ALL]
    assert [(asked.group, asked.ranks) for asked in trainer.asked] == [("", 4), ("g0", 4), ("g0", 4)]


@pytest.mark.parametrize("at", [JOINS, ALL[0], ALL[1], ALL[-1]])
def test_what_fails_in_the_middle_is_loaded_from_the_directory(at: str) -> None:
    server, trainer = ScriptedServer(), ScriptedTrainer(sends(), sends("g1"))
    receiver = TensorReceiver(trainer, "r/0")
    server.refuses = {at}
    load(receiver, server, 1)
    journal = server.take()
    assert journal[-3:] == ["end_weight_update", LEAVES, LOADS]
    assert dict(server.bodies)[LEAVES] == {"group_name": "g0"}
    assert server.version == "policy-e0-v1"
    assert trainer.broken == ["g0"]  # nobody waits for it
    server.refuses = set()
    load(receiver, server, 2)
    assert trainer.asked[-1].group == ""
    assert server.take() == [JOINS, *ALL]


@pytest.mark.parametrize(("at", "entered"), [(-1, []), (0, [JOINS, ALL[0]]), (1, [JOINS, *ALL[:2]])])
def test_what_fails_elsewhere_keeps_no_server_inside_a_broadcast(at: int, entered: list[str]) -> None:
    server, trainer = ScriptedServer(), ScriptedTrainer(sends(), sends("g1"), sends("g2"))
    receiver = TensorReceiver(trainer, "r/0")
    trainer.breaks_at, trainer.late = at, 3
    load(receiver, server, 1)
    assert server.take() == [*entered, "end_weight_update", LEAVES, LOADS]
    trainer.breaks_at = 2  # this one has all of it by then, but does not use the group again
    load(receiver, server, 2)
    assert server.take() == [JOINS, *ALL]
    load(receiver, server, 3)
    assert [asked.group for asked in trainer.asked] == ["", "", ""]


@pytest.mark.parametrize("at", [JOINS, ALL[1], ALL[-1]])
def test_a_server_that_does_not_answer_is_lost(at: str) -> None:
    server, trainer = ScriptedServer(), ScriptedTrainer(sends())
    server.loses = {at}
    with pytest.raises(EngineLost):
        load(TensorReceiver(trainer, "r/0"), server, 1)
    assert trainer.broken == ["g0"]
    assert LOADS not in server.journal


def test_a_version_that_the_server_does_not_name_is_loaded_from_the_directory() -> None:
    server = ScriptedServer()
    server.nameless = True
    load(TensorReceiver(ScriptedTrainer(sends()), "r/0"), server, 1)
    assert server.take()[-2:] == [LEAVES, LOADS]
    assert server.version == "policy-e0-v1"


def test_without_tensors_the_directory_is_loaded_and_the_trainer_asked_ever_less_often() -> None:
    server = ScriptedServer()
    away = [RpcTimeout("nobody answers")] * 20
    trainer = ScriptedTrainer(SendsNothing("a newer one"), *away)
    receiver = TensorReceiver(trainer, "r/0")
    for version in range(1, 17):
        load(receiver, server, version)
    assert server.take() == [LOADS] * 16
    # A version that was overtaken is no failure. After it: pauses of 0, 1, 3 and 7 updates.
    assert [asked.tag.version for asked in trainer.asked] == [1, 2, 3, 5, 9]


@pytest.mark.parametrize("size", ["pp_size", "dp_size"])
def test_servers_that_cannot_take_tensors_are_refused_at_the_start(size: str) -> None:
    receiver = TensorReceiver(ScriptedTrainer(), "r/0")
    with pytest.raises(EngineError, match=r"size 2.*weights.channel to auto"):
        asyncio.run(receiver.opened(ScriptedServer(**{size: 2}), None))  # type: ignore[arg-type]


GPU = TorchBuild("2.14.1+cu130", "13.0", "2.30.7")
CPU = TorchBuild("2.13.0+cpu", "", "")
"""The build of a trainer whose group uses gloo. A server reports its own."""


@pytest.mark.parametrize(
    ("trainer", "server"),
    [
        (GPU, GPU),
        (GPU, TorchBuild("2.14.0", "13.1", "2.30.7")),
        (GPU, TorchBuild("2.13.0+cu130", "13.0", "2.30.7")),
        (CPU, CPU),
        (CPU, GPU),
    ],
)
def test_builds_that_can_join_one_group_are_taken(trainer: TorchBuild, server: TorchBuild) -> None:
    check_builds(trainer, server)


@pytest.mark.parametrize(
    ("trainer", "server", "named"),
    [
        (GPU, TorchBuild("2.14.1+cu130", "13.0", "2.30.6"), r"NCCL 2\.30\.7 and 2\.30\.6:"),
        (GPU, TorchBuild("2.14.1+cu129", "12.9", "2.30.7"), r"CUDA 13\.0 and 12\.9:"),
        (GPU, TorchBuild("2.15.0+cu130", "13.0", "2.30.7"), r"torch 2\.14\.1\+cu130 and 2\.15\.0\+cu130:"),
        (
            GPU,
            TorchBuild("2.14.1+cpu", "", ""),
            r"NCCL 2\.30\.7 and none, CUDA 13\.0 and none: .*s-gpu",
        ),
        (CPU, TorchBuild("2.9.1+cpu", "", ""), r"torch 2\.13\.0\+cpu and 2\.9\.1\+cpu:"),
    ],
)
def test_builds_that_cannot_join_are_refused_with_what_differs(
    trainer: TorchBuild, server: TorchBuild, named: str
) -> None:
    with pytest.raises(EngineError, match=named):
        check_builds(trainer, server)


def test_a_server_is_compared_with_the_trainer_and_not_with_its_worker() -> None:
    import torch

    server, python = ScriptedServer(), Path(sys.executable)
    its = asyncio.run(build_of(python))
    assert (its.torch, its.cuda) == (torch.__version__, torch.version.cuda or "")
    trainer = ScriptedTrainer()
    for trainer.build in (None, its):  # one that is restarting is asked nothing more
        asyncio.run(TensorReceiver(trainer, "r/0").opened(server, python))  # type: ignore[arg-type]
    trainer.build = TorchBuild(its.torch, "13.0", "1.2.3")
    with pytest.raises(EngineError, match=r"NCCL 1\.2\.3"):
        asyncio.run(TensorReceiver(trainer, "r/0").opened(server, python))  # type: ignore[arg-type]


def test_an_environment_without_torch_is_refused_with_its_reason(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(EngineError, match="broken"):
        asyncio.run(build_of(broken))
