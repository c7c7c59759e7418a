"""The promise `nothing_is_pickled`: in our source, and on a socket that somebody sends a pickle to."""

import ast
import asyncio
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

import areal_async
from areal_async.base.errors import SnapshotError
from areal_async.rpc import endpoints
from areal_async.rpc.frames import HEADER, WIRE_VERSION, Kind, write_frames
from areal_async.rpc.schema import SCHEMA, Fault, Hello, Ok, Welcome
from areal_async.weights.manifest import unseal
from tests.unit.rpc.peers import SECRET, serving

PACKAGES = ("areal_async", "rollout_service", "replay_buffer", "reward_service", "trainer_service")
MODULES = {
    "_pickle", "cPickle", "cloudpickle", "copyreg", "dill", "joblib", "marshal", "multiprocessing", "pickle",
    "pickletools", "shelve",
}  # fmt: skip
NAMES = {
    "send_pyobj", "recv_pyobj", "ProcessPoolExecutor", "to_pickle", "read_pickle",
    "broadcast_object_list", "scatter_object_list", "all_gather_object", "gather_object",
}  # fmt: skip


def offences(source: str) -> Iterator[str]:
    """What in `source` would pickle or unpickle."""
    for node in ast.walk(ast.parse(source)):
        imported: list[str] = []
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in imported:
            parts = set(name.split("."))
            if parts & MODULES or parts & NAMES or name in ("torch.load", "torch.save"):
                yield f"line {node.lineno}: imports {name}"
        if isinstance(node, ast.Attribute) and node.attr in NAMES | MODULES:
            yield f"line {node.lineno}: uses {node.attr}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            called = f"{owner}.{node.func.attr}"
            if called == "torch.save" or (called == "torch.load" and given.get("weights_only") != "True"):
                yield f"line {node.lineno}: calls {called}"
            if given.get("allow_pickle", "False") != "False":
                yield f"line {node.lineno}: {called} allows pickle"


def test_nothing_is_pickled_in_our_source():
    root = Path(areal_async.__file__).parents[1]
    files = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    assert {path.relative_to(root).parts[0] for path in files} == set(PACKAGES)
    found = [f"{path.relative_to(root)} {what}" for path in files for what in offences(path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from multiprocessing import Pool", "import torch.multiprocessing as mp",
        "import torch\ntorch.multiprocessing.spawn(f)", "from concurrent.futures import ProcessPoolExecutor",
        "from concurrent import futures\nfutures.ProcessPoolExecutor()", "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)", "import torch\ntorch.save({}, 'x')",
        "from torch import load", "import numpy as np\nnp.load('x', allow_pickle=True)",
        "socket.send_pyobj(1)", "import torch.distributed as dist\ndist.broadcast_object_list([1])",
    ],
)  # fmt: skip
def test_nothing_is_pickled_unseen_by_the_scan(source):
    assert list(offences(source))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load('x', weights_only=True)",
        "import json\njson.load(f)",
        "import numpy as np\nnp.load('x', allow_pickle=False)",
    ],
)
def test_the_scan_lets_other_things_pass(source):
    assert not list(offences(source))


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


async def test_nothing_is_pickled_a_pickle_on_the_socket_is_refused(ipc, tmp_path):
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    seen: list[bytes] = []

    async def handle(peer, message, attachments):
        seen.extend(bytes(a) for a in attachments)
        return Ok()

    def attack(endpoint):
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        endpoints.connect(socket, endpoint, SECRET)
        head = HEADER.pack(b"AA", WIRE_VERSION, Kind.REQUEST, 0, 5, 2, 0)
        socket.send_multipart(write_frames(Kind.REQUEST, 5, 1, 0, Hello(SCHEMA, "j", "r", "n"), ()))
        socket.send_pyobj(Bomb(tmp_path / "exploded"))
        socket.send(head + bomb)
        socket.send(head + msgspec.msgpack.encode(msgspec.msgpack.Ext(1, bomb)))
        stats = write_frames(Kind.REQUEST, 5, 3, 0, None, [bomb])
        stats[0] = bytes(stats[0]) + msgspec.msgpack.encode({"type": "Stats"})
        socket.send_multipart(stats)
        replies = []
        for _ in range(4):
            assert socket.poll(5000)
            body = socket.recv()[HEADER.size :]
            replies.append(msgspec.msgpack.decode(body, type=Ok | Fault | Welcome))
        context.destroy(linger=0)
        return replies

    async with serving(ipc, handle) as server:
        welcome, *refused, ok = await asyncio.to_thread(attack, server.endpoint)
        assert server.counters["malformed"] == 3
    assert isinstance(welcome, Welcome)
    assert [isinstance(reply, Fault) and reply.kind for reply in refused] == ["invalid", "invalid"]
    assert ok == Ok()
    assert seen == [bomb]  # an attachment is bytes to us, whatever they spell
    with pytest.raises(SnapshotError):
        unseal(bomb)
    assert not (tmp_path / "exploded").exists()
