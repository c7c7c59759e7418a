"""Workers are renewed between calls: their code has changed, they have run enough, or grown too much."""

import asyncio
import os
import time

import pytest
from prometheus_client import REGISTRY

from areal_async.rpc.verdicts import Failure, Score
from reward_service.crew import Limits
from reward_service.pool import Pool
from reward_service.sdk import RewardInput, RewardLoadError
from reward_service.spec import RewardSpec

HEAD = "import os, time\nfrom reward_service.sdk import reward\n"
LIMIT_S = 30.0


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
    verdicts, done = [], asyncio.Event()

    def take(index, of_call, elapsed_ms):
        verdicts.append(of_call[0])
        if len(verdicts) == n:
            done.set()

    await pool.submit([RewardInput(extra_info=extra)] * n, take)
    async with asyncio.timeout(LIMIT_S):
        await done.wait()
    return verdicts


async def until(pool, holds):
    """Ask until the verdict is as wanted, and return all that came before it."""
    before = []
    async with asyncio.timeout(LIMIT_S):
        while not holds(verdict := (await ask(pool))[0]):
            before.append(verdict)
            await asyncio.sleep(0)  # a refusal comes at once
    return before


def counted(name, **labels):
    return REGISTRY.get_sample_value(name, labels) or 0.0


def serve(path, drive, workers=2, **limits):
    async def run():
        async with Pool([RewardSpec(f"{path}:f")], workers=workers, limits=Limits(**limits)) as pool:
            return await drive(pool)

    return asyncio.run(run())


def test_a_changed_file_is_taken_between_calls_and_no_call_is_lost(file):
    path = file("return 1.0")
    taken = counted("areal_reward_reloads_total", reward="mine.py:f", outcome="taken")

    async def drive(pool):
        assert await ask(pool, 50) == [Score(1.0)] * 50
        file("return 2.0")
        before = await until(pool, lambda verdict: verdict == Score(2.0))
        assert set(map(type, before)) <= {Score}
        # Not one call is begun under the old version once one was under the new.
        return await ask(pool, 200)

    assert serve(path, drive) == [Score(2.0)] * 200
    assert counted("areal_reward_reloads_total", reward="mine.py:f", outcome="taken") == taken + 1


def test_a_call_under_way_ends_under_the_version_it_began_with(file, tmp_path):
    path = file("time.sleep(given.extra_info.get('seconds', 0)); return 1.0")

    async def drive(pool):
        slow = asyncio.create_task(ask(pool, seconds=3.0))
        await ask(pool)
        file("return 2.0")
        await until(pool, lambda verdict: verdict == Score(2.0))
        assert not slow.done()
        return await slow

    assert serve(path, drive, workers=2) == [Score(1.0)]


@pytest.mark.parametrize(
    "broken",
    ["def f(:\n", "raise RuntimeError\n", "import os\nos._exit(3)\n", "x = 1\n", ""],
    ids=["syntax", "raises", "dies", "no function", "empty"],
)
def test_a_version_that_does_not_load_changes_nothing_and_says_so(file, tmp_path, caplog, broken):
    path = file("return 1.0")
    refused = counted("areal_reward_reloads_total", reward="mine.py:f", outcome="refused")

    async def drive(pool):
        path.write_text(broken)
        async with asyncio.timeout(LIMIT_S):
            while not [r for r in caplog.records if "cannot be loaded" in r.message]:
                assert await ask(pool) == [Score(1.0)]
        # A worker that dies now is started again with the version that is in use.
        assert await ask(pool, 20) == [Score(1.0)] * 20
        file("return 3.0")
        await until(pool, lambda verdict: verdict == Score(3.0))

    serve(path, drive, workers=1)
    assert counted("areal_reward_reloads_total", reward="mine.py:f", outcome="refused") == refused + 1


