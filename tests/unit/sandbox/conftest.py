"""One sandbox of each kind for all tests; a kind that this machine does not offer skips its tests."""

import os
from pathlib import Path

import pytest
import yaml

from reward_service.sandbox import Program, RunLimits, Sandbox, SandboxError
from reward_service.sandbox.confinement import START, LauncherClient

ISOLATED = ("grouped", "summed")
"""How memory is held: by a memory group, or by looking."""
WITHOUT_GROUP = START.replace("from", "from isolation import cgroup; cgroup.enter = lambda: None; from", 1)


@pytest.fixture(scope="session", autouse=True)
def secret():
    """What no program may find."""
    os.environ["AREAL_TEST_SECRET"] = "do-not-tell"
    yield
    del os.environ["AREAL_TEST_SECRET"]


def opened(kind):
    if kind == "none":
        return Sandbox.at("none")
    try:
        box = Sandbox.at("isolated", LauncherClient(WITHOUT_GROUP if kind == "summed" else START))
    except SandboxError as error:
        pytest.skip(str(error))
    if kind == "grouped" and "memory group" not in box.guards:
        box.close()
        pytest.skip("no memory group can be had here")
    return box


@pytest.fixture(scope="session", params=ISOLATED)
def isolated(request, secret):
    """What hostile programs are run in."""
    with opened(request.param) as box:
        yield box


@pytest.fixture(scope="session", params=[*ISOLATED, "none"])
def every_sandbox(request, secret):
    with opened(request.param) as box:
        yield box


@pytest.fixture(scope="session")
def best(secret):
    with opened("best") as box:
        yield box


@pytest.fixture(scope="session", params=["best", "none"])
def sandbox(request, best):
    """For programs that harm nobody: how memory is held makes no difference to them."""
    with opened("none") as unprotected:
        yield best if request.param == "best" else unprotected


@pytest.fixture(autouse=True)
def isolation(request):
    """Code rewards isolate unless told otherwise."""
    if request.path.name == "test_code_rewards.py":
        request.getfixturevalue("best")


LIMITS = RunLimits(wall_s=30, cpu_s=20, memory_mb=128, processes=16)
PROGRAMS = yaml.safe_load(Path(__file__).with_name("programs.yaml").read_text())


@pytest.fixture(scope="session")
def opening():
    """Text in front of such programs."""
    return PROGRAMS["opening"]


@pytest.fixture(scope="session")
def attempt(isolated):
    """Runs a program that says ESCAPED where it got further than it may, and must end by itself unless `ok`
    is false."""

    def made(source, limits=LIMITS, *, ok=True):
        outcome = isolated.run(Program(source=PROGRAMS["opening"] + source, limits=limits))
        assert b"ESCAPED" not in outcome.stdout + outcome.stderr, outcome.stdout.decode()
        assert outcome.ok or not ok, outcome.describe()
        return outcome

    return made
