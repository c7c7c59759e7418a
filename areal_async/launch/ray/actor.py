"""The actor that hosts one process in a Ray cluster.

Ray chooses the node of the actor and detects the loss of the node. `process_host.py` does the work on the
node. Requests and answers are bytes, so no object of this project is pickled."""

from __future__ import annotations

import os
from typing import Any, TypeVar, get_type_hints

import msgspec
import ray

from areal_async.base.errors import RunError
from areal_async.base.own_files import PRIVATE_UMASK
from areal_async.launch.ray.process_host import ProcessHost

NODE_ID_DIGITS = 12  # Of 56 digits: enough to distinguish the nodes of a cluster
AT_ONCE = 4  # Concurrent calls of an actor; one of them waits for news


DONE, FAILED = b"\0", b"\1"
"""First byte of an answer. The result follows `DONE`, the text of the error follows `FAILED`."""

T = TypeVar("T")


class HostActor:
    """A `ProcessHost` on the node of this actor."""

    def __init__(self) -> None:
        os.umask(PRIVATE_UMASK)
        node_id = ray.get_runtime_context().get_node_id()[:NODE_ID_DIGITS]
        self._host = ProcessHost(node_id, self.address())

    def address(self) -> str:
        """Return the IP address of this node."""
        return ray.util.get_node_ip_address()

    def call(self, name: str, given: bytes) -> bytes:
        """Call a method of the host.

        The annotations of the method determine how the arguments are decoded. An error is returned as text,
        because Ray cannot transport every exception."""
        try:
            method = getattr(self._host, name)
            kinds = [kind for argument, kind in get_type_hints(method).items() if argument != "return"]
            arguments = msgspec.msgpack.decode(given, type=tuple[tuple(kinds)])  # type: ignore[misc]
            return DONE + msgspec.msgpack.encode(method(*arguments))
        except Exception as error:
            return FAILED + f"{type(error).__name__}: {error}".encode()


def call(actor: Any, name: str, *arguments: object) -> Any:
    """Call a method of the actor's `ProcessHost`, and return a reference to the answer."""
    return actor.call.remote(name, msgspec.msgpack.encode(arguments))


def answer_of(data: bytes, kind: type[T]) -> T:
    """Return the result of a call. Raises `RunError` with the error of the call."""
    if data[:1] == FAILED:
        raise RunError(data[1:].decode())
    return msgspec.msgpack.decode(data[1:], type=kind)


def new_actor(name: str, options: dict[str, Any]) -> Any:
    """Return a handle of a new actor with these placement `options`. The actor may wait for room."""
    fixed = {"max_concurrency": AT_ONCE, "max_restarts": 0, "max_task_retries": 0}
    return ray.remote(HostActor).options(name=name, **fixed, **options).remote()