@pytest.fixture
def importing(file, tmp_path):
    """A reward that returns what a package beside it holds: its path, and how to write the package's file."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("")

    def write(value):
        (tmp_path / "parts" / "value.py").write_text(f"VALUE = {value}\n")

    write(1.0)
    return file(DYING_OF_VALUE, f"{HEAD}from parts.value import VALUE\n"), write


DYING_OF_VALUE = "os._exit(1) if given.extra_info.get('die') else None; return VALUE"


def test_a_changed_import_of_the_file_is_taken_too(importing, file, caplog):
    path, write = importing
    taken = counted("areal_reward_reloads_total", reward="mine.py:f", outcome="taken")

    async def drive(pool):
        assert await ask(pool, 20) == [Score(1.0)] * 20
        write(2.0)
        before = await until(pool, lambda verdict: verdict == Score(2.0))
        assert all(verdict == Score(1.0) for verdict in before)
        assert await ask(pool, 100) == [Score(2.0)] * 100
        write("")
        async with asyncio.timeout(LIMIT_S):
            while not [r for r in caplog.records if "cannot be loaded" in r.message]:
                assert await ask(pool) == [Score(2.0)]
        write(3.0)
        await until(pool, lambda verdict: verdict == Score(3.0))
        (path.parent / "parts" / "value.py").unlink()
        file("return 4.0")
        await until(pool, lambda verdict: verdict == Score(4.0))

    serve(path, drive)
    assert counted("areal_reward_reloads_total", reward="mine.py:f", outcome="taken") == taken + 3


def test_a_worker_that_dies_comes_back_with_the_imports_in_use(importing):
    path, write = importing

    async def drive(pool):
        write("")
        [died] = await ask(pool, die=True)
        assert isinstance(died, Failure)
        return await ask(pool, 5)

    assert serve(path, drive, workers=1, reload=False) == [Score(1.0)] * 5


def test_a_worker_that_dies_comes_back_with_the_version_in_use(file):
    path = file("os._exit(1) if given.extra_info.get('die') else None; return 1.0")

    async def drive(pool):
        path.unlink()
        [died] = await ask(pool, die=True)
        assert isinstance(died, Failure)
        return await ask(pool, 5)

    assert serve(path, drive, workers=1) == [Score(1.0)] * 5


FRAGILE = HEAD + "if os.path.exists(__file__ + '.bad'): raise RuntimeError('half saved')\n"
DYING = "os._exit(1) if given.extra_info.get('die') else None; return 1.0"


def test_a_reward_that_fails_once_to_load_again_is_tried_again(file, caplog):
    path = file(DYING, FRAGILE)
    bad = path.with_name("mine.py.bad")

    async def drive(pool):
        bad.touch()
        await ask(pool, die=True)
        async with asyncio.timeout(LIMIT_S):
            while len([r for r in caplog.records if "is tried again" in r.message]) < 2:
                assert await ask(pool) == [Score(1.0)]
            bad.unlink()
            while pool.alive < 2:
                assert await ask(pool) == [Score(1.0)]
        return pool.broken.done()

    assert serve(path, drive, workers=2) is False


def test_a_good_version_brings_back_a_reward_that_was_given_up(file, monkeypatch):
    monkeypatch.setattr("reward_service.crew.RELOAD_LIMIT_S", 0.0)
    path = file(DYING, FRAGILE)

    async def run():
        async with Pool([RewardSpec(f"{path}:f")], workers=1, strict=False) as pool:
            path.with_name("mine.py.bad").touch()
            await ask(pool, die=True)
            await until(pool, lambda verdict: isinstance(verdict, Failure) and verdict.kind == "load")
            file("return 2.0")
            await until(pool, lambda verdict: verdict == Score(2.0))
            return await ask(pool, 5)

    assert asyncio.run(run()) == [Score(2.0)] * 5


def test_without_reload_the_version_of_the_start_stays(file):
    path = file("os._exit(1) if given.extra_info.get('die') else None; return 1.0")

    async def drive(pool):
        file("return 2.0")
        await ask(pool, die=True)
        return await ask(pool, 5)

    assert serve(path, drive, workers=1, reload=False) == [Score(1.0)] * 5


def test_an_edit_within_the_same_second_and_of_the_same_length_is_seen(file):
    path = file("return 1.0")

    async def drive(pool):
        file("return 2.0")
        await until(pool, lambda verdict: verdict == Score(2.0))
        file("return 3.0")
        await until(pool, lambda verdict: verdict == Score(3.0))

    serve(path, drive, workers=1)


def test_workers_are_renewed_after_so_many_calls_and_no_call_is_lost(file, monkeypatch):
    monkeypatch.setattr("reward_service.crew.HOUSEKEEPING_S", 0.05)
    path = file("return float(os.getpid())")
    renewed = counted("areal_reward_workers_renewed_total", reason="calls")

    async def drive(pool):
        processes = set()
        async with asyncio.timeout(LIMIT_S):
            while len(processes) < 4:
                processes |= {verdict.value for verdict in await ask(pool, 30)}
        return processes

    assert len(serve(path, drive, workers=1, recycle_calls=50)) >= 4
    assert counted("areal_reward_workers_renewed_total", reason="calls") >= renewed + 3


def test_a_worker_that_grows_is_renewed_between_calls(file, monkeypatch):
    monkeypatch.setattr("reward_service.crew.HOUSEKEEPING_S", 0.05)
    head = HEAD + "KEPT = []\n"
    grow = "if len(KEPT) < 40: KEPT.append(bytearray(4 << 20))\n    "
    path = file(f"{grow}return float(os.getpid())", head)

    async def drive(pool):
        processes = set()
        async with asyncio.timeout(LIMIT_S):
            while len(processes) < 3:
                [verdict] = await ask(pool)
                assert isinstance(verdict, Score)
                processes.add(verdict.value)

    serve(path, drive, workers=1, memory_bytes=200 << 20)


def test_a_call_that_takes_too_much_memory_is_ended_and_is_the_only_one_to_pay(file):
    bomb = "x = []\n    while given.extra_info.get('bomb'): x.append(bytearray(4 << 20)); time.sleep(0.01)\n"
    path = file(bomb + "    return 1.0")

    async def drive(pool):
        hit = asyncio.create_task(ask(pool, bomb=True))
        others = await ask(pool, 20)
        return await hit, others, await ask(pool, 20)

    [hit], others, after = serve(path, drive, workers=2, memory_bytes=200 << 20)
    assert hit.kind == "process_died"
    assert "reward.worker_memory_mb = 200" in hit.message
    assert others == after == [Score(1.0)] * 20


def test_a_reward_that_is_larger_than_the_limit_once_loaded_does_not_load(file):
    path = file("return 1.0", HEAD + "BIG = bytearray(os.urandom(1)) * (150 << 20)\n")

    async def drive(pool):
        return None

    with pytest.raises(RewardLoadError, match=r"reward\.worker_memory_mb"):
        serve(path, drive, workers=1, memory_bytes=100 << 20)


def test_the_pool_says_how_many_workers_are_busy(file):
    path = file("time.sleep(given.extra_info.get('seconds', 0)); return 1.0")

    async def drive(pool):
        assert (pool.busy, pool.alive, pool.queued) == (0, 2, 0)
        slow = asyncio.create_task(ask(pool, 6, seconds=0.3))
        async with asyncio.timeout(LIMIT_S):
            while pool.busy < 2:
                await asyncio.to_thread(time.sleep, 0.001)
        assert pool.queued > 0
        await slow
        return pool.busy

    assert serve(path, drive) == 0
    assert os.path.exists(path)
