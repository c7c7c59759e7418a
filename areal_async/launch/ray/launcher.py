"""The launcher of a Ray cluster. Ray chooses the node of each process, and detects the loss of a node.

Promises:

- Nothing starts before the whole job has its places.
- A process whose node is lost is reported as lost. Its next start asks Ray for another place.
- Lines that processes append to their logs and events arrive on the home host within a second.
- A buffer with its own Redis runs on the home host, so that a resumed run finds its files there.
- After `close`, or after the death of this process, no process of the run is left on any node.

One thread for each process of the run talks to its actor. The supervisor's thread never waits for an
actor."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from areal_async.base.cache import CACHE_VARIABLE
from areal_async.base.errors import RunError
from areal_async.base.gpus import gpu_variables
from areal_async.base.log import get_logger
from areal_async.base.own_files import append_beneath
from areal_async.base.processes import INCURABLE_STATUS
from areal_async.base.topology import RunHost, ServicePlace, Topology
from areal_async.config.cluster import RaySection
from areal_async.config.job import JobConfig
from areal_async.launch.folders import RunFolders
from areal_async.launch.home_files import with_home_store
from areal_async.launch.launcher import WAITS, Child
from areal_async.launch.local_launcher import LocalLauncher, write_json
from areal_async.launch.plan import thread_count, with_channel
from areal_async.launch.ray.actor import T, answer_of, call, new_actor
from areal_async.launch.ray.head import check_head
from areal_async.launch.ray.orders import (
    FileNews,
    Placed,
    PlaceOrder,
    ProcessNews,
    ProcessStarted,
    StartOrder,
)
from areal_async.launch.ray.placement import (
    BUILT_IN,
    Need,
    PlacedTogether,
    by_node,
    in_words,
    lacking,
    need_of,
    needs_in_words,
    together,
)
from areal_async.launch.ray.process_host import (
    confirmed_in,
    listen_in,
    served_by,
    shipped_by,
    write_confirmed,
)
from areal_async.rpc.endpoints import HELD_VARIABLE
from areal_async.service.context import SERVED_VARIABLE

HOME = "home"
"""Node id of the supervisor's host. No process that Ray places shares memory with this host's processes."""
LEAST_CPUS = 0.01  # Every place in a group must reserve at least this
NEWS_S = 1.0
UNHEARD_S = 3 * NEWS_S  # Seconds without an answer of its host after which a process counts as unheard
MEETING_S = 3600.0  # Longest wait of a rank until rank 0 has its place and its files
LOOK_S = 0.2
TELL_S = 30.0  # Interval of the lines that report a wait for room
CLOSE_S = 8.0
PUBLISHED_S = 60.0
LOST_STATUS = -9
FORWARDED = ("HF_", "TRANSFORMERS_", "AREAL_ASYNC_", "TOKENIZERS_")
"""Prefixes of environment variables that are copied to processes on other hosts, besides those of GPU
libraries."""
OWN_VARIABLES = frozenset({HELD_VARIABLE, SERVED_VARIABLE, CACHE_VARIABLE})
"""Environment variables that are valid on one host only."""

log = get_logger("launcher")


class Cancelled(Exception):
    """The process must end before it has started."""


@dataclass
class RemoteChild:
    """A process on a node. Its own thread writes the fields, and the supervisor's thread reads them."""

    pid: int = 0
    report: dict[str, Any] | None = None
    status: int | None = None
    how_lost: str = ""
    said: bytearray = field(default_factory=bytearray)
    answered_s: float = -UNHEARD_S
    """Time of the host's last answer with news."""
    actor: Any = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ready_report(self) -> dict[str, Any] | None:
        return self.report

    def poll(self) -> int | None:
        return self.status

    def lost(self) -> str:
        return self.how_lost

    def heard(self) -> bytes:
        with self.lock:
            said, self.said = bytes(self.said), bytearray()
        return said

    def is_heard(self) -> bool:
        return time.monotonic() - self.answered_s < UNHEARD_S

    def terminate(self) -> None:
        self._end("terminate")

    def kill(self) -> None:
        self._end("kill")

    def close(self) -> None:
        """Do nothing, because this child has no local descriptors."""

    def _end(self, how: str) -> None:
        self.cancelled.set()
        if self.actor is not None:
            call(self.actor, how)


