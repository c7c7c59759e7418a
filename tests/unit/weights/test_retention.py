import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from areal_async.base.versions import VersionTag
from areal_async.weights.retention import MAX_HOLDS, MAX_PENDING, RetentionPolicy, Retired
from tests.unit.weights.world import tag


def policy_with(*versions: int, evaluate: bool = False) -> RetentionPolicy:
    policy = RetentionPolicy(2, hold_ms=1000)
    add(policy, *versions, evaluate=evaluate)
    return policy


def add(policy: RetentionPolicy, *versions: int, evaluate: bool = False) -> None:
    for version in versions:
        policy.add(tag(version), evaluate=evaluate, final=False)


def test_what_a_delta_is_being_made_of_stays() -> None:
    policy = policy_with(0, 1)
    policy.use(tag(0), tag(1))
    add(policy, *(2, 3, 4))
    assert [retired.tag for retired in policy.retire(0)] == [tag(2)]
    policy.use(tag(1), tag(4))
    policy.release(tag(0), tag(1))
    assert [retired.tag for retired in policy.retire(0)] == [tag(0)]
    policy.release(tag(1), tag(4))
    assert [retired.tag for retired in policy.retire(0)] == [tag(1)]


def test_serving_skips_to_the_newest() -> None:
    policy = policy_with(0, 1, 2)
    assert policy.serve("r", None, 0) == tag(2)
    assert policy.serve("r", tag(0), 0) == tag(2)
    assert policy.serve("r", tag(2), 0) is None


def test_a_newer_epoch_is_newer_whatever_its_version() -> None:
    policy = policy_with(8, 9)
    policy.add(tag(5, epoch=2), evaluate=False, final=False)
    assert policy.serve("r", tag(9), 0) == tag(5, epoch=2)
    with pytest.raises(ValueError, match="not newer"):
        policy.add(tag(10), evaluate=False, final=False)


def test_nothing_is_unbounded_an_evaluation_that_falls_behind_loses_the_oldest_but_never_the_ends() -> None:
    policy = RetentionPolicy(2, hold_ms=1000)
    policy.add(tag(0), evaluate=True, final=False)
    for version in range(1, 10):
        policy.add(tag(version), evaluate=True, final=version == 9)
    assert policy.pending_evaluations == [tag(0), tag(7), tag(8), tag(9)]
    assert policy.is_final(tag(9))
    assert not policy.is_final(tag(8))


def test_what_is_being_evaluated_is_not_dropped() -> None:
    policy = policy_with(1, evaluate=True)
    assert policy.evaluate("e", None, 0) == tag(1)
    for version in (2, 3, 4, 5):
        policy.add(tag(version), evaluate=True, final=False)
    assert policy.pending_evaluations == [tag(1), tag(4), tag(5)]


def test_old_ones_retire_and_may_be_filled_again() -> None:
    assert policy_with(0, 1, 2, 3).retire(0) == [Retired(tag(0), True), Retired(tag(1), True)]


def test_what_a_receiver_was_told_of_stays_until_acknowledged() -> None:
    policy = policy_with(0)
    policy.serve("r", None, 0)
    add(policy, *(1, 2, 3))
    assert policy.retire(0) == [Retired(tag(1), True)]
    policy.acknowledge("r", "serve", tag(0))
    assert policy.retire(0) == [Retired(tag(0), True)]


def test_what_a_receiver_never_acknowledged_is_not_filled_again() -> None:
    policy = policy_with(0)
    policy.serve("r", None, 0)
    add(policy, *(1, 2))
    assert policy.retire(999) == []
    assert policy.retire(1000) == [Retired(tag(0), False)]


def test_nothing_is_unbounded_a_receiver_that_never_acknowledges_holds_only_a_few() -> None:
    policy = policy_with()
    for version in range(MAX_HOLDS + 4):
        add(policy, version)
        assert policy.serve("r", None, 0) == tag(version)
    assert policy.retire(0) == [Retired(tag(version), False) for version in range(4)]


def test_acknowledging_a_newer_one_ends_older_holds() -> None:
    policy = policy_with(0)
    policy.serve("r", None, 0)
    policy.add(tag(1), evaluate=False, final=False)
    policy.serve("r", None, 0)
    add(policy, *(2, 3))
    policy.acknowledge("r", "serve", tag(1))
    assert policy.retire(0) == [Retired(tag(0), True), Retired(tag(1), True)]


class Policies(RuleBasedStateMachine):
    KEEP, HOLD_MS = 2, 50
    receivers = st.sampled_from(["r0", "r1"])

    def __init__(self) -> None:
        super().__init__()
        self.policy = RetentionPolicy(self.KEEP, self.HOLD_MS)
        self.now_ms = 0
        self.version = 0
        self.on_disk: list[VersionTag] = []
        self.reading: dict[tuple[str, str, VersionTag], int] = {}
        self.pinned: list[VersionTag] = []

    @rule(evaluate=st.booleans())
    def publish(self, evaluate: bool) -> None:
        for gone in self.policy.retire(self.now_ms):
            assert gone.tag not in self.on_disk[-self.KEEP :]
            assert gone.tag not in self.policy.pending_evaluations
            self.on_disk.remove(gone.tag)
            readers = [key for key in self.reading if key[2] == gone.tag]
            assert not (readers and gone.reusable), "bytes may be overwritten under a reader"
            for key in readers:
                # Unlinked under a reader only after its hold, or when it went on to newer ones.
                newer = [k for k in self.reading if k[:2] == key[:2] and k[2] > gone.tag]
                assert self.now_ms - self.reading[key] >= self.HOLD_MS or len(newer) >= MAX_HOLDS
                del self.reading[key]
        self.policy.add(tag(self.version), evaluate=evaluate, final=False)
        self.on_disk.append(tag(self.version))
        if evaluate:
            self.pinned.append(tag(self.version))
        self.version += 1

    @rule(receiver=receivers, purpose=st.sampled_from(["serve", "evaluate"]), behind=st.integers(0, 4))
    def ask(self, receiver: str, purpose: str, behind: int) -> None:
        after = tag(self.version - behind) if behind else None
        look = self.policy.serve if purpose == "serve" else self.policy.evaluate
        told = look(receiver, after, self.now_ms)
        if told is not None:
            assert told in self.on_disk
            assert after is None or told > after
            assert (told == self.policy.newest) if purpose == "serve" else (told in self.pinned)
            self.reading[(receiver, purpose, told)] = self.now_ms

    @rule(receiver=receivers, purpose=st.sampled_from(["serve", "evaluate"]), back=st.integers(0, 5))
    def acknowledge(self, receiver: str, purpose: str, back: int) -> None:
        done = tag(max(0, self.version - back))
        self.policy.acknowledge(receiver, purpose, done)  # type: ignore[arg-type]
        for key in [k for k in self.reading if k[:2] == (receiver, purpose) and k[2] <= done]:
            del self.reading[key]

    @rule(ms=st.integers(1, 60))
    def wait(self, ms: int) -> None:
        self.now_ms += ms

    @invariant()
    def memory_is_bounded(self) -> None:
        readers = 2 * 2 * MAX_HOLDS
        assert len(self.on_disk) <= self.KEEP + 1 + (MAX_PENDING + 1) + 2 * readers
        assert set(self.policy.pending_evaluations) <= set(self.on_disk)


Policies.TestCase.settings = settings(max_examples=40, stateful_step_count=50)
test_policy_keeps_its_promises = Policies.TestCase
