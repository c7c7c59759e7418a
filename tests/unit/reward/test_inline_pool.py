"""Rewards that run in this process: the same verdicts as from a pool, and errors as they are."""

import asyncio
import logging
import sys
import threading
from pathlib import Path

import pytest

from areal_async.base.verdicts import Failure, Score
from areal_async.config.reward import RewardSection
from reward_service.client import LocalScorer
from reward_service.pool import inline as inline_pool
from reward_service.sdk import RewardLoadError
from tests.scoring import LIMIT_S, processes_below, scored, texts

FILE = Path(__file__).with_name("kinds.py")

OWN = """
import threading

from areal_async import RewardInput, reward

RUNNING, MOST = [], []
WARNED = threading.Event()


@reward
def alone(given: RewardInput) -> float:
    RUNNING.append(1)
    MOST.append(len(RUNNING))
    threading.Event().wait(0.002)
    RUNNING.pop()
    return VALUE


@reward
def until_warned(given: RewardInput) -> float:
    return float(WARNED.wait(60))


VALUE = 0.5
"""


def inline(section, inputs, groups=None):
    async def run():
        async with LocalScorer(section, inline=True) as scorer:
            return await asyncio.wait_for(scorer.score(inputs, groups), LIMIT_S)

    return asyncio.run(run())


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "inline_rewards.py"
    path.write_text(OWN, encoding="utf-8")
    return path


@pytest.mark.parametrize("function", ["many", "tournament", "scaled_later"])
def test_verdicts_are_those_of_a_pool_and_no_process_is_started(function):
    args = {"scale": 2.0} if function == "scaled_later" else {}
    scope = "group" if function == "tournament" else "episode"
    section = RewardSection(name=f"{FILE}:{function}", args=args, scope=scope)
    inputs = texts(*range(20))
    groups = [place // 4 for place in range(20)]
    before = processes_below()
    verdicts = inline(section, inputs, groups)
    assert processes_below() <= before
    assert verdicts == scored(section, inputs, groups)
    assert len({verdict.value for verdict in verdicts}) > 1


def test_a_batch_is_as_large_as_the_reward_says(tmp_path):
    section = RewardSection(name=f"{FILE}:many")
    log = tmp_path / "log"

    async def run():
        async with LocalScorer(section, inline=True) as scorer:
            calls = texts(*range(20), extra_info={"log": str(log)})
            done = []
            await scorer.submit(scorer.specs[0], calls, lambda *verdict: done.append(verdict))
            return [index for index, _, _ in done]

    assert asyncio.run(run()) == list(range(20))
    assert log.read_text().split() == ["8", "8", "4"]


@pytest.mark.parametrize(("span_s", "trips"), [(60.0, 1), (0.0, 20)])
def test_quick_calls_go_to_the_thread_together_and_slow_ones_one_by_one(monkeypatch, span_s, trips):
    section = RewardSection(name=f"{FILE}:scaled", args={"scale": 2.0}, timeout_s=600)
    made = []

    async def counted(work):
        made.append(work)
        return await on_the_thread(work)

    async def run():
        async with LocalScorer(section, inline=True) as scorer:
            monkeypatch.setattr(inline_pool, "_on_the_thread", counted)
            return await asyncio.wait_for(scorer.score(texts(*range(20))), LIMIT_S)

    on_the_thread = inline_pool._on_the_thread
    monkeypatch.setattr(inline_pool, "SPAN_S", span_s)
    assert asyncio.run(run()) == [Score(2.0 * value) for value in range(20)]
    assert len(made) == trips


def test_what_a_reward_raises_is_raised_and_what_it_returns_wrongly_is_a_verdict():
    section = RewardSection(name=f"{FILE}:many")
    with pytest.raises(ValueError, match="a bad one") as raised:
        inline(section, texts("raise"))
    assert raised.traceback[-1].path == FILE
    (verdict,) = inline(section, texts("nan"))
    assert isinstance(verdict, Failure)
    with pytest.raises(RewardLoadError, match="defines no"):
        inline(RewardSection(name=f"{FILE}:nothing_of_that_name"), texts(1))


def test_a_call_past_its_deadline_is_logged_and_its_score_counts(own):
    class Told(logging.Handler):
        def emit(self, record):
            if "past its deadline" in record.getMessage():
                sys.modules["areal_reward_inline_rewards"].WARNED.set()

    handler = Told()
    logging.getLogger("areal").addHandler(handler)
    try:
        verdicts = inline(RewardSection(name=f"{own}:until_warned", timeout_s=0.05), texts(1))
    finally:
        logging.getLogger("areal").removeHandler(handler)
    assert verdicts == [Score(1.0)]


def test_two_scorers_share_the_module_and_one_call_runs_at_a_time_and_the_next_run_reads_the_file_anew(own):
    section = RewardSection(name=f"{own}:alone")

    async def both():
        async with LocalScorer(section, inline=True) as one, LocalScorer(section, inline=True) as other:
            asked = (one.score(texts(*range(20))), other.score(texts(*range(20))))
            return await asyncio.wait_for(asyncio.gather(*asked), LIMIT_S)

    assert asyncio.run(both()) == [[Score(0.5)] * 20] * 2
    assert sys.modules["areal_reward_inline_rewards"].MOST == [1] * 40
    own.write_text(OWN.replace("VALUE = 0.5", "VALUE = 0.75"), encoding="utf-8")
    assert inline(section, texts(1)) == [Score(0.75)]
    assert [thread.name for thread in threading.enumerate()].count("rewards") == 1