class RayPlace:
    """The place of one process in the cluster, and its actor there."""

    def __init__(self, launcher: RayLauncher, place: ServicePlace, options: Mapping[str, Any]) -> None:
        self.place = place
        self.options = options
        self.host: RunHost | None = None
        self.endpoints: dict[str, str] = {}
        self.actor: Any = None
        self._launcher = launcher
        self._run_dir = launcher.folders.run_dir
        self._confirmed = confirmed_in(self._run_dir) if place.role == "buffer" else 0
        self._have: dict[str, int] = {}
        self._lives = 0

    def take(self, cancelled: threading.Event) -> None:
        """Create an actor, wait for its place, and prepare the place. Raises `Cancelled`."""
        self._lives += 1
        actor = new_actor(f"{self.place.name}.{self._lives}", dict(self.options))
        try:
            self._launcher.refuse_listeners(_wait_for(actor.address.remote(), cancelled))
            folders, ports = self._launcher.folders, self._launcher.section.ports
            order = PlaceOrder(folders.run_id, self.place, folders.secret.of(self.place.role), ports)
            placed = _answer(call(actor, "place", order), Placed, cancelled)
            if self.host is None or self.host.node_id != placed.host.node_id:
                self._have = {}
        except BaseException:
            ray.kill(actor)
            raise
        self.host, self.endpoints, self.actor = placed.host, placed.endpoints, actor
        self.place = msgspec.structs.replace(
            self.place,
            node_id=placed.host.node_id,
            status=placed.endpoints["status"],
            chunks=placed.endpoints.get("chunks", ""),
            gpus_of_its_own=bool(self.options.get("num_gpus")),
        )
        log.info("placed", service=self.place.name, node=placed.host.node_id, address=placed.host.address)

    def live(self, child: RemoteChild, served_before: bool, meeting: Future[str] | None) -> None:
        """Follow one life of the process, from its start to its end. Runs on a separate thread."""
        try:
            if self.actor is None:
                self.take(child.cancelled)
                self._launcher.moved(self)
            child.actor = self.actor
            self._start(child, served_before, meeting)
            self._follow(child)
        except Cancelled:  # the actor may still be starting the process, and must not outlive the request
            self._gone(child, "was stopped before it had started")
        except RayError as error:
            self._gone(child, f"was lost with its node ({first_line(error)})")
        except Exception as error:
            log.exception("a process could not be placed or started", service=self.place.name)
            self._gone(child, f"could not be started: {error}", status=INCURABLE_STATUS)
        finally:
            if meeting is not None and self.place.is_first and not meeting.done():
                meeting.cancel()

    def close(self) -> Any:
        """Close the actor's host. Return the reference of this call; None if there is no actor."""
        return call(self.actor, "close") if self.actor is not None else None

    def _start(self, child: RemoteChild, served_before: bool, meeting: Future[str] | None) -> None:
        makes_meeting = meeting is not None and self.place.is_first
        order = StartOrder(
            topology=self._launcher.published_with(self.place),
            environment=self._launcher.environment_of(self.place, served_before),
            meets=meeting is not None,
            meeting="" if meeting is None or makes_meeting else meeting.result(MEETING_S),
            confirmed=self._confirmed,
        )
        # The start may take long, because the host first fetches the model's files.
        started = _answer(call(self.actor, "start", order), ProcessStarted, child.cancelled)
        child.pid = started.pid
        if meeting is not None and makes_meeting:
            meeting.set_result(started.meeting)

    def _follow(self, child: RemoteChild) -> None:
        """Handle the news from the process until it has ended.

        The link to its node may be cut for any length of time. Only Ray decides when the node is dead."""
        while True:
            try:
                asked = call(self.actor, "news", self._have, NEWS_S, child.report is not None)
                news = _answer(asked, ProcessNews)
            except ActorUnavailableError:  # files are sent again; bytes of the line are lost
                time.sleep(LOOK_S)
                continue
            brought = self._bring_home(news.files)
            with child.lock:
                child.said += news.heard
            child.answered_s = time.monotonic()
            if news.confirmed > self._confirmed:
                self._confirmed = news.confirmed
                with suppress(OSError):  # the next revision is written instead
                    write_confirmed(self._run_dir, self._confirmed)
            child.report = news.ready or child.report
            if news.status is not None and not brought:
                child.status = news.status
                return

    def _bring_home(self, files: Sequence[FileNews]) -> bool:
        """Append these pieces to the run's files. Return whether there were any pieces.

        If the disk at home is full, the pieces are requested again later."""
        for piece in files:
            try:
                self._launcher.bring_home(self.place.name, piece)
            except OSError as error:
                log.warning("logs do not come home", service=self.place.name, error=str(error))
                time.sleep(NEWS_S)
                return False
            self._have[piece.name] = piece.offset + len(piece.data)
        return bool(files)

    def _gone(self, child: RemoteChild, how: str, status: int = LOST_STATUS) -> None:
        if self.actor is not None:
            with suppress(Exception):
                ray.kill(self.actor)
        self.actor = None
        child.how_lost, child.status = how, status


