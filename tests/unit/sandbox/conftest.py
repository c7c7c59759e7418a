"""One sandbox of each level for all tests; a level that this machine does not offer skips its tests."""

import os

import pytest

from reward_service.sandbox import Sandbox, SandboxError

LEVELS = ("seccomp", "bubblewrap", "namespaces", "rlimits")


@pytest.fixture(scope="session", autouse=True)
def secret():
    """What no program may find."""
    os.environ["AREAL_TEST_SECRET"] = "do-not-tell"
    yield
    del os.environ["AREAL_TEST_SECRET"]


@pytest.fixture(scope="session", params=LEVELS)
def sandbox(request, secret):
    try:
        box = Sandbox.at(request.param)
    except SandboxError as error:
        pytest.skip(str(error))
    with box:
        yield box


@pytest.fixture(scope="session")
def best(secret):
    with Sandbox.best() as box:
        yield box
