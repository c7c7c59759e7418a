"""one_death_is_local: what the supervisor decides when a service dies, on a simulated clock."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.base.errors import ArealError, FaultError, RpcTimeout
from areal_async.base.processes import RestartPolicy
from areal_async.launch.lifecycle import Action, Ending, Lifecycle, Phase
from areal_async.service.main import restart_may_help
from replay_buffer.redis.address import StoreUnavailable, StoreUnusable
from tests.harness.profiles import examples
from tests.unit.launch.launching import NAMES, PLACES, serving
from trainer_service.errors import CheckpointError, DiskFull, StalenessViolation

POLICY = RestartPolicy(limit=2, window_s=100.0, first_pause_s=1.0, longest_pause_s=8.0)


def test_a_service_that_was_well_is_started_again_at_once_however_often_it_is_killed():
    life = serving(RestartPolicy(limit=10, window_s=1e9, first_pause_s=1.0, longest_pause_s=8.0))
    now_s = 0.0
    for _ in range(5):
        now_s += 10.0
        life.exited("rollout-0", -9, now_s)
        assert life.tick(now_s) == [Action("start", "rollout-0")]
        now_s += 4.0
        life.ready("rollout-0", now_s)


@pytest.mark.parametrize(
    ("error", "before", "after"),
    [
        (ArealError("a wrong path"), False, True),
        (RuntimeError("a bug"), False, True),
        (RpcTimeout("the buffer is away"), True, True),
        (FaultError("fenced", "another epoch"), True, True),
        (FaultError("invalid", "another data set"), False, True),
        (StoreUnavailable("Redis is away"), True, True),
        (StoreUnusable("it evicts keys"), False, True),
        (StalenessViolation("too old"), False, False),
        (CheckpointError("damaged"), False, False),
        (DiskFull("no room"), False, False),
    ],
)
def test_a_service_knows_whether_a_restart_may_help(error, before, after):
    assert restart_may_help(error, served=False) is before
    assert restart_may_help(error, served=True) is after


def test_a_service_that_dies_is_started_again_and_the_others_go_on():
    life = serving(POLICY)
    assert life.exited("rollout-0", -9, 9.0) == []
    assert life.states["rollout-0"].phase is Phase.RESTARTING
    assert life.tick(9.5) == []
    assert life.tick(10.0) == [Action("start", "rollout-0")]
    assert not life.all_serve()
    life.ready("rollout-0", 12.0)
    assert life.all_serve()
    assert not life.stopping


def test_what_died_beside_the_buffer_waits_for_it():
    life = serving(POLICY)
    life.exited("buffer", -9, 10.0)
    life.exited("trainer", -9, 10.0)
    assert life.tick(11.0) == [Action("start", "buffer")]
    assert life.tick(12.0) == []
    life.ready("buffer", 13.0)
    assert life.tick(13.1) == [Action("start", "trainer")]

    before = Lifecycle(PLACES, 60.0, POLICY)
    before.begin(0.0)
    before.exited("buffer", -9, 1.0)
    assert before.tick(2.0) == [Action("start", "buffer")]
    assert {action.name for action in before.ready("buffer", 3.0)} == set(NAMES) - {"buffer"}


def test_an_evaluator_that_was_done_is_needed_again_when_the_trainer_died():
    life = serving(POLICY)
    life.exited("evaluator", 0, 10.0)
    life.exited("trainer", -9, 11.0)
    assert {action.name for action in life.tick(12.0)} == {"evaluator", "trainer"}
    life.exited("trainer", 0, 20.0)
    assert not life.stopping
    life.exited("evaluator", 0, 21.0)
    assert life.ending == Ending("finished")


def test_a_stop_starts_nothing_that_was_to_be_started_again():
    life = serving(POLICY)
    life.exited("rollout-0", -9, 10.0)
    life.interrupt(10.1)
    for name in ("trainer", "evaluator", "rollout-1", "reward", "buffer"):
        actions = life.exited(name, 143, 10.5)
        assert all(action.do != "start" for action in actions)
    assert life.over
    assert life.tick(20.0) == []


@settings(max_examples=examples(200))
@given(
    st.lists(st.tuples(st.sampled_from(sorted(NAMES)), st.sampled_from([-9, -11, 0, 75, 143])), max_size=30)
)
def test_any_deaths_are_survived_until_the_limit_and_a_process_is_never_started_twice(deaths):
    life = Lifecycle(PLACES, 60.0, RestartPolicy(limit=3, window_s=1e9, first_pause_s=0.1))
    running = set()
    counted = dict.fromkeys(NAMES, 0)
    now_s = 0.0

    def apply(actions):
        for action in actions:
            assert action.do != "start" or action.name not in running
            if action.do == "start":
                running.add(action.name)
            elif action.do == "kill":
                running.discard(action.name)

    def settle():
        """Let the clock run until everything that is to run serves."""
        nonlocal now_s
        for _ in range(100):
            now_s += 0.1
            apply(life.tick(now_s))
            for name in sorted(running):
                apply(life.ready(name, now_s))

    apply(life.begin(now_s))
    settle()
    for name, status in deaths:
        if name not in running or (status == 0 and name in ("trainer", "evaluator")):
            continue
        running.discard(name)
        counted[name] += 1
        apply(life.exited(name, status, now_s))
        if counted[name] > 3:
            assert (life.ending.kind, life.ending.culprit, life.ending.deaths) == ("died", name, 4)
            return
        assert not life.stopping
        settle()
        assert life.all_serve()
        assert running == set(NAMES)


def test_an_evaluator_that_dies_after_the_trainer_is_done_ends_the_run_with_its_name():
    life = serving(POLICY)
    assert life.exited("trainer", 0, 10.0) == []
    life.exited("evaluator", -9, 11.0)
    assert life.ending == Ending("died", "evaluator", -9, 11.0)
