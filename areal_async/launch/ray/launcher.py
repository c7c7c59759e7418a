"""The launcher of a Ray cluster: Ray decides where each process goes, and notices when a node is gone.

Promises: nothing is started before the whole job has its places; a process whose node is gone is said to be
lost, and its next start asks Ray for another place; what processes append to their logs and events is on the
home host a second later; when `close` has returned, what the buffer's own Redis held lies there too, for a
resume, or stays on its node, where the resume finds it; then, or when this process has died, nothing of the
run is left running on any node.

One thread for each process of the run talks to its actor; the supervisor's never waits for one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from areal_async.base.cache import CACHE_VARIABLE
from areal_async.base.errors import RunError
from areal_async.base.log import get_logger
from areal_async.base.own_files import append_beneath, write_whole
from areal_async.base.processes import INCURABLE_STATUS
from areal_async.base.topology import RunHost, ServicePlace, Topology
from areal_async.config.cluster import RaySection
from areal_async.config.job import JobConfig
from areal_async.launch.buffer_files import BufferNode, forget_at_home, write_confirmed
from areal_async.launch.folders import RunFolders
from areal_async.launch.home_files import with_home_store
from areal_async.launch.launcher import WAITS
from areal_async.launch.plan import thread_count, with_channel
from areal_async.launch.ray.actor import answer_of, new_actor
from areal_async.launch.ray.head import check_head
from areal_async.launch.ray.node_files import HOME, NodeFiles, alive_nodes, first_line
from areal_async.launch.ray.orders import (
    FileNews,
    Placed,
    PlaceOrder,
    ProcessNews,
    ProcessStarted,
    StartOrder,
    pack,
)
from areal_async.launch.ray.placement import Need, PlacedTogether, lacking, need_of, needs_in_words, together
from areal_async.launch.ray.process_host import listen_in, shipped_by
from areal_async.rpc.endpoints import HELD_VARIABLE
from areal_async.service.context import SERVED_VARIABLE

LEAST_CPUS = 0.01  # A place in a group must reserve something
NEWS_S = 1.0
UNHEARD_S = 3 * NEWS_S  # Without an answer of its host for so long, a process may live and not be heard
MEETING_S = 3600.0  # Longest wait of a rank for the first one to have its files and its place
LOOK_S = 0.2
TELL_S = 30.0  # Between two lines that say that a run waits for room
CLOSE_S = 8.0
PUBLISHED_S = 60.0
LOST_STATUS = -9
FORWARDED = ("HF_", "TRANSFORMERS_", "AREAL_ASYNC_", "TOKENIZERS_")
"""Beginnings of the names of variables that processes on other hosts are given as they are here."""
OWN_VARIABLES = frozenset({HELD_VARIABLE, SERVED_VARIABLE, CACHE_VARIABLE})
"""Those that are about one host alone."""

log = get_logger("launcher")


class RemoteChild:
    """A process on a node, as its thread sees it. The supervisor's thread reads."""

    def __init__(self) -> None:
        self.pid_there = 0
        self.report: dict[str, Any] | None = None
        self.status: int | None = None
        self.how_lost = ""
        self.said = bytearray()
        self.answered_s = -UNHEARD_S
        """Time of its host's last answer with what is new."""
        self.kills = 0
        self.cancelled = threading.Event()  # It is to end before it has begun
        self.actor: Any = None
        self.lock = threading.Lock()

    @property
    def pid(self) -> int:
        return self.pid_there

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

    def memory_kills(self) -> int:
        return self.kills

    def terminate(self) -> None:
        self.cancelled.set()
        if self.actor is not None:
            self.actor.terminate.remote()

    def kill(self) -> None:
        self.cancelled.set()
        if self.actor is not None:
            self.actor.kill.remote()

    def close(self) -> None:
        """Nothing is kept here."""


