"""What of the manifests can be run without Docker and Kubernetes, is run: their commands with their files."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import redis as redis_sync

from areal_async.cli.keys import make_keys
from areal_async.config.job import RedisLoginSection
from areal_async.config.redis_url import parse_redis_url
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.rules import Rules
from replay_buffer.redis.address import RedisAddress
from tests.deploy.checks import HEAD_PORT, RAY_PORTS
from tests.deploy.commands import ROOT
from tests.deploy.containers import Container, compose_containers, unit_settings
from tests.unit.buffer.conftest import front_of
from tests.unit.redis_server.conftest import Life, free_port, redis_7
from tests.waiting import LIMIT_S, wait_for

DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
SCRIPTS = [
    path.relative_to(DEPLOY).as_posix()
    for path in sorted(DEPLOY.rglob("*.s*"))
    if path.suffix in (".sh", ".sbatch")
]

MONITOR_PORT = 44217
"""Ray's monitor serves figures of its own there on the head, whatever it is told. Nobody needs them."""


def can(*words: str) -> bool:
    """Whether this machine lets us do that."""
    if shutil.which(words[0]) is None:
        return False
    return subprocess.run(words, capture_output=True, timeout=LIMIT_S, check=False).returncode == 0


BOX = ("bwrap", "--ro-bind", "/", "/", "--unshare-all", "true")


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    folder = tmp_path / "secrets"
    subprocess.run([DEPLOY / "secrets.sh", folder], check=True)
    return folder


