import io
import json
import logging
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from areal_async.base.log import MOST_LINES, REPEAT_S, end_logging, get_logger, setup_logging


@pytest.fixture
def clock(monkeypatch):
    """The clock of the log, which goes on when told."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(time, "monotonic", lambda: now.s)
    return now


@pytest.fixture
def stream():
    root = logging.getLogger()
    before = root.handlers[:], root.level
    stream = io.StringIO()
    setup_logging("demo", "buffer", "info", stream)
    yield stream
    root.handlers[:], root.level = before
    logging.captureWarnings(False)


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize("number", [28, 30, 5, 122, 116])
def test_a_log_that_a_disk_does_not_take_costs_one_line(capsys, stream, number):
    def write(text):
        raise OSError(number, "refused")

    stream.write = write
    for i in range(5):
        get_logger("buffer").warning(f"event {i}")
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("warning: the log cannot be written: ")
    del stream.write
    get_logger("buffer").warning("written again")
    assert lines(stream)[-1]["event"] == "written again"


def test_an_event_is_one_json_line_with_job_and_process(stream):
    get_logger("ledger").info("group dropped", group_id="a:1:0#0", n=3)
    [line] = lines(stream)
    assert line["event"] == "group dropped"
    told = (line["job"], line["process"], line["logger"], line["level"])
    assert told == ("demo", "buffer", "ledger", "info")
    assert (line["group_id"], line["n"]) == ("a:1:0#0", 3)
    assert line["time"].endswith("+00:00")


def test_whatever_an_event_and_its_fields_hold_is_written(stream):
    odd = {"process": "other", "level": 3, "scalar": np.float32(0.5), "nan": float("nan"), "thing": set}
    get_logger("ledger").info("100% of\nit", **odd)
    [line] = lines(stream)
    assert line["event"] == "100% of\nit"
    assert (line["process"], line["field_process"]) == ("buffer", "other"), "no key of the line is hidden"
    assert (line["level"], line["field_level"]) == ("info", 3)
    assert (line["scalar"], line["nan"]) == (0.5, None)
    assert "set" in line["thing"]


def test_an_exception_carries_its_traceback(stream):
    try:
        raise RuntimeError("on purpose")
    except RuntimeError:
        get_logger("ledger").exception("it broke", step=4)
    [line] = lines(stream)
    assert line["level"] == "error"
    assert "RuntimeError: on purpose" in line["traceback"]


def test_libraries_and_warnings_come_out_in_the_same_form_and_what_is_below_the_level_does_not(stream):
    get_logger("ledger").debug("noise")
    logging.getLogger("some.library").info("more noise")
    logging.getLogger("some.library").warning("a %s thing", "strange")
    warnings.warn("old name", UserWarning, stacklevel=1)
    first, second = lines(stream)
    assert (first["event"], first["logger"]) == ("a strange thing", "some.library")
    assert "old name" in second["event"]


def test_setting_up_twice_does_not_write_twice(stream):
    again = io.StringIO()
    setup_logging("demo", "trainer", "debug", again)
    get_logger("x").debug("once")
    assert lines(stream) == []
    assert [line["process"] for line in lines(again)] == ["trainer"]


def test_equal_lines_are_counted_not_repeated(stream, clock):
    """As 1,800 episodes that fail alike leave them: the first, then how many more, and the last count at the
    end."""
    rollout = get_logger("rollout")
    for number in range(1800):
        rollout.warning("episode failed", group_id=f"g{number}", sample=number % 8, error="no tools")
        clock.s += 0.025
    end_logging()
    told = [line for line in lines(stream) if line["event"] == "episode failed"]
    assert len(told) < 10
    assert "repeated" not in told[0]
    assert sum(line.get("repeated", 0) for line in told) + 1 == 1800
    assert {line["error"] for line in told} == {"no tools"}
    assert told[-1]["group_id"] == "g1799"
    end_logging()
    assert len(lines(stream)) == len(told)


def test_lines_that_say_something_else_are_all_written(stream):
    rollout = get_logger("rollout")
    for number in range(5):
        rollout.info("step trained", step=number)
    rollout.warning("episode failed", group_id="g", error="one")
    rollout.warning("episode failed", group_id="g", error="another")
    get_logger("other").warning("episode failed", group_id="g", error="one")
    rollout.error("episode failed", group_id="g", error="one")
    for text in ("one", "another"):
        try:
            raise RuntimeError(text)
        except RuntimeError:
            rollout.exception("it broke")
    assert len(lines(stream)) == 11


def test_a_line_that_comes_now_and_then_is_written_each_time(stream, clock):
    for _ in range(4):
        get_logger("rollout").warning("buffer does not answer", call="put")
        clock.s += 2 * REPEAT_S
    assert [line.get("repeated", 0) for line in lines(stream)] == [0, 0, 0, 0]


def test_the_count_of_what_has_stopped_comes_with_the_next_line_of_any_kind(stream, clock):
    for _ in range(3):
        logging.getLogger("some.library").warning("old")
    clock.s += REPEAT_S
    get_logger("rollout").info("another thing")
    told = [(line["event"], line.get("repeated", 0)) for line in lines(stream)]
    assert told == [("old", 0), ("old", 2), ("another thing", 0)]


def test_what_is_kept_in_mind_of_lines_is_bounded_and_no_count_is_lost(stream):
    for number in range(3 * MOST_LINES):
        get_logger("rollout").warning("episode failed", error=str(number))
        get_logger("rollout").warning("episode failed", error=str(number))
    counted_before_the_end = sum(line.get("repeated", 0) for line in lines(stream))
    assert counted_before_the_end == 2 * MOST_LINES, "so many lines were forgotten"
    end_logging()
    assert sum(line.get("repeated", 0) for line in lines(stream)) == 3 * MOST_LINES
