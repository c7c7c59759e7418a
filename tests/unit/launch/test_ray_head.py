"""Whether a Ray head answers, asked of listeners that are none."""

import socket
import sys

import pytest

from areal_async.base.errors import RunError
from areal_async.launch.ray.head import check_head


def says(code):
    return (sys.executable, "-c", f"import signal, sys\n{code}")


@pytest.fixture
def address():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_an_address_at_which_nobody_listens_is_named():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(RunError, match=f"nobody listens at {address}: start the cluster"):
            check_head(address, connect_s=0.1)


def test_who_does_not_answer_as_a_head_is_refused_in_time_and_with_its_words(address, monkeypatch):
    monkeypatch.setenv("RAY_USE_TLS", "0")
    with pytest.raises(RunError, match=rf"{address} .* head: silent for 0.5 s\..*RAY_USE_TLS is not set"):
        check_head(address, answer_s=0.5, ask=says("signal.pause()"))
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with pytest.raises(RunError, match=r"head: wrong token\. .*in this shell, with"):
        check_head(address, ask=says("sys.exit('a trace\\nwrong token')"))


@pytest.mark.parametrize("auto", [False, True])
def test_a_head_that_answers_is_taken(address, auto):
    wanted = "auto" if auto else address
    check_head(wanted, ask=says(f"sys.exit(sys.argv[1:] != [{wanted!r}])"))
