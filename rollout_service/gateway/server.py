"""The gateway of one process: an HTTP server in the worker's event loop, and the sessions of its episodes.

Promises: it listens on a loopback address, and only once an episode asks for it; a key that was never given
out, or whose episode has ended, gets 401 with the reason and nothing else; stopping ends every call.
It serves whoever on this machine has a key: keys are passed to agents, and never logged.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from areal_async.config.rollout import GatewaySection
from areal_async.runtime.http_server import HttpLimits, HttpServer, listen
from areal_async.runtime.log import get_logger
from areal_async.trajectory import EpisodeBuilder
from rollout_service import metrics
from rollout_service.gateway.conversation import ConversationTree
from rollout_service.gateway.http import make_app
from rollout_service.gateway.requests import ApiError, GatewayError
from rollout_service.gateway.session import ENDED, Session
from rollout_service.gateway.template import ChatTemplate

if TYPE_CHECKING:
    from rollout_service.workflows.context import Context

log = get_logger("gateway")

REMEMBERED_KEYS = 4096
"""Ended keys that are still told so."""
CONNECTIONS = 1024
BODIES_AT_ONCE = 64
"""So many of the longest requests are held at a time, or more of shorter ones."""
ANSWER_GRACE_S = 60.0
"""Time for an agent to take an answer that was made just within the deadline of its call."""


class Gateway:
    """Made once a process; episodes open sessions in it."""

    def __init__(
        self,
        section: GatewaySection,
        tokenizer: Any,
        *,
        job: str,
        max_model_len: int,
        trains: bool = True,
        offset: int = 0,
    ) -> None:
        """`trains`: what is recorded will be trained on; `offset` is added to a configured port."""
        self._section = section
        self._template = ChatTemplate(tokenizer, section.tool_format)
        self._job = job
        self._max_model_len = max_model_len
        self._trains = trains
        self._port = section.port and section.port + offset
        self._sessions: dict[bytes, Session] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        # Nothing of an episode's paths may hold its builder, or they would stay for ever.
        self._trees: WeakKeyDictionary[EpisodeBuilder, ConversationTree] = WeakKeyDictionary()
        self.server: HttpServer | None = None
        """The HTTP server, once it listens."""
        self.address = ""

    @asynccontextmanager
    async def session(self, episode: Context) -> AsyncIterator[Session]:
        """Access for an episode, until the block ends. Raises `GatewayError` when the port is taken."""
        self._start()
        tree = self._trees.get(episode.builder)
        if tree is None:
            tree = self._trees[episode.builder] = ConversationTree(self._template)
        session = Session(
            episode,
            tree,
            self._section,
            job=self._job,
            address=self.address,
            max_model_len=self._max_model_len,
            trains=self._trains,
        )
        name = _digest(session.api_key)
        self._sessions[name] = session
        metrics.GATEWAY_SESSIONS.set(len(self._sessions))
        try:
            yield session
        finally:
            del self._sessions[name]
            metrics.GATEWAY_SESSIONS.set(len(self._sessions))
            self._ended[name] = None
            if len(self._ended) > REMEMBERED_KEYS:
                self._ended.popitem(last=False)
            await session.close()
            session.check_whole()

    async def close(self) -> None:
        """End every session and the server."""
        for session in list(self._sessions.values()):
            await session.close()
        if self.server is not None:
            await self.server.close()

    # --- who may call --------------------------------------------------------------------------------

    def find(self, key: str) -> Session:
        """The session of an API key. Raises `ApiError`. Looked up by digest: the time that takes says
        nothing about the key."""
        name = _digest(key)
        if (session := self._sessions.get(name)) is not None:
            session.check_open()
            return session
        reason = ENDED if name in self._ended else "no session has this API key"
        raise ApiError(401, reason if key else "an API key is needed", code="invalid_api_key")

    @property
    def max_body_bytes(self) -> int:
        return self._section.max_body_bytes

    @property
    def max_calls(self) -> int:
        return self._section.max_calls

    # --- the server ----------------------------------------------------------------------------------

    def _start(self) -> None:
        if self.server is not None:
            return
        section = self._section
        try:
            listening = listen(section.host, self._port)
        except OSError as error:
            raise GatewayError(
                f"the gateway cannot listen on {section.host} port {self._port}: {error}. Set "
                "rollout.gateway.port to a free port, or to 0 to have one picked."
            ) from error
        limits = HttpLimits(
            connections=CONNECTIONS,
            held_bytes=BODIES_AT_ONCE * section.max_body_bytes,
            answer_s=section.call_timeout_s + ANSWER_GRACE_S,
        )
        self.server = HttpServer(make_app(self), listening, limits, name="gateway")
        self.server.start()
        self.address = self.server.url
        log.info("gateway serves", address=self.address)


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(errors="replace"), digest_size=16).digest()
