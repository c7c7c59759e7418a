"""The ranks of a trainer as one: they start, die and end together, and the one that is to blame is named."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from areal_async.base.processes import RestartPolicy
from areal_async.launch.lifecycle import (
    KILLED_LIMIT_S,
    LAST_ONE_LIMIT_S,
    Action,
    Ending,
    Lifecycle,
    Phase,
    in_order_of_cause,
)
from areal_async.launch.local_launcher import RankLines
from areal_async.launch.plan import services_of
from areal_async.launch.rank_lines import Lines
from areal_async.launch.summary import failure_text
from areal_async.service import rank_group as line
from tests.unit.launch.launching import changed
from tests.unit.launch.test_supervisor import supervise

RANKS = ["trainer", "trainer-1", "trainer-2"]
POLICY = RestartPolicy(limit=2, window_s=100.0, first_pause_s=1.0, longest_pause_s=8.0)


@pytest.fixture
def places(job):
    return services_of(changed(job, "trainer", ranks=3))


@pytest.fixture
def life(places):
    """A run whose services all serve at time 0."""
    life = Lifecycle(places, 60.0, POLICY)
    life.begin(0.0)
    for place in places:
        life.ready(place.name, 0.0)
    return life


def test_every_rank_is_a_process_with_a_place_of_its_own(job, places):
    ranks = [place for place in places if place.role == "trainer"]
    assert [(place.name, place.index) for place in ranks] == [(name, i) for i, name in enumerate(RANKS)]
    with_ports = changed(changed(job, "trainer", ranks=3), "observe", metrics_port=9000)
    ports = [place.metrics_port for place in services_of(with_ports)]
    assert ports == list(range(9000, 9000 + len(ports)))
    sft = changed(job, "trainer", ranks=2).model_copy(update={"kind": "sft"})
    assert [place.name for place in services_of(sft)] == ["trainer", "trainer-1"]


def test_the_others_are_killed_with_one_rank_and_all_start_again_once_they_are_gone(life):
    assert life.exited("trainer-1", -9, 5.0) == [Action("kill", "trainer"), Action("kill", "trainer-2")]
    assert not life.all_serve()
    assert life.exited("trainer-2", -9, 5.1) == []
    assert life.tick(7.0) == [], "rank 0 is still there"
    assert life.exited("trainer", -9, 7.1) == []
    assert life.tick(7.2) == [Action("start", name) for name in RANKS]
    for name in RANKS:
        assert not life.all_serve()
        life.ready(name, 8.0)
    assert life.all_serve()
    assert len(life.states["trainer"].restarts.deaths_s) == 1


def test_a_rank_that_dies_before_the_group_serves_takes_it_along_too(life):
    life.exited("trainer-1", -9, 5.0)
    for name in ("trainer", "trainer-2"):
        life.exited(name, -9, 5.0)
    assert life.tick(7.0) == [Action("start", name) for name in RANKS]
    life.ready("trainer", 7.5)
    assert life.exited("trainer-2", -9, 8.0) == [Action("kill", "trainer"), Action("kill", "trainer-1")]
    for name in ("trainer", "trainer-1"):
        life.exited(name, -9, 8.1)
    assert life.tick(10.1) == [Action("start", name) for name in RANKS]


def test_the_deaths_of_all_ranks_are_counted_together_and_the_last_is_named(life):
    for number, name in enumerate(("trainer-2", "trainer", "trainer-1")):
        now_s = 10.0 * (number + 1)
        life.exited(name, -9, now_s, "gave no sign of life")
        for other in RANKS:
            if life.states[other].alive and not life.stopping:
                life.exited(other, -9, now_s)
        life.tick(now_s + 5)
        for other in RANKS:
            life.ready(other, now_s + 6)
    assert life.ending == Ending("died", "trainer-1", -9, 5.0, 3, "gave no sign of life")
    text = failure_text(life.ending, Path("/absent.log"))
    assert text.startswith("trainer-1 gave no sign of life after 5.0 s, its death number 3 in a short time")


def test_the_trainer_is_done_when_all_its_ranks_are(life):
    assert life.exited("trainer-1", 0, 5.0) == []
    assert life.exited("trainer-2", 0, 5.0) == []
    life.tick(5.0 + LAST_ONE_LIMIT_S + 1)
    assert not life.stopping, "rank 0 may wait for the evaluator"
    life.exited("trainer", 0, 200.0)
    assert life.ending == Ending("finished")


def test_ranks_that_had_finished_come_back_with_one_that_had_not(life):
    life.exited("trainer-1", 0, 20.0)
    assert life.exited("trainer", -11, 21.0) == [Action("kill", "trainer-2")]
    life.exited("trainer-2", -9, 21.1)
    assert life.tick(21.2) == [Action("start", name) for name in RANKS]


def test_a_rank_that_is_silent_is_killed_and_one_that_the_kernel_holds_ends_the_run(life):
    assert life.silent("trainer-1", 5.0) == [Action("kill", "trainer-1")]
    assert life.silent("trainer-1", 5.1) == [], "once is enough"
    life.tick(5.0 + KILLED_LIMIT_S - 1)
    assert not life.stopping
    life.tick(5.0 + KILLED_LIMIT_S + 1)
    assert (life.ending.kind, life.ending.culprit) == ("not_gone", "trainer-1")
    assert "driver" in failure_text(life.ending, Path("/absent.log"))


def test_workers_without_weights_have_time_anew_when_the_ranks_are_started_again(places):
    life = Lifecycle(places, 60.0, POLICY)
    life.begin(0.0)
    for name in ("buffer", "reward"):
        life.ready(name, 0.0)
    life.exited("trainer-1", -9, 59.5)
    for name in ("trainer", "trainer-2"):
        life.exited(name, -9, 59.5)
    life.tick(60.2)
    assert life.tick(60.5) == [Action("start", name) for name in RANKS]
    life.tick(100.0)
    assert not life.stopping, "a worker cannot serve before the trainer does"
    for name in RANKS:
        life.ready(name, 100.0)
    life.tick(121.0)
    assert (life.ending.kind, life.ending.culprit) == ("not_ready", "rollout-0")


def test_ranks_that_do_not_serve_in_time_are_all_named(places):
    life = Lifecycle(places, 60.0, POLICY)
    life.begin(0.0)
    life.ready("buffer", 0.0)
    for name in ("trainer-1", "reward", "rollout-0"):
        life.ready(name, 1.0)
    life.tick(60.5)
    assert (life.ending.kind, life.ending.culprit, life.ending.cause) == ("not_ready", "trainer", "trainer-2")


def test_of_several_that_ended_those_that_were_killed_came_first():
    ended = {"trainer": os.EX_TEMPFAIL, "trainer-1": 0, "trainer-2": -9, "trainer-3": 1}
    assert in_order_of_cause(ended) == ["trainer-2", "trainer-3", "trainer", "trainer-1"]


def test_a_stop_during_a_fall_starts_nothing(life):
    life.exited("trainer-1", -9, 5.0)
    life.interrupt(5.1)
    life.exited("trainer", -9, 5.2)
    life.exited("trainer-2", -9, 5.2)
    assert not [action for action in life.tick(9.0) if action.do == "start"]
    assert {life.states[name].phase for name in RANKS} <= {Phase.ENDED, Phase.RESTARTING}


# --- the supervisor's side ------------------------------------------------------------------------------


class Told:
    """A child whose line is written to by the test."""

    def __init__(self):
        self.said, self.near = b"", True

    def heard(self):
        said, self.said = self.said, b""
        return said

    def is_heard(self):
        return self.near


@pytest.fixture
def ranks(places):
    return {place.name: Told() for place in places}


@pytest.fixture
def group(places, ranks):
    group = Lines(lambda place: 10.0 if place.role == "trainer" else 20.0)
    for place in places:
        group.started(place, ranks[place.name])
    return group


def test_one_rank_alone_has_no_socket_and_others_a_fresh_one_at_each_start(job, places):
    (trainer,) = [place for place in services_of(job) if place.role == "trainer"]
    variables, given, line_fd = RankLines("127.0.0.1", several=False).prepare(trainer)
    assert variables == {}
    assert list(given) == [line.PULSE_VARIABLE]
    closed(given, line_fd)
    several, addresses = RankLines("127.0.0.1", several=True), []
    first, second = [place for place in places if place.role == "trainer"][:2]
    for _ in range(2):
        variables, given, line_fd = several.prepare(first)
        addresses.append(variables[line.MEETING_VARIABLE])
        with socket.socket(fileno=os.dup(given[line.LISTENING_VARIABLE])) as there:
            assert addresses[-1] == "{}:{}".format(*there.getsockname())
            assert there.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            assert there.getsockname()[0] == "127.0.0.1"
        closed(given, line_fd)
        variables, given, line_fd = several.prepare(second)
        assert variables[line.MEETING_VARIABLE] == addresses[-1]
        assert line.LISTENING_VARIABLE not in given
        closed(given, line_fd)
    assert addresses[0] != addresses[1]


def closed(given, line_fd):
    for fd in (*given.values(), line_fd):
        os.close(fd)


def test_a_rank_without_a_pulse_is_found_and_a_supervisor_that_was_held_up_takes_none_for_dead(group, ranks):
    for rank in ranks.values():
        rank.said = b"\n"
    for second in range(1, 12):
        for name in ("trainer", "trainer-2"):
            ranks[name].said += b"\n"
        assert group.look(float(second)) == []
    assert group.look(1000.0) == ["trainer-1"], "what the supervisor has not looked at counts for a second"
    assert group.cause_of("trainer-1", 1000.1) == "gave no sign of life for 10 s and was killed"
    assert group.cause_of("trainer", 1000.1) == ""


@pytest.mark.parametrize("name", ["rollout-0", "reward", "buffer", "trainer-2"])
@pytest.mark.parametrize(
    ("heard_first", "pulses", "near", "found"),
    [
        (True, False, True, True),
        (True, True, True, False),
        (True, False, False, False),
        (False, False, True, False),
    ],
    ids=["silent", "busy for long", "link cut", "still loading"],
)
def test_one_rule_of_liveness_holds_for_every_role(group, ranks, name, heard_first, pulses, near, found):
    for other, child in ranks.items():
        child.said = b"\n" if heard_first or other != name else b""
    ranks[name].near = near
    hanging = []
    for second in range(100):
        for other, child in ranks.items():
            if other != name or pulses:
                child.said += b"\n"
        hanging += group.look(float(second))
    assert set(hanging) == ({name} if found else set())


def test_a_rank_says_how_it_dies_and_for_whom_it_waits(group, ranks, monkeypatch):
    monkeypatch.setattr(line, "_pulse_fd", 0)

    def tell(name, note):
        monkeypatch.setattr(line, "_write", lambda fd, said: setattr(ranks[name], "said", said))
        line.tell(note)

    tell("trainer-2", line.Note("ran out of memory (a\n" + "very " * 200 + "long text)"))
    assert group.look(1.0) == []
    cause = group.cause_of("trainer-2", 1.1)
    assert cause.startswith("ran out of memory (a very very")
    assert len(cause) == line.NOTE_LIMIT
    tell("trainer", line.Note("did not come", (1,)))
    assert group.look(2.0) == ["trainer-1"]
    assert group.cause_of("trainer-1", 2.1) == "did not come"
    assert group.cause_of("trainer", 2.1) == ""
    ranks["trainer"].said = b"what is no note\n"
    group.forget("trainer-1")
    assert group.look(3.0) == []


# --- real processes ---------------------------------------------------------------------------------------


def test_a_rank_that_is_killed_brings_the_group_back(job, folders, behave):
    behave({"trainer": "waits for the next", "trainer-1": "killed once", "trainer-2": "waits for the next"})
    three = changed(changed(job, "trainer", ranks=3), "supervisor", restarts=1, first_pause_s=0.0)
    told = []
    ending, _ = supervise(three, folders, on_restart=lambda name, text: told.append((name, text)))
    assert ending == Ending("finished")
    assert told[0][0] == "trainer-1"
    assert told[0][1].startswith(
        "trainer-1 was killed by SIGKILL; the 3 ranks of the trainer are started again"
    )


def test_a_rank_that_is_stopped_is_found_and_named(job, folders, behave):
    behave({"trainer": "waits for the next", "trainer-1": "stops once"})
    two = changed(changed(job, "trainer", ranks=2, hang_s=10.0), "supervisor", restarts=1)
    told = []
    ending, _ = supervise(two, folders, on_restart=lambda name, text: told.append(text))
    assert ending == Ending("finished")
    (text,) = told
    assert text.startswith("trainer-1 gave no sign of life for 10 s and was killed; the 2 ranks")


def test_a_service_that_is_stopped_is_found_named_and_started_again_whatever_its_role(job, folders, behave):
    stopped = ["buffer", "reward", "rollout-0"]
    behave({"trainer": "serves until told", **dict.fromkeys(stopped, "stops once")})
    told = {}

    def on_restart(name, text):
        told[name] = text
        if set(told) == set(stopped):
            (folders.run_dir / "enough").touch()

    ending, _ = supervise(changed(job, "supervisor", restarts=1, hang_s=5.0), folders, on_restart=on_restart)
    assert ending == Ending("finished")
    for name in stopped:
        assert told[name].startswith(
            f"{name} gave no sign of life for 5 s and was killed; it is started again"
        )
