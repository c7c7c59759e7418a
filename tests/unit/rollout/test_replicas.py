"""Several engines behind one face: placement, updates, deaths."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import Any

import pytest

from areal_async.base.errors import RpcTimeout
from areal_async.base.versions import VersionTag
from areal_async.trajectory import Sampling
from rollout_service.engines.base import DeadlinePassed, EngineError, EngineLost
from rollout_service.metrics import EngineMetrics
from rollout_service.replicas import ReplicaGone, replica, replica_set
from rollout_service.worker import Worker
from rollout_service.workflows import PolicyEngine, Renderer, load_workflow
from tests.unit.rollout.fakes import FakeBuffer, LetterTokenizer, eventually, group, job, working
from tests.unit.rollout.fleet import Fleet, Snapshot, driven


def begun(fleet: Fleet) -> int:
    return len(fleet.seen)


async def test_requests_are_spread_and_a_group_stays_together() -> None:
    async with driven(2, capacity=6) as fleet:
        asked = [fleet.ask(f"{g}.{s}", session=f"t{g}#0.{s}") for g in range(2) for s in range(4)]
        await eventually(lambda: begun(fleet) == 8)
        assert {tuple(fleet.where(f"{g}.{s}")) for g in range(2) for s in range(4)} == {(0,), (1,)}
        for g in range(2):
            assert len({fleet.where(f"{g}.{s}")[0] for s in range(4)}) == 1
        # A second turn goes where the first was.
        home = fleet.where("1.3")
        fleet.server(home[0]).answer("1.3")
        await asked[7]
        again = fleet.ask("1.3/1", session="t1#0.3")
        await eventually(lambda: begun(fleet) == 9)
        assert fleet.where("1.3/1") == home
        fleet.let_go()
        await asyncio.gather(*asked, again)


async def test_among_waiting_requests_the_oldest_lease_goes_first() -> None:
    async with driven(capacity=2) as fleet:
        running = await fleet.begin(*(f"r{n}" for n in range(3)))  # two places, one in front
        later = fleet.ask("young", priority=9)
        await asyncio.sleep(0)
        sooner = fleet.ask("old", priority=2)
        await asyncio.sleep(0)
        assert fleet.set.stats().waiting == 1 + 2
        for number, name in ((0, "old"), (1, "young")):
            fleet.server(0).answer(f"r{number}")
            await running[number]
            await eventually(lambda name=name: fleet.where(name) == [0])
        assert [request.priority for request in fleet.server(0).seen] == [0, 0, 0, 2, 9]
        for name in ("r2", "old", "young"):
            fleet.server(0).answer(name)
        await asyncio.gather(*running, sooner, later)


async def test_a_request_that_is_given_up_while_it_waits_takes_no_place() -> None:
    async with driven(capacity=1) as fleet:
        first = await fleet.begin(*(f"r{n}" for n in range(2)))
        gone, stays = fleet.ask("gone"), fleet.ask("stays")
        await asyncio.sleep(0)
        gone.cancel()
        fleet.server(0).answer("r0")
        await eventually(lambda: fleet.where("stays") == [0])
        assert fleet.where("gone") == []
        fleet.server(0).answer("r1")
        fleet.server(0).answer("stays")
        await asyncio.gather(*first, stays)
        assert fleet.set.replicas[0].given == 0


@pytest.mark.parametrize("busy", [False, True])
async def test_a_deadline_holds_in_the_engine_and_before_it(busy: bool) -> None:
    async with driven(capacity=1) as fleet:
        first = [fleet.ask(f"r{n}") for n in range(2)] if busy else []
        await eventually(lambda: begun(fleet) == len(first))
        late = fleet.ask("late", deadline_s=time.monotonic() + 0.02)
        with pytest.raises(DeadlinePassed, match="late"):
            await late
        assert fleet.set.replicas[0].given == len(first)
        assert fleet.set.alive()
        for task in first:
            task.cancel()


# --- updates -------------------------------------------------------------------------------------------


async def test_an_update_reaches_every_replica_and_the_set_serves_the_oldest() -> None:
    async with driven(2) as fleet:
        seen: list[VersionTag] = []
        server, load = fleet.server(0), fleet.server(1).load

        async def loading(snapshot: Any) -> None:
            await load(snapshot)
            seen.append(fleet.set.version)

        fleet.server(1).load = loading  # type: ignore[method-assign]
        stall = await fleet.set.exchange(Snapshot(1))
        assert stall.total_s >= 0
        assert fleet.set.version == VersionTag("policy", 0, 1)
        (shown,) = [
            each for each in EngineMetrics(fleet.set).collect() if each.name == "areal_rollout_version"
        ]
        assert [(one.labels, one.value) for one in shown.samples] == [({"policy": "policy"}, 1)]
        assert server.journal == ["start 0", "pause", "load 1", "resume"]
        fleet.held = False
        results = await asyncio.gather(*(fleet.ask(f"r{n}") for n in range(4)))
        assert {int(result.versions[0]) for result in results} == {1}


async def test_weights_that_do_not_fit_are_an_error_and_the_engines_go_on() -> None:
    async with driven(2) as fleet:
        fleet.misfits.add(1)
        fleet.held = False
        with pytest.raises(EngineError, match="does not fit"):
            await fleet.set.exchange(Snapshot(1))
        assert fleet.set.version.version == 0
        await fleet.ask("r")
        await fleet.set.exchange(Snapshot(2))
        assert fleet.set.version.version == 2


async def test_what_an_engine_serves_is_written_down_before_it_samples_from_it(monkeypatch):
    async with driven(2, started=False) as fleet:

        def write(event: str, *, replica: int, policy: str, epoch: int, version: int) -> None:
            assert (event, policy, epoch) == ("served", "policy", 0)
            fleet.server(replica).journal.append(f"served {version}")

        monkeypatch.setattr(replica, "record", write)
        await fleet.set.start(Snapshot(0))
        await fleet.set.exchange(Snapshot(1))
        for index in range(2):
            journal = fleet.server(index).journal
            assert journal == ["start 0", "served 0", "pause", "load 1", "served 1", "resume"]
        # Nothing is said twice of one that begins again with what it served.
        fleet.server(1).kill()
        watching = asyncio.ensure_future(fleet.set.watch())
        await eventually(lambda: len(fleet.made) == 3 and fleet.set.replicas[1].serves)
        watching.cancel()
        assert fleet.server(1).journal == ["start 1"]
        await fleet.set.exchange(Snapshot(2))
        assert fleet.server(1).journal[1:] == ["pause", "load 2", "served 2", "resume"]


# --- deaths --------------------------------------------------------------------------------------------


async def test_requests_of_a_dead_replica_run_on_another() -> None:
    shares: list[float] = []
    async with driven(2, on_serving=shares.append) as fleet:
        asked = await fleet.begin(*(f"r{n}" for n in range(4)))
        mine = [f"r{n}" for n in range(4) if fleet.where(f"r{n}") == [1]]
        assert len(mine) == 2
        fleet.held = False
        fleet.server(1).kill()
        for name in [f"r{n}" for n in range(4) if f"r{n}" not in mine]:
            fleet.server(0).answer(name)
        await asyncio.gather(*asked)
        assert [fleet.where(name) for name in mine] == [[1, 0], [1, 0]]
        await eventually(lambda: shares == [1.0, 0.5, 1.0])
        await fleet.ask("after")
        assert [server.index for server in fleet.made] == [0, 1, 1]


async def test_requests_wait_for_the_restart_of_the_only_replica() -> None:
    async with driven() as fleet:
        asked = [fleet.ask(f"r{n}", priority=n) for n in range(7)]
        await eventually(lambda: begun(fleet) == 5)
        fleet.held = False
        fleet.server(0).kill()
        results = await asyncio.gather(*asked)
        assert [len(result.token_ids) for result in results] == [1] * 7
        assert len(fleet.made) == 2
        # Nothing is counted twice, and nothing falls.
        assert fleet.set.stats().requests_total == 7


async def test_a_hung_engine_is_noticed_ended_and_replaced() -> None:
    now_s = 0.0

    async with driven(stuck_s=10.0, clock=lambda: now_s, watch_s=0.0) as fleet:
        (asked,) = await fleet.begin("r")
        hung = fleet.server(0)
        for _ in range(2):
            now_s += 4.0
            await fleet.looked()
            assert fleet.server(0) is hung
        now_s += 8.0
        await eventually(lambda: len(fleet.made) == 2)
        assert hung.dead
        fleet.held = False
        await eventually(lambda: fleet.where("r") == [0, 0])
        fleet.server(0).running and fleet.server(0).answer("r")
        await asked


@pytest.mark.parametrize("count", ["tokens", "decoded"])
async def test_an_engine_that_is_idle_or_samples_is_not_stuck(count: str) -> None:
    now_s = 0.0

    async with driven(stuck_s=10.0, clock=lambda: now_s, watch_s=0.0) as fleet:
        for _ in range(5):
            now_s += 4.0
            await fleet.looked()  # idle
        (asked,) = await fleet.begin("r")
        for _ in range(5):
            now_s += 4.0
            setattr(fleet.server(0), count, getattr(fleet.server(0), count) + 1)
            await fleet.looked()
        assert len(fleet.made) == 1
        fleet.server(0).answer("r")
        await asked


async def test_a_restart_takes_the_newest_snapshot_and_catches_up_with_the_set() -> None:
    offered = [RpcTimeout("the trainer restarts"), Snapshot(3), Snapshot(5)]
    held: list[str] = []

    @asynccontextmanager
    async def newest() -> Any:
        snapshot = offered.pop(0)
        if isinstance(snapshot, Exception):
            raise snapshot
        held.append("held")
        yield snapshot
        held.append("let go")

    async with driven(newest=newest, fetch_pause_s=0.001) as fleet:
        await fleet.set.exchange(Snapshot(2))
        fleet.server(0).kill()
        lost = fleet.ask("r")
        await eventually(lambda: not fleet.set.replicas[0].serves)
        assert fleet.set.version.version == 2
        await fleet.set.exchange(Snapshot(4))
        await eventually(lambda: fleet.set.replicas[0].serves)
        # What the set serves was acknowledged, and may be overwritten: it is not read again.
        assert fleet.server(0).journal == ["start 3", "pause", "load 5", "resume"]
        assert held == ["held", "let go"] * 2
        # What it has already is not loaded again.
        await fleet.set.exchange(Snapshot(5))
        assert fleet.server(0).journal[-1] == "resume"
        assert fleet.server(0).journal.count("pause") == 1
        await eventually(lambda: fleet.where("r") == [0])
        fleet.server(0).answer("r")
        await lost


async def test_a_restart_that_fails_lets_go_of_its_snapshot() -> None:
    ends: list[BaseException | None] = []
    offered = [Snapshot(3), Snapshot(3)]

    class Held:
        async def __aenter__(self) -> Any:
            return offered.pop(0)

        async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
            ends.append(error)

    async with driven(newest=Held) as fleet:
        fleet.start_errors.append(EngineError("no memory"))
        fleet.server(0).kill()
        await eventually(lambda: len(ends) == 2 and fleet.set.replicas[0].serves)
        assert ends == [None, None], "the one that failed ended as the one that served"


async def test_a_restart_that_fails_in_an_unknown_way_ends_the_set_with_the_reason() -> None:
    @asynccontextmanager
    async def newest() -> Any:
        raise OSError("no space left")
        yield

    async with driven(newest=newest, watch_s=0.005) as fleet:
        (asked,) = await fleet.begin("r")
        fleet.server(0).kill()
        with pytest.raises(EngineError, match="no space left"):
            await asked
        with pytest.raises(EngineError, match="no space left"):
            await fleet.set.watch()


async def test_an_engine_that_loses_a_request_again_and_again_is_taken_for_dead() -> None:
    async with driven() as fleet:
        asked = fleet.ask("r")
        for tries in range(1, 2 + replica_set.MAX_SENT_AGAIN):
            await eventually(lambda tries=tries: begun(fleet) == tries)
            assert len(fleet.made) == 1
            fleet.server(0).running["r"].set_exception(EngineLost("the connection broke"))
        await eventually(lambda: begun(fleet) == 2 + replica_set.MAX_SENT_AGAIN)
        assert len(fleet.made) == 2
        fleet.server(0).answer("r")
        await asked


async def test_an_engine_that_dies_during_an_update_does_not_stop_it() -> None:
    async with driven(2) as fleet:
        fleet.server(1).kill()
        await fleet.set.exchange(Snapshot(1))
        assert fleet.server(0).version.version == 1
        await eventually(lambda: fleet.set.replicas[1].serves)
        assert fleet.server(1).version.version == 1
        assert len(fleet.made) == 3


async def test_start_failures_after_a_death_count_and_the_last_words_are_told() -> None:
    async with driven() as fleet:
        (waits,) = await fleet.begin("r")
        fleet.start_errors += [EngineError(f"no port (try {n})\nCUDA out of memory") for n in range(9)]
        fleet.server(0).kill()
        with pytest.raises(ReplicaGone, match=r"died 4 times within 300 s[\s\S]*CUDA out of memory"):
            await fleet.set.watch()
        with pytest.raises(ReplicaGone):
            await waits
        with pytest.raises(ReplicaGone):
            await fleet.ask("more")
        assert not fleet.set.alive()
        assert len(fleet.made) == 1 + 3


async def test_an_engine_that_never_served_is_not_tried_again() -> None:
    async with driven(2, started=False) as fleet:
        fleet.start_errors.append(EngineError("no such flag: --oops"))
        with pytest.raises(EngineError, match="--oops"):
            await fleet.set.start(Snapshot(0))
        assert len(fleet.made) == 2


async def test_a_failing_request_of_a_living_engine_is_its_own() -> None:
    async with driven() as fleet:
        (asked,) = await fleet.begin("r")
        fleet.server(0).running["r"].set_exception(EngineError("the engine's step failed"))
        with pytest.raises(EngineError, match="step failed"):
            await asked
        assert len(fleet.made) == 1
        assert fleet.set.replicas[0].serves


async def test_stop_ends_what_runs_and_what_waits() -> None:
    async with driven(capacity=1) as fleet:
        asked = [fleet.ask(f"r{n}") for n in range(5)]
        await eventually(lambda: begun(fleet) == 2)
        await fleet.set.stop()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(result, EngineError) for result in results)


# --- what is told on the way ------------------------------------------------------------------------------


async def test_an_engine_that_is_lost_before_the_first_piece_is_not_noticed() -> None:
    async with driven() as fleet:
        told: list[Any] = []
        asking = fleet.ask("r", told.append)
        await eventually(lambda: fleet.where("r"))
        fleet.server(0).kill()
        await eventually(lambda: len(fleet.where("r")) == 2)
        fleet.let_go()
        assert (told, len((await asking).token_ids)) == ([], 1)


async def test_what_was_told_is_never_told_otherwise_when_the_engine_is_lost() -> None:
    async with driven() as fleet:
        fleet.pieces, told = 2, list[Any]()
        asking = fleet.ask("r", told.append)
        await eventually(lambda: len(told) == 2 and fleet.where("r"))
        fleet.server(0).kill("the server was killed")
        with pytest.raises(EngineError, match=r"2 units .* had been streamed: the server was killed"):
            await asking
        assert fleet.where("r") == [0]
        # The set goes on: the next one is served by a new engine.
        await eventually(lambda: len(fleet.made) == 2)
        fleet.let_go()
        assert len((await fleet.ask("next", told.append)).token_ids) == 1


# --- with a worker around them -------------------------------------------------------------------------


async def test_leases_outlive_the_death_of_the_engine() -> None:
    async with (
        driven() as fleet,
        working(FakeBuffer([group(0, life_ms=60), group(1, life_ms=60)]), engine=fleet.set) as (_, buffer, _),
    ):
        await eventually(lambda: begun(fleet) == 5)
        fleet.start_errors.append(EngineError("not yet"))
        fleet.server(0).kill()
        await eventually(lambda: not fleet.set.replicas[0].serves)
        beats = len(buffer.beats)
        await eventually(lambda: fleet.set.replicas[0].serves)
        await buffer.until(lambda: len(buffer.beats) > beats)
        fleet.let_go()
        await buffer.until(lambda: buffer.whole(0, 1))
    assert buffer.released == {}


async def test_a_worker_whose_engine_is_dead_for_good_ends_with_the_last_words_of_its_server() -> None:
    async with driven() as fleet:
        buffer = FakeBuffer([group(0)])
        voice = PolicyEngine(fleet.set, Renderer(LetterTokenizer()), Sampling())
        worker = Worker(buffer, {"policy": voice}, load_workflow("single_turn"), job=job(), name="rollout-0")
        running = asyncio.ensure_future(worker.run(asyncio.Event(), fleet.set.watch()))
        await eventually(lambda: begun(fleet) == 4)
        fleet.start_errors += [EngineError("it ended. The end of its log:\nno kernel image")] * 9
        fleet.server(0).kill()
        with pytest.raises(ReplicaGone, match="no kernel image") as ending:
            await running
        assert ending.value.restart_helps
        assert list(buffer.released) == ["L0"]