# --- scripts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_ones_that_their_shell_takes(name: str) -> None:
    shell = (DEPLOY / name).read_text().splitlines()[0].removeprefix("#!")
    subprocess.run([shell, "-n", DEPLOY / name], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", DEPLOY / name], check=True)
    assert os.access(DEPLOY / name, os.X_OK) or name.endswith(".sbatch")


def test_secrets_are_made_once_and_lie_in_a_closed_folder(secrets: Path) -> None:
    before = {path.name: path.read_text() for path in secrets.iterdir()}
    assert set(before) == {"ray.token", "redis.front", "redis.reader", "users.acl"}
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o700
    assert len({text for name, text in before.items() if name != "users.acl"}) == 3
    assert min(len(text) for text in before.values()) >= 64
    for name in ("redis.front", "redis.reader"):
        assert before[name] not in before["users.acl"]
    (secrets / "redis.reader").unlink()
    subprocess.run([DEPLOY / "secrets.sh", secrets], check=True)
    after = {path.name: path.read_text() for path in secrets.iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"redis.reader", "users.acl"}


# --- Redis -------------------------------------------------------------------------------------------


@pytest.fixture
def redis_port(tmp_path: Path, secrets: Path) -> Iterator[int]:
    """A Redis by the configuration of compose and Kubernetes, and by the users of `secrets.sh`."""
    binary = redis_7(tmp_path)
    if binary is None:
        pytest.skip("needs Redis 7 or newer: the Debian package redis-tools")
    port, data, config = free_port(), tmp_path / "data", tmp_path / "redis.conf"
    data.mkdir()
    text = (DEPLOY / "k8s" / "base" / "redis.conf").read_text()
    config.write_text(text.replace("dir /data", f"dir {data}").replace("/run/secrets/", f"{secrets}/"))
    options = ["--port", str(port), "--bind", "127.0.0.1", "--logfile", "log"]
    server = subprocess.Popen([binary, config, *options])

    def answers() -> bool:
        assert server.poll() is None, (data / "log").read_text()
        try:
            return bool(redis_sync.Redis(port=port, username="probe", password="", protocol=2).ping())
        except redis_sync.ConnectionError:
            return False

    try:
        wait_for(answers, "a Redis that answers")
        yield port
    finally:
        server.kill()
        server.wait()


async def test_a_buffer_works_on_the_redis_of_the_manifests(redis_port: int, secrets: Path) -> None:
    url = parse_redis_url(f"redis://areal-front@127.0.0.1:{redis_port}/0")
    address = RedisAddress(url, RedisLoginSection(password_file=secrets / "redis.front"))
    rules = Rules.alone(group_size=2, batch_groups=2, max_staleness=1, durability="everysec")
    async with front_of(address, "job-a", rules) as front:
        opened = (await front.execute(OpenedWith("policy", "t", 0))).reply
        batch = await Life(front, opened.epoch, 0, "everysec").train()  # type: ignore[attr-defined]
        assert len(batch.groups) == 2


def test_users_of_redis_may_do_what_is_theirs_and_no_more(redis_port: int, secrets: Path) -> None:
    def user(name: str) -> redis_sync.Redis:
        file = secrets / name.replace("areal-", "redis.")
        password = file.read_text() if file.is_file() else ""
        return redis_sync.Redis(port=redis_port, username=name, password=password, protocol=2)

    user("areal-front").hset("areal:{job}:meta", "a", "1")
    assert user("areal-reader").hgetall("areal:{job}:meta") == {b"a": b"1"}
    refused = {
        "areal-reader": ["HSET areal:{job}:meta a 2"],
        "areal-front": ["HSET other a 2", "FLUSHALL", "CONFIG SET appendonly no"],
        "probe": ["HGETALL areal:{job}:meta", "INFO"],
    }
    for name, words in ((name, words) for name, commands in refused.items() for words in commands):
        with pytest.raises(redis_sync.ResponseError, match=r"NOPERM|permission"):
            user(name).execute_command(*words.split())
    with pytest.raises(redis_sync.AuthenticationError):
        redis_sync.Redis(port=redis_port, protocol=2).ping()
    if client := shutil.which("redis-cli", path=f"{BIN}:{os.environ['PATH']}"):
        (redis,) = [each for each in compose_containers(DEPLOY) if each.where == "compose redis"]
        (words,) = redis.probe_commands
        asked = words[-1].replace("redis-cli", f"{client} -p {redis_port}")
        subprocess.run(["sh", "-c", asked], check=True, timeout=LIMIT_S)


# --- the controller's container ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not can(*BOX), reason="needs bubblewrap")
def test_the_controller_of_compose_works_in_a_root_that_cannot_be_written(tmp_path: Path) -> None:
    """The container's command, mounts, user and healthcheck; Python and this checkout stand for the image."""
    (container,) = [each for each in compose_containers(DEPLOY) if each.where == "compose controller"]
    probe = shlex.join(container.probe_commands[0])
    inside = f"""
        {" ".join(container.command)} & controller=$!
        until {probe} 2>/dev/null; do kill -0 $controller || exit 9; sleep 0.2; done
        areal-async status --json
        ls -l $AREAL_ASYNC_CLUSTER_DIR
        touch /opt/written 2>/dev/null && exit 8
        kill -TERM $controller; wait $controller
    """
    words = [*_boxed(container, tmp_path), "sh", "-c", inside]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    answer, files = done.stdout.split("\n", 1)
    assert json.loads(answer)["cluster"] == "compose"
    assert "-rw------- 1 10001 10001" in files
    assert "look.token" in files


def _boxed(container: Container, scratch: Path) -> list[str]:
    """bubblewrap for `container`: its mounts alone can be written, and it reaches nothing outside."""
    words = shlex.split("bwrap --unshare-all --die-with-parent --uid 10001 --gid 10001 --cap-drop ALL")
    for folder in ("/usr", "/bin", "/lib", "/lib64"):
        words += ["--ro-bind-try", folder, folder]
    words += ["--proc", "/proc", "--dev", "/dev", "--dir", "/opt"]
    for number, (point, mount) in enumerate(sorted(container.mounts.items())):
        source = scratch / f"mount-{number}"
        if mount.kind == "volume":
            source.mkdir(exist_ok=True)
        elif mount.files and "" in mount.files:
            source.write_text(mount.files[""])
        else:
            continue
        words += ["--bind" if mount.writable else "--ro-bind", str(source), point]
    # Last: they may lie where the container has something of its own, such as /tmp.
    for folder in dict.fromkeys((sys.base_prefix, str(BIN.parent.resolve()), str(ROOT.resolve()))):
        words += ["--ro-bind", folder, folder]
    path = f"{BIN.parent.resolve() / 'bin'}:/usr/bin:/bin"
    given = {"PATH": path, "HOME": "/var/lib/areal-async", "PYTHONPATH": str(ROOT.resolve())}
    for name, value in (given | dict(container.environment)).items():
        words += ["--setenv", name, str(value)]
    return [*words, "--remount-ro", "/"]


# --- a Ray node --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not can("unshare", "--net", "true"), reason="needs root, for a network of its own")
def test_a_ray_head_listens_where_policies_know_and_takes_no_other_token(tmp_path: Path) -> None:
    """What `keys init` makes, in another place, and the command of the systemd unit with the role that its
    comment gives, in a network of its own."""
    pytest.importorskip("ray")
    unit = DEPLOY / "systemd" / "areal-async-ray.service"
    (command,) = unit_settings(unit)["ExecStart"]
    role = "--head --port=6380 --dashboard-host=127.0.0.1 --num-cpus=0 --num-gpus=0"
    assert role in unit.read_text()
    words = command.replace("$RAY_ROLE", role).replace("${RAY_NODE_IP}", "10.77.0.1").split()
    keys = tmp_path / "keys"
    make_keys(tmp_path / "made", ["10.77.0.1"])
    shutil.copytree(tmp_path / "made" / "nodes" / "10.77.0.1", keys)
    shutil.rmtree(tmp_path / "made")
    exported = subprocess.check_output(["bash", "-c", f". {keys}/env.sh && env -0"], text=True).split("\0")
    environment = dict(line.split("=", 1) for line in exported if line)
    environment |= {"PATH": f"{BIN}:{os.environ['PATH']}"}
    up = "ip link set lo up && ip addr add 10.77.0.1/32 dev lo && echo 30000 39999"
    up += " > /proc/sys/net/ipv4/ip_local_port_range && exec ray " + " ".join(words[1:])
    short = Path("/tmp") / f"areal-ray-{os.getpid()}"  # sockets lie in it
    log = tmp_path / "log"
    with log.open("wb") as output:
        node = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", f"{up} --temp-dir={short}"],
            env=environment, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        inside = ["nsenter", "--net", "-t", str(node.pid)]
        asked = [*inside, "ray", "health-check", f"--address=10.77.0.1:{HEAD_PORT}"]

        def reached() -> set[int]:
            words = [*inside, "ss", "-Hltn"]
            shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
            places = [line.split()[3].rpartition(":") for line in shown.splitlines()]
            return {int(port) for host, _, port in places if "127.0.0.1" not in host and host != "[::1]"}

        def asks(**variables: str) -> tuple[int, str]:
            given = environment | variables
            done = subprocess.run(
                asked, env=given, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
            return done.returncode, done.stderr

        def healthy() -> bool:
            assert node.poll() is None, log.read_text()
            return HEAD_PORT in reached() and asks()[0] == 0  # who asks before waits for long

        wait_for(healthy, "a Ray head")
        assert "AuthenticationError" in asks(RAY_AUTH_TOKEN="0" * 64)[1]
        assert asks(RAY_USE_TLS="0", RAY_gcs_rpc_server_reconnect_timeout_s="5")[0] != 0
        # Where grpcio is installed a head also listens for Ray's client, which nothing of ours uses and no
        # policy lets in; it cannot be told not to.
        client = 10_001
        known = {HEAD_PORT, 8265, MONITOR_PORT, client, *RAY_PORTS.values(), *range(30_000, 40_000)}
        known |= {*range(RAY_PORTS["min_worker_port"], RAY_PORTS["max_worker_port"] + 1)}
        names = ("node_manager_port", "object_manager_port", "runtime_env_agent_port")
        own = {HEAD_PORT, *(RAY_PORTS[name] for name in names)}
        wait_for(lambda: own <= reached(), "the ports of a Ray head")
        assert reached() - known == set()
    finally:
        started = psutil.Process(node.pid).children(recursive=True) if node.poll() is None else []
        node.kill()
        node.wait()
        for child in started:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        shutil.rmtree(short, ignore_errors=True)


# --- units and scrapes ---------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("name", ["areal-async-controller", "areal-async-ray"])
def test_systemd_takes_the_units_and_finds_them_closed(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.service"
    text = (DEPLOY / "systemd" / f"{name}.service").read_text().replace("/opt/areal-async/bin/", f"{BIN}/")
    path.write_text(text)

    def analyzed(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["systemd-analyze", *words, path]
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)

    verified = analyzed("verify")
    assert (verified.returncode, verified.stderr) == (0, "")
    judged = analyzed("security", "--offline=true", "--threshold=50", "--no-pager")
    assert judged.returncode == 0, judged.stdout
    path.write_text(text.replace("[Service]", "[Services]"))
    assert analyzed("verify").stderr != ""


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: the Debian package prometheus")
@pytest.mark.parametrize("name", ["compose/prometheus.yml", "prometheus/prometheus.yml"])
def test_prometheus_takes_what_it_is_to_scrape(name: str) -> None:
    command = ["promtool", "check", "config", "--syntax-only", DEPLOY / name]
    subprocess.run(command, check=True, capture_output=True)
