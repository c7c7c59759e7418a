import io

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


def test_the_interval_and_the_self_check_have_a_place():
    shown = status(accuracy_interval=(0.59, 0.671), self_check="passed: 512 log-probs")
    assert "0.380 → 0.630 [0.590, 0.671] at version 100" in drawn(shown)
    assert "self-check  passed: 512 log-probs" in drawn(shown)
    console = paper()
    view = PlainView(console)
    for _ in range(3):
        view.show(shown)
    assert text(console).count("self-check passed: 512 log-probs") == 1


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
    for said in (drawn(shown), plain_line(shown)):
        assert words in said
        assert "80%" not in said, "not the share of the process that died"


def test_services_alike_are_one_entry_but_for_those_that_do_not_serve():
    ranks = [ServiceActivity(name, "serving", 0.62) for name in ("trainer", "trainer-1", "trainer-2")]
    workers = [ServiceActivity(f"rollout-{n}", "serving", 0.8 + n / 100) for n in range(12)]
    starting = ServiceActivity("rollout-12", "starting")
    shown = status(services=(*SERVICES[:1], *ranks, *workers, starting), trained=True)
    assert plain_line(shown).endswith(
        "busy buffer 12%, 3 × trainer 62%, 12 × rollout 80% to 91%, rollout-12 starting"
    )


def test_the_plain_line_has_it_all():
    assert plain_line(status()) == (
        "1:23 · step 123/300, left 2:01 · reward 0.610 · held-out 0.380 → 0.630 at version 100 · "
        "staleness 1.31, max 3, seen 4 of 4 allowed · tokens/s 4,512 generated, 4,310 trained · "
        "busy buffer 12%, trainer 81%, reward 8%, rollout-0 96%"
    )


def test_plain_lines_come_every_few_seconds_and_warnings_at_once():
    console = paper()
    now_s = 0.0
    view = PlainView(console, every_s=5.0, clock=lambda: now_s)
    for tick in range(24):
        now_s = tick * 0.5
        view.show(status(message="odd" if tick in (3, 4) else ""))
    lines = text(console).splitlines()
    assert sum("step 123/300" in line for line in lines) == 3
    assert lines.count("1:23 odd") == 1


def test_a_stall_is_told_once_on_plain_lines_and_then_now_and_again():
    console = paper()
    now_s = 0.0
    view = PlainView(console, every_s=1e9, clock=lambda: now_s)
    for tick in range(80):
        now_s = tick * 0.5
        edge = "reward" if tick < 70 else "rollout"
        stall = Stall(edge, f"trainer waits; {edge} has not answered for {now_s:.0f} s")
        view.show(status(elapsed_s=now_s, stall=stall, stall_s=now_s))
    assert [line for line in text(console).splitlines() if "stalled" in line] == [
        "0:00 stalled for 0:00: trainer waits; reward has not answered for 0 s",
        "0:30 stalled for 0:30: trainer waits; reward has not answered for 30 s",
        "0:35 stalled for 0:35: trainer waits; rollout has not answered for 35 s",
    ]


@pytest.mark.parametrize(
    ("terminal", "plain", "live"), [(False, False, False), (True, True, False), (True, False, True)]
)
def test_the_live_view_is_for_terminals(terminal, plain, live):
    console = paper(90, force_terminal=terminal)
    with open_view(console, plain=plain) as show:
        show(status())
    assert ("╭" in text(console)) == live
    assert "step 123/300" in text(console)


def test_a_terminal_that_has_gone_does_not_keep_a_run_from_its_end():
    console = paper(90, force_terminal=True)
    with open_view(console, plain=False) as show:
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
    assert f"dropped {LOST.text}" in plain_line(status(dropped=LOST))
