"""A service answers how it is, whatever its own loop is busy with."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from areal_async.base.errors import ArealError, PeerGone, RpcTimeout
from areal_async.base.log import get_logger
from areal_async.base.loop_thread import LoopThread
from areal_async.base.metrics import busy
from areal_async.launch.monitor import StatusClients
from areal_async.rpc.board import StatusBoard
from areal_async.rpc.control_messages import ServiceFigures
from areal_async.service.control import answer_status
from tests.contexts import context_for_test
from tests.waiting import LIMIT_S


@pytest.fixture
def ctx(job, tmp_path):
    return context_for_test(job, tmp_path, "rollout", "rollout-0")


async def ask(ctx, name="rollout-0"):
    clients = StatusClients(lambda: ctx.topology, ctx.job.job, ctx.keys)
    try:
        return await asyncio.wait_for(clients.ask(name), LIMIT_S)
    finally:
        await clients.close()


async def test_a_service_says_its_state_its_figures_and_its_newest_notice(ctx):
    said = StatusBoard()
    said.figures = lambda: ServiceFigures(version=3)
    answer_status(ctx, said)
    before = await ask(ctx)
    assert (before.name, before.state, before.figures.version) == ("rollout-0", "starting", 3)
    ctx.ready()
    with busy("status_test"):
        get_logger("test").warning("the disk is full", reason="of logs", other=3)
        get_logger("test").info("nothing to be told of")
        after = await ask(ctx)
    assert after.state == "serving"
    assert (after.notice, after.notices) == ("the disk is full (of logs)", before.notices + 1)
    assert after.busy_s["status_test"] >= 0


async def test_a_service_whose_thread_is_held_up_answers(ctx):
    answer_status(ctx, StatusBoard())
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(asyncio.run, ask(ctx))
        assert answer.result(LIMIT_S).name == "rollout-0", "this loop stands still meanwhile"


def test_torch_computes_with_as_many_threads_as_a_service_was_told(ctx):
    import torch

    board = StatusBoard()
    answer_status(ctx, board)
    before = torch.get_num_threads()

    async def tell(threads):
        clients = StatusClients(lambda: ctx.topology, ctx.job.job, ctx.keys)
        await clients.ask(ctx.name, threads)
        await clients.close()

    try:
        for told, expected in ((0, before), (before + 2, before + 2), (0, before + 2)):
            asyncio.run(tell(told))
            board.follow_threads()
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_what_is_waited_for_and_a_drain_are_said_as_long_as_they_are():
    said = StatusBoard()
    said.waits("trainer", "the first snapshot")
    said.waits("server", "its SGLang server to load")
    both = {"trainer": "the first snapshot", "server": "its SGLang server to load"}
    assert said.status("rollout-0", serves=False).waiting_for == both
    said.waits("trainer", "")
    assert said.status("rollout-0", serves=True).waiting_for == {"server": both["server"]}

    said.draining = True
    assert said.status("rollout-0", serves=True).state == "draining"


async def test_a_service_says_its_series_as_they_are_now_and_one_that_left_says_nothing(ctx):
    answer_status(ctx, StatusBoard())
    clients = StatusClients(lambda: ctx.topology, ctx.job.job, ctx.keys)
    try:
        for _ in range(2):
            with busy("series_test"):
                text = await clients.metrics(ctx.name)
        assert b'areal_busy_seconds_total{activity="series_test"}' in text
        with pytest.raises((ArealError, TimeoutError)):
            await clients.metrics("rollout-7")
        with pytest.raises(KeyError):
            await clients.metrics("../buffer")
    finally:
        await clients.close()


async def test_a_scrape_whose_time_is_over_leaves_the_status_in_flight_alone(ctx, monkeypatch):
    answer_status(ctx, StatusBoard())
    monkeypatch.setattr("areal_async.launch.monitor.SCRAPE_S", 0.0)
    clients = StatusClients(lambda: ctx.topology, ctx.job.job, ctx.keys)
    try:
        asking = asyncio.create_task(clients.ask(ctx.name))
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await clients.metrics(ctx.name)
        assert (await asking).name == ctx.name
    finally:
        await clients.close()


@pytest.mark.parametrize("on_loop", [True, False])
def test_a_thread_that_hangs_does_not_keep_its_loop_from_closing(monkeypatch, on_loop):
    monkeypatch.setattr("areal_async.base.loop_thread.CLOSE_S", 0.1)
    hangs, hung = threading.Event(), LoopThread("hung")

    async def hang():
        hangs.wait()

    hung.begin(hang() if on_loop else asyncio.to_thread(hangs.wait))
    try:
        hung.close()
        assert not hangs.is_set()
    finally:
        hangs.set()


async def test_nobody_at_the_endpoint_is_an_error(ctx):
    with pytest.raises((RpcTimeout, PeerGone)):
        await ask(ctx, "rollout-7")
