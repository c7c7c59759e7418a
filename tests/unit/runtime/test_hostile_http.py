"""Every kind of HTTP server under hostile clients: a small form of `benchmarks/hostile_http.py`."""

import psutil
import pytest
from hostile_http import HELD, KINDS, MOST_MORE, hold, malformed, send_malformed, served, settle

pytestmark = pytest.mark.slow

OPEN_FILES, CONNECTIONS = 256, 300


@pytest.fixture(scope="module", params=KINDS)
def subject(request, tmp_path_factory):
    with served(request.param, tmp_path_factory.mktemp(request.param), OPEN_FILES) as one:
        send_malformed(one, len(malformed(one)))
        settle(one)
        one.before = one.usage()
        yield one


def assert_as_before(subject):
    settle(subject)
    subject.honest()
    after = subject.usage()
    more = {name: after[name] - subject.before[name] for name in after}
    assert {name: value for name, value in more.items() if value > MOST_MORE[name]} == {}
    assert psutil.pid_exists(subject.process.pid)
    assert subject.process.poll() is None


@pytest.mark.parametrize("what", HELD)
def test_an_honest_client_is_answered_while_connections_are_held(subject, what):
    hold(subject, what, CONNECTIONS)
    assert_as_before(subject)


def test_malformed_requests_leave_nothing_behind(subject):
    send_malformed(subject, 2 * len(malformed(subject)))
    assert_as_before(subject)
