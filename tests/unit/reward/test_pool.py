"""The promise `verdicts_are_final`: one verdict for each call in bounded time, whatever the reward does."""

import asyncio
import os
import subprocess
import sys
from functools import partial

import pytest

from areal_async.base.verdicts import Abstain, Failure, Score, Timeout
from areal_async.config.reward_routing import RewardSpec
from reward_service.client import LocalScorer
from reward_service.pool.pool import WorkerPool
from reward_service.router import Router
from reward_service.sdk import RewardInput, RewardLoadError
from tests.processes import is_gone
from tests.scoring import processes_below, scored, texts, verdicts_of
from tests.waiting import LIMIT_S, until, wait_for

GOOD = {
    "true": Score(1.0), "integer": Score(3.0), "score": Score(0.5, {"format": 1.0, "answer": 0.0}),
    "abstain": Abstain("too short"), "print": Score(0.25), "print much": Score(0.25),
}  # fmt: skip
RAISES = {
    "raise": "ValueError: on purpose", "raise unprintable": "no text", "raise huge": "ValueError: xxx",
    "raise surrogate": "ValueError: ?", "sys.exit": "SystemExit: 3", "interrupt": "KeyboardInterrupt",
    "memory error": "MemoryError", "assert": "AssertionError", "deep recursion": "RecursionError",
}  # fmt: skip
WRONG = dict.fromkeys(["nan", "infinity", "too large", "nan component"], "not_finite") | dict.fromkeys(
    ["none", "text", "list", "strange", "complex", "text component", "text value", "many components"],
    "return_type",
)
DIES = {
    "os._exit": "exit status 3", "exit 0": "exit status 0", "abort": "SIGABRT", "segfault": "SIGSEGV",
    "crash the stack": "", "kill itself": "SIGKILL", "close everything": "",
}  # fmt: skip
HANGS = ["spin", "sleep", "deaf", "stop itself", "print for ever"]


@pytest.mark.parametrize("function", ["behave", "behave_async"])
def test_verdicts_are_final_for_whatever_a_reward_returns_or_raises(section, call, function):
    names = [*GOOD, *RAISES, *WRONG]
    verdicts = dict(zip(names, scored(section(function), [call(name) for name in names]), strict=True))
    assert {name: verdicts[name] for name in GOOD} == GOOD
    for name, text in RAISES.items():
        assert isinstance(verdicts[name], Failure), name
        assert verdicts[name].kind == "exception", name
        assert text in verdicts[name].message
        assert len(verdicts[name].message) < 1200
    assert {name: verdicts[name].kind for name in WRONG} == WRONG


def test_verdicts_are_final_when_the_reward_kills_its_process(section, call):
    inputs = [call(name) for dying in DIES for name in ("true", dying, "integer")]
    verdicts = scored(section(), inputs)
    for index, (name, text) in enumerate(DIES.items()):
        before, died, after = verdicts[3 * index : 3 * index + 3]
        assert (before, after) == (Score(1.0), Score(3.0)), name
        assert isinstance(died, Failure), name
        assert died.kind == "process_died", name
        assert text in died.message, name


def test_verdicts_are_final_when_the_reward_hangs_and_only_the_hanging_call_pays(section, call):
    inputs = [call(name) for hang in HANGS for name in ("true", hang, "integer", "score")]
    verdicts = scored(section(timeout_s=0.5), inputs)
    for index in range(len(HANGS)):
        assert verdicts[4 * index : 4 * index + 4] == [Score(1.0), Timeout(500), Score(3.0), GOOD["score"]]


def test_verdicts_are_final_when_the_protocol_itself_is_attacked(section, call):
    before, garbled, after = scored(section(), [call("true"), call("garble"), call("integer")])
    assert (before, after) == (Score(1.0), Score(3.0))
    assert isinstance(garbled, Failure)


def test_a_good_call_is_not_run_again_when_nothing_dies(section, call, tmp_path):
    log = tmp_path / "calls"
    verdicts = scored(section(), [call("count", log=str(log), value=i) for i in range(300)], workers=2)
    assert verdicts == [Score(float(i)) for i in range(300)]
    assert len(log.read_text().splitlines()) == 300


@pytest.mark.parametrize("end", ["hangs", "dies", "returns"])
def test_children_that_a_reward_started_end_with_its_worker(section, call, tmp_path, end):
    pids = tmp_path / "pids"
    [verdict] = scored(section(timeout_s=1.0), [call(f"children, {end}", pids=str(pids))])
    assert type(verdict) is {"hangs": Timeout, "dies": Failure, "returns": Score}[end]
    children = pids.read_text().split()
    assert len(children) == 3
    wait_for(lambda: all(map(is_gone, map(int, children))))


