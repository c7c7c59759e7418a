import io
import os
import shlex
from types import SimpleNamespace

import msgspec
import pyte
import pytest
from rich.console import Console

from areal_async.base.log import clock_text
from areal_async.launch.aggregator import DropReport, RunStatus, ServiceActivity
from areal_async.launch.watchdog import Stall
from areal_async.rpc.messages import NoScore
from areal_async.show.view import PlainLines, open_view, render, status_line

SERVICES = tuple(
    ServiceActivity(name, "serving", share)
    for name, share in (("buffer", 0.12), ("trainer", 0.81), ("reward", 0.08), ("rollout-0", 0.96))
)


def status(**changes):
    place = {"job": "sums", "kind": "rl", "elapsed_s": 83.0, "step": 123, "steps": 300, "eta_s": 121.0}
    learnt = {"version": 123, "reward": 0.61, "loss": 0.01, "message": "", "services": SERVICES}
    held_out = {"accuracy": 0.63, "accuracy_start": 0.38, "accuracy_version": 100}
    rates = {"generated_per_s": 4512.0, "trained_per_s": 4310.0}
    staleness = {"staleness_mean": 1.31, "staleness_max": 3, "staleness_seen": 4, "bound": 4}
    groups = {"queued": 2, "leased": 130, "scored": 70, "trained": 1472, "committed": 0}
    figures = place | learnt | held_out | rates | staleness | {"groups": groups}
    return RunStatus(**(figures | changes))


def paper(width=200, **options):
    """A console that keeps what is printed; `text` has it."""
    return Console(file=io.StringIO(), width=width, **options)


def text(console):
    return console.file.getvalue()


def drawn(shown, width=100):
    console = paper(width)
    console.print(render(shown, width))
    return text(console)


def test_the_panel_shows_every_figure():
    panel = drawn(status(message="trainer: waiting for scored groups"))
    for figure in (
        "step 123/300, left 2:01",
        "0.380 → 0.630 at version 100",
        "4,512 generated, 4,310 trained",
        "1.31, max 3, seen 4 of 4 allowed",
        "2 queued, 130 leased, 70 scored, 1,472 trained",
        "trainer: waiting for scored groups",
        "trainer 81%, reward 8%, rollout-0 96%",
    ):
        assert figure in panel


@pytest.mark.parametrize("width", [60, 80, 110])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"message": "trainer: waiting for scored groups (" + "reward has no workers; " * 9 + ")"},
        {"services": tuple(ServiceActivity(f"rollout-{index}", "serving", 0.5) for index in range(40))},
        {"reward": None, "accuracy": None, "staleness_mean": None, "groups": {}, "eta_s": None},
        {"kind": "sft", "reward": None},
        {"accuracy_interval": (0.59, 0.67), "self_check": "passed: 1,512,000 log-probs " + "of sglang " * 9},
        {"step": 0, "services": (ServiceActivity("trainer", "starting"),), "stopping": True},
    ],
)
def test_every_line_fits_the_terminal(width, changes):
    lines = drawn(status(**changes), width).splitlines()
    assert {len(line) for line in lines} == {width}
    assert len(lines) < 24


def plain(moments):
    """Return the lines printed of these moments, 0.5 s apart."""
    console, now = paper(), SimpleNamespace(s=0.0)
    view = PlainLines(console, clock=lambda: now.s)
    for moment in moments:
        view.show(moment)
        now.s += 0.5
    return text(console)


def test_the_interval_and_the_self_check_have_a_place():
    shown = status(accuracy_interval=(0.59, 0.671), self_check="passed: 512 log-probs")
    assert "0.380 → 0.630 [0.590, 0.671] at version 100" in drawn(shown)
    assert "self-check  passed: 512 log-probs" in drawn(shown)
    assert plain([shown] * 3).count('self_check="passed: 512 log-probs"') == 1


STARTING = ServiceActivity("rollout-0", "starting", None, "its SGLang server to load")


