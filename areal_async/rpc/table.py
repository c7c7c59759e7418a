"""Every request and reply of the wire, in one table."""

from __future__ import annotations

from typing import Any

from areal_async.rpc import control_messages, messages, weights_messages
from areal_async.rpc.schema import Fault, Message, Request, replies_to

MODULES = (messages, weights_messages, control_messages)
"""The modules that declare requests: importing them is what fills the table."""
REQUESTS: tuple[type[Request[Any]], ...] = tuple(Request.__subclasses__())
REPLIES: tuple[type[Message], ...] = tuple(
    dict.fromkeys([Fault, *(reply for request in REQUESTS for reply in replies_to(request))])
)
