import json

import pytest

from areal_async.launch.lifecycle import Ending
from areal_async.launch.report import failure_text, last_lines, readable


def test_the_paragraph_names_service_status_words_and_log(tmp_path):
    log = tmp_path / "reward.log"
    record = {"time": "x", "level": "error", "event": "service failed", "message": "twice"}
    log.write_text(json.dumps(record) + "\nreward: rewards.py has no function far.\n")
    text = failure_text(Ending("died", "reward", 1, 12.34), log)
    assert text.startswith("reward ended with status 1 after 12.3 s")
    assert "\n    reward: rewards.py has no function far.\n" in text
    assert "twice" not in text
    assert text.endswith(str(log))


@pytest.mark.parametrize(
    ("ending", "says"),
    [
        (Ending("died", "trainer", -9, 1.0), "was killed by SIGKILL"),
        (Ending("died", "trainer", -9, 1.0), "ran out of memory"),
        (Ending("died", "trainer", -11, 1.0), "SIGSEGV"),
        (Ending("died", "trainer", -40, 1.0), "signal 40"),
        (Ending("died", "trainer", 143, 1.0), "something outside the run sent it a signal"),
        (Ending("died", "buffer", 0, 1.0), "which no service may"),
        (Ending("not_ready", "trainer", lived_s=300), "did not serve within 300 s"),
        (Ending("did_not_end", "evaluator", lived_s=120), "The trained model is complete"),
    ],
)
def test_each_ending_says_what_to_do(tmp_path, ending, says):
    text = failure_text(ending, tmp_path / "absent.log")
    assert says in text
    assert "It said last: nothing." in text


def test_structured_lines_are_put_in_words():
    line = {"time": "t", "level": "warning", "job": "j", "process": "p", "event": "call slow", "ms": 3}
    assert readable(json.dumps(line)) == "warning: call slow ms=3"
    assert readable("plain ") == "plain"
    assert readable("{not json") == "{not json"
    failed = line | {"traceback": "Traceback\n  File x\nValueError: no"}
    assert readable(json.dumps(failed)).endswith("ValueError: no")


def test_only_the_end_of_a_large_log_is_read(tmp_path):
    log = tmp_path / "log"
    log.write_text("".join(f"line {i} {'x' * 1000}\n" for i in range(1000)))
    lines = last_lines(log)
    assert [line.split()[1] for line in lines] == [str(i) for i in range(994, 1000)]
    assert all(len(line) <= 400 for line in lines)
