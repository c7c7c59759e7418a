"""One sandbox of each kind for all tests; a kind that this machine does not offer skips its tests."""

import os

import pytest

from reward_service.sandbox import Sandbox, SandboxError, client

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
    with Sandbox.at("isolated") as box:
        yield box
