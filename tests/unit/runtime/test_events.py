import os
import signal
import subprocess
import sys

import pytest

from areal_async.base import events
from areal_async.base.events import arm, failpoint
from areal_async.service.record import as_it_became
from tests.events import read_events


@pytest.fixture(autouse=True)
def closed():
    yield
    events.close_events()
    arm("")


def test_events_carry_who_when_and_in_which_order(tmp_path):
    events.record("put", samples=[1])
    assert not events.recording(), "the log is not open"
    assert read_events(tmp_path) == []
    events.open_events(tmp_path, "rollout-0")
    events.record("put", samples=[0, 1])
    events.record("put_acked", stored=[0, 1])
    first, second = read_events(tmp_path)
    assert (first["event"], first["n"], first["samples"]) == ("put", 0, [0, 1])
    assert (second["event"], second["n"]) == ("put_acked", 1)
    assert (first["process"], first["pid"]) == ("rollout-0", os.getpid())
    assert first["mono_s"] <= second["mono_s"]


def test_a_line_that_a_kill_cut_short_is_ignored(tmp_path):
    events.open_events(tmp_path, "buffer")
    events.record("loaded")
    (path,) = (tmp_path / "events").iterdir()
    with path.open("ab") as file:
        file.write(b'{"event":"deci')
    assert [event["event"] for event in read_events(tmp_path)] == ["loaded"]


SCRIPT = """
import sys
from pathlib import Path
from areal_async.base.events import open_events
from areal_async.base.events import arm_from_environment, failpoint
open_events(Path(sys.argv[1]), "trainer")
arm_from_environment(Path(sys.argv[1]))
for _ in range(3):
    failpoint("trainer.after_publish")
    failpoint("trainer.after_commit")
"""


def passes(run_dir, spec):
    environment = os.environ | {"AREAL_ASYNC_FAILPOINTS": spec}
    return subprocess.call([sys.executable, "-c", SCRIPT, str(run_dir)], env=environment)


def test_a_failpoint_kills_at_its_turn_and_once_per_run(tmp_path):
    assert passes(tmp_path, "trainer.after_commit@2, buffer.before_write") == -signal.SIGKILL
    assert passes(tmp_path, "trainer.after_commit@2") == 0
    assert passes(tmp_path, "trainer.after_publish@3") == -signal.SIGKILL
    assert passes(tmp_path, "trainer.after_publish@3") == 0
    hits = [(e["name"], e["hit"]) for e in read_events(tmp_path) if e["event"] == "failpoint"]
    assert hits == [("trainer.after_commit", 2), ("trainer.after_publish", 3)]


def test_an_unset_failpoint_does_nothing_and_a_wrong_list_is_refused():
    failpoint("trainer.after_commit")
    for wrong in ("@2", "a@0", "a@x"):
        with pytest.raises(ValueError, match="NAME@N"):
            arm(wrong)


def test_the_record_of_a_step_done_again_replaces_the_first():
    life = [{"kind": "step", "step": 1, "loss": 1}, {"kind": "evaluation", "version": 0, "accuracy": 0.1}]
    again = [{"kind": "step", "step": 1, "loss": 2}, {"kind": "evaluation", "version": 0, "accuracy": 0.2}]
    first, resume = {"kind": "step", "step": 1, "policy": "alice"}, {"kind": "resume"}
    assert as_it_became([first, *life, resume, *again]) == [first, resume, *again]
