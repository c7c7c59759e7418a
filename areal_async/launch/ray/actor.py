"""The actor of one process in a Ray cluster. Ray decides on which node it lives, and finds out when that is
gone; what it does there is in `process_host.py`. Bytes go in and out: nothing of ours is pickled."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import msgspec
import ray

from areal_async.base.errors import RunError
from areal_async.base.own_files import PRIVATE_UMASK
from areal_async.launch.buffer_files import LeftFiles, Part
from areal_async.launch.ray.orders import PlaceOrder, StartOrder, pack
from areal_async.launch.ray.process_host import ProcessHost

NODE_ID_DIGITS = 12  # Of Ray's 56: as many as tell the nodes of a cluster apart
AT_ONCE = 4  # Calls that are carried out at once: one of them waits for news


Done, Failed = b"\0", b"\1"
"""What an answer begins with: what the call came to, or the text of its error."""


def told(method: Callable[..., bytes | None]) -> Callable[..., bytes]:
    """The method with its errors as text: not every exception survives the way through Ray."""

    @wraps(method)
    def call(*arguments: Any) -> bytes:
        try:
            return Done + (method(*arguments) or b"")
        except Exception as error:
            return Failed + f"{type(error).__name__}: {error}".encode()

    return call


def answer_of(data: bytes) -> bytes:
    """What a call came to. Raises `RunError` with what it failed with."""
    if data[:1] == Failed:
        raise RunError(data[1:].decode())
    return data[1:]


class HostActor:
    """The methods are those of `ProcessHost`."""

    def __init__(self) -> None:
        import os

        os.umask(PRIVATE_UMASK)
        context = ray.get_runtime_context()
        self._host = ProcessHost(context.get_node_id()[:NODE_ID_DIGITS], ray.util.get_node_ip_address())
        self._left: LeftFiles | None = None

    def address(self) -> str:
        """IP address of its node."""
        return ray.util.get_node_ip_address()

    @told
    def place(self, order: bytes) -> bytes:
        return pack(self._host.place(msgspec.msgpack.decode(order, type=PlaceOrder)))

    @told
    def start(self, order: bytes) -> bytes:
        return pack(self._host.start(msgspec.msgpack.decode(order, type=StartOrder)))

    @told
    def news(self, have: bytes, wait_s: float, serves: bool) -> bytes:
        known = msgspec.msgpack.decode(have, type=dict[str, int])
        return pack(self._host.news(known, wait_s, serves=serves))

    @told
    def kept(self, have: bytes) -> bytes:
        return msgspec.msgpack.encode(self._host.kept(msgspec.msgpack.decode(have, type=dict[str, int])))

    @told
    def left(self, folder: str, part: Part, have: bytes) -> bytes:
        """Pieces of what a run has left in `folder` (`LeftFiles`)."""
        if self._left is None:
            self._left = LeftFiles(folder)
        known = msgspec.msgpack.decode(have, type=dict[str, int])
        return msgspec.msgpack.encode(self._left.read(part, known))

    def remove_left(self) -> None:
        if self._left is not None:
            self._left.remove()

    def terminate(self) -> None:
        self._host.terminate()

    def kill(self) -> None:
        self._host.kill()

    def close(self, keep_buffer: bool = False) -> None:
        self._host.close(keep_buffer=keep_buffer)


def new_actor(name: str, options: dict[str, Any]) -> Any:
    """A handle of a new actor that is placed as `options` say; it may wait for room."""
    fixed = {"max_concurrency": AT_ONCE, "max_restarts": 0, "max_task_retries": 0}
    return ray.remote(HostActor).options(name=name, **fixed, **options).remote()
