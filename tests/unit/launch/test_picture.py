from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_async.config.job import JobConfig
from areal_async.launch.registry import default_registry
from areal_async.runtime.log import NO_SCORES, SERVER_LOADS
from areal_async.runtime.metrics import busy, start_metrics_server
from areal_async.status.monitor import Monitor, Tail
from areal_async.status.picture import MESSAGE_LIFE_S, Observer, Picture
from areal_async.status.samples import by_label, fetch_samples, parse_samples

EXPOSITION = """\
# HELP areal_buffer_groups Groups.
# TYPE areal_buffer_groups gauge
areal_buffer_groups{state="queued"} 3.0
areal_buffer_groups{state="say \\"hi\\""} 1.0
areal_reward_call_seconds_bucket{le="0.1"} 5.0
areal_reward_call_seconds_sum 0.25
areal_busy_seconds_total{activity="train"} 1.5
python_info{version="3"} 1.0
"""


@pytest.fixture
def observer(job: JobConfig) -> Observer:
    return Observer(job, ["buffer", "trainer", "rollout-0", "rollout-1"], started_s=100.0)


def test_only_our_series_are_read_and_no_buckets() -> None:
    samples = parse_samples(EXPOSITION)
    assert len(samples) == 4
    assert samples["areal_reward_call_seconds_sum"] == 0.25
    assert dict(by_label(samples, "areal_buffer_groups", "state")) == {"queued": 3.0, 'say \\"hi\\"': 1.0}


def test_a_real_endpoint_is_read() -> None:
    with busy("picture_test"):
        port = start_metrics_server(0)
        samples = fetch_samples(port)
    assert 'areal_busy_seconds_total{activity="picture_test"}' in samples


def test_an_empty_run_has_an_empty_picture(observer: Observer) -> None:
    picture = observer.picture(101.0)
    assert (picture.step, picture.elapsed_s, picture.eta_s, picture.reward) == (0, 1.0, None, None)
    assert picture.bound == 4


def test_records_make_progress_and_time_left(observer: Observer) -> None:
    for step in range(30):
        observer.feed_record(
            {"kind": "step", "step": step, "version": step + 1, "time_s": 1000 + 2 * step, "reward_mean": 0.5}
            | {"staleness_mean": 0.7, "staleness_max": 2 if step == 5 else 1}
        )
    picture = observer.picture(160.0)
    assert (picture.step, picture.steps, picture.version) == (30, 100, 30)
    assert picture.eta_s == pytest.approx(2 * 70)
    assert (picture.staleness_max, picture.staleness_seen) == (1, 2)
    assert len(picture.rewards) == 30


def test_held_out_accuracy_is_by_version_not_by_arrival(observer: Observer) -> None:
    for version, accuracy in ((25, 0.5), (0, 0.3), (50, 0.6)):
        observer.feed_record({"kind": "evaluation", "version": version, "accuracy": accuracy})
    picture = observer.picture(101.0)
    assert (picture.accuracy_start, picture.accuracy, picture.accuracy_version) == (0.3, 0.6, 50)


def test_the_interval_is_that_of_the_newest_version_and_the_self_check_is_told(observer: Observer) -> None:
    assert (observer.picture(101.0).accuracy_interval, observer.picture(101.0).self_check) == (None, "")
    for version, ends in ((50, (0.5, 0.7)), (25, (0.4, 0.6))):
        record = {"kind": "evaluation", "version": version, "accuracy": 0.6, "mean": [0.6, *ends]}
        observer.feed_record(record)
    check = {"kind": "self_check", "step": 0, "n": 4096, "engine": "local", "max": 3.14e-6, "mean": 4e-7}
    observer.feed_record(check | {"bound": 1e-3, "passed": True})
    picture = observer.picture(101.0)
    assert picture.accuracy_interval == (0.5, 0.7)
    assert picture.self_check == (
        "passed: 4,096 log-probs of local, largest difference 3.1e-06 of 0.001 allowed, mean 4e-07"
    )
    observer.feed_record(check | {"bound": 1e-3, "passed": False, "max": None})
    assert "not finite" in observer.picture(101.0).self_check


def test_supervised_records_count_from_one(job: JobConfig) -> None:
    observer = Observer(job.model_copy(update={"kind": "sft"}), ["trainer"], 0.0)
    observer.feed_record({"kind": "sft", "step": 0, "accuracy": 0.0, "time_s": 10.0})
    observer.feed_record({"kind": "sft", "step": 10, "loss": 2.0, "time_s": 15.0})
    picture = observer.picture(5.0)
    assert (picture.step, picture.loss, picture.eta_s) == (10, 2.0, pytest.approx(45.0))


