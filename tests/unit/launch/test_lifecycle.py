from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.base.processes import RestartPolicy
from areal_async.launch.lifecycle import LAST_ONE_LIMIT_S, STOP_LIMIT_S, Action, Ending, Lifecycle, Phase
from tests.unit.launch.launching import NAMES, PLACES, serving

OTHERS = [name for name in NAMES if name != "buffer"]
TICK_S = 0.1


def names(actions, do):
    return [action.name for action in actions if action.do == do]


def test_the_buffer_serves_before_anything_else_starts():
    life = Lifecycle(PLACES, 60.0)
    assert life.begin(0.0) == [Action("start", "buffer")]
    assert life.tick(1.0) == []
    assert names(life.ready("buffer", 2.0), "start") == OTHERS
    assert not life.all_serve()
    for name in OTHERS:
        assert life.ready(name, 3.0) == []
    assert life.all_serve()


def test_an_evaluator_starts_once_a_step_is_trained_and_the_others_do_not_wait_for_it():
    life = Lifecycle(PLACES, 60.0, evaluates_later=True)
    life.begin(0.0)
    others = [name for name in OTHERS if name != "evaluator"]
    assert names(life.ready("buffer", 1.0), "start") == others
    for name in others:
        assert life.ready(name, 2.0) == []
    assert life.all_serve()
    assert life.tick(1000.0) == [], "it may wait for long"
    assert life.trained(1001.0) == [Action("start", "evaluator")]
    assert not life.all_serve()
    assert life.trained(1002.0) == []
    assert life.ready("evaluator", 1003.0) == []
    assert life.all_serve()


def test_an_evaluator_starts_if_no_step_was_left_and_not_while_the_buffer_is_away():
    life = Lifecycle(PLACES, 60.0, RestartPolicy(limit=3), evaluates_later=True)
    life.begin(0.0)
    for name in NAMES:
        life.ready(name, 1.0)
    life.exited("buffer", -9, 20.0)
    assert life.exited("trainer", 0, 20.0) == []
    assert life.tick(20.0) == [Action("start", "buffer")]
    assert life.ready("buffer", 21.0) == [Action("start", "evaluator")]
    life.ready("evaluator", 22.0)
    assert not life.stopping
    life.exited("evaluator", 0, 23.0)
    assert life.ending == Ending("finished")


def test_an_evaluator_that_was_not_started_does_not_hold_up_a_stop():
    life = Lifecycle(PLACES, 60.0, evaluates_later=True)
    life.begin(0.0)
    for name in NAMES:
        life.ready(name, 1.0)
    assert "evaluator" not in names(life.interrupt(2.0), "terminate")
    assert life.trained(2.1) == []


def test_the_job_is_done_when_trainer_and_evaluator_are():
    life = serving()
    assert life.exited("trainer", 0, 5.0) == []
    assert not life.stopping
    actions = life.exited("evaluator", 0, 6.0)
    assert life.ending == Ending("finished")
    assert names(actions, "terminate") == ["rollout-0", "rollout-1"]
    assert life.exited("rollout-1", 143, 6.1) == []
    assert names(life.exited("rollout-0", 143, 6.2), "terminate") == ["reward"]
    assert names(life.exited("reward", 0, 6.3), "terminate") == ["buffer"]
    assert not life.over
    assert life.exited("buffer", 0, 6.4) == []
    assert life.over


def test_an_evaluator_that_never_ends_is_a_failure_with_its_name():
    life = serving()
    life.exited("trainer", 0, 5.0)
    life.tick(5.0 + LAST_ONE_LIMIT_S - 1)
    assert not life.stopping
    life.tick(5.0 + LAST_ONE_LIMIT_S + 1)
    assert (life.ending.kind, life.ending.culprit) == ("did_not_end", "evaluator")


def test_the_first_death_is_the_one_that_is_named():
    life = serving()
    life.exited("reward", -9, 3.0)
    life.exited("trainer", 1, 3.1)
    assert life.ending == Ending("died", "reward", -9, 3.0)


def test_a_second_interrupt_kills_all_that_is_left():
    life = serving()
    life.interrupt(1.0)
    life.exited("trainer", 0, 1.5)
    assert set(names(life.interrupt(2.0), "kill")) == set(NAMES) - {"trainer"}


@dataclass
class Fate:
    """What becomes of a simulated process."""

    ready_after_s: float
    obeys_after_s: float
    dies_at_s: float
    status: int


fates = st.builds(
    Fate,
    ready_after_s=st.sampled_from([0.0, 0.3, 2.0, math.inf]),
    obeys_after_s=st.sampled_from([0.0, 0.2, 1.0, 4.0, 8.0, math.inf]),
    dies_at_s=st.sampled_from([math.inf, math.inf, 0.5, 3.0, 6.0]),
    status=st.sampled_from([0, 1, -9]),
)


@settings(max_examples=200)
@given(st.fixed_dictionaries(dict.fromkeys(NAMES, fates)), st.one_of(st.none(), st.floats(0.0, 8.0)))
def test_every_run_ends_in_bounded_time_with_its_promises_kept(fate, interrupt_s):
    life = Lifecycle(PLACES, ready_limit_s=5.0)
    log = []
    born = {}
    ends_at = {}
    stop_s = None
    now_s = 0.0

    def apply(actions):
        nonlocal stop_s
        if life.stopping and stop_s is None:
            stop_s = now_s
        for action in actions:
            log.append((now_s, action))
            name = action.name
            match action.do:
                case "start":
                    assert name not in born
                    assert stop_s is None, "nothing starts once a stop has begun"
                    assert name == "buffer" or life.states["buffer"].phase is Phase.SERVING
                    born[name] = now_s
                    ends_at[name] = now_s + fate[name].dies_at_s
                case "terminate":
                    ends_at[name] = min(ends_at[name], now_s + fate[name].obeys_after_s)
                case "kill":
                    ends_at[name] = now_s

    apply(life.begin(now_s))
    interrupted = False
    while not life.over:
        now_s = round(now_s + TICK_S, 3)
        assert now_s < 8.0 + 5.0 + LAST_ONE_LIMIT_S + STOP_LIMIT_S + 20.0, "a run that never ends"
        if interrupt_s is not None and now_s >= interrupt_s and not interrupted:
            interrupted = True
            if not life.stopping:
                apply(life.interrupt(now_s))
        for name in life.alive():
            if ends_at[name] <= now_s:
                apply(life.exited(name, fate[name].status, now_s))
            elif now_s - born[name] >= fate[name].ready_after_s:
                apply(life.ready(name, now_s))
        apply(life.tick(now_s))
        if interrupt_s is None and now_s > 20.0 and not life.stopping:
            apply(life.interrupt(now_s))

    assert now_s - stop_s <= STOP_LIMIT_S + 1.0 <= 10.5, "after ten seconds nothing is left"
    assert life.alive() == []
    told = {action.name: at for at, action in log if action.do == "terminate"}
    if "buffer" in told:
        assert all(at <= told["buffer"] for at in told.values()), "the buffer is told last"
    if life.ending.kind in ("died", "not_ready", "did_not_end"):
        assert life.ending.culprit in born