class RayPlace:
    """The place of one process in the cluster, and its actor there."""

    def __init__(self, launcher: RayLauncher, place: ServicePlace, options: Mapping[str, Any]) -> None:
        self.place = place
        self.options = options
        self.host: RunHost | None = None
        self.endpoints: dict[str, str] = {}
        self.actor: Any = None
        self.confirmed = 0
        """Newest revision that the Redis of a buffer is known to have confirmed."""
        self._launcher = launcher
        self._have: dict[str, int] = {}
        self._lives = 0

    def take(self, cancelled: threading.Event) -> bool:
        """Have an actor made, wait until it has a place, and let that be prepared. False when `cancelled`."""
        self._lives += 1
        actor = new_actor(f"{self.place.name}.{self._lives}", dict(self.options))
        try:
            if (there := _wait_for(actor.address.remote(), cancelled)) is not None:
                self._launcher.refuse_listeners(there)
            data = _answer(actor.place.remote(pack(self._launcher.order_for(self.place))), cancelled)
        except BaseException:
            ray.kill(actor)
            raise
        if data is None:
            ray.kill(actor)
            return False
        placed = msgspec.msgpack.decode(data, type=Placed)
        if self.host is None or self.host.node_id != placed.host.node_id:
            if self.host is not None and self._launcher.keeps_files(self.place):
                ray.kill(actor)
                raise RunError(f"the files of its Redis are on {self.host.address}, which was lost")
            self._have = {}
        self.host, self.endpoints, self.actor = placed.host, placed.endpoints, actor
        self.place = msgspec.structs.replace(
            self.place,
            node_id=placed.host.node_id,
            status=placed.endpoints["status"],
            chunks=placed.endpoints.get("chunks", ""),
            gpus_of_its_own=bool(self.options.get("num_gpus")),
        )
        log.info("placed", service=self.place.name, node=placed.host.node_id, address=placed.host.address)
        return True

    def live(self, child: RemoteChild, served_before: bool, meeting: Future[str] | None) -> None:
        """One life of the process, from its start to its end; on a thread of its own."""
        try:
            if self.actor is None:
                if not self.take(child.cancelled):
                    child.status = LOST_STATUS
                    return
                self._launcher.moved(self)
            child.actor = self.actor
            self._start(child, served_before, meeting)
            self._follow(child)
        except RayError as error:
            self._gone(child, f"was lost with its node ({first_line(error)})")
        except Exception as error:
            log.exception("a process could not be placed or started", service=self.place.name)
            self._gone(child, f"could not be started: {error}", status=INCURABLE_STATUS)
        finally:
            if meeting is not None and self.place.is_first and not meeting.done():
                meeting.cancel()

    def close(self, *, keep_buffer: bool = False) -> Any:
        """The reference of the last call to the actor; None where there is none."""
        return self.actor.close.remote(keep_buffer) if self.actor is not None else None

    def _start(self, child: RemoteChild, served_before: bool, meeting: Future[str] | None) -> None:
        where = ""
        if meeting is not None and not self.place.is_first:
            where = meeting.result(MEETING_S)
        order = StartOrder(
            topology=self._launcher.published_with(self.place),
            environment=self._launcher.environment_of(self.place, served_before),
            meets=meeting is not None,
            meeting=where,
        )
        if self._launcher.keeps_files(self.place):
            self._launcher.note_buffer(self)
        # It may take long: the files of a model come first.
        data = _answer(self.actor.start.remote(pack(order)), child.cancelled)
        if data is None:
            raise RunError("it was to end before it had begun")
        started = msgspec.msgpack.decode(data, type=ProcessStarted)
        if self._launcher.keeps_files(self.place):
            forget_at_home(self._launcher.run_dir)
        child.pid_there = started.pid
        if meeting is not None and self.place.is_first:
            meeting.set_result(started.meeting)

    def _follow(self, child: RemoteChild) -> None:
        while True:
            news = self._news(child)
            brought = self._bring_home(news.files)
            with child.lock:
                child.said += news.heard
            child.answered_s = time.monotonic()
            if news.confirmed > self.confirmed:
                self.confirmed = news.confirmed
                with suppress(OSError):  # it is written with the next one
                    self._launcher.note_buffer(self)
            child.kills, child.report = news.memory_kills, news.ready or child.report
            if news.status is not None and not brought:
                child.status = news.status
                return

    def _bring_home(self, files: Sequence[FileNews]) -> bool:
        """Append these pieces to the run's files, and return whether any came. What the disk at home does not
        take comes again."""
        for piece in files:
            try:
                self._launcher.bring_home(self.place.name, piece)
            except OSError as error:
                log.warning("logs do not come home", service=self.place.name, error=str(error))
                time.sleep(NEWS_S)
                return False
            self._have[piece.name] = piece.offset + len(piece.data)
        return bool(files)

    def _news(self, child: RemoteChild) -> ProcessNews:
        """What is new, however long the link to the node is cut: Ray decides when that is dead."""
        have = msgspec.msgpack.encode(self._have)
        while True:
            try:
                asked = self.actor.news.remote(have, NEWS_S, child.report is not None)
                data = _answer(asked, threading.Event())
            except ActorUnavailableError:  # what was heard meanwhile comes again, but for a rank's line
                time.sleep(LOOK_S)
                continue
            assert data is not None
            return msgspec.msgpack.decode(data, type=ProcessNews)

    def _gone(self, child: RemoteChild, how: str, status: int = LOST_STATUS) -> None:
        if self.actor is not None:
            with suppress(Exception):
                ray.kill(self.actor)
        self.actor = None
        if (
            status == LOST_STATUS
            and self.host is not None
            and self._launcher.keeps_files(self.place)
            and not self._launcher.lives(self.host.node_id)
        ):
            how = f"{how}, and with it the files of its Redis, on {self.host.address}"
            status = INCURABLE_STATUS
        child.how_lost, child.status = how, status