def test_rates_and_busy_shares_are_of_the_last_seconds(observer: Observer) -> None:
    for tick in range(41):
        now_s = 100 + tick / 2
        rate = 100 if tick <= 20 else 50
        base = 0 if tick <= 20 else 500
        for name in ("rollout-0", "rollout-1"):
            observer.feed_samples(
                name,
                {
                    "areal_rollout_tokens_total": base + rate * tick / 2,
                    'areal_busy_seconds_total{activity="generate"}': 0.9 * tick / 2,
                    'areal_busy_seconds_total{activity="load"}': 0.1 * tick / 2,
                    'areal_busy_seconds_total{activity="wait"}': 1.0 * tick / 2,
                },
                now_s,
            )
    picture = observer.picture(120.0)
    assert picture.generated_per_s == pytest.approx(100.0)
    shares = {service.name: service.busy for service in picture.services}
    assert shares["rollout-0"] == pytest.approx(0.9)
    assert shares["trainer"] is None


def test_busy_while_training_leaves_out_what_came_before_and_after(observer: Observer) -> None:
    series = 'areal_busy_seconds_total{activity="generate"}'
    observer.feed_samples("rollout-0", {series: 0.0}, 100.0)
    assert observer.busy_while_training("rollout-0") is None
    observer.feed_record({"kind": "step", "step": 0})
    observer.feed_samples("rollout-0", {series: 1.0}, 150.0)
    observer.feed_samples("rollout-0", {series: 2.0}, 160.0)
    assert observer.busy_while_training("rollout-0") is None
    observer.feed_record({"kind": "step", "step": 1})
    observer.feed_samples("rollout-0", {series: 41.0}, 200.0)
    observer.feed_samples("rollout-0", {series: 41.0}, 900.0)
    assert observer.busy_while_training("rollout-0") == pytest.approx(0.8)


def test_busy_shares_and_rates_outlive_a_restart(observer: Observer) -> None:
    series = 'areal_busy_seconds_total{activity="generate"}'
    names = ("buffer", "trainer", "rollout-0", "rollout-1")
    observer.set_phases(dict.fromkeys(names, "serving"))

    def life(begin_s: float, busy_s: float, steps: range) -> None:
        for at_s, share in ((begin_s, 0.0), (begin_s + 10, 1.0)):
            observer.feed_record({"kind": "step", "step": steps[0] if share == 0 else steps[-1]})
            samples = {series: 5 + busy_s * share, "areal_rollout_tokens_total": 100 * share}
            observer.feed_samples("rollout-0", samples, at_s)

    life(100.0, 8.0, range(1, 5))
    for phase in ("restarting", "starting", "serving"):
        observer.set_phases({"rollout-0": phase})
    assert observer.picture(111.0).generated_per_s is None
    life(200.0, 6.0, range(5, 9))
    assert observer.busy_while_training("rollout-0") == pytest.approx((8.0 + 6.0) / 20)
    assert observer.picture(210.0).generated_per_s == pytest.approx(10.0)


