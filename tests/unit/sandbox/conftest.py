"""One sandbox of each kind for all tests; a kind that this machine does not offer skips its tests."""

import os

import pytest

from reward_service.sandbox import Limits, Program, Sandbox, SandboxError, client

ISOLATED = ("bubblewrap", "own", "summed")
"""By whom the namespaces are made, and our own without a memory group."""
WITHOUT_GROUP = "from reward_service.jail import memory; memory.enter = lambda: None; "


@pytest.fixture(scope="session", autouse=True)
def secret():
    """What no program may find."""
    os.environ["AREAL_TEST_SECRET"] = "do-not-tell"
    yield
    del os.environ["AREAL_TEST_SECRET"]


def opened(kind):
    if kind == "none":
        return Sandbox.at("none")
    with pytest.MonkeyPatch.context() as patch:
        if kind != "bubblewrap":
            patch.setenv("PATH", "/nowhere")
        if kind == "summed":
            path, rest = client.START.split("; from ", 1)
            patch.setattr(client, "START", f"{path}; {WITHOUT_GROUP}from {rest}")
        try:
            box = Sandbox.at("isolated")
        except SandboxError as error:
            pytest.skip(str(error))
        # The second jailer of pairs is of the same kind.
        box._partner._connected()
    if kind == "bubblewrap" and "bubblewrap" not in box.guards:
        box.close()
        pytest.skip("bubblewrap is not installed, or does not work here")
    return box


@pytest.fixture(scope="session", params=ISOLATED)
def isolated(request, secret):
    """What hostile programs are run in."""
    with opened(request.param) as box:
        yield box


@pytest.fixture(scope="session", params=[*ISOLATED, "none"])
def sandbox(request, secret):
    """For programs that harm nobody."""
    with opened(request.param) as box:
        yield box


@pytest.fixture(scope="session")
def best(secret):
    try:
        box = Sandbox.at("isolated")
    except SandboxError as error:
        pytest.skip(str(error))
    with box:
        yield box


@pytest.fixture(autouse=True)
def isolation(request):
    """Code rewards and sandbox servers isolate unless told otherwise."""
    if request.path.name in ("test_code_rewards.py", "test_remote.py"):
        request.getfixturevalue("best")


LIMITS = Limits(wall_s=30, cpu_s=20, memory_mb=128, processes=16)
OPENING = """
import ctypes, errno, fcntl, mmap, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def tried(what, call, *arguments):
    try:
        call(*arguments)
    except (OSError, ValueError, PermissionError):
        return
    print('ESCAPED', what)
def refused(what, number, *arguments):
    "A system call by its number must fail."
    words = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    if libc.syscall(ctypes.c_long(number), *words) >= 0:
        print('ESCAPED', what)
"""


@pytest.fixture(scope="session")
def opening():
    """What such programs begin with."""
    return OPENING


@pytest.fixture(scope="session")
def attempt(isolated):
    """Runs a program that says ESCAPED where it got further than it may, and must end by itself unless `ok`
    is false."""

    def made(source, limits=LIMITS, *, ok=True):
        outcome = isolated.run(Program(source=OPENING + source, limits=limits))
        assert b"ESCAPED" not in outcome.stdout + outcome.stderr, outcome.stdout.decode()
        assert outcome.ok or not ok, outcome.describe()
        return outcome

    return made
