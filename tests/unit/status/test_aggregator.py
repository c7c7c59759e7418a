"""What is worked out of a run's records and of what its services say of themselves."""

import asyncio
import gc
import os
import sys
import time
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from areal_async.base.errors import PeerGone
from areal_async.base.processes import ChildProcess
from areal_async.base.records import RunRecord
from areal_async.launch.aggregator import MESSAGE_LIFE_S, StatusAggregator
from areal_async.launch.monitor import LoadLog, Monitor
from areal_async.rpc.control_messages import ServiceFigures, ServiceStatus
from areal_async.rpc.messages import BufferStats, NoScore
from areal_async.service.record import RunLog, Tail
from tests.waiting import until, wait_for

BURN = "import time; t = time.process_time\nwhile t() < 0.3: pass\ntime.sleep(600)"
NAMES = ("buffer", "trainer", "rollout-0", "rollout-1")


@pytest.fixture
def aggregator(job):
    return StatusAggregator(job, NAMES, started_s=100.0)


def said(name, busy_s=None, figures=None, **fields):
    """A service's answer."""
    given = {"pid": 1, "state": "serving", "waiting_for": {}} | fields
    return ServiceStatus(name=name, busy_s=busy_s or {}, figures=figures or ServiceFigures(), **given)


def told(name, *records, recorded, **fields):
    """The answer of a service that tells these records."""
    shown = [msgspec.convert(record, RunRecord) for record in records]
    return said(name, records=shown, recorded=recorded, **fields)


def test_records_make_progress_and_time_left(aggregator):
    empty = aggregator.status(101.0)
    assert (empty.step, empty.elapsed_s, empty.eta_s, empty.reward, empty.bound) == (0, 1.0, None, None, 4)
    aggregator.read(
        {"kind": "step", "step": step, "version": step + 1, "time_s": 1000 + 2 * step, "reward_mean": 0.5}
        | {"staleness_mean": 0.7, "staleness_max": 2 if step == 5 else 1}
        for step in range(30)
    )
    status = aggregator.status(160.0)
    assert (status.step, status.steps, status.version) == (30, 100, 30)
    assert status.eta_s == pytest.approx(2 * 70)
    aggregator.read(
        {"kind": "step", "step": step, "version": step + 1, "time_s": 1060.0} for step in (98, 99)
    )
    assert aggregator.status(230.0).eta_s is None, "a last evaluation and the checkpoint are not steps"
    assert (status.staleness_max, status.staleness_seen) == (1, 2)
    assert status.reward == 0.5


def test_held_out_accuracy_is_by_version_not_by_arrival(aggregator):
    assert aggregator.status(101.0).accuracy_interval is None
    aggregator.read(
        {"kind": "evaluation", "version": version, "accuracy": it, "mean": [it, it - 0.125, it + 0.125]}
        for version, it in ((25, 0.5), (0, 0.3), (50, 0.6), (40, 0.4))
    )
    status = aggregator.status(101.0)
    assert (status.accuracy_start, status.accuracy, status.accuracy_version) == (0.3, 0.6, 50)
    assert status.accuracy_interval == (0.475, 0.725)


SELF_CHECK = {"kind": "self_check", "step": 0, "n": 4096, "engine": "local", "mean": 4e-7, "bound": 1e-3}


def test_the_self_check_is_told(aggregator):
    assert aggregator.status(101.0).self_check == ""
    aggregator.read([SELF_CHECK | {"passed": True, "max": 1.0, "p999": 3.14e-6}])
    assert aggregator.status(101.0).self_check == (
        "passed: 4,096 log-probs of local, 99.9 % of differences within 3.1e-06 of 0.001 allowed, mean 4e-07"
    )
    aggregator.read([SELF_CHECK | {"passed": False, "max": 0.2, "p999": 0.1, "bound": 0.0}])
    assert aggregator.status(101.0).self_check.startswith(
        "not judged: 4,096 log-probs of local, 99.9 % of diff"
    )
    aggregator.read([SELF_CHECK | {"passed": True, "max": 1.0, "p999": 3e-6, "version": 1}])
    assert aggregator.status(101.0).self_check.startswith("passed: 4,096 log-probs of version 1 of local")
    broken = SELF_CHECK | {"passed": False, "max": None}
    aggregator.read([broken, SELF_CHECK | {"passed": True, "max": 1.0, "p999": 3e-6, "version": 2}])
    assert "not finite" in aggregator.status(101.0).self_check, "another version does not mend a failure"


