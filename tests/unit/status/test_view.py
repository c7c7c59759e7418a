from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from areal_async.rpc.messages import NoScore
from areal_async.status.aggregator import DropReport, RunStatus, ServiceActivity
from areal_async.status.view import PlainView, clock_text, open_view, plain_line, render
from areal_async.status.watchdog import Stall

SERVICES = tuple(
    ServiceActivity(name, "serving", share)
    for name, share in (("buffer", 0.12), ("trainer", 0.81), ("reward", 0.08), ("rollout-0", 0.96))
)


def status(**changes: Any) -> RunStatus:
    values: dict[str, Any] = {
        "job": "sums",
        "kind": "rl",
        "elapsed_s": 83.0,
        "step": 123,
        "steps": 300,
        "eta_s": 121.0,
        "version": 123,
        "reward": 0.61,
        "loss": 0.01,
        "accuracy": 0.63,
        "accuracy_start": 0.38,
        "accuracy_version": 100,
        "generated_per_s": 4512.0,
        "trained_per_s": 4310.0,
        "staleness_mean": 1.31,
        "staleness_max": 3,
        "staleness_seen": 4,
        "bound": 4,
        "groups": {"queued": 2, "leased": 130, "scored": 70, "trained": 1472, "committed": 0},
        "services": SERVICES,
        "message": "",
    }
    return RunStatus(**(values | changes))


class Paper(Console):
    """A console that keeps what is printed."""

    def __init__(self, width: int = 200, **options: Any) -> None:
        self.paper = io.StringIO()
        super().__init__(file=self.paper, width=width, **options)

    @property
    def text(self) -> str:
        return self.paper.getvalue()


def drawn(shown: RunStatus, width: int = 100) -> str:
    console = Paper(width)
    console.print(render(shown, width))
    return console.text


def test_the_panel_shows_every_figure() -> None:
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
def test_every_line_fits_the_terminal(width: int, changes: dict[str, Any]) -> None:
    lines = drawn(status(**changes), width).splitlines()
    assert {len(line) for line in lines} == {width}
    assert len(lines) < 24


def test_the_interval_and_the_self_check_have_a_place() -> None:
    shown = status(accuracy_interval=(0.59, 0.671), self_check="passed: 512 log-probs")
    assert "0.380 → 0.630 [0.590, 0.671] at version 100" in drawn(shown)
    assert "self-check  passed: 512 log-probs" in drawn(shown)
    console = Paper()
    view = PlainView(console)
    for _ in range(3):
        view.show(shown)
    assert console.text.count("self-check passed: 512 log-probs") == 1


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
def test_a_service_that_does_not_serve_says_so(service: ServiceActivity, trained: bool, words: str) -> None:
    shown = status(services=(SERVICES[0], service), trained=trained)
    for text in (drawn(shown), plain_line(shown)):
        assert words in text
        assert "80%" not in text, "not the share of the process that died"


def test_the_plain_line_has_it_all() -> None:
    assert plain_line(status()) == (
        "1:23 · step 123/300, left 2:01 · reward 0.610 · held-out 0.380 → 0.630 at version 100 · "
        "staleness 1.31, max 3, seen 4 of 4 allowed · tokens/s 4,512 generated, 4,310 trained · "
        "busy buffer 12%, trainer 81%, reward 8%, rollout-0 96%"
    )


def test_plain_lines_come_every_few_seconds_and_warnings_at_once() -> None:
    console = Paper()
    now_s = 0.0
    view = PlainView(console, every_s=5.0, clock=lambda: now_s)
    for tick in range(24):
        now_s = tick * 0.5
        view.show(status(message="odd" if tick in (3, 4) else ""))
    lines = console.text.splitlines()
    assert sum("step 123/300" in line for line in lines) == 3
    assert lines.count("1:23 odd") == 1


def test_a_stall_is_told_once_on_plain_lines_and_then_now_and_again() -> None:
    console = Paper()
    now_s = 0.0
    view = PlainView(console, every_s=1e9, clock=lambda: now_s)
    for tick in range(80):
        now_s = tick * 0.5
        edge = "reward" if tick < 70 else "rollout"
        stall = Stall(edge, f"trainer waits; {edge} has not answered for {now_s:.0f} s")
        view.show(status(elapsed_s=now_s, stall=stall, stall_s=now_s))
    assert [line for line in console.text.splitlines() if "stalled" in line] == [
        "0:00 stalled for 0:00: trainer waits; reward has not answered for 0 s",
        "0:30 stalled for 0:30: trainer waits; reward has not answered for 30 s",
        "0:35 stalled for 0:35: trainer waits; rollout has not answered for 35 s",
    ]


@pytest.mark.parametrize(
    ("terminal", "plain", "live"), [(False, False, False), (True, True, False), (True, False, True)]
)
def test_the_live_view_is_for_terminals(terminal: bool, plain: bool, live: bool) -> None:
    console = Paper(90, force_terminal=terminal)
    with open_view(console, plain=plain) as show:
        show(status())
    assert ("╭" in console.text) == live
    assert "step 123/300" in console.text


def test_times_are_minutes_and_hours() -> None:
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
    text = drawn(status(dropped=LOST), width)
    assert "9 groups (verdict_error 6, overtaken 3)" in text
    assert "14 episodes masked (timeout 14)" in text
    assert "error:exception ×12: ValueError: the grader lost" in text
    assert "timeout ×14: no answer within 0.5 s" in text
    assert max(map(len, text.splitlines())) <= width
    assert f"dropped {LOST.text}" in plain_line(status(dropped=LOST))
