"""Deadlines and the slot of whole jobs."""

import fcntl
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests.harness import calibration
from tests.harness.slot import VARIABLE, in_job_slot, job_slot, jobs_started


def test_a_measurement_is_held_within_bounds():
    reference_s = calibration.REFERENCE_S
    slow = [calibration.slowness_of(times * reference_s) for times in (0.1, 1.0, 2.5, 1000.0)]
    assert slow == [1.0, 1.0, pytest.approx(2.5), calibration.MOST]


def test_a_run_measures_once_and_its_children_have_the_same_deadlines(monkeypatch):
    measured = []
    monkeypatch.delenv(calibration.VARIABLE)
    monkeypatch.setattr(
        calibration, "measure_s", lambda: measured.append(1) or 2.5 * calibration.REFERENCE_S * len(measured)
    )
    assert [calibration.deadline_s(factor) for factor in (1, 100)] == [2.5, 250.0]
    asked = "from tests.harness.calibration import deadline_s; print(deadline_s(100))"
    child = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert (child.stdout, measured) == ("250.0\n", [1])


def test_a_wait_is_longer_on_a_machine_that_became_slower_meanwhile(monkeypatch):
    monkeypatch.setenv(calibration.VARIABLE, "1.0")
    monkeypatch.setattr(calibration, "measure_s", lambda: 2 * calibration.REFERENCE_S)
    deadline = calibration.Deadline(1e-6)
    while not deadline.is_over():
        pass
    assert deadline.seconds == pytest.approx(2e-6)
    assert calibration.deadline_s(10) == pytest.approx(20)


def test_another_process_waits_for_the_slot_and_its_holder_does_not(tmp_path, monkeypatch):
    path = tmp_path / "slot"
    monkeypatch.setenv(VARIABLE, str(path))
    asks = f"import fcntl; fcntl.flock(open({str(path)!r}), fcntl.LOCK_EX | fcntl.LOCK_NB)"

    @in_job_slot
    @contextmanager
    def job(name):
        yield name

    with job("outer") as outer:
        with job_slot():
            pass
        refused = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True)
        assert "BlockingIOError" in refused.stderr
    assert (outer, jobs_started()) == ("outer", 2)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
