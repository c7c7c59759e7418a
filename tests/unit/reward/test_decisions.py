"""The pure parts: how much is claimed, how calls are dealt out."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.base.verdicts import Parts, Score
from areal_async.config.reward_routing import RewardSpec
from areal_async.rpc.messages import EpisodeVerdict
from reward_service.pool.protocol import FrameError, FrameReader, framed
from reward_service.pool.queue import FairQueue, PooledReward, QueuedCall
from reward_service.server import (
    MAX_BYTES,
    MAX_CLAIM,
    MAX_PENDING,
    MAX_PENDING_BYTES,
    MAX_VERDICTS,
    VALUE_BYTES,
    ClaimLoad,
    episodes_to_claim,
    portion,
)


@pytest.mark.parametrize(
    ("known", "wanted"),
    [
        # quick calls by the hundred, slow ones few
        ({}, MAX_CLAIM), ({"call_s": 0.01}, 200), ({"call_s": 0.1}, 20), ({"call_s": 10.0}, 4),
        # little while the speed is not known, or where claims are soon taken back
        ({"calls_done": 0}, 8), ({"calls_done": 20}, 48), ({"call_s": 0.01, "deadline_s": 0.4}, 20),
        # large episodes by their bytes
        ({"pending": 4, "pending_bytes": 60 << 20}, 0), ({"pending": 60, "pending_bytes": 60 << 20}, 4),
    ],
)  # fmt: skip
def test_nothing_is_unbounded_as_much_is_claimed_as_can_be_scored_soon(known, wanted):
    fields = {"workers": 2, "call_s": 1e-4, "calls_done": 10_000, "pending": 0, "pending_bytes": 0}
    assert episodes_to_claim([ClaimLoad(**{**fields, "deadline_s": math.inf, **known})]) == wanted


LOADS = st.builds(
    ClaimLoad,
    workers=st.integers(1, 64),
    call_s=st.floats(0, 1000),
    calls_done=st.integers(0, 10**9),
    pending=st.integers(0, 2 * MAX_PENDING),
    pending_bytes=st.integers(0, 2 * MAX_PENDING_BYTES),
    deadline_s=st.floats(0, 1000) | st.just(math.inf),
)


@given(LOADS)
@settings(derandomize=True)
def test_nothing_is_unbounded_in_what_is_claimed(given_load):
    wanted = episodes_to_claim([given_load])
    assert 0 <= wanted <= MAX_CLAIM
    assert wanted == 0 or given_load.pending + wanted <= max(MAX_PENDING, 2 * given_load.workers)
    if given_load.pending == 0:
        assert wanted >= 2 * min(given_load.workers, MAX_CLAIM // 2)


def queue_of(n):
    """A queue and `n` rewards that it holds."""
    rewards = {number: PooledReward(number, RewardSpec("exact_match")) for number in range(n)}
    return FairQueue(rewards), list(rewards.values())


def push(queue, *rewards):
    for reward in rewards:
        queue.push(QueuedCall(reward, 0, [b""], lambda index, verdicts, elapsed_ms: None))


def turns(queue, n, cost_s=lambda reward: 1.0):
    """The rewards that had the next `n` turns; each of them goes on waiting."""

    order = []
    for _ in range(n):
        reward = queue.next()
        queue.pop(reward)
        reward.used_s += cost_s(reward)
        push(queue, reward)
        order.append(reward)
    return order


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=6))
@settings(derandomize=True, max_examples=60)
def test_rewards_have_equal_time_whatever_their_calls_cost(costs_s):
    queue, rewards = queue_of(len(costs_s))
    push(queue, *rewards)
    turns(queue, 3000, lambda reward: costs_s[reward.number])
    had = [reward.used_s for reward in rewards]
    assert max(had) - min(had) <= 3 * max(costs_s)


def test_a_reward_that_had_nothing_to_do_does_not_make_up_for_it():
    queue, (busy, away) = queue_of(2)
    push(queue, busy)
    turns(queue, 1000)
    push(queue, away)
    assert sum(reward is away for reward in turns(queue, 20)) in (10, 11)


def taken(queue, reward, *, calls=100, workers=1):
    push(queue, *[reward] * calls)
    invocation = queue.take(1, workers)
    queue.drain()
    return len(invocation.calls)


def test_calls_of_a_quick_reward_share_an_invocation_and_those_of_others_do_not():
    queue, (reward,) = queue_of(1)
    assert taken(queue, reward) == 1, "its first call has not told yet how long one takes"
    reward.latency.note(0.0001)
    assert taken(queue, reward) == 50
    assert taken(queue, reward, workers=20) == 5, "every free worker has a part"
    assert taken(queue, reward, calls=3) == 3
    for _ in range(200):
        reward.latency.note(0.02)
    assert taken(queue, reward) == 1


def test_a_reward_that_judges_a_group_at_a_time_has_one_in_an_invocation():
    reward = PooledReward(0, RewardSpec("exact_match", scope="group"))
    reward.latency.note(0.0001)
    assert taken(FairQueue({0: reward}), reward) == 1


@given(st.lists(st.binary(max_size=50), max_size=8), st.lists(st.integers(0, 400), max_size=8))
@settings(derandomize=True)
def test_frames_survive_any_cutting_of_the_stream(payloads, cuts):
    stream = b"".join(framed(payload) for payload in payloads)
    reader = FrameReader(limit=1000)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    read = []
    for start, end in itertools.pairwise(edges):
        read += reader.feed(stream[start:end])
    assert read == payloads


def test_a_frame_above_the_limit_is_refused_before_its_bytes_are_awaited():
    with pytest.raises(FrameError):
        FrameReader(limit=10).feed((11).to_bytes(4, "little"))


def of_claims(*sizes: int, parts: Parts | None = None) -> list[EpisodeVerdict]:
    """So many verdicts of one claim after the other."""
    return [
        EpisodeVerdict(f"g{claim}.{sample}", f"C{claim}", Score(1.0, parts=parts))
        for claim, size in enumerate(sizes)
        for sample in range(size)
    ]


LARGE = Parts(units=[0.5] * (MAX_BYTES // VALUE_BYTES // 2 + 1))


@pytest.mark.parametrize(
    ("claims", "parts", "sent"),
    [
        ([], None, 0), ([3, 4], None, 7), ([MAX_VERDICTS], None, MAX_VERDICTS),
        # a message ends between two claims
        ([1] * (MAX_VERDICTS + 9), None, MAX_VERDICTS), ([MAX_VERDICTS - 2, 8, 1], None, MAX_VERDICTS + 6),
        ([MAX_VERDICTS + 40, 1], None, MAX_VERDICTS + 40), ([1, 1, 1, 1], LARGE, 2),
    ],
)  # fmt: skip
def test_nothing_is_unbounded_a_message_of_verdicts_ends_in_time(claims, parts, sent):
    assert portion(of_claims(*claims, parts=parts)) == sent