@pytest.mark.parametrize(
    ("service", "trained", "words"),
    [
        (ServiceActivity("trainer", "starting"), False, "starting trainer"),
        (STARTING, False, "starting rollout-0 (waits for its SGLang server to load)"),
        (ServiceActivity("trainer", "starting", 0.8), True, "trainer starting"),
        (ServiceActivity("rollout-0", "silent"), True, "rollout-0 silent"),
        (ServiceActivity("rollout-1", "draining", 0.4), True, "rollout-1 draining"),
    ],
)
def test_a_service_that_does_not_serve_says_so(service, trained, words):
    shown = status(services=(SERVICES[0], service), trained=trained)
    assert words in drawn(shown)
    line = parsed(status_line(shown))
    assert words in (line["not_serving"] if trained else f"starting {line['starting']}")
    for said in (drawn(shown), status_line(shown)):
        assert "80%" not in said, "not the share of the process that died"


def test_an_evaluation_under_way_says_how_far_it_is():
    evaluator = ServiceActivity("evaluator", "serving", 0.9, "", "120 of 512 answers, left 1:23")
    shown = status(services=(*SERVICES, evaluator))
    assert "doing      evaluator 120 of 512 answers, left 1:23" in drawn(shown)
    assert parsed(status_line(shown))["doing"] == "evaluator 120 of 512 answers, left 1:23"


def test_services_alike_are_one_entry_but_for_those_that_do_not_serve():
    ranks = [ServiceActivity(name, "serving", 0.62) for name in ("trainer", "trainer-1", "trainer-2")]
    workers = [ServiceActivity(f"rollout-{n}", "serving", 0.8 + n / 100) for n in range(12)]
    starting = ServiceActivity("rollout-12", "starting")
    shown = status(services=(*SERVICES[:1], *ranks, *workers, starting), trained=True)
    busy = "buffer 12%, 3 × trainer 62%, 12 × rollout 80% to 91%, rollout-12 starting"
    assert busy in " ".join(drawn(shown, 110).replace("│", " ").split())


def parsed(line):
    """A line of key=value, as a script reads it."""
    return dict(pair.split("=", 1) for pair in shlex.split(line))


def record(kind, **fields):
    return msgspec.json.encode({"kind": kind, "time_s": 0.0, "policy": "policy", **fields})


def test_each_step_and_evaluation_is_one_short_line_of_key_and_value():
    console = paper(80)
    lines = PlainLines(console, policy="policy")
    figures = {"loss": -0.00012345678, "grad_norm": 12.3456789, "reward_mean": 0.6123456, "staleness_max": 3}
    work = {"tokens": 123456, "step_s": 12.345678, "wait_s": 0.1}
    lines.record(record("load", sums={}))
    for step in range(98, 100):
        lines.record(record("step", step=step, version=step + 1, **figures | work | {"time_s": 12.5 * step}))
    lines.record(
        record("evaluation", version=100, accuracy=0.633, mean=[0.633, 0.59, 0.67], n=512, wall_s=3.21)
    )
    lines.record(record("step", step=100, version=101, **figures | work | {"time_s": 1250.0}))
    lines.record(record("step", step=7, **figures | {"policy": "other", "loss": None}))
    assert not text(console), "nothing waits for a reader"
    lines.flush()
    told = text(console).splitlines()
    assert max(map(len, told)) <= 110
    first, second, evaluation, after, other = map(parsed, told)
    step = "step=98 reward=0.612 staleness=3 tok/s=10000 loss=-0.000123 grad_norm=12.3"
    assert first == second | {"step": "98"} == parsed(step)
    assert evaluation == parsed("evaluation=100 accuracy=0.633 low=0.59 high=0.67 tasks=512 wall_s=3.21")
    assert after == first | {"step": "100"}
    assert other == {"step": "7", "policy": "other", "reward": "0.612", "staleness": "3", "grad_norm": "12.3"}
    lesson = PlainLines(console, policy="policy")
    lesson.record(record("sft", step=12, loss=1.5, accuracy=0.25, held_out_loss=1.6, tokens=900, step_s=0.5))
    lesson.flush()
    sft = parsed(text(console).splitlines()[-1])
    assert (sft["step"], sft["accuracy"], sft["tok/s"]) == ("12", "0.25", "1800")


