"""The worker's side of the gateway: the keys of episodes, the access to the engine, and the recording of
answers.

Promises: the gateway's process starts when the first episode needs it, and restarts if it dies. Its address
stays the same. A session's key works until the session ends and never again. If the process dies, the calls
in flight are lost. An episode with a lost call fails, because it is unknown whether its agent received the
answer. Other episodes continue, but the next call of each conversation begins a new path.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary, finalize

import msgspec
import numpy as np

from areal_async.base.addresses import Address
from areal_async.base.errors import FaultError, PeerGone, RpcTimeout
from areal_async.base.http_server import listen
from areal_async.base.log import get_logger
from areal_async.base.processes import ChildProcess, RestartPolicy, Restarts, exit_text
from areal_async.base.topology import RunHost
from areal_async.rpc.client import CallLimits, Client
from areal_async.rpc.gateway_messages import (
    DropCall,
    EndSession,
    RecordCalls,
    Sample,
    SampleRefused,
    ServeAgents,
    Unrecorded,
)
from areal_async.rpc.reply_book import ServerLimits
from areal_async.rpc.schema import Ok
from areal_async.rpc.secret import RoleKeys
from areal_async.rpc.server import Answer, Handler, Peer, Server, by_type
from areal_async.trajectory import EpisodeBuilder
from rollout_service import metrics
from rollout_service.gateway.recording import RecordedCalls, Session
from rollout_service.gateway.requests import ENDED, GatewayError

if TYPE_CHECKING:
    from rollout_service.workflows.context import Context

log = get_logger("gateway")

START_S = 120.0  # Longest wait for the start of the gateway, which imports modules and reads a tokenizer
END_S = 10.0  # Longest wait for the end of a session
Side = Literal["worker", "gateway"]
# Connections and `max_calls` limit the calls in flight, not the sockets between worker and gateway
AT_ONCE = 1 << 16
RESTARTS = RestartPolicy(limit=5)


class ServedModel(msgspec.Struct, frozen=True):
    """The model of one policy."""

    folder: str
    max_model_len: int
    template_args: dict[str, Any] = {}
    pixels: tuple[int | None, int | None] = (None, None)
    """Minimum and maximum of the pixels to which images are scaled."""


class GatewaySetup(msgspec.Struct, frozen=True):
    """Set-up of the gateway's process, which reads it from standard input."""

    job: str
    name: str
    """The worker's name. The endpoints between worker and gateway are named after the worker."""
    host: RunHost
    keys: RoleKeys  # Keys of the worker's role
    section: dict[str, Any]  # `rollout.gateway`
    models: dict[str, ServedModel]
    """Models by policy. Agents use the policy names as model names."""
    trains: bool = True  # Whether the recorded answers will be trained on
    header_s: float = 10.0
    listening_fd: int = -1
    life: int = 0
    """Number of earlier starts of this gateway's process."""

    def client(self, service: Side) -> Client:
        """Return a client for the socket of the worker or of the gateway. The other side of the two uses
        it."""
        return Client(
            Address(self._endpoint(service), self.keys.role),
            job=self.job,
            role="gateway" if service == "worker" else "rollout",
            name=self.name,
            access=self.keys,
            limits=CallLimits(in_flight=AT_ONCE),
        )

    def server(self, service: Side, handlers: Mapping[type[Any], Handler]) -> Server:
        """Return the server for the socket of the worker or of the gateway."""
        return Server(
            self._endpoint(service),
            service=service,
            job=self.job,
            access=self.keys,
            handler=by_type(service, handlers),
            limits=ServerLimits(in_flight=AT_ONCE),
        )

    def _endpoint(self, service: Side) -> str:
        return self.host.local_endpoint(f"{self.name}.{'engine' if service == 'worker' else 'gateway'}")


