"""One libzmq context per server and client, so that closing one ends its sockets and its I/O thread.

Open contexts are held here: one that is merely dropped (a service that ends by an exception) would
otherwise be ended by the garbage collector, in an order in which libzmq waits for ever for sockets that are
still open.
"""

from __future__ import annotations

import asyncio

import zmq

_open: set[zmq.Context[zmq.Socket[bytes]]] = set()


def open_context() -> zmq.Context[zmq.Socket[bytes]]:
    context = zmq.Context[zmq.Socket[bytes]](io_threads=1)
    _open.add(context)
    return context


async def end_context(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """End a context whose sockets are closed; takes as long as they linger."""
    await asyncio.to_thread(context.term)
    _open.discard(context)


def drop_context(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """End a context that was never used, with its sockets, at once."""
    context.destroy(linger=0)
    _open.discard(context)