def test_steps_done_again_are_told_and_not_drawn_twice(observer: Observer) -> None:
    def step(number: int, time_s: float) -> None:
        record = {"kind": "step", "step": number, "time_s": time_s, "reward_mean": number / 10}
        observer.feed_record(record)

    for number in range(8):
        step(number, 1000.0 + number)
    observer.feed_log_line("trainer", '{"event":"trainer opened","level":"info","epoch":2,"step":5}', 110.0)
    told = observer.picture(111.0).message
    assert told == "trainer goes on from the checkpoint of step 5; steps to do again: 3"
    step(5, 1020.0)
    assert observer.picture(111.0).eta_s is None
    step(6, 1021.0)
    picture = observer.picture(111.0)
    assert picture.rewards == (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    assert (picture.step, picture.eta_s) == (7, pytest.approx(93.0))


def test_a_resumed_run_is_starting_until_it_trains(observer: Observer) -> None:
    for number in range(3):
        observer.feed_record({"kind": "step", "step": number, "time_s": 1000.0 + number})
    assert observer.picture(101.0).trained
    check = {"kind": "self_check", "step": 0, "n": 9, "engine": "local", "max": 1e-6, "mean": 1e-7}
    observer.feed_record({**check, "bound": 1e-3, "passed": True})
    assert observer.picture(101.0).self_check
    observer.feed_record({"kind": "resume", "time_s": 9000.0})
    picture = observer.picture(101.0)
    assert (picture.trained, picture.step, picture.eta_s) == (False, 3, None)
    assert picture.self_check == "", "the check of the life before says nothing of this one"
    observer.feed_record({"kind": "step", "step": 3, "time_s": 9005.0})
    assert observer.picture(101.0).trained


def test_what_a_silent_service_said_last_is_not_shown(observer: Observer) -> None:
    observer.set_phases({"rollout-0": "serving"})
    for at_s, tokens in ((100.0, 0.0), (101.0, 50.0)):
        observer.feed_samples("rollout-0", {"areal_rollout_tokens_total": tokens}, at_s)
    assert observer.picture(102.0).generated_per_s == pytest.approx(50.0)
    picture = observer.picture(107.0)
    assert picture.generated_per_s is None
    assert {service.name: service.phase for service in picture.services}["rollout-0"] == "silent"


def test_the_last_warning_is_shown_for_a_while(observer: Observer) -> None:
    line = {"event": "waiting for scored groups", "level": "info", "detail": "reward has 0 of 4 workers"}
    observer.feed_log_line("trainer", json.dumps(line), 110.0)
    observer.feed_log_line("trainer", '{"event": "step", "level": "info"}', 111.0)
    observer.feed_log_line("trainer", "a line that is not structured, with waiting for", 111.0)
    shown = "trainer: waiting for scored groups (reward has 0 of 4 workers)"
    assert observer.picture(112.0).message == shown
    assert observer.picture(111.0 + MESSAGE_LIFE_S).message == ""


def test_what_is_waited_for_is_void_with_the_next_step_but_a_warning_stays(observer: Observer) -> None:
    for level, left in (("info", ""), ("warning", "trainer: waiting for room")):
        line = json.dumps({"event": "waiting for room", "level": level})
        observer.feed_log_line("trainer", line, 110.0)
        assert observer.picture(111.0).message == "trainer: waiting for room"
        observer.feed_record({"kind": "step", "step": 3})
        assert observer.picture(111.0).message == left


def test_a_tail_gives_each_whole_line_once(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    assert list(tail.lines()) == []
    with (tmp_path / "log").open("a") as file:
        file.write("one\ntw")
        file.flush()
        assert list(tail.lines()) == ["one"]
        file.write("o\n\nthree\n")
        file.flush()
        assert list(tail.lines()) == ["two", "three"]
    assert list(tail.lines()) == []


def test_a_monitor_shows_what_it_can_read_and_survives_what_it_cannot(job: JobConfig, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "trainer.log"
    log.write_text('{"event": "from the run before", "level": "warning"}\n')
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 4}\nnot json\n[1]\n')
    shown: list[Picture] = []
    monitor = Monitor(
        Observer(job, ["trainer"], 0.0),
        tmp_path,
        endpoints=lambda: {"trainer": 1},  # nothing listens there
        phases=lambda: {"trainer": "serving"},
        show=shown.append,
        poll_s=0.01,
    )
    with log.open("a") as file:
        file.write('{"event": "odd", "level": "warning"}\n')
    monitor.start()
    monitor.stop()
    assert shown[-1].step == 5
    assert {picture.message for picture in shown} <= {"", "trainer: odd"}
    assert shown[-1].message == "trainer: odd"


def test_workers_that_join_and_leave_are_shown_as_long_as_they_are_there(
    job: JobConfig, observer: Observer, tmp_path: Path
) -> None:
    phases = dict.fromkeys(("buffer", "trainer", "rollout-0", "rollout-1"), "serving")
    (tmp_path / "logs").mkdir()
    pictures: list[Picture] = []
    monitor = Monitor(observer, tmp_path, endpoints=dict, phases=lambda: phases, show=pictures.append)
    monitor.look()
    phases["rollout-2"] = "starting"
    del phases["rollout-1"]
    monitor.look()
    log = json.dumps({"level": "warning", "event": "engine lost", "time": ""})
    (tmp_path / "logs" / "rollout-2.log").write_text(log + "\n")
    monitor.look()
    picture = observer.picture(200.0)
    assert [service.name for service in picture.services] == ["buffer", "trainer", "rollout-0", "rollout-2"]
    assert observer.names("rollout") == ["rollout-0", "rollout-2"]
    observer.feed_samples("rollout-1", {"areal_rollout_version": 3.0}, 200.0)
    assert observer.names("rollout") == ["rollout-0", "rollout-2"]
    assert observer._message is not None
    assert observer._message[1] == "rollout-2: engine lost"


def test_a_worker_that_drains_is_shown_so_whoever_told_it_to(observer: Observer) -> None:
    def shown() -> dict[str, str]:
        return {service.name: service.phase for service in observer.picture(103.0).services}

    observer.set_phases({"rollout-0": "draining", "rollout-1": "serving"})
    observer.feed_samples("rollout-1", {"areal_rollout_draining": 0.0}, 102.0)
    assert (shown()["rollout-0"], shown()["rollout-1"]) == ("draining", "serving")
    observer.feed_samples("rollout-1", {"areal_rollout_draining": 1.0}, 103.0)
    assert shown()["rollout-1"] == "draining"


def test_a_service_that_starts_says_what_it_is_at(observer: Observer) -> None:
    line = json.dumps({"event": SERVER_LOADS, "level": "info", "server": "SGLang"})

    def doing() -> str:
        return next(s.doing for s in observer.picture(103.0).services if s.name == "rollout-0")

    observer.set_phases({"rollout-0": "starting"})
    assert doing() == ""
    observer.feed_log_line("rollout-0", line, 102.0)
    assert doing() == "its SGLang server loads"
    observer.set_phases({"rollout-0": "serving"})
    assert doing() == ""
    # A replica that is started again does not make a worker that serves one that starts.
    observer.feed_log_line("rollout-0", line, 104.0)
    assert doing() == ""


def counted(**reasons: int) -> dict[str, float]:
    return {
        f'areal_buffer_transitions_total{{reason="{name.replace("__", ":")}"}}': float(count)
        for name, count in reasons.items()
    }


def no_score_line(kind: str, count: int, message: str) -> str:
    fields = {"level": "warning", "event": NO_SCORES, "kind": kind, "count": count, "message": message}
    return json.dumps(fields)


def test_what_was_dropped_and_masked_is_in_the_picture_with_its_reasons(observer: Observer) -> None:
    shown = counted(scored=9, dropped__overtaken=1, dropped__verdict_error=4, episode_masked__timeout=2)
    observer.feed_samples("buffer", shown, 101.0)
    observer.feed_log_line("buffer", no_score_line("timeout", 2, "no answer within 1 s"), 101.0)
    observer.feed_log_line("buffer", no_score_line("error:exception", 4, "ValueError: no"), 101.0)
    observer.feed_log_line("buffer", no_score_line("timeout", 3, "no answer within 1 s"), 101.0)
    dropped = observer.picture(102.0).dropped
    assert dropped.text == "5 groups (verdict_error 4, overtaken 1), 2 episodes masked (timeout 2)"
    assert [note.text for note in dropped.no_scores] == [
        "error:exception ×4: ValueError: no",
        "timeout ×3: no answer within 1 s",
    ]


def test_a_stall_is_blamed_on_verdicts_since_the_trainer_last_computed(observer: Observer) -> None:
    names = ("buffer", "trainer", "rollout-0", "rollout-1")
    observer.set_phases(dict.fromkeys(names, "serving"))
    observer.feed_samples("buffer", counted(dropped__verdict_error=50), 100.0)
    observer.feed_samples("trainer", {'areal_busy_seconds_total{activity="train"}': 1.0}, 100.0)
    observer.feed_log_line("buffer", no_score_line("error:exception", 4, "ValueError: no"), 101.0)
    for now_s, dropped in ((100.5, 50), (1000.0, 50), (1000.0, 58)):
        observer.feed_samples("buffer", counted(dropped__verdict_error=dropped), now_s)
        for name in names[1:]:
            observer.feed_samples(name, {'areal_busy_seconds_total{activity="train"}': 1.0}, now_s)
        stall = observer.stall(now_s)
        assert (stall is not None and "8 groups were dropped" in stall.detail) == (dropped == 58)
    assert stall is not None
    assert "ValueError: no" in stall.detail


def test_a_stall_says_in_words_why_there_is_no_shared_reward_service(observer: Observer) -> None:
    names = ("buffer", "trainer", "rollout-0", "rollout-1")
    observer.set_phases(dict.fromkeys((*names, "reward"), "serving"))
    for now_s in (100.0, 1000.0):
        observer.feed_samples("buffer", counted(), now_s)
        observer.feed_samples("reward", {'areal_reward_waits{why="no_service"}': 1.0}, now_s)
        for name in names[1:]:
            observer.feed_samples(name, {'areal_busy_seconds_total{activity="train"}': 1.0}, now_s)
    stall = observer.stall(1000.0)
    assert stall is not None
    command = f"areal-async reward up --registry {default_registry()}"
    assert f"no shared reward service runs; start one with `{command}`" in stall.detail


def test_nothing_is_unbounded_in_what_is_kept_of_kinds(observer: Observer) -> None:
    for number in range(50):
        observer.feed_log_line("buffer", no_score_line(f"error:{number}", 1, "m"), 101.0)
    assert len(observer.picture(102.0).dropped.no_scores) == 8
