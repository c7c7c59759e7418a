"""The engine's hold on its server: the process (unless it is attached), the connection, and whether it lives.

Once lost it stays lost: the process is killed, and every call ends in `EngineLost`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from areal_async.runtime.log import get_logger
from rollout_service.engines.base import EngineError, EngineLost, RequestError
from rollout_service.engines.server.http import CONTROL_TIMEOUT_S, ServerClient
from rollout_service.engines.server.liveness import PATIENCE, Liveness, Patience
from rollout_service.engines.server.process import ServerProcess
from rollout_service.engines.streaming import Tell
from rollout_service.engines.vllm.answer import Answer, Heard
from rollout_service.engines.vllm.gauges import Gauges, parse_gauges

log = get_logger("engine")
T = TypeVar("T")

POLL_S = 1.0
GENERATE = "/inference/v1/generate"


class Status(msgspec.Struct):
    status: str


class Link:
    """To `server`, which serves; `process` is None for one that was attached. `on_lost` is called once, to
    end what is in flight."""

    def __init__(
        self,
        server: ServerClient,
        process: ServerProcess | None,
        on_lost: Callable[[EngineLost], None],
        patience: Patience = PATIENCE,
    ) -> None:
        self.server = server
        self.gauges = Gauges()
        """As of the last poll."""
        self._generated_before: int | None = None
        self._process = process
        self._on_lost = on_lost
        self._lost: str | None = None
        self._poll: asyncio.Task[None] | None = None
        self._liveness = Liveness(lambda: server.serves("/health"), process, patience)

    def alive(self) -> bool:
        return self._lost is None and not self._liveness.ended()

    @property
    def generated(self) -> int:
        """Units sampled since the first poll: also of answers that are not finished, which may take long."""
        return self.gauges.generated - (self._generated_before or 0)

    def check(self) -> None:
        """Raises `EngineLost` after the loss."""
        if self._lost is not None:
            raise EngineLost(f"the engine vllm is lost: {self._lost}")

    def watch(self) -> None:
        """Poll from now on."""
        self._poll = asyncio.create_task(self._polling())

    async def control(
        self, path: str, answer: type[T], body: object = None, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> T:
        """A POST that is no request for units: a refusal is the engine's failure, not a request's."""
        self.check()
        try:
            return await self.server.post(path, body, answer, timeout_s=timeout_s)
        except RequestError as error:
            raise EngineError(str(error)) from error

    async def ask(self, body: dict[str, Any], tell: Tell | None = None) -> Answer:
        """A request for units; `tell` is given them as they come. Raises `RequestError`, `EngineLost`, and
        `EngineError` when the server failed on it and lives on."""
        self.check()
        try:
            if tell is None:
                return await self.server.post(GENERATE, body, Answer, timeout_s=None)
            heard = Heard(tell)
            await self.server.stream(GENERATE, body | {"stream": True}, Answer, heard.take)
            return heard.answer()
        except EngineError as error:
            if await self.examined() and not isinstance(error, EngineLost):
                raise
            # What the server's log ends with says more than its last answer.
            raise EngineLost(self._lost or str(error)) from error

    def lose(self, why: str) -> EngineLost:
        """Give the server up. Returns the error to raise."""
        if self._lost is None:
            log.error("engine lost", engine="vllm", reason=why)
            self._lost = why
            if self._process is not None:
                self._process.kill()
            self._on_lost(EngineLost(f"the engine vllm is lost: {why}"))
        return EngineLost(f"the engine vllm is lost: {why}")

    async def examined(self) -> bool:
        """After a failure: whether the server lives. One that does not is given up."""
        if self._lost is not None:
            return False
        if await self._liveness.confirmed():
            return True
        tail = f"\n{self._process.tail()}" if self._process is not None else ""
        self.lose(f"{self.server.name} ended or does not answer /health{tail}")
        return False

    async def close(self) -> None:
        """End the process, if it is ours; calls in flight raise `EngineLost`."""
        self._lost = self._lost or "it has stopped"
        if self._poll is not None:
            self._poll.cancel()
        self._liveness.close()
        await self.server.close()
        if self._process is not None:
            await self._process.stop()

    async def _polling(self) -> None:
        while self._lost is None:
            try:
                status, content = await self.server.request("GET", "/metrics")
                if status == 200:
                    self.gauges = parse_gauges(content.decode())
                    if self._generated_before is None:
                        self._generated_before = self.gauges.generated
            except EngineLost:
                await self.examined()
            await asyncio.sleep(POLL_S)