class RayLauncher:
    """Starts the processes of one run on the nodes of the cluster in `section`. `tell` shows a line of text
    to the user."""

    def __init__(self, section: RaySection, folders: RunFolders, tell: Callable[[str], None]) -> None:
        self.section = section
        self.folders = folders
        self._tell = tell
        self._places: dict[str, RayPlace] = {}
        self._groups: list[PlacementGroup] = []
        self._moved: list[ServicePlace] = []
        self._published: Topology | None = None
        self._changed = threading.Condition()
        self._meeting: Future[str] | None = None
        self._files = threading.Lock()
        self._held: dict[str, socket.socket] = {}
        self._here: LocalLauncher | None = None
        """Local launcher for a buffer with its own Redis, because such a buffer runs on this host."""
        self._buffer = ""

    def begin(self, job: JobConfig, services: list[ServicePlace]) -> list[ServicePlace]:
        try:
            self.job = job
            self._connect()
            here = [self._keep_here(place) for place in services if runs_at_home(job, place)]
            services = [place for place in services if not runs_at_home(job, place)]
            for group in together(services):
                self._reserve(group, needs_in_words(job, services))
            return [*here, *self._take_places(services)]
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        section = self.section
        check_head(section.address)
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(
                address=section.address,
                namespace=f"areal-{self.folders.run_id}",
                log_to_driver=False,
                configure_logging=False,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            problem = f"the Ray cluster at {section.address} cannot be reached: {first_line(error)}"
            raise RunError(f"{problem}. Is this machine a node of it (`ray start`)?") from error
        finally:
            signal.signal(signal.SIGTERM, handler)  # Ray's handler would end this process with a trace
        self._node = ray.util.get_node_ip_address()
        address = section.home_address or self._node
        self._home = msgspec.structs.replace(self.folders.host, node_id=HOME, address=address)
        self._endpoint = self._hold_port()

    def _hold_port(self) -> str:
        """Reserve a port of this host for this process and its children, and return the endpoint."""
        sock = listen_in(self._home.address, self.section.ports)
        endpoint = f"tcp://{self._home.address}:{sock.getsockname()[1]}"
        self._held[endpoint] = sock
        os.environ[HELD_VARIABLE] = " ".join(f"{name}={each.fileno()}" for name, each in self._held.items())
        return endpoint

    def _keep_here(self, place: ServicePlace) -> ServicePlace:
        endpoints = {served: self._hold_port() for served in served_by(place)}
        self._buffer = endpoints["buffer"]
        fds = [self._held[endpoint].fileno() for endpoint in endpoints.values()]
        self._here = LocalLauncher(self.job, self.folders, pass_fds=fds)
        return msgspec.structs.replace(place, node_id=HOME, status=endpoints["status"])

    def _take_places(self, services: Sequence[ServicePlace]) -> list[ServicePlace]:
        """Create actors for all services at the same time. Raises `RunError`."""
        cancelled = threading.Event()
        with ThreadPoolExecutor(max(1, len(services)), "place") as pool:
            try:
                list(pool.map(lambda place: self._places[place.name].take(cancelled), services))
            except BaseException as error:
                cancelled.set()
                if isinstance(error, RayError):
                    raise RunError(f"the job could not be placed: {first_line(error)}") from error
                raise
        return [self._places[place.name].place for place in services]

    def join(self, place: ServicePlace) -> ServicePlace:
        need = need_of(self.job, place.role)
        self._place(place, need, scheduling_strategy="SPREAD", label_selector=dict(need.labels))
        return place

    def leave(self, name: str) -> None:
        place = self._places.pop(name, None)
        if place is not None and place.actor is not None:
            ending, actor = place.close(), place.actor

            def end() -> None:
                with suppress(RayError):
                    ray.wait([ending], timeout=CLOSE_S)
                    ray.kill(actor)

            threading.Thread(target=end, name=f"end-{name}", daemon=True).start()

    def start(self, place: ServicePlace, *, served_before: bool) -> Child:
        if self._here is not None and place.node_id == HOME:
            return self._here.start(place, served_before=served_before)
        ours, meeting = self._places[place.name], None
        if place.role == "trainer" and self.job.trainer.ranks > 1:
            if place.is_first or self._meeting is None:
                self._meeting = Future()
            meeting = self._meeting
        child = RemoteChild(actor=ours.actor)
        threading.Thread(
            target=ours.live, args=(child, served_before, meeting), name=f"place-{place.name}", daemon=True
        ).start()
        return child

    def is_taken(self, name: str) -> bool:
        return name in self._places

    def publish(self, job: JobConfig, services: list[ServicePlace]) -> Topology:
        self.job = job
        hosts = {place.host.node_id: place.host for place in self._places.values() if place.host is not None}
        topology = Topology(
            self.folders.run_id,
            HOME,
            {HOME: self._home, **hosts},
            services,
            control=self._endpoint,
            buffer=self._buffer or self._endpoint_of("buffer", "buffer"),
            weights=self._endpoint_of("trainer", "weights"),
            job=job.model_dump(mode="json"),
        )
        write_json(self.folders.topology, topology)
        told = with_home_store(with_channel(job, several_hosts=True)).model_dump(mode="json")
        with self._changed:
            self._published = msgspec.structs.replace(topology, job=told)
            self._changed.notify_all()
        return topology

    def tend(self, now_s: float, *, calm: bool) -> list[ServicePlace]:
        with self._changed:
            moved, self._moved = self._moved, []
        return moved

    def close(self) -> None:
        with ExitStack() as ends:  # each step runs, whatever an earlier one raises
            ends.callback(ray.shutdown)
            for sock in self._held.values():
                ends.callback(sock.close)
            ends.callback(os.environ.pop, HELD_VARIABLE, None)
            if self._here is not None:
                ends.callback(self._here.close)
            self._close_places()

    def _close_places(self) -> None:
        closing = [place.close() for place in self._places.values()]
        with suppress(RayError):
            if ends := [ending for ending in closing if ending is not None]:
                ray.wait(ends, num_returns=len(ends), timeout=CLOSE_S)
        for place in self._places.values():
            if place.actor is not None:
                with suppress(RayError):
                    ray.kill(place.actor)
        for group in self._groups:
            with suppress(RayError):
                remove_placement_group(group)

    # --- used by the threads of places ---------------------------------------------------------------

    def refuse_listeners(self, address: str) -> None:
        """Raise `RunError` if the run's keys would be sent unencrypted to a node at `address`."""
        encrypted = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
        if address != self._node and not encrypted and not self.section.trust_network:
            raise RunError(
                f"Ray would carry keys of this run from {self._node} to {address} unencrypted. Start all "
                "nodes and this command with RAY_USE_TLS=1 and certificates (docs/cluster.md), or, where "
                "nobody else can listen in on their network, set ray.trust_network: true in the cluster file"
            )

    def moved(self, place: RayPlace) -> None:
        """Record a new place, which the supervisor gets from `tend`."""
        with self._changed:
            self._moved.append(place.place)

    def published_with(self, place: ServicePlace) -> bytes:
        """Wait until the published topology contains `place`, and return the topology."""

        def says() -> bool:
            return self._published is not None and place in self._published.services

        with self._changed:
            if not self._changed.wait_for(says, PUBLISHED_S):
                raise RunError("its place was not written down")
            return msgspec.json.encode(self._published)

    def environment_of(self, place: ServicePlace, served_before: bool) -> dict[str, str]:
        given = gpu_variables() | {
            name: value
            for name, value in os.environ.items()
            if name.startswith(FORWARDED) and name not in OWN_VARIABLES
        }
        if place.role == "buffer" and (password := self.job.buffer.redis_login.password_env):
            # Reward and workflow code is the user's, so it must not see the buffer's passwords.
            given[password] = os.environ.get(password, "")
        if served_before:
            given[SERVED_VARIABLE] = "1"
        return given | {"OMP_NUM_THREADS": str(thread_count(self.job, place.role))}

    def bring_home(self, sender: str, piece: FileNews) -> None:
        """Append to a file of the run's folder.

        The file must be a log or the events of the process `sender`; otherwise raises ValueError. Raises
        OSError if it cannot be written."""
        if not shipped_by(sender).fullmatch(piece.name):
            raise ValueError(f"the node of {sender} sent {piece.name[:200]!r}, no file of that process")
        with self._files:
            append_beneath(self.folders.run_dir, piece.name, piece.data)

    # --- placing --------------------------------------------------------------------------------------

    def _reserve(self, group: PlacedTogether, needed: str) -> None:
        """Wait for room, then reserve either all places of a group or none. Raises `RunError`."""
        needs = [need_of(self.job, place.role) for place in group.places]
        needs = [need if need.resources else Need({"CPU": LEAST_CPUS}, need.labels) for need in needs]
        labels = [dict(need.labels) for need in needs]
        made = placement_group(
            [dict(need.resources) for need in needs],
            strategy=group.strategy,
            name=f"{self.folders.run_id}-{group.name}",
            bundle_label_selector=labels if any(labels) else None,
        )
        self._groups.append(made)
        begun_s, told_at_s, limit_s = time.monotonic(), 5.0, self.section.place_s
        while not made.wait(LOOK_S):
            waited_s = time.monotonic() - begun_s
            if waited_s <= min(told_at_s, limit_s):
                continue
            nodes = [node["Labels"] for node in ray.nodes() if node["Alive"]]
            free = {name: n for name, n in ray.available_resources().items() if name in BUILT_IN}
            wants = f"the job needs {needed}, and free are {in_words(free) or 'none'}{lacking(needs, nodes)}"
            if waited_s > limit_s:
                raise RunError(
                    f"the cluster had no room for the {group.name} of this job within {limit_s:g} s: "
                    f"{wants}. Wait for other jobs to end, add nodes, or ask for less (`placement`)"
                )
            told_at_s = waited_s + TELL_S
            log.warning("waiting for room on the cluster", group=group.name, needs=needs)
            self._tell(f"{WAITS}, for its {group.name}: {wants}")
        order = [*range(len(needs))]
        if group.name == "trainer":  # all ranks need the same, so each may have any bundle
            nodes = placement_group_table(made)["bundles_to_node_id"]
            order = by_node([nodes[index] for index in order])
        for index, place, need in zip(order, group.places, needs, strict=True):
            strategy = PlacementGroupSchedulingStrategy(
                made, placement_group_bundle_index=index, placement_group_capture_child_tasks=False
            )
            self._place(place, need, scheduling_strategy=strategy)

    def _place(self, place: ServicePlace, need: Need, **options: Any) -> None:
        """Add a place with these options and needs. Its actor is created later."""
        own = need.resources
        options |= {"num_cpus": own.get("CPU", 0), "num_gpus": own.get("GPU", 0), "memory": own.get("memory")}
        options["resources"] = {name: amount for name, amount in own.items() if name not in BUILT_IN}
        self._places[place.name] = RayPlace(self, place, options)

    def _endpoint_of(self, name: str, served: str) -> str:
        place = self._places.get(name)
        return place.endpoints.get(served, "") if place is not None else ""


def runs_at_home(job: JobConfig, place: ServicePlace) -> bool:
    """Return whether a process runs on the home host, because its files must survive the run."""
    return place.role == "buffer" and job.buffer.redis == "embedded"


def first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def _answer(reference: Any, kind: type[T], cancelled: threading.Event | None = None) -> T:
    """Return the result of a call to an actor.

    Raises `Cancelled`, `RayError`, and `RunError` with the error of the call."""
    return answer_of(_wait_for(reference, cancelled), kind)


def _wait_for(reference: Any, cancelled: threading.Event | None) -> Any:
    """Return the referenced value. Waits as long as Ray considers the actor alive, even if the link is cut.

    Raises `Cancelled` and `RayError`."""
    while cancelled is None or not cancelled.is_set():
        done, _ = ray.wait([reference], timeout=LOOK_S)
        if done:
            return ray.get(reference)
    raise Cancelled
