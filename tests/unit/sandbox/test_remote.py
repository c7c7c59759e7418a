"""Programs on another machine: the same requests and outcomes over HTTP."""

import asyncio
import contextlib
import socket
import urllib.error
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from areal_async.errors import EndpointError
from areal_async.rpc.verdicts import Failure
from reward_service.sandbox import CompilerMissing, Program, RunLimits, SandboxError
from reward_service.sandbox.program import CannotIsolate
from reward_service.sandbox.remote import RemoteSandbox
from reward_service.sandbox.serving import MOST, bounded, serving
from reward_service.sdk import RewardInput
from reward_service.verifiers.code_rewards import code_stdio


@contextlib.contextmanager
def served(**options):
    """URL of a server that lives as long as the block."""
    loop, url, end = asyncio.new_event_loop(), Future(), asyncio.Event()

    async def serve():
        try:
            async with serving("127.0.0.1", 0, places=2, **options) as one:
                url.set_result(one)
                await end.wait()
        except BaseException as error:
            if not url.done():
                url.set_exception(error)
            raise

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(loop.run_until_complete, serve())
        try:
            yield url.result(60)
        finally:
            loop.call_soon_threadsafe(end.set)
            running.result(60)
            loop.close()


@pytest.fixture(scope="module")
def url():
    with served() as one:
        yield one


def test_a_program_runs_there_as_it_does_here(url, best):
    remote = RemoteSandbox(url)
    program = Program(source="print(input()[::-1])", stdin=b"\xc3\xa9ab", limits=RunLimits(wall_s=8))
    here, there = best.run(program), remote.run(program)
    assert (there.kind, there.stdout) == (here.kind, here.stdout) == ("ok", "baé\n".encode())
    assert there.level == "isolated"
    assert there.guards == ("remote", *best.guards)
    loop = remote.run(Program(source="while True: pass", limits=RunLimits(wall_s=0.4)))
    assert loop.kind == "timeout"


def test_a_pair_runs_there_as_it_does_here(url):
    remote = RemoteSandbox(url)
    limits = RunLimits(wall_s=20)
    asks = "import os\nos.write(3, b'\\xff1')\nprint(os.read(3, 9))"
    echo = "import os\nwhile data := os.read(3, 99): os.write(3, data + b'!')\nimport time; time.sleep(99)"
    tests, program = remote.run_pair(Program(source=asks, limits=limits), Program(source=echo, limits=limits))
    assert (tests.kind, tests.stdout, program.kind) == ("ok", b"b'\\xff1!'\n", "ended"), tests.describe()
    assert (tests.level, program.level) == ("isolated", "isolated")


def test_what_is_wrong_comes_back_as_the_same_error(url):
    remote = RemoteSandbox(url)
    with pytest.raises(CompilerMissing, match="cobol"):
        remote.run(Program(source="x", language="cobol"))
    with pytest.raises(ValueError, match="inside the folder"):
        remote.run(Program(source="x", files={"../x": b""}))


def test_a_server_wants_its_token(monkeypatch):
    monkeypatch.setenv("SANDBOX_TOKEN", "right")
    monkeypatch.setenv("WRONG_TOKEN", "wrong")
    with served(token="right") as url:
        assert RemoteSandbox(url, token_env="SANDBOX_TOKEN").run(Program(source="print(1)")).ok
        for variable in (None, "WRONG_TOKEN"):
            with pytest.raises(SandboxError, match="401"):
                RemoteSandbox(url, token_env=variable)
        with pytest.raises(SandboxError, match="NO_TOKEN"):
            RemoteSandbox(url, token_env="NO_TOKEN")


def post(url, body, media_type):
    request = urllib.request.Request(f"{url}/v1/sandbox/run", data=body, headers={"content-type": media_type})
    return urllib.request.urlopen(request, timeout=20)


def test_a_server_without_isolation_is_used_only_where_the_job_says_none():
    with served(level="none") as url:
        with pytest.raises(CannotIsolate, match="runs programs without isolation"):
            RemoteSandbox(url)
        outcome = RemoteSandbox(url, level="none").run(Program(source="print(1)"))
    assert (outcome.stdout, outcome.level) == (b"1\n", "none")


def test_bad_bodies_are_refused(url):
    for body, status in ((b"not json", 400), (b'{"limits": {"wall_s": "x"}}', 400), (b"x" * (17 << 20), 413)):
        with pytest.raises((urllib.error.HTTPError, ConnectionError, urllib.error.URLError)) as raised:
            post(url, body, "application/json")
        assert getattr(raised.value, "code", status) == status


def test_a_page_in_a_browser_cannot_have_a_program_run(url):
    with pytest.raises(urllib.error.HTTPError) as raised:
        post(url, b'{"source": "print(1)"}', "text/plain")
    assert raised.value.code == 415
    assert post(url, b'{"source": "print(1)"}', "application/json").status == 200


def test_no_server_is_an_error_and_never_a_score():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        given = RewardInput(response="```\nprint(1)\n```", ground_truth={"inputs": [""], "outputs": ["1"]})
        verdict = code_stdio(given, remote=f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert isinstance(verdict, Failure)
    assert verdict.kind == "sandbox"


def test_a_reward_scores_by_a_remote_sandbox(url):
    given = RewardInput(response="```\nprint(1)\n```", ground_truth={"inputs": [""], "outputs": ["1"]})
    verdict = code_stdio(given, remote=url)
    assert verdict.value == 1
    assert verdict.sandbox == "isolated"


def test_an_address_beyond_loopback_needs_a_token():
    for host in ("0.0.0.0", "192.168.0.1", "example.org"):
        with pytest.raises(EndpointError, match="token"):
            asyncio.run(serving(host, 0, places=1).__aenter__())


def test_a_server_grants_no_more_than_its_most():
    asked = RunLimits(wall_s=1e9, memory_mb=10**9, processes=-5, cpu_s=1.0)
    assert bounded(asked).wall_s == MOST.wall_s
    assert bounded(asked).memory_mb == MOST.memory_mb
    assert bounded(asked).processes == 0
    assert bounded(asked).cpu_s == 1.0