def test_plain_lines_show_every_death_also_of_several_at_once_and_each_once():
    console, now = paper(), SimpleNamespace(s=0.0)
    lines = PlainLines(console, policy="policy", clock=lambda: now.s)
    texts = ["trainer-1 was killed by SIGBUS (most likely …)", "reward ended with status 1", 'buffer: "gone"']
    for kind, death in zip(("restart", "death", "restart"), texts, strict=True):
        lines.record(record(kind, service="x", text=death))
    for _ in range(800):
        lines.show(status(message=texts[-1]))
        now.s += 0.5
    told = [parsed(line)["message"] for line in text(console).splitlines() if "message=" in line]
    assert told == texts
    lines.record(record("restart", service="x", text=texts[0]))
    lines.show(status(message=texts[0]))
    told = [parsed(line)["message"] for line in text(console).splitlines() if "message=" in line]
    assert told == [*texts, texts[0]], "it died again"


def test_how_the_run_stands_is_one_short_line():
    groups = {"queued": 2, "leased": 130, "generated": 2, "scored": 70, "trained": 6400}
    line = status_line(status(step=999, steps=1000, groups=groups, dropped=LOST))
    assert len(line) <= 130
    assert line == (
        "time=1:23 done=999/1000 left=2:01 generated/s=4512 busiest=rollout-0:96% leased=130 generated=2 "
        "scored=70 dropped=9 masked=14"
    )
    trainer = ServiceActivity("trainer", "starting", None, "the model's files")
    starts = parsed(status_line(status(trained=False, services=(trainer, SERVICES[0]))))
    assert starts == {"time": "1:23", "starting": "trainer (waits for the model's files)"}


def test_plain_lines_of_the_whole_come_now_and_then_and_warnings_at_once(monkeypatch):
    monkeypatch.setattr("areal_async.show.view.PLAIN_EVERY_S", 5.0)
    first = {tick: f'trainer waits for "{tick}"' for tick in (3, 4, 6)}
    moments = [status(message=first.get(tick, ""), trained=False) for tick in range(24)]
    died = dict.fromkeys((30, 31, 40), "rollout-0 was killed")
    moments += [status(message=died.get(tick, "")) for tick in range(24, 120)]
    lines = [parsed(line) for line in plain(moments).splitlines()]
    assert sum("done" in line for line in lines) == 3 + 2
    assert [line for line in lines if "message" in line] == [
        {"message": 'trainer waits for "3"', "time": "1:23"},
        {"message": "rollout-0 was killed", "time": "1:23"},
        {"message": "rollout-0 was killed", "time": "1:23"},
    ]


def test_why_answers_get_no_score_is_told_as_soon_as_it_is_known():
    told = [parsed(line).get("no_score") for line in plain([status(dropped=LOST)] * 3).splitlines()]
    told = [line for line in told if line]
    assert [line.split(":")[0] for line in told] == ["timeout ×14", "error"]
    assert told[1].startswith("error:exception ×12: ValueError: the grader lost")


def test_a_stall_is_told_once_on_plain_lines_and_then_now_and_again(monkeypatch):
    monkeypatch.setattr("areal_async.show.view.PLAIN_EVERY_S", 1e9)
    moments = []
    for now_s in (tick * 0.5 for tick in range(80)):
        edge = "reward" if now_s < 35 else "rollout"
        stall = Stall(edge, f"trainer waits; {edge} has not answered for {now_s:.0f} s")
        moments.append(status(elapsed_s=now_s, stall=stall, stall_s=now_s))
    told = [parsed(line) for line in plain(moments).splitlines()]
    assert [line["stall"] for line in told if "stall" in line] == [
        "stalled for 0:00: trainer waits; reward has not answered for 0 s",
        "stalled for 0:30: trainer waits; reward has not answered for 30 s",
        "stalled for 0:35: trainer waits; rollout has not answered for 35 s",
    ]


