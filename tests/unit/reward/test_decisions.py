"""The pure parts: how much is claimed, how calls are dealt out, what is done about a slow one."""

import asyncio
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.rewards import RewardSpec
from areal_async.rpc.messages import EpisodeVerdict
from areal_async.rpc.verdicts import Parts, Score
from reward_service.pool.protocol import FrameError, FrameReader, Marker, framed
from reward_service.pool.queue import (
    FairQueue,
    LatencyEstimate,
    PooledReward,
    QueuedCall,
    next_action,
)
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


def load(**changes):
    fields = {"workers": 2, "call_s": 1e-4, "calls_done": 10_000, "pending": 0, "pending_bytes": 0}
    return [ClaimLoad(**{**fields, "deadline_s": math.inf, **changes})]


def test_quick_calls_are_claimed_by_the_hundred_and_slow_ones_few():
    assert episodes_to_claim(load()) == MAX_CLAIM
    assert episodes_to_claim(load(call_s=0.1)) == 20
    assert episodes_to_claim(load(call_s=10.0)) == 4


def test_claims_start_small_while_the_speed_is_unknown():
    assert episodes_to_claim(load(calls_done=0)) == 8
    assert episodes_to_claim(load(calls_done=20)) == 48


def test_a_short_claim_deadline_shortens_what_is_held():
    assert episodes_to_claim(load(call_s=0.01, deadline_s=0.4)) == 20
    assert episodes_to_claim(load(call_s=0.01)) == 200


def test_nothing_is_unbounded_large_episodes_are_held_by_their_bytes():
    assert episodes_to_claim(load(pending=4, pending_bytes=60 << 20)) == 0
    assert episodes_to_claim(load(pending=60, pending_bytes=60 << 20)) == 4


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


def test_batches_follow_the_pace_of_the_calls():
    pace = LatencyEstimate()
    for _ in range(500):
        pace.note(1e-5)
    assert pace.batch == 256
    for _ in range(500):
        pace.note(0.5)
    assert pace.batch == 1


def test_batches_are_small_while_nothing_is_known_of_a_reward():
    pace = LatencyEstimate()
    assert pace.batch == 1
    pace.note(1e-5)
    assert pace.batch == 4


def test_a_short_queue_is_spread_over_all_workers():
    pace = LatencyEstimate()
    for _ in range(100):
        pace.note(1e-5)
    assert pace.share(queued=10, workers=4) == 3
    assert pace.share(queued=1, workers=4) == 1
    assert pace.share(queued=10_000, workers=4) == 256


@pytest.mark.parametrize(
    ("running_for_s", "still_for_s", "waiting", "action"),
    [
        (9.9, 0.0, 1, "nothing"), (10.1, 0.0, 5, "kill_call"),
        (None, 10.1, 5, "nothing"), (None, 12.1, 5, "kill_stuck"), (None, 99.0, 0, "nothing"),
        (0.2, 0.0, 5, "recall"), (0.2, 0.0, 1, "nothing"), (0.01, 0.0, 5, "nothing"),
    ],
)  # fmt: skip
def test_what_is_late_is_killed_and_what_waits_behind_a_slow_call_is_recalled(
    running_for_s, still_for_s, waiting, action
):
    known = {"running_for_s": running_for_s, "still_for_s": still_for_s, "waiting": waiting}
    assert next_action(10.0, **known) == action


# --- turns -------------------------------------------------------------------------------------------


def queue_of(n):
    """A queue and `n` rewards that it holds."""
    rewards = {number: PooledReward(number, RewardSpec("exact_match")) for number in range(n)}
    return FairQueue(rewards), list(rewards.values())


def push(queue, *rewards):
    for reward in rewards:
        queue.push(QueuedCall(reward, 0, [b""], lambda index, verdicts, elapsed_ms: None))


def turns(queue, n, cost_s=lambda reward: 1.0):
    """The rewards that had the next `n` turns; each of them goes on waiting."""

    async def run():
        order = []
        for _ in range(n):
            reward = queue.next()
            queue.pop(reward)
            reward.used_s += cost_s(reward)
            push(queue, reward)
            order.append(reward)
        return order

    return asyncio.run(run())


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=6))
@settings(derandomize=True, max_examples=60, deadline=None)
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


def test_what_is_taken_back_does_not_count_as_used():
    queue, (one, other) = queue_of(2)
    push(queue, one, other)
    one.used_s += 5.0
    one.used_s -= 5.0
    other.used_s += 1.0
    assert queue.next() is one


# --- what travels --------------------------------------------------------------------------------------


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


def test_the_marker_is_seen_through_its_descriptor():
    ours = Marker.create()
    theirs = Marker(ours.fd)
    assert ours.running() == (0, 0)
    theirs.begin(7, 12345)
    assert ours.running() == (7, 12345)
    ours.recall(9)
    assert theirs.recalled == 9
    ours.close()


def of_claims(*sizes: int, parts: Parts | None = None) -> list[EpisodeVerdict]:
    """So many verdicts of one claim after the other."""
    return [
        EpisodeVerdict(f"g{claim}.{sample}", f"C{claim}", Score(1.0, parts=parts))
        for claim, size in enumerate(sizes)
        for sample in range(size)
    ]


def test_everything_goes_while_it_is_little():
    assert portion([]) == 0
    assert portion(of_claims(3, 4)) == 7
    assert portion(of_claims(MAX_VERDICTS)) == MAX_VERDICTS


def test_a_message_ends_between_two_claims():
    assert portion(of_claims(*[1] * (MAX_VERDICTS + 9))) == MAX_VERDICTS
    assert portion(of_claims(MAX_VERDICTS - 2, 8, 1)) == MAX_VERDICTS + 6
    assert portion(of_claims(MAX_VERDICTS + 40, 1)) == MAX_VERDICTS + 40


def test_a_message_is_bounded_in_bytes():
    large = Parts(units=[0.5] * (MAX_BYTES // VALUE_BYTES // 2 + 1))
    assert portion(of_claims(1, 1, 1, 1, parts=large)) == 2