class RayLauncher:
    """Starts the processes of one run on the nodes of the cluster that `section` names. `tell` shows a
    person a line of text."""

    def __init__(self, section: RaySection, folders: RunFolders, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._section = section
        self._folders = folders
        self._places: dict[str, RayPlace] = {}
        self._groups: list[PlacementGroup] = []
        self._moved: list[ServicePlace] = []
        self._published: Topology | None = None
        self._changed = threading.Condition()
        self._meeting: Future[str] | None = None
        self._files = threading.Lock()
        self._left = NodeFiles(self.run_dir, tell, self.refuse_listeners)

    def begin(self, job: JobConfig, services: list[ServicePlace]) -> list[ServicePlace]:
        try:
            return self._begin(job, services)
        except BaseException:
            self.close()
            raise

    def _begin(self, job: JobConfig, services: list[ServicePlace]) -> list[ServicePlace]:
        self._job = job
        section = self._section
        check_head(section.address)
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(
                address=section.address,
                namespace=f"areal-{self._folders.run_id}",
                log_to_driver=False,
                configure_logging=False,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            problem = f"the Ray cluster at {section.address} cannot be reached: {first_line(error)}"
            raise RunError(f"{problem}. Is this machine a node of it (`ray start`)?") from error
        finally:
            signal.signal(signal.SIGTERM, handler)  # Ray's would end this process at once, with a trace
        self._node = ray.util.get_node_ip_address()
        address = section.home_address or self._node
        self._control = listen_in(address, section.ports)
        endpoint = f"tcp://{address}:{self._control.getsockname()[1]}"
        os.environ[HELD_VARIABLE] = f"{endpoint}={self._control.fileno()}"
        self._home = msgspec.structs.replace(self._folders.host, node_id=HOME, address=address)
        self._endpoint = endpoint
        self._left.recover(self._folders.topology if job.observe.event_log else None)
        for group in together(services):
            self._reserve(group, needs_in_words(job, services))
        cancelled = threading.Event()
        with ThreadPoolExecutor(max(1, len(services)), "place") as pool:
            try:
                list(pool.map(lambda place: self._places[place.name].take(cancelled), services))
            except RayError as error:
                cancelled.set()
                raise RunError(f"the job could not be placed: {first_line(error)}") from error
            except BaseException:
                cancelled.set()
                raise
        return [self._places[place.name].place for place in services]

    def join(self, place: ServicePlace) -> ServicePlace:
        need = need_of(self._job, place.role)
        self._places[place.name] = RayPlace(
            self,
            place,
            {**_options(need), "scheduling_strategy": "SPREAD", "label_selector": dict(need.labels)},
        )
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

    def start(self, place: ServicePlace, *, served_before: bool) -> RemoteChild:
        child, meeting = RemoteChild(), None
        if place.role == "trainer" and self._job.trainer.ranks > 1:
            if place.is_first or self._meeting is None:
                self._meeting = Future()
            meeting = self._meeting
        ours = self._places[place.name]
        child.actor = ours.actor
        threading.Thread(
            target=ours.live, args=(child, served_before, meeting), name=f"place-{place.name}", daemon=True
        ).start()
        return child

    def is_taken(self, name: str) -> bool:
        return name in self._places

    def publish(self, job: JobConfig, services: list[ServicePlace]) -> Topology:
        self._job = job
        placed = [place for place in self._places.values() if place.host is not None]
        topology = Topology(
            self._folders.run_id,
            HOME,
            {HOME: self._home, **{p.host.node_id: p.host for p in placed if p.host is not None}},
            services,
            control=self._endpoint,
            buffer=self._endpoint_of("buffer", "buffer"),
            weights=self._endpoint_of("trainer", "weights"),
            job=job.model_dump(mode="json"),
        )
        write_whole(self._folders.topology, msgspec.json.format(msgspec.json.encode(topology)))
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
        keep = not self._keep_buffer()
        closing = (place.close(keep_buffer=keep) for place in self._places.values())
        ends = [ending for ending in closing if ending is not None]
        with suppress(RayError):
            if ends:
                ray.wait(ends, num_returns=len(ends), timeout=CLOSE_S)
        for place in self._places.values():
            if place.actor is not None:
                with suppress(RayError):
                    ray.kill(place.actor)
        for group in self._groups:
            with suppress(RayError):
                remove_placement_group(group)
        os.environ.pop(HELD_VARIABLE, None)
        ray.shutdown()

    # --- what the threads of places ask --------------------------------------------------------------

    def refuse_listeners(self, address: str) -> None:
        """Raise `RunError` where the keys of the run would go to a node at `address` in the clear."""
        encrypted = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
        if address != self._node and not encrypted and not self._section.trust_network:
            raise RunError(
                f"Ray would carry keys of this run from {self._node} to {address} unencrypted. Start all "
                "nodes and this command with RAY_USE_TLS=1 and certificates (docs/cluster.md), or, where "
                "nobody else can listen in on their network, set ray.trust_network: true in the cluster file"
            )

    def order_for(self, place: ServicePlace) -> PlaceOrder:
        return PlaceOrder(
            self._folders.run_id,
            place,
            self._folders.secret.of(place.role),
            self._section.ports,
        )

    def moved(self, place: RayPlace) -> None:
        """It has a place that the supervisor does not know of yet."""
        with self._changed:
            self._moved.append(place.place)

    def published_with(self, place: ServicePlace) -> bytes:
        """The topology, once it says where `place` is."""

        def says() -> bool:
            return self._published is not None and place in self._published.services

        with self._changed:
            if not self._changed.wait_for(says, PUBLISHED_S):
                raise RunError("its place was not written down")
            return msgspec.json.encode(self._published)

    def environment_of(self, place: ServicePlace, served_before: bool) -> dict[str, str]:
        given = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(FORWARDED) and name not in OWN_VARIABLES
        }
        if place.role == "buffer" and (password := self._job.buffer.redis_login.password_env):
            # Reward and workflow code is a user's: it has no business with the buffer's passwords.
            given[password] = os.environ.get(password, "")
        if served_before:
            given[SERVED_VARIABLE] = "1"
        return given | {"OMP_NUM_THREADS": str(thread_count(self._job, place.role))}

    def bring_home(self, sender: str, piece: FileNews) -> None:
        """Append to a file of the run's folder. Raises OSError, and ValueError unless it is a log of the
        process `sender`, or its events."""
        if not shipped_by(sender).fullmatch(piece.name):
            raise ValueError(f"the node of {sender} sent {piece.name[:200]!r}, no file of that process")
        with self._files:
            append_beneath(self.run_dir, piece.name, piece.data)

    def keeps_files(self, place: ServicePlace) -> bool:
        """Whether what this process needs lies on its node alone."""
        return place.role == "buffer" and self._job.buffer.redis == "embedded"

    def lives(self, node_id: str) -> bool:
        """Return whether Ray takes this node for alive."""
        with suppress(RayError):
            return any(node["NodeID"].startswith(node_id) for node in alive_nodes())
        return False

    def note_buffer(self, place: RayPlace) -> None:
        """Write down how much the buffer's Redis has confirmed and, of its own one, where the files are."""
        if not self.keeps_files(place.place):
            write_confirmed(self.run_dir, place.confirmed)
        elif (host := place.host) is not None:
            BufferNode(host.node_id, host.address, host.run_dir, place.confirmed).write(self.run_dir)

    @property
    def run_dir(self) -> Path:
        """Folder of the run, at home."""
        return self._folders.run_dir

    def _keep_buffer(self) -> bool:
        """Bring the files of the buffer's own Redis home for a resume, and return whether they came."""
        place = self._places.get("buffer")
        if place is None or place.actor is None or not self.keeps_files(place.place):
            return True
        return self._left.keep(place.actor)

    # --- placing --------------------------------------------------------------------------------------

    def _reserve(self, group: PlacedTogether, needed: str) -> None:
        """Reserve the places of a group, all or none, waiting for room. Raises `RunError`."""
        needs = [need_of(self._job, place.role) for place in group.places]
        bundles = [dict(need.resources) or {"CPU": LEAST_CPUS} for need in needs]
        labels = [dict(need.labels) for need in needs]
        made = placement_group(
            bundles,
            strategy=group.strategy,
            name=f"{self._folders.run_id}-{group.name}",
            bundle_label_selector=labels if any(labels) else None,
        )
        self._groups.append(made)
        begun_s, told_at_s = time.monotonic(), 5.0
        while not made.wait(LOOK_S):
            waited_s = time.monotonic() - begun_s
            if waited_s <= min(told_at_s, self._section.place_s):
                continue
            nodes = [node["Labels"] for node in ray.nodes() if node["Alive"]]
            wants = f"the job needs {needed}, and free are {_free()}{lacking(needs, nodes)}"
            if waited_s > self._section.place_s:
                raise RunError(
                    f"the cluster had no room for the {group.name} of this job within "
                    f"{self._section.place_s:g} s: {wants}. Wait for other jobs to end, add nodes, or ask "
                    "for less (`placement`)"
                )
            told_at_s = waited_s + TELL_S
            log.warning("waiting for room on the cluster", group=group.name, needs=bundles)
            self._tell(f"{WAITS}, for its {group.name}: {wants}")
        for index, (place, need) in enumerate(zip(group.places, needs, strict=True)):
            strategy = PlacementGroupSchedulingStrategy(
                made, placement_group_bundle_index=index, placement_group_capture_child_tasks=False
            )
            least = need if need.resources else Need({"CPU": LEAST_CPUS}, {})
            options = {**_options(least), "scheduling_strategy": strategy}
            self._places[place.name] = RayPlace(self, place, options)

    def _endpoint_of(self, name: str, served: str) -> str:
        place = self._places.get(name)
        return place.endpoints.get(served, "") if place is not None else ""


def _options(need: Need) -> dict[str, Any]:
    """The options of an actor that takes what is needed."""
    custom = {n: amount for n, amount in need.resources.items() if n not in ("CPU", "GPU", "memory")}
    cpus, gpus = need.resources.get("CPU", 0), need.resources.get("GPU", 0)
    memory = need.resources.get("memory")
    return {"num_cpus": cpus, "num_gpus": gpus, "memory": memory, "resources": custom}


def _answer(reference: Any, cancelled: threading.Event) -> bytes | None:
    """What a call to an actor comes to, None when `cancelled`. Raises `RayError`, and `RunError` with what
    the call failed with."""
    answer = _wait_for(reference, cancelled)
    return None if answer is None else answer_of(answer)


def _wait_for(reference: Any, cancelled: threading.Event) -> Any:
    """What is referred to, however long the link is cut, as long as Ray takes the actor for alive; None when
    `cancelled`."""
    while not cancelled.is_set():
        done, _ = ray.wait([reference], timeout=LOOK_S)
        if done:
            return ray.get(reference)
    return None


def _free() -> str:
    free = ray.available_resources()
    shown = {name: amount for name, amount in free.items() if name in ("CPU", "GPU", "memory")}
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(shown.items())) or "none"