BUSY_DAY = {
    "job": "a-job-with-a-long-name-as-sweeps-give-them-lr-3e-6-eta-4-group-16",
    "message": "rollout-0: " + "the engine has not answered for a while and is asked again; " * 6,
    "self_check": "passed: 1,512,000 log-probs of sglang differ by at most 0.0012, which is less than 0.02",
    "pacing": "2.4 steps ahead, since scoring takes 12.1 s of 30.2 s that a group lives",
    "accuracy_interval": (0.59, 0.67),
}


class Screen:
    """What a person sees on a terminal that is as a real one."""

    def __init__(self, monkeypatch, columns, lines):
        self.size = os.terminal_size((columns, lines))
        self.screen = pyte.Screen(columns, lines)
        self.stream = pyte.Stream(self.screen)
        monkeypatch.setattr(os, "get_terminal_size", lambda *_: self.size)
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            monkeypatch.delenv(name, raising=False)
        self.console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm-256color"})

    def resize(self, columns, lines):
        self.size = os.terminal_size((columns, lines))
        self.screen.resize(lines, columns)

    def lines(self):
        """The lines with anything on them, as they are now."""
        self.stream.feed(text(self.console).replace("\n", "\r\n"))
        self.console.file.seek(0)
        self.console.file.truncate()
        return [line.rstrip() for line in self.screen.display if line.strip()]


def assert_is_one_panel(lines, columns, height):
    assert lines[0].startswith("╭─ areal-async")
    assert lines[-1].startswith("╰─")
    assert {len(line) for line in lines} == {min(110, columns)}
    assert {(line[0], line[-1]) for line in lines[1:-1]} == {("│", "│")}
    assert len(lines) <= height


@pytest.mark.parametrize(("columns", "height"), [(200, 50), (80, 24), (60, 20), (40, 12), (30, 10)])
def test_every_frame_is_one_whole_panel_with_the_message(monkeypatch, columns, height):
    seen = Screen(monkeypatch, columns, height)
    with open_view(seen.console, None) as show:
        for moment in (status(), status(**BUSY_DAY, dropped=LOST), status(**BUSY_DAY), status()):
            show(moment)
            lines = seen.lines()
            assert_is_one_panel(lines, columns, height)
            shown = "\n".join(lines)
            assert "step 123/300" in shown
            assert "0.610" in shown
            assert not moment.message or "rollout-0: the" in shown


def test_a_frame_after_a_resize_is_alone_on_the_screen(monkeypatch):
    seen = Screen(monkeypatch, 100, 40)
    seen.console.print("what was there before")
    with open_view(seen.console, None) as show:
        for columns, height in ((100, 40), (64, 20), (120, 30), (80, 24), (80, 10), (80, 40)):
            seen.resize(columns, height)
            show(status(**BUSY_DAY))
            show(status(**BUSY_DAY))
            lines = [line for line in seen.lines() if "before" not in line]
            assert_is_one_panel(lines, columns, height)


def test_a_terminal_that_has_gone_does_not_keep_a_run_from_its_end():
    console = paper(90, force_terminal=True)
    with open_view(console, None) as show:
        console.file.close()
        with pytest.raises(ValueError, match="closed file"):
            show(status())


def test_times_are_minutes_and_hours():
    shown = [clock_text(seconds) for seconds in (0, 59.9, 61, 3600, -5)]
    assert shown == ["0:00", "0:59", "1:01", "1:00:00", "0:00"]


LOST = DropReport(
    groups={"verdict_error": 6, "overtaken": 3},
    masked={"timeout": 14},
    no_scores=(
        NoScore("timeout", 14, "no answer within 0.5 s", "e", 1),
        NoScore("error:exception", 12, "ValueError: the grader lost its connection " + "x" * 200, "e", 1),
    ),
)


@pytest.mark.parametrize("width", [100, 120])
def test_the_panel_says_what_was_lost_and_why(width):
    panel = drawn(status(dropped=LOST), width)
    assert "9 groups (verdict_error 6, overtaken 3)" in panel
    assert "14 episodes masked (timeout 14)" in panel
    assert "error:exception ×12: ValueError: the grader lost" in panel
    assert "timeout ×14: no answer within 0.5 s" in panel
    assert max(map(len, panel.splitlines())) <= width
