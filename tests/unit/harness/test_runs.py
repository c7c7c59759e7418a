"""Runs of pytest with the plugins of `tests/harness`, in a folder of their own."""

import json
import os
import subprocess
import sys

import pytest

from tests.harness import calibration, deadlines, history, profiles
from tests.waiting import LIMIT_S

PLUGINS = ["deadlines", "slot", "profiles", "lanes", "rerun", "breakdown"]
IN_WORKERS = ("-n", "2", "--dist", "loadfile")
FLAKY = """
import pathlib, pytest
here = pathlib.Path(__file__).parent
def note(word):
    with (here / "notes").open("a") as file:
        file.write(word + " ")
@pytest.fixture(scope="module")
def made():
    note("made")
    yield
    note("gone")
def test_before(made):
    note("before")
def test_once(made):
    note("once")
    if not (here / "was").exists():
        (here / "was").touch()
        assert False, "only the first time"
def test_after(made):
    note("after")
"""
TWICE = """
def test_twice():
    assert False, "every time"
"""
OF_SESSION = """
import pathlib, pytest
@pytest.fixture(scope="session")
def unlucky(tmp_path_factory):
    was = pathlib.Path(__file__).with_suffix(".was")
    if not was.exists():
        was.touch()
        raise OSError("no room")
def test_it(unlucky):
    pass
"""
JOB = """
import os, pathlib, pytest
pytestmark = pytest.mark.slow
@pytest.mark.parametrize("n", range(2))
def test_job(n):
    with (pathlib.Path(__file__).parent / "workers").open("a") as file:
        file.write(os.environ["PYTEST_XDIST_WORKER"] + " ")
"""


def run(folder, *arguments, environment=None, **files):
    """Run pytest on files (name → text); return the exit status, the output and the lines of the history."""
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow: jobs\n  nightly: once a night\n")
    (folder / "conftest.py").write_text(f"pytest_plugins = {[f'tests.harness.{name}' for name in PLUGINS]}")
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    record = folder / "history.jsonl"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    clean |= {history.VARIABLE: str(record), **(environment or {})}
    # With a base folder of its own, the run does not clean the shared one, and warns of nothing found there.
    own = ["-p", "no:cacheprovider", f"--basetemp={folder / 'base'}"]
    command = [sys.executable, "-m", "pytest", *own, *arguments, str(folder)]
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=LIMIT_S)
    return done.returncode, done.stdout + done.stderr, list(history.records(record))


@pytest.mark.parametrize("how", [(), IN_WORKERS], ids=["alone", "in workers"])
def test_a_test_that_fails_once_is_named_and_one_that_fails_twice_has_failed(tmp_path, how):
    status, told, lines = run(tmp_path, *how, test_flaky=FLAKY, test_session=OF_SESSION, test_twice=TWICE)
    assert status == 1, told
    assert "FAILED test_twice.py::test_twice" in told
    assert "1 failed, 4 passed, 3 rerun" in told
    assert "2 flaky: failed once, then passed" in told
    assert "FLAKY test_flaky.py::test_once" in told
    assert "FLAKY test_session.py::test_it" in told
    assert "only the first time" in told
    notes = "made before once gone made once after gone "
    assert (tmp_path / "notes").read_text() == notes, "fixtures of the file are made anew"
    texts = {line["test"]: line["failure"] for line in lines if line["kind"] == "flaky"}
    assert texts.keys() == {"test_flaky.py::test_once", "test_session.py::test_it"}
    assert "only the first time" in texts["test_flaky.py::test_once"]
    of_run = lines[-1]
    assert of_run["files"].keys() == {"test_flaky.py", "test_session.py", "test_twice.py"}
    assert (of_run["kind"], of_run["exit"], sorted(texts)) == ("run", 1, of_run["flaky"])


def test_a_run_whose_only_failures_are_flaky_succeeds(tmp_path):
    status, told, _ = run(tmp_path, test_session=OF_SESSION, test_then="def test_it():\n    pass\n")
    assert status == 0, told


def test_a_test_that_hangs_has_its_whole_time_twice_and_no_more(tmp_path):
    hangs = "import pytest, time\n@pytest.mark.timeout(1)\ndef test_it():\n    time.sleep(3600)\n"
    status, told, _ = run(tmp_path, test_hangs=hangs)
    assert status == 1, told
    assert "1 failed, 1 rerun" in told


def test_whole_jobs_run_in_one_worker_and_the_end_has_the_breakdown(tmp_path):
    slotted = (
        "from tests.harness.slot import job_slot as s\ndef test_it():\n    with s(), s():\n        pass\n"
    )
    files = {"test_a": JOB, "test_b": JOB, "test_c": JOB, "test_d": slotted, "test_e": slotted}
    status, told, lines = run(tmp_path, "-n", "3", "--dist", "loadfile", **files)
    assert status == 0, told
    workers = (tmp_path / "workers").read_text().split()
    assert (len(workers), len(set(workers))) == (6, 1)
    assert "4 whole jobs started" in told
    assert "gw0" in told.partition("breakdown")[2]
    (of_run,) = lines
    assert of_run["jobs"] == 4
    assert of_run["cpu_s"] > 0


def test_the_deadline_of_a_test_grows_with_the_slowness_of_the_machine(tmp_path):
    text = f"""
from tests.harness.calibration import deadline_s
def test_it(request):
    assert request.config.option.timeout == {deadlines.TEST_FACTOR * 3}
    assert deadline_s(10) == 30
"""
    status, told, _ = run(tmp_path, *IN_WORKERS, environment={calibration.VARIABLE: "3"}, test_deadline=text)
    assert status == 0, told
    assert "3.00 times slower" in told


def test_properties_run_at_night_too_and_draw_all_their_examples_then(tmp_path):
    text = """
from hypothesis import given, settings, strategies as st
@given(st.integers())
def test_property(n):
    assert settings().max_examples == 100 and settings().deadline is None
def test_other():
    pass
"""
    _, told, _ = run(tmp_path, "-m", "nightly", environment={profiles.VARIABLE: "nightly"}, test_both=text)
    assert "1 passed, 1 deselected" in told
    assert [profiles.examples(n, "nightly") for n in (7, 200)] == [7, 200]
    assert [profiles.examples(n, "ci") for n in (7, 20, 200)] == [7, profiles.FEWEST, 50]


def test_recent_flaky_tests_are_listed_with_count_and_dates(tmp_path):
    path = tmp_path / "some" / "runs.jsonl"
    assert history.flaky_lines(path) == []
    for day, flaky in enumerate([["old"], ["a"], ["a", "b"]], start=1):
        dated = {"date": f"2026-01-0{day}T10:00:00", "revision": "abc"}
        for test in flaky:
            history.append_line(path, {"kind": "flaky", "test": test, **dated})
        history.append_line(path, {"kind": "run", "files": {"f": float(day)}, **dated})
    with path.open("a") as file:
        file.write('{"kind": "fl')
    first, second = history.flaky_lines(path, runs=2)
    assert first == "   2 times  a  (2026-01-02T10:00 abc, 2026-01-03T10:00 abc)"
    assert second.startswith("   1 times  b")
    assert history.durations(path) == {"f": 3.0}
    command = [sys.executable, "-m", "tests.harness.history", str(path)]
    assert "2 times  a" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_long_history_loses_its_older_half(tmp_path):
    path = tmp_path / "runs.jsonl"
    for number in range(9):
        history.append_line(path, {"n": number}, most_bytes=70)
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [4, 5, 6, 7, 8]