def test_supervised_records_count_from_one(job):
    aggregator = StatusAggregator(job.model_copy(update={"kind": "sft"}), ["trainer"], 0.0)
    first, last = {"step": 0, "accuracy": 0.0, "time_s": 10.0}, {"step": 10, "loss": 2.0, "time_s": 15.0}
    aggregator.read({"kind": "sft"} | record for record in (first, last))
    status = aggregator.status(5.0)
    assert (status.step, status.loss, status.eta_s) == (10, 2.0, pytest.approx(45.0))


def test_each_record_that_a_service_tells_counts_once(aggregator):
    steps = [{"kind": "step", "step": n, "reward_mean": float(n)} for n in range(4)]
    for pid, last, mean in ((1, 2, 0.5), (1, 2, 0.5), (1, 3, 1.0), (2, 2, 0.8)):
        aggregator.feed_status("trainer", told("trainer", *steps[:last], recorded=last, pid=pid), 101.0)
        assert aggregator.status(101.0).reward == pytest.approx(mean)


def test_rates_and_busy_shares_are_of_the_last_seconds(aggregator):
    for tick in range(41):
        now_s = 100 + tick / 2
        rate = 100 if tick <= 20 else 50
        base = 0 if tick <= 20 else 500
        for name in ("rollout-0", "rollout-1"):
            spent = {"generate": 0.9 * tick / 2, "load": 0.1 * tick / 2, "wait": 1.0 * tick / 2}
            figures = ServiceFigures(tokens=base + rate * tick // 2)
            aggregator.feed_status(name, said(name, spent, figures), now_s)
    status = aggregator.status(120.0)
    assert status.generated_per_s == pytest.approx(100.0)
    shares = {service.name: service.busy for service in status.services}
    assert shares["rollout-0"] == pytest.approx(0.9)
    assert shares["trainer"] is None


def test_busy_while_training_is_from_the_first_to_the_last_step_of_the_process_that_is_there(aggregator):
    phases = dict.fromkeys(NAMES, "serving")
    aggregator.set_phases(phases)

    def feed(now_s, busy_s, tokens=0, step=None):
        if step is not None:
            record = {"kind": "step", "step": step}
            aggregator.feed_status("trainer", told("trainer", record, recorded=step + 1), now_s)
        figures = ServiceFigures(tokens=tokens)
        aggregator.feed_status("rollout-0", said("rollout-0", {"generate": busy_s}, figures), now_s)
        return aggregator.busy_while_training("rollout-0")

    assert feed(100.0, 0.0) is None
    assert feed(150.0, 1.0, step=0) is None
    assert feed(200.0, 41.0, step=1) == pytest.approx(0.8)
    assert feed(900.0, 41.0) == pytest.approx(0.8)
    for phase in ("restarting", "starting", "serving"):
        aggregator.set_phases(phases | {"rollout-0": phase})
    assert aggregator.status(901.0).generated_per_s is None
    assert feed(1000.0, 5.0, 0, step=2) is None
    assert feed(1010.0, 11.0, 100, step=3) == pytest.approx(0.6)
    assert aggregator.status(1010.0).generated_per_s == pytest.approx(10.0)


def test_steps_done_again_have_a_pace_of_their_own(aggregator):
    times = [*((number, 1000.0 + number) for number in range(8)), (5, 1020.0), (6, 1021.0)]
    steps = [{"kind": "step", "step": number, "time_s": time_s} for number, time_s in times]
    aggregator.read(steps[:-1])
    assert aggregator.status(111.0).eta_s is None
    aggregator.read(steps)
    status = aggregator.status(111.0)
    assert (status.step, status.eta_s) == (7, pytest.approx(93.0))


def test_a_resumed_run_is_starting_until_it_trains(aggregator):
    before = [{"kind": "step", "step": number, "time_s": 1000.0 + number} for number in range(3)]
    before.append(SELF_CHECK | {"passed": True, "max": 1e-6})
    aggregator.read(before)
    assert aggregator.status(101.0).trained
    assert aggregator.status(101.0).self_check
    aggregator.read([*before, {"kind": "resume", "time_s": 9000.0}])
    status = aggregator.status(101.0)
    assert (status.trained, status.step, status.eta_s) == (False, 3, None)
    assert status.self_check == "", "the check of the life before says nothing of this one"
    step = {"kind": "step", "step": 3, "time_s": 9005.0}
    aggregator.feed_status("trainer", told("trainer", step, recorded=1), 101.0)
    assert aggregator.status(101.0).trained


def test_what_a_silent_service_said_last_is_not_shown(aggregator):
    aggregator.set_phases(dict.fromkeys(NAMES, "serving"))
    for at_s, tokens in ((100.0, 0), (101.0, 50)):
        answer = said("rollout-0", figures=ServiceFigures(tokens=tokens), waiting_for={"a": "rain"})
        aggregator.feed_status("rollout-0", answer, at_s)
    assert aggregator.status(102.0).generated_per_s == pytest.approx(50.0)
    assert aggregator.status(102.0).message == "rollout-0 waits for rain"
    status = aggregator.status(107.0)
    assert (status.generated_per_s, status.message) == (None, "")
    assert {service.name: service.phase for service in status.services}["rollout-0"] == "silent"


def test_the_last_notice_is_shown_for_a_while_and_then_what_is_waited_for(aggregator):
    aggregator.set_phases(dict.fromkeys(NAMES, "serving"))
    waits = {"batch": "a batch (reward: it has 0 of 4 workers)"}
    for now_s, notices in ((110.0, 1), (112.0, 1), (139.0, 1)):
        answer = said("trainer", waiting_for=waits, notice="the disk is nearly full", notices=notices)
        aggregator.feed_status("trainer", answer, now_s)
        assert aggregator.status(now_s).message == "trainer: the disk is nearly full"
    waiting = "trainer waits for a batch (reward: it has 0 of 4 workers)"
    assert aggregator.status(110.0 + MESSAGE_LIFE_S).message == waiting
    aggregator.feed_status("trainer", said("trainer", notice="again", notices=2), 141.0)
    assert aggregator.status(141.0).message == "trainer: again"
    aggregator.feed_status("trainer", said("trainer", pid=2, notice="another life", notices=1), 142.0)
    assert aggregator.status(142.0).message == "trainer: another life"


def test_a_tail_gives_each_whole_record_once(tmp_path):
    tail = Tail(tmp_path / "log")
    assert list(tail.records()) == []
    with (tmp_path / "log").open("a") as file:
        file.write('{"n": 1}\n{"n"')
        file.flush()
        assert list(tail.records()) == [{"n": 1}]
        file.write(': 2}\n\nno record\n[3]\n{"n": 4}\n')
        file.flush()
        assert list(tail.records()) == [{"n": 2}, {"n": 4}]
    assert list(tail.records()) == []


class Answers:
    """In place of the clients: what each service answers, where it does."""

    def __init__(self, **answers):
        self.answers = answers
        self.threads = {}

    async def ask(self, name, threads):
        await asyncio.sleep(0)
        self.threads[name] = threads
        if name not in self.answers:
            raise PeerGone(f"{name} is not there")
        return self.answers[name]

    async def metrics(self, name):
        return b"areal_told 7"

    async def close(self): ...


def monitor_of(job, clients, show=lambda status: None, **options):
    """A monitor of services that all serve."""
    names = list(clients.answers)
    phases = dict.fromkeys(names, "serving")
    given = {"clients": clients, "phases": lambda: phases, "show": show, "load": None}
    return Monitor(StatusAggregator(job, names, 0.0), **(given | options))


def test_a_monitor_shows_what_it_is_told_and_survives_who_does_not_answer(job):
    trainer = told("trainer", {"kind": "step", "step": 4}, recorded=1, notice="odd", notices=1)
    shown = []
    answers = Answers(trainer=trainer)
    monitor = monitor_of(
        job, answers, shown.append, phases=lambda: {"trainer": "serving", "reward": "serving"}
    )
    monitor.start()
    monitor.look()
    monitor.stop()
    assert (shown[-1].step, shown[-1].message) == (5, "trainer: odd")
    assert monitor.newest == shown[-1]


@pytest.mark.parametrize("error", [OSError(5, "the terminal has gone"), ZeroDivisionError(), SystemExit(1)])
async def test_a_monitor_whose_view_fails_watches_on_and_once_ended_says_so(job, error, recwarn):
    shown = []

    def show(status):
        shown.append(status)
        raise error

    monitor = monitor_of(job, Answers(trainer=said("trainer")), show)
    monitor.start()
    await until(lambda: shown and monitor.newest is not shown[0])
    assert await monitor.metrics("trainer") == b"areal_told 7"
    monitor.stop()
    assert len(shown) == 1
    with pytest.raises(PeerGone, match="not watched any more"):
        await monitor.metrics("trainer")
    monitor.stop()
    gc.collect()
    assert not [warning for warning in recwarn if "never awaited" in str(warning.message)]


async def test_a_monitor_that_was_stopped_blames_nobody_for_that_time(job, monkeypatch):
    """SIGSTOP of the supervisor for a minute: its clock goes on, and nobody was asked."""
    away_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + away_s)
    monkeypatch.setattr("areal_async.launch.monitor.time", clock)
    answers, shown = Answers(trainer=said("trainer"), buffer=said("buffer")), []
    monitor = monitor_of(job, answers, shown.append)
    monitor.start()
    monitor.look()
    answers.answers = {}
    begun_s, before = time.monotonic(), len(shown)
    away_s = 600.0
    await until(lambda: len(shown) >= before + 3)
    monitor.stop()
    assert all(one.stall is None for one in shown)
    assert max(one.stall_s for one in shown) <= time.monotonic() - begun_s + 10


