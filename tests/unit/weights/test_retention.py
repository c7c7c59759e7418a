from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from areal_async.rpc.schema import VersionTag
from areal_async.weights.retention import MAX_HOLDS, MAX_PENDING, RetentionPolicy, Retired
from tests.unit.weights.world import tag


def policy_with(*versions: int, evaluate: bool = False) -> RetentionPolicy:
    policy = RetentionPolicy(2, hold_ms=1000)
    add(policy, *versions, evaluate=evaluate)
    return policy


def add(policy: RetentionPolicy, *versions: int, evaluate: bool = False) -> None:
    for version in versions:
        policy.add(tag(version), evaluate=evaluate, final=False)


def test_what_a_delta_is_being_made_of_stays():
    policy = policy_with(0, 1)
    policy.use(tag(0), tag(1))
    add(policy, *(2, 3, 4))
    assert [retired.tag for retired in policy.retire(0)] == [tag(2)]
    policy.use(tag(1), tag(4))
    policy.release(tag(0), tag(1))
    assert [retired.tag for retired in policy.retire(0)] == [tag(0)]
    policy.release(tag(1), tag(4))
    assert [retired.tag for retired in policy.retire(0)] == [tag(1)]


def test_nothing_is_unbounded_an_evaluation_that_falls_behind_loses_the_oldest_but_never_the_ends():
    policy = RetentionPolicy(2, hold_ms=1000)
    policy.add(tag(0), evaluate=True, final=False)
    for version in range(1, 10):
        policy.add(tag(version), evaluate=True, final=version == 9)
    assert policy.pending_evaluations == [tag(0), tag(7), tag(8), tag(9)]
    assert policy.is_final(tag(9))
    assert not policy.is_final(tag(8))


def test_what_is_being_evaluated_is_not_dropped():
    policy = policy_with(1, evaluate=True)
    assert policy.evaluate("e", None, 0) == tag(1)
    for version in (2, 3, 4, 5):
        policy.add(tag(version), evaluate=True, final=False)
    assert policy.pending_evaluations == [tag(1), tag(4), tag(5)]


def test_nothing_is_unbounded_a_receiver_that_never_acknowledges_holds_only_a_few():
    policy = policy_with()
    for version in range(MAX_HOLDS + 4):
        add(policy, version)
        assert policy.serve("r", None, 0) == tag(version)
    assert policy.retire(0) == [Retired(tag(version), False) for version in range(4)]


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


Policies.TestCase.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
test_policy_keeps_its_promises = Policies.TestCase
