"""One job that runs until it is stopped: it is watched by tools, tried by another user of the machine and
scraped by a real Prometheus, and goes on meanwhile. Ctrl-C ends it and leaves nothing. The tests share the
job and stand in the order of what happens to it."""

import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

import psutil
import pytest
from hostile_http import until

from tests.e2e.conftest import started, told_by
from tests.e2e.scraping import NOT_IN_THIS_RUN, ONLY_IN_TROUBLE, firing, has_data, scraped
from tests.e2e.stranger import allowed, as_stranger, connects, crowd, is_refusal, opened, sysv_segments, talk
from tests.panels import Asked, panel_queries, rules, uses
from tests.processes import listening, processes_of, words_of
from tests.waiting import LIMIT_S, deadline_s

pytestmark = pytest.mark.slow

REWARD = """
import pathlib
import random

from reward_service.sdk import RewardInput, Score, reward

FAILS = pathlib.Path(__file__).with_name("fails")


@reward
def parts(given: RewardInput) -> Score:
    if FAILS.exists() and random.random() < 0.02:
        raise ValueError("now and then")
    ones = given.response.count("1") / max(1, len(given.response))
    return Score(ones, {"ones": ones, "twos": given.response.count("2") / 32})
"""
"""Its verdicts have components, and some are errors once a test wants them."""
RUN = {
    "buffer__batch_groups": 4,
    "reward": {"name": "parts.py:parts", "on_error": {"then": "mask"}},
    "trainer__objective": {"prox": "reuse", "kl": {"coefficient": 1e-3}},
    "trainer__steps": 100_000,
    "trainer__record_batches": False,
    "checkpoint": {"every_steps": 10, "keep": 1},
    "evaluation": {"every_steps": 2, "sampling": {"temperature": 0.0, "max_new_tokens": 8}},
    "observe": {"metrics_port": 0, "stall_s": 0.2},
    "placement": {"pretend": {"rollout-0": "host-1"}},
}
"""Weights go to another host, and there is a reference."""
DATA_S = deadline_s(120)
MOST_GROWTH_BYTES = 200 << 20
"""Of a process that trains or generates meanwhile."""