def test_a_monitor_tells_every_process_of_a_side_how_many_threads_to_use(job):
    answers = Answers(**{name: said(name) for name in ("trainer", "trainer-1", "rollout-0", "buffer")})
    monitor = monitor_of(job, answers, threads=lambda status: {"trainer": 3, "rollout": 2})
    monitor.start()
    wanted = {"trainer": 3, "trainer-1": 3, "rollout-0": 2, "buffer": 0}
    wait_for(lambda: monitor.look() or answers.threads == wanted)
    monitor.stop()


def test_workers_that_join_and_leave_are_shown_as_long_as_they_are_there(aggregator):
    aggregator.set_phases(dict.fromkeys(NAMES, "serving"))
    aggregator.set_phases(dict.fromkeys(("buffer", "trainer", "rollout-0", "rollout-2"), "serving"))
    aggregator.feed_status("rollout-1", said("rollout-1"), 200.0)
    assert list(shown(aggregator)) == ["buffer", "trainer", "rollout-0", "rollout-2"]
    assert aggregator.names("rollout") == ["rollout-0", "rollout-2"]


def shown(aggregator):
    """The services by name."""
    return {service.name: service for service in aggregator.status(103.0).services}


def test_a_worker_that_drains_is_shown_so_whoever_told_it_to(aggregator):
    aggregator.set_phases(dict.fromkeys(NAMES, "serving") | {"rollout-0": "draining"})
    aggregator.feed_status("rollout-1", said("rollout-1"), 102.0)
    assert [shown(aggregator)[name].phase for name in NAMES[2:]] == ["draining", "serving"]
    aggregator.feed_status("rollout-1", said("rollout-1", state="draining"), 103.0)
    assert shown(aggregator)["rollout-1"].phase == "draining"


