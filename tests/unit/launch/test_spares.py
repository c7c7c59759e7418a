"""A spare process becomes the service that died; what happens to spares costs no more than a usual start."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing

import psutil
import pytest

from areal_async.base.processes import service_environment
from areal_async.base.topology import ServicePlace
from areal_async.launch.local_launcher import LocalLauncher
from areal_async.launch.spares import Spares
from tests.unit.launch.launching import changed, supervisor_of
from tests.unit.launch.test_supervisor import assert_nothing_is_left
from tests.waiting import wait_for

TRAINER = ServicePlace("trainer", "trainer", 0, "becomes", 0)
BECOMES = """
import json, os, sys
fd = int(os.environ["GIVEN"])
os.write(fd, json.dumps([sys.argv, os.environ["WORD"], os.getpid()]).encode())
print("printed", flush=True)
os.write(int(sys.argv[sys.argv.index("--ready-fd") + 1]), b'{"ready": "trainer"}\\n')
sys.stdin.read()
import signal
signal.pause()
"""


@pytest.fixture
def spares(tmp_path):
    """What makes them, with modules that take no time to import."""

    def make(*modules, most=1, after_s=0.0):
        environment = service_environment("test", 1) | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
        return Spares(most, after_s, environment, tmp_path / "spare.log", modules or ("json",))

    (tmp_path / "becomes.py").write_text(BECOMES)
    return make


def prepared(made, *, most=1):
    """Tend until so many wait to be called."""

    def ready():
        made.tend(time.monotonic(), calm=True)
        return sum(spare.ready for spare in made._spares) == most

    wait_for(ready)


def take(made, tmp_path, **descriptors):
    environment = {**made.environment, "WORD": "said"}
    return made.take(TRAINER, tmp_path / "topology.json", tmp_path / "trainer.log", environment, descriptors)


def test_a_spare_becomes_the_service_with_its_arguments_descriptors_and_output(spares, tmp_path):
    with closing(spares()) as made:
        assert take(made, tmp_path) is None, "nothing is prepared yet"
        prepared(made)
        read_fd, write_fd = os.pipe()
        child = take(made, tmp_path, GIVEN=write_fd)
        os.close(write_fd)
        try:
            wait_for(lambda: child.ready_report() == {"ready": "trainer"})
            arguments = ["--topology", str(tmp_path / "topology.json"), "--name", "trainer"]
            said = os.read(read_fd, 4096).decode()
            assert '"said"' in said
            assert str(child.pid) in said
            assert all(word in said for word in arguments)
            assert (tmp_path / "trainer.log").read_text() == "printed\n"
            shown = [word for word in psutil.Process(child.pid).cmdline() if word]
            assert shown[2:4] == ["-m", "becomes"], "whoever looks for the service finds it"
            assert shown[4:8] == arguments
            assert take(made, tmp_path) is None, "it was the only one"
            assert made.take(TRAINER, tmp_path, tmp_path / "x", {}, {}) is None
        finally:
            child.kill()
            child.join()
            child.close()
            os.close(read_fd)


def test_none_is_prepared_before_the_run_was_undisturbed_for_long_enough(spares):
    with closing(spares(after_s=30.0)) as made:
        made.tend(0.0, calm=False)
        made.tend(5.0, calm=True)
        made.tend(34.0, calm=True)
        assert made._spares == []
        made.tend(35.0, calm=True)
        assert len(made._spares) == 1
        made.tend(36.0, calm=True)
        assert len(made._spares) == 1, "one is enough"


def test_after_a_death_the_next_is_prepared_soon(spares):
    with closing(spares(after_s=30.0)) as made:
        made.tend(0.0, calm=True)
        made.tend(10.0, calm=False)
        made.tend(12.0, calm=True)
        assert len(made._spares) == 1


def test_none_is_prepared_where_memory_is_short_or_the_job_wants_none(spares, monkeypatch):
    with closing(spares(after_s=None)) as made:
        made.tend(0.0, calm=True)
        made.tend(1e6, calm=True)
        assert made._spares == []
    short = type("Memory", (), {"available": 1 << 30})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: short)
    with closing(spares()) as made:
        made.tend(0.0, calm=True)
        assert made._spares == []


@pytest.mark.parametrize("starting", [True, False])
def test_a_spare_that_is_killed_is_replaced(spares, tmp_path, starting):
    with closing(spares()) as made:
        if starting:
            made.tend(time.monotonic(), calm=True)
        else:
            prepared(made)
        first = made._spares[0].child
        first.kill()
        wait_for(lambda: first.poll() is not None)
        assert take(made, tmp_path) is None, "a usual start has to do"
        prepared(made)
        assert made._spares[0].child.pid != first.pid


def test_spares_that_die_again_and_again_are_given_up(spares, tmp_path):
    with closing(spares("no_such_module")) as made:

        def given_up():
            made.tend(time.monotonic(), calm=True)
            return made._given_up and not made._spares

        wait_for(given_up)
    assert "no_such_module" in (tmp_path / "spare.log").read_text()


def test_a_spare_ends_when_nobody_can_call_it_any_more(spares):
    made = spares()
    prepared(made)
    (spare,) = made._spares
    spare.channel.close()
    assert spare.child.join() == 0
    made.close()


def test_a_spare_that_cannot_become_a_service_ends_so_that_this_is_started_again(spares, tmp_path):
    with closing(spares()) as made:
        prepared(made)
        place = ServicePlace("trainer", "trainer", 0, "becomes", 0)
        (spare,) = made._spares
        spare.channel.send(b"no JSON")
        assert spare.child.join() == os.EX_TEMPFAIL
        assert made.take(place, tmp_path, tmp_path / "trainer.log", {}, {}) is None


def test_the_supervisor_starts_a_killed_trainer_from_a_spare_and_leaves_none(
    job, folders, behave, monkeypatch
):
    monkeypatch.setattr("areal_async.launch.local_launcher.PRELOADED", ("json",))
    behave({"trainer": "waits for the next"})
    job = changed(job, "supervisor", restarts=3, spare_after_s=0.0)
    launcher = LocalLauncher(job, folders)
    supervisor = supervisor_of(job, folders, launcher=launcher)
    first = []

    def kill_once_a_spare_is_ready():
        spares = launcher._spares._spares
        if not first and spares and spares[0].ready:
            first.append(supervisor.children["trainer"].pid)
            (spare,) = spares
            first.append(spare.child.pid)
            os.kill(first[0], signal.SIGKILL)
        elif first and supervisor.children["trainer"].pid != first[0]:
            (folders.run_dir / "again").touch()

    tend = launcher._spares.tend

    def watched(now_s, *, calm):
        tend(now_s, calm=calm)
        kill_once_a_spare_is_ready()

    launcher._spares.tend = watched
    try:
        assert supervisor.run().kind == "finished"
    finally:
        folders.release()
    assert supervisor.children["trainer"].pid == first[1]
    assert_nothing_is_left(folders)
