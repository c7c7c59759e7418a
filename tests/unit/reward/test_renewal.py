"""Workers are renewed between calls: they have run enough, or grown too much; and started again."""

import asyncio

import pytest
from prometheus_client import REGISTRY

from areal_async.base.verdicts import Failure, Score
from areal_async.config.reward_routing import RewardSpec
from reward_service.pool.pool import WorkerPool
from reward_service.pool.workers import WorkerLimits
from reward_service.sdk import RewardInput, RewardLoadError
from tests.scoring import verdicts_of
from tests.waiting import deadline_s, until

HEAD = "import os, time\nfrom reward_service.sdk import reward\n"
LIMIT_S = deadline_s(300)


@pytest.fixture
def file(tmp_path):
    """Write the body of the reward `f(given)`; returns its path."""

    def write(body, head=HEAD):
        path = tmp_path / "mine.py"
        unfinished = tmp_path / "mine.tmp"
        unfinished.write_text(f"{head}@reward\ndef f(given):\n    {body}\n")
        unfinished.replace(path)
        return path

    return write


async def ask(pool, n=1, **extra):
    """The verdicts on `n` calls."""
    return await verdicts_of(pool.submit, [RewardInput(extra_info=extra)] * n)


def pool_of(path, workers=2, **limits):
    return WorkerPool([RewardSpec(f"{path}:f")], workers=workers, limits=WorkerLimits(look_s=0.05, **limits))


FRAGILE = HEAD + "if os.path.exists(__file__ + '.bad'): raise RuntimeError('half saved')\n"
DYING = "os._exit(1) if given.extra_info.get('die') else None; return 1.0"


async def test_a_reward_that_fails_once_to_load_again_is_tried_again(file, caplog):
    path = file(DYING, FRAGILE)
    bad = path.with_name("mine.py.bad")
    async with pool_of(path) as pool:
        bad.touch()
        await ask(pool, die=True)
        async with asyncio.timeout(LIMIT_S):
            while len([r for r in caplog.records if "is tried again" in r.message]) < 2:
                assert await ask(pool) == [Score(1.0)]
            bad.unlink()
            while pool.alive < 2:
                assert await ask(pool) == [Score(1.0)]
        assert not pool.broken.done()


@pytest.mark.parametrize("changed", [True, False], ids=["changed", "deleted"])
async def test_a_worker_that_dies_comes_back_with_the_version_of_the_start(file, changed):
    path = file(DYING)
    async with pool_of(path, workers=1) as pool:
        file("return 2.0") if changed else path.unlink()
        [died] = await ask(pool, die=True)
        assert isinstance(died, Failure)
        assert await ask(pool, 5) == [Score(1.0)] * 5


async def test_a_worker_that_grows_is_renewed_between_calls(file):
    head = HEAD + "KEPT = []\n"
    grow = "if len(KEPT) < 40: KEPT.append(bytearray(4 << 20))\n    "
    path = file(f"{grow}return float(os.getpid())", head)
    renewed = REGISTRY.get_sample_value("areal_reward_workers_renewed_total")
    processes = set()
    async with pool_of(path, workers=1, memory_bytes=200 << 20) as pool:
        async with asyncio.timeout(LIMIT_S):
            while len(processes) < 3:
                [verdict] = await ask(pool)
                assert isinstance(verdict, Score)
                processes.add(verdict.value)
    assert REGISTRY.get_sample_value("areal_reward_workers_renewed_total") >= renewed + 2


async def test_a_call_that_takes_too_much_memory_is_ended_and_is_the_only_one_to_pay(file):
    bomb = "x = []\n    while given.extra_info.get('bomb'): x.append(bytearray(4 << 20)); time.sleep(0.01)\n"
    async with pool_of(file(bomb + "    return 1.0"), memory_bytes=200 << 20) as pool:
        hitting = asyncio.create_task(ask(pool, bomb=True))
        others = await ask(pool, 20)
        [hit] = await hitting
        after = await ask(pool, 20)
    assert hit.kind == "process_died"
    assert "reward.worker_memory_mb = 200" in hit.message
    assert others == after == [Score(1.0)] * 20


async def test_a_reward_that_is_larger_than_the_limit_once_loaded_does_not_load(file):
    path = file("return 1.0", HEAD + "BIG = bytearray(os.urandom(1)) * (150 << 20)\n")
    with pytest.raises(RewardLoadError, match=r"reward\.worker_memory_mb"):
        await pool_of(path, workers=1, memory_bytes=100 << 20).__aenter__()


async def test_the_pool_says_how_many_workers_are_busy(file):
    async with pool_of(file("time.sleep(given.extra_info.get('seconds', 0)); return 1.0")) as pool:
        assert (pool.busy, pool.alive, pool.queued) == (0, 2, 0)
        slow = asyncio.create_task(ask(pool, 6, seconds=0.3))
        await until(lambda: pool.busy == 2)
        assert pool.queued > 0
        await slow
        assert pool.busy == 0