def test_a_service_that_starts_says_what_it_waits_for(aggregator):
    aggregator.set_phases(dict.fromkeys(NAMES, "serving") | {"rollout-0": "starting"})
    assert shown(aggregator)["rollout-0"].waiting_for == ""
    loads = said("rollout-0", state="starting", waiting_for={"server": "its SGLang server to load"})
    aggregator.feed_status("rollout-0", loads, 102.0)
    assert shown(aggregator)["rollout-0"].waiting_for == "its SGLang server to load"
    assert aggregator.status(103.0).message == "", "a service that starts is named where the start is shown"
    aggregator.feed_status("rollout-0", said("rollout-0"), 103.0)
    assert shown(aggregator)["rollout-0"].waiting_for == ""


def buffer_says(*no_scores, **reasons):
    counts = {name.replace("__", ":"): count for name, count in reasons.items()}
    stats = BufferStats({}, {}, counts, {}, 0, 0, no_scores=list(no_scores))
    return said("buffer", figures=ServiceFigures(buffer=stats))


def test_what_was_dropped_and_masked_is_told_with_its_reasons(aggregator):
    counts = {"dropped__overtaken": 1, "dropped__verdict_error": 4, "episode_masked__timeout": 2}
    no_scores = [
        NoScore("timeout", 3, "no answer within 1 s", "e", age_ms=5),
        NoScore("error:exception", 4, "ValueError: no", "e", age_ms=70),
    ]
    aggregator.feed_status("buffer", buffer_says(*no_scores, scored=9, **counts), 101.0)
    dropped = aggregator.status(102.0).dropped
    assert dropped.text == "5 groups (verdict_error 4, overtaken 1), 2 episodes masked (timeout 2)"
    assert [note.kind for note in dropped.no_scores] == ["error:exception", "timeout"]