@pytest.fixture(scope="module")
def runs():
    """Where everybody may enter, unlike the folders of pytest: what is closed is closed by the job itself."""
    folder = Path(tempfile.mkdtemp(prefix="live-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def live(workspace, runs):
    (workspace.folder / "parts.py").write_text(REWARD, encoding="utf-8")
    job_file = workspace.job("live", evaluated=True, run_dir=str(runs), **RUN)
    with started(workspace, "run", job_file) as job:
        job.folder = runs / "live"
        job.wait_for_steps(1)
        job.read_until("step=[1-9]")
        yield job


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory, runs):
    if not shutil.which("prometheus"):
        pytest.skip("needs the Debian package prometheus")
    with scraped(tmp_path_factory.mktemp("dashboards"), runs) as port:
        yield port


def test_a_job_that_trains_is_watched_without_its_noticing(live):
    stats = json.loads(told_by("buffer", "stats", live.folder, "--json"))
    assert stats["alive"]
    assert stats["stats"]["policies"]["policy"]["trainer_epoch"] == 1
    listing = told_by("buffer", "peek", live.folder, "--limit", "3")
    assert len(listing.splitlines()) >= 2
    live.wait_for_steps(3)
    live.read_until("step=[1-9]")
    for word in ("restart", "Traceback"):
        assert word not in live.told


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a second user of the machine")
def test_another_user_gets_nothing_but_refusals_and_the_job_goes_on(live):
    """What a user may have is what a loopback port gives everybody: a connection, which is refused or runs
    out, and the metrics."""
    segments, record = sysv_segments(), live.record
    processes = [psutil.Process(live.process.pid), *processes_of(record["run_id"])]
    before = {process.pid: (process.num_fds(), process.memory_info().rss) for process in processes}
    ports = {at: " ".join(words_of(one)[-6:]) for at, one in listening(processes).items()}
    folders = [str(live.folder), record["socket_dir"], record["shm_dir"]]
    walked = [found for folder in folders for found in os.walk(folder)]
    paths = [*folders, *(f"{at}/{name}" for at, inner, files in walked for name in inner + files)]
    sockets = [path for path in paths if Path(path).is_socket()]
    assert len(sockets) >= 3, "buffer, weights, control"
    assert any("trainer" in name for name in ports.values())
    proc = ("environ", "mem", "maps", "fd", "map_files")
    maps = [f"/proc/{process.pid}/{name}" for process in processes for name in proc]
    pids = list(before)

    def try_everything():
        listed = [*folders, *(path for path in maps if path.endswith(("fd", "map_files")))]
        return {
            "paths": {path: ways for path in [*paths, *maps] if (ways := opened(path))},
            "listed": [path for path in listed if allowed(os.listdir, path)],
            "sockets": [path for path in sockets if connects(path)],
            "signals": [pid for pid in pids if allowed(os.kill, pid, 0)],
            "ports": {str(port): talk(port) for port in ports},
            "crowds": {str(port): crowd(port) for port in ports},
        }

    found = as_stranger(try_everything)
    assert found["paths"] == {}
    assert found["listed"] == []
    assert found["sockets"] == []
    assert found["signals"] == []
    for port, said in found["ports"].items():
        refused = said in ("closed", "zmq refuses (CURVE)") or is_refusal(said)
        assert refused, f"{ports[int(port)]} at {port}: {said}"
    assert any("CURVE" in said for said in found["ports"].values())
    assert sysv_segments() == segments
    secret = (Path(record["socket_dir"]) / "secret").read_text().strip()
    assert not [p for p in processes if secret in " ".join(words_of(p))]
    # Nobody has gone, and nothing is kept of those who came.
    assert [pid for pid in pids if not psutil.pid_exists(pid)] == []
    # But for a few descriptors of the job's own.
    most = {process: before[process.pid][0] + 32 for process in processes}
    ended = "the end of the connections"
    live.wait_for(lambda: all(p.num_fds() <= most[p] for p in processes), ended, LIMIT_S)
    grown = {p.pid: p.memory_info().rss - before[p.pid][1] for p in processes}
    assert {pid: size for pid, size in grown.items() if size > MOST_GROWTH_BYTES} == {}
    live.wait_for_steps(3)
    steps = [step["step"] for step in live.steps()]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert {step["episodes"] for step in live.steps()} == {16}
    assert live.logged("restart") == []


def test_every_query_and_recording_rule_has_data_of_a_real_run(prometheus, live):
    """What this run does not have is shown of a stand-in with the series that the product declares."""
    recorded = [Asked(rule["record"], rule["record"] + '{job=~".*"}') for rule in rules("recording")]
    queries = [*panel_queries(), *recorded]
    names = {query: {name for name, _ in uses(query.expression).series} for query in queries}
    impossible = [query for query in queries if names[query] & NOT_IN_THIS_RUN.keys()]
    troubles = [query for query in queries if names[query] & ONLY_IN_TROUBLE.keys()]
    excused = {name for query in impossible + troubles for name in names[query]}
    assert {*NOT_IN_THIS_RUN, *ONLY_IN_TROUBLE} - excused == set(), "nothing asks for them"
    left = [query for query in queries if query not in impossible + troubles]

    def all_have_data():
        while left and has_data(prometheus, left[-1], "live"):
            left.pop()
        return not left

    (live.workspace.folder / "fails").touch()
    live.wait_for_steps(1)
    live.service("reward").kill()
    with contextlib.suppress(TimeoutError):
        until(all_have_data, "data", DATA_S)
    assert [query.where for query in left if not has_data(prometheus, query, "live")] == []
    assert [query.where for query in impossible if has_data(prometheus, query, "live")] == []
    unheard = impossible + troubles

    def all_are_heard():
        while unheard and has_data(prometheus, unheard[-1], "everything"):
            unheard.pop()
        return not unheard

    with contextlib.suppress(TimeoutError):
        until(all_are_heard, "data of the stand-in", DATA_S)
    assert [query.where for query in unheard] == []


def test_every_alert_fires_and_says_of_which_job(prometheus):
    wanted = {rule["alert"] for rule in rules("alerts")}
    until(lambda: {alert["labels"]["alertname"] for alert in firing(prometheus)} == wanted, "alerts", 60.0)
    for alert in firing(prometheus):
        told = " ".join(alert["annotations"].values())
        assert "<" not in told
        assert "bad" in told


def test_ctrl_c_ends_the_job_and_leaves_nothing(live):
    live.process.send_signal(signal.SIGINT)
    live.end(status=130)
    assert "Traceback" not in live.told
    assert re.search(r"areal-async\s+resume", live.told)
