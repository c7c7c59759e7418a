"""Lanes: scored work passes a flood of puts, which is bounded, and is not starved in its turn."""

import asyncio
from collections import Counter

from areal_async.rpc.client import Client
from areal_async.rpc.lanes import Lane, Lanes
from areal_async.rpc.messages import Claim, Claims, GroupSamples, PutAck, PutEpisodes, StoredGroup
from areal_async.rpc.schema import Message
from areal_async.rpc.server import Answer, Peer
from tests.unit.rpc.peers import client_of, serving
from tests.waiting import until


def begun(lanes: Lanes[int], count: int) -> list[str]:
    taken = [lanes.pop() for _ in range(count)]
    return [each[0] for each in taken if each is not None]


def test_a_lane_that_waits_gets_its_share_whatever_waits_in_the_others() -> None:
    lanes = Lanes[int]({"put": Lane(1), "score": Lane(4)})
    for number in range(100):
        lanes.push("put", number)
    assert begun(lanes, 3) == ["put"] * 3
    for number in range(100):
        lanes.push("score", number)
    assert begun(lanes, 1) == ["score"]
    assert Counter(begun(lanes, 50)) == {"score": 40, "put": 10}


def test_a_lane_keeps_the_order_of_arrival() -> None:
    lanes = Lanes[int]({"put": Lane(1), "score": Lane(2)})
    for number in range(6):
        lanes.push("put" if number % 2 else "score", number)
    taken = [lanes.pop() for _ in range(6)]
    assert [n for lane, n in filter(None, taken) if lane == "put"] == [1, 3, 5]
    assert [n for lane, n in filter(None, taken) if lane == "score"] == [0, 2, 4]
    assert lanes.pop() is None


def test_a_lane_is_bounded_in_requests_and_in_bytes() -> None:
    lanes = Lanes[int]({"put": Lane(1, most_waiting=2), "large": Lane(1, most_bytes=100)})
    assert [lanes.push("put", n) for n in range(3)] == [True, True, False]
    assert [lanes.push("large", n, size) for n, size in enumerate((150, 1))] == [True, False]
    assert len(lanes) == 3


def test_no_more_run_than_may_at_once() -> None:
    lanes = Lanes[int]({"put": Lane(1, most_running=2)})
    for number in range(3):
        lanes.push("put", number)
    assert begun(lanes, 3) == ["put", "put"]
    lanes.done("put")
    assert begun(lanes, 1) == ["put"]


def test_what_had_nothing_to_do_does_not_come_back_with_all_the_turns_it_missed() -> None:
    lanes = Lanes[int]({"a": Lane(1), "b": Lane(1)})
    for number in range(100):
        lanes.push("a", number)
    begun(lanes, 50)
    for number in range(50):
        lanes.push("b", number)
    assert Counter(begun(lanes, 20)) == {"a": 10, "b": 10}


class Putting:
    """Puts that wait until they are let go; claims that are answered at once."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.begun, self.go = asyncio.Semaphore(0), asyncio.Event()

    async def __call__(self, peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
        self.order.append(type(message).__name__)
        if isinstance(message, Claim):
            return Claims([])
        self.begun.release()
        await self.go.wait()
        return PutAck([StoredGroup([0])], "memory")


def lane_of(request: Message) -> str:
    return "score" if isinstance(request, Claim) else "put"


def put(client: Client) -> asyncio.Task[PutAck]:
    request = PutEpisodes([GroupSamples("l", "g", [0])])
    return asyncio.create_task(client.call(request, attachments=[b"x"], timeout_s=10.0))


async def test_a_claim_passes_the_puts_that_wait(ipc):
    puts, lanes = Putting(), {"put": Lane(1, most_running=1), "score": Lane(4)}
    async with serving(ipc, puts, lanes=Lanes(lanes, lane_of)), client_of(ipc) as worker:
        waiting = [put(worker) for _ in range(5)]
        await puts.begun.acquire()
        async with client_of(ipc, name="m") as scorer:
            await scorer.call(Claim("s", 1), timeout_s=60)
        assert puts.order == ["PutEpisodes", "Claim"]
        puts.go.set()
        assert len(await asyncio.gather(*waiting)) == 5


async def test_a_full_lane_answers_busy_and_what_comes_again_is_answered(ipc):
    puts, lanes = Putting(), {"put": Lane(1, most_running=1, most_waiting=1), "score": Lane(4)}
    async with serving(ipc, puts, lanes=Lanes(lanes, lane_of)) as server, client_of(ipc) as worker:
        waiting = [put(worker) for _ in range(5)]
        await until(lambda: server.counters["busy"] >= 3, "three refused calls")
        puts.go.set()
        assert len(await asyncio.gather(*waiting)) == 5