POOL_AND_DIE = """
import asyncio, os, psutil, sys
from areal_async.config.reward import RewardSection
from reward_service.client import LocalScorer
from reward_service.sdk import RewardInput

async def main():
    async with LocalScorer(RewardSection(name=sys.argv[1], timeout_s=600), workers=2) as scorer:
        work = asyncio.ensure_future(scorer.score([RewardInput(response="spin")] * 2))
        print(*[child.pid for child in psutil.Process().children()], flush=True)
        os.kill(os.getpid(), 9)

asyncio.run(main())
"""


def test_workers_die_with_their_pool_even_when_it_is_killed(section):
    done = subprocess.run(
        [sys.executable, "-c", POOL_AND_DIE, section().name], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == -9
    pids = done.stdout.split()
    assert len(pids) == 2
    wait_for(lambda: all(map(is_gone, map(int, pids))))


async def test_closing_gives_the_calls_under_way_their_verdict_in_bounded_time(section, call):
    before = processes_below()
    async with asyncio.timeout(LIMIT_S):
        async with WorkerPool([RewardSpec(section().name, timeout_s=600.0)], workers=2) as pool:
            calls = [call(name) for name in ("spin", "sleep", "true", "true")]
            work = asyncio.create_task(verdicts_of(pool.submit, calls))
            await until(lambda: pool.busy == 2)
        verdicts = await work
    assert {verdict.kind for verdict in verdicts[:2]} == {"pool"}
    assert processes_below() <= before


def test_workers_start_light(section, call):
    assert scored(section(), [call("imports")]) == [Score(0.0)]


def test_what_a_reward_prints_is_logged_up_to_a_rate(section, call, caplog):
    caplog.set_level("INFO", logger="areal.pool")
    scored(section(), [call("print"), call("print much"), call("print")])
    fields = [record.areal_fields for record in caplog.records if record.message == "reward printed"]
    logged = "".join(entry["text"] for entry in fields)
    assert "hello" in logged
    assert len(logged) < 100_000


def test_a_reward_that_cannot_be_loaded_ends_the_start_and_leaves_no_process(section):
    with pytest.raises(RewardLoadError, match="absent"):
        scored(section("absent"), [])


def test_a_reward_that_kills_its_process_on_import_ends_the_start(tmp_path, section):
    file = tmp_path / "dying.py"
    file.write_text("import os\nprint('the last words', flush=True)\nos._exit(9)\n")
    with pytest.raises(RewardLoadError, match=r"exit status 9.*the last words"):
        scored(section().model_copy(update={"name": f"{file}:f"}), [])


async def test_verdicts_are_final_for_calls_that_come_back_to_a_pool_that_has_given_up(tmp_path, section):
    file, needed, given_up = tmp_path / "fragile.py", tmp_path / "needed", tmp_path / "given up"
    needed.touch()
    file.write_text(
        f"import os, time\nfrom reward_service.sdk import reward\nopen({str(needed)!r})\n"
        "@reward\ndef f(given):\n"
        f"    if given.response == 'first':\n        os.remove({str(needed)!r})\n        os._exit(1)\n"
        f"    while given.response == 'second':\n        time.sleep(0.01)\n"
        f"        if os.path.exists({str(given_up)!r}):\n            os._exit(2)\n"
        "    return 1.0\n"
    )

    broken = section().model_copy(update={"name": f"{file}:f", "timeout_s": 30.0})
    async with Router(broken, workers=2) as router:
        submit = partial(router.submit, router.specs[0])
        scoring = asyncio.create_task(verdicts_of(submit, texts("first", "second", "behind", "behind")))
        await asyncio.wait_for(router.broken, LIMIT_S)
        given_up.touch()
        verdicts = await scoring
    assert [verdict.kind for verdict in verdicts] == ["process_died", "process_died", "pool", "pool"]


async def test_dying_workers_leave_no_descriptor_behind(section, call):
    async with LocalScorer(section(), workers=2) as scorer:
        await scorer.score([call("true")] * 4)
        before = len(os.listdir("/proc/self/fd"))
        await scorer.score([call("os._exit")] * 12 + [call("true")] * 50)
        async with asyncio.timeout(LIMIT_S):
            while scorer.alive < 2:
                await scorer.score([call("true")])
        found = len(os.listdir("/proc/self/fd")) - before
    assert found <= 0


def test_an_input_that_cannot_be_sent_is_that_calls_failure(section, call):
    bad = RewardInput(response="true", ground_truth=object())
    good, failed = scored(section(), [call("true"), bad])
    assert good == Score(1.0)
    assert failed.kind == "input"


def test_a_large_input_arrives_whole(section):
    big = RewardInput(response="value", extra_info={"value": 2, "padding": "x" * 6_000_000})
    assert scored(section(timeout_s=10.0), [big] * 4) == [Score(2.0)] * 4