def test_a_stall_is_blamed_on_verdicts_since_the_trainer_last_computed(aggregator):
    aggregator.set_phases(dict.fromkeys(NAMES, "serving"))
    why = NoScore("error:exception", 4, "ValueError: no", "e", age_ms=5)
    aggregator.feed_status("buffer", buffer_says(dropped__verdict_error=50), 100.0)
    aggregator.feed_status("trainer", said("trainer", {"train": 1.0}), 100.0)
    for now_s, dropped in ((100.5, 50), (1000.0, 50), (1000.0, 58)):
        aggregator.feed_status("buffer", buffer_says(why, dropped__verdict_error=dropped), now_s)
        for name in NAMES[1:]:
            aggregator.feed_status(name, said(name, {"train": 1.0}), now_s)
        stall = aggregator.stall(now_s)
        assert (stall is not None and "8 groups were dropped" in stall.detail) == (dropped == 58)
    assert "ValueError: no" in stall.detail


def test_a_trainer_of_which_a_rank_stands_still_computes_nothing(aggregator):
    """Rank 0 waits for it in a collective, which looks like work."""
    names = (*NAMES, "reward", "trainer-1")
    aggregator.set_phases(dict.fromkeys(names, "serving"))
    for now_s in range(100, 160, 2):
        for each in names:
            if each != "trainer-1" or now_s < 110:
                aggregator.feed_status(each, said(each, {"train": float(now_s)}), float(now_s))
    stall = aggregator.stall(158.0)
    assert stall.edge == "trainer"
    assert stall.detail == "no step is trained; trainer-1 has not answered for 50 s"
    aggregator.feed_status("trainer-1", said("trainer-1", {"train": 9.0}), 159.0)
    aggregator.feed_status("trainer", said("trainer", {"train": 160.0}), 159.0)
    assert aggregator.stall(160.0) is None


@pytest.mark.parametrize(
    ("name", "subject", "what"),
    [
        ("buffer", "redis", "Redis cannot write to its disk"),
        ("rollout-0", "weights", "no chunk of version 3 has come for 9 s"),
        ("trainer", "commit", "version 3 to be published and its step to be committed"),
        ("trainer", "checkpoint", "the newest checkpoint to be written"),
    ],
)
def test_a_stall_says_what_a_service_waits_for(aggregator, name, subject, what):
    names = (*NAMES, "reward")
    aggregator.set_phases(dict.fromkeys(names, "serving"))
    for now_s in (100.0, 1000.0):
        for each in names:
            waiting = {subject: what} if each == name else {}
            figures = ServiceFigures(3 if each == "trainer" else 2)
            answer = said(each, {"train": 1.0}, figures, waiting_for=waiting)
            aggregator.feed_status(each, answer, now_s)
    stall = aggregator.stall(1000.0)
    assert what in stall.detail


def test_what_a_run_uses_up_is_recorded_now_and_then_while_steps_are_done(tmp_path):
    log = RunLog(tmp_path / "metrics.jsonl")
    load = LoadLog(log)
    answers = {"trainer": said("trainer", pid=os.getpid())}
    for steps, now_s in ((1, 10.0), (2, 11.0), (2, 20.0), (3, 21.0), (4, 40.0), (4, 50.0)):
        load.look(answers, steps, now_s)
    load.look({"trainer": said("trainer", pid=2**30)}, 5, 60.0)  # It has just ended
    child = ChildProcess([sys.executable, "-c", BURN])
    wait_for(lambda: sum(psutil.Process(child.pid).cpu_times()[:2]) >= 0.2)
    load.look({"trainer": said("trainer", pid=os.getpid()), "child": said("child", pid=child.pid)}, 6, 70.0)
    child.kill()
    child.join()
    records = list(Tail(log.path).records())
    assert [record["kind"] for record in records] == ["load"] * 4
    assert [record["steps"] for record in records] == [1, 2, 4, 6]
    both = records[3]["services"]
    assert both["child"]["cpu_s"] >= 0.2
    assert both["trainer"]["cpu_s"] >= records[2]["services"]["trainer"]["cpu_s"] + 0.2, "with its children"
    assert records[0]["services"]["trainer"]["cpu_s"] > 0
    assert records[0]["cores"] >= 1


def test_whether_groups_would_be_leased_is_told(aggregator):
    assert aggregator.status(101.0).lease_wait == ""
    stats = BufferStats({}, {}, {}, {}, 0, 0, lease_wait="the trainer need not wait")
    aggregator.feed_status("buffer", said("buffer", figures=ServiceFigures(buffer=stats)), 101.0)
    assert aggregator.status(101.0).lease_wait == "the trainer need not wait"
