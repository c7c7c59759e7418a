import io
import json
import logging
import warnings

import numpy as np
import pytest

from areal_async.observe.log import get_logger, setup_logging


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


def test_an_event_is_one_json_line_with_job_and_process(stream):
    get_logger("ledger").info("group dropped", group_id="a:1:0#0", n=3)
    [line] = lines(stream)
    assert line["event"] == "group dropped"
    assert (line["job"], line["process"], line["logger"], line["level"]) == (
        "demo",
        "buffer",
        "ledger",
        "info",
    )
    assert (line["group_id"], line["n"]) == ("a:1:0#0", 3)
    assert line["time"].endswith("+00:00")


def test_what_is_below_the_level_is_left_out(stream):
    get_logger("ledger").debug("noise")
    logging.getLogger("some.library").info("more noise")
    assert lines(stream) == []


def test_an_event_may_hold_a_percent_sign_and_a_line_break(stream):
    get_logger("ledger").info("100% of\nit")
    [line] = lines(stream)
    assert line["event"] == "100% of\nit"


def test_a_field_never_hides_a_key_of_the_line(stream):
    get_logger("ledger").info("text", process="other", level=3)
    [line] = lines(stream)
    assert (line["process"], line["field_process"]) == ("buffer", "other")
    assert (line["level"], line["field_level"]) == ("info", 3)


def test_values_that_json_lacks_are_written_all_the_same(stream):
    get_logger("ledger").info("text", scalar=np.float32(0.5), nan=float("nan"), thing={1, 2}.__class__)
    [line] = lines(stream)
    assert line["scalar"] == 0.5
    assert line["nan"] is None
    assert "set" in line["thing"]


def test_an_exception_carries_its_traceback(stream):
    try:
        raise RuntimeError("on purpose")
    except RuntimeError:
        get_logger("ledger").exception("it broke", step=4)
    [line] = lines(stream)
    assert line["level"] == "error"
    assert "RuntimeError: on purpose" in line["traceback"]


def test_libraries_and_warnings_come_out_in_the_same_form(stream):
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
