"""A job on a Redis of one's own, with a login and a disk that fills up while the job runs."""

import resource
import signal
import subprocess

import pytest
import redis
from hostile_http import until

from areal_async.launch.one_host import short_socket_dir
from areal_async.launch.preflight import find_redis_server
from tests.redis_client import documented_rights

pytestmark = pytest.mark.slow

LIMIT_BYTES = 400_000
STEPS = 12


def small_files():
    """No file grows beyond a limit; writing more is an error, not a signal."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, resource.RLIM_INFINITY))


@pytest.fixture
def own_redis(tmp_path):
    """A Redis whose disk is nearly full, and its socket."""
    folder = short_socket_dir(tmp_path)
    folder.mkdir(exist_ok=True)
    options = f"--port 0 --unixsocket {folder}/s --dir {folder} --appendonly yes".split()
    command = [find_redis_server(), *options, "--save", ""]
    server = subprocess.Popen(command, preexec_fn=small_files, stdout=subprocess.DEVNULL)
    until((folder / "s").exists, "Redis does not start")
    yield server, folder / "s"
    server.kill()
    server.wait()


def test_a_full_disk_of_redis_stalls_a_job_by_name_and_loses_nothing(own_redis, workspace, running):
    server, path = own_redis
    admin = redis.Redis(unix_socket_path=str(path), protocol=2)
    admin.execute_command("ACL", "SETUSER", "front", "on", ">hunter2", *documented_rights("own"))
    (workspace.folder / "secret").write_text("hunter2\n")
    job_file = workspace.job(
        "own",
        trainer__steps=STEPS,
        buffer__redis=f"unix://front@{path}",
        buffer__redis_login={"password_file": "secret"},
        observe={"metrics_port": 0, "stall_s": 1},
    )
    with running("run", job_file) as job:
        job.read_until(r"which waits for Redis: Redis cannot write to its disk")
        # Whatever was under way is done: from here on only room helps.
        assert len(job.steps()) < STEPS
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        summary = job.end().summary
    assert summary["episodes_trained"] == STEPS * 8 * 4
    assert summary["episodes_dropped"] == 0
    assert not any(summary["restarts"].values()), "nothing died of it"
    assert [step["step"] for step in job.steps()] == list(range(STEPS))
    for file in job.folder.rglob("*"):
        assert not file.is_file() or b"hunter2" not in file.read_bytes(), file
    assert "hunter2" not in job.told