def start_process(setup: GatewaySetup) -> ChildProcess:
    """Start the gateway in its own process, which writes to this process's log."""
    return ChildProcess(
        [sys.executable, "-P", "-m", "rollout_service.gateway"],
        output=sys.stderr.fileno(),
        given=msgspec.json.encode(setup),
        pass_fds=[setup.listening_fd],
        on_orphaned="kill",
    )


Start = Callable[[GatewaySetup], Any]


class Gateway:
    """The gateway of a worker. Episodes open sessions in it."""

    def __init__(
        self, setup: GatewaySetup, restarts: RestartPolicy = RESTARTS, start: Start = start_process
    ) -> None:
        """`start` starts a gateway and returns an object with the methods `wait` and `stop` of a
        `ChildProcess`."""
        self._setup = setup
        self._restarts = Restarts(restarts)
        self._start_one = start
        self._listening: socket.socket | None = None
        self._server: Server | None = None
        self._client: Client | None = None
        self._running: asyncio.Task[None] | None = None
        self._serving = asyncio.Event()
        self._failed: Exception | None = None  # Reason why the gateway cannot be started
        self._sessions: dict[bytes, Session] = {}
        # Nothing in an episode's paths may refer to its builder, or they would never be freed.
        self._records: WeakKeyDictionary[EpisodeBuilder, RecordedCalls] = WeakKeyDictionary()
        self._episodes = 0
        self._forgotten: list[int] = []
        self.address = ""

    @asynccontextmanager
    async def session(self, episode: Context) -> AsyncIterator[Session]:
        """Give an episode access to the policies until the `async with` block ends. Raises `GatewayError` if
        the port is taken, if the gateway cannot start, or if the record differs from the answers that the
        agent received."""
        await self._up()
        session = Session(episode, self._record_of(episode.builder), self._setup.job, self.address)
        self._sessions[session.digest] = session
        metrics.GATEWAY_SESSIONS.set(len(self._sessions))
        try:
            forget, self._forgotten = self._forgotten, []
            while not await self._told(session.opening(forget)):
                await self._up()
            yield session
        finally:
            try:
                if session.broken is None:
                    await self._told(EndSession(session.digest))
            finally:
                del self._sessions[session.digest]
                metrics.GATEWAY_SESSIONS.set(len(self._sessions))
                session.close()
            if (broken := session.broken) is not None:  # an answer that the agent received may be missing
                raise GatewayError(f"an answer to the agent could not be recorded: {broken}") from broken

    async def close(self) -> None:
        """End every session, and the gateway."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        for session in self._sessions.values():
            session.close()
        if self._server is not None:
            await self._server.stop()
        if self._listening is not None:
            self._listening.close()

    def _record_of(self, builder: EpisodeBuilder) -> RecordedCalls:
        record = self._records.get(builder)
        if record is None:
            self._episodes += 1
            record = self._records[builder] = RecordedCalls(self._episodes)
            finalize(builder, self._forgotten.append, self._episodes).atexit = False
        return record

    async def _told(self, request: Any) -> bool:
        """Send a request to the gateway, and return whether it has answered. If the gateway is dead, the
        return value is False, and `_run` restarts it."""
        if self._client is None:
            return False
        with suppress(PeerGone, RpcTimeout, FaultError):
            await self._client.call(request, timeout_s=END_S)
            return True
        return False

    # --- the process ---------------------------------------------------------------------------------

    async def _up(self) -> None:
        """Wait until the gateway serves. Raises `GatewayError`."""
        if self._running is None:
            named = {"loopback": self._setup.host.loopback, "host": self._setup.host.address}
            interface, port = self._setup.section["host"], self._setup.section["port"]
            interface = named.get(interface, interface)
            try:
                # Every caller must show the key of an open session.
                self._listening = listen(interface, port, guarded=True)
            except OSError as error:
                raise GatewayError(
                    f"the gateway cannot listen on {interface} port {port}: {error}. Set "
                    "rollout.gateway.port to a free port, or to 0 to have one picked."
                ) from error
            host, port = self._listening.getsockname()[:2]
            self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            self._running = asyncio.ensure_future(self._run())
        serving = asyncio.ensure_future(self._serving.wait())
        try:
            await asyncio.wait((serving, self._running), return_when=asyncio.FIRST_COMPLETED)
        finally:
            serving.cancel()
        if not self._serving.is_set():
            raise GatewayError(f"there is no gateway: {self._failed or 'it was closed'}") from self._failed

    async def _run(self) -> None:
        """Restart the gateway until the restart policy ends it."""
        assert self._listening is not None
        handlers: dict[type[Any], Handler] = {Sample: self._on_sample, DropCall: self._on_drop}
        handlers[RecordCalls] = self._on_record
        self._server = self._setup.server("worker", handlers)
        try:
            await self._server.start()
            life, pause_s = 0, 0.0
            while True:
                await asyncio.sleep(pause_s)
                fd = self._listening.fileno()
                setup = msgspec.structs.replace(self._setup, life=life, listening_fd=fd)
                status, served_s = await self._one_life(setup)
                life += 1
                lost = sum(bool(session.open) for session in self._sessions.values())
                log.warning("the gateway died", how=exit_text(status), episodes_lost=lost)
                again_s = self._restarts.died(time.monotonic(), served_s=served_s, status=status)
                if again_s is None:
                    raise GatewayError(f"its process {exit_text(status)}, too often to start it again")
                pause_s = again_s
        except Exception as error:
            self._failed = error
            for session in self._sessions.values():
                session.broken = session.broken or GatewayError(f"there is no gateway: {error}")
                session.close()

    async def _one_life(self, setup: GatewaySetup) -> tuple[int, float | None]:
        """Run the gateway's process once, until it exits. Return its exit status, and the time when it began
        to serve."""
        process, served_s = self._start_one(setup), None
        ended = asyncio.ensure_future(process.wait())
        client = setup.client("gateway")
        greeted = asyncio.ensure_future(client.connect(START_S))
        try:
            await asyncio.wait((greeted, ended), return_when=asyncio.FIRST_COMPLETED)
            if greeted.done():
                greeted.result()
                for session in list(self._sessions.values()):
                    if session.broken is None:
                        await client.call(session.opening(), timeout_s=END_S)
                await client.call(ServeAgents(), timeout_s=END_S)
                self._client, served_s = client, time.monotonic()
                self._serving.set()
                log.info("gateway serves", address=self.address)
            return await asyncio.shield(ended), served_s
        finally:
            self._serving.clear()
            self._client = None
            for session in self._sessions.values():
                if session.open:
                    session.broken = GatewayError(
                        "the gateway died during a call: what of it the agent was sent is not known"
                    )
                    session.close()
                session.interrupted(GatewayError("the gateway died, and was started again"))
            greeted.cancel()
            ended.cancel()
            await asyncio.gather(greeted, ended, return_exceptions=True)
            await client.close()
            await process.stop()

    # --- requests of the gateway ---------------------------------------------------------------------------

    async def _on_sample(self, _: Peer, request: Sample, attachments: list[memoryview]) -> Answer:
        session = self._sessions.get(request.key)
        if session is None:
            return SampleRefused(401, ENDED, "invalid_api_key")
        return await session.sample(request, np.frombuffer(attachments[0], np.int32), attachments[1:])

    async def _on_drop(self, _: Peer, request: DropCall, __: list[memoryview]) -> Answer:
        if (session := self._sessions.get(request.key)) is not None:
            session.drop(request.call)
        return Ok()

    async def _on_record(self, _: Peer, request: RecordCalls, __: list[memoryview]) -> Answer:
        reasons = {}
        for place, call in enumerate(request.calls):
            try:
                if (session := self._sessions.get(call.key)) is not None:
                    session.record(call)
            except Exception as error:
                log.exception("a call could not be recorded")
                reasons[place] = f"{type(error).__name__}: {error}"
        return Unrecorded(reasons)
