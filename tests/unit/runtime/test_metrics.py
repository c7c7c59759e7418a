import contextlib
import gzip
import re
import resource
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from areal_async.base.metrics import Busy, MetricsPortError, busy, start_metrics_server
from tests.waiting import LIMIT_S


@pytest.fixture
def clock():
    """One that goes on when told: `clock(2.0)`; `clock()` reads it."""
    now_s = 100.0

    def read(more_s=0.0):
        nonlocal now_s
        now_s += more_s
        return now_s

    return read


def test_busy_adds_up_pieces_of_one_activity_and_those_that_overlap_count_once(clock):
    busy = Busy(clock)
    for _ in range(3):
        with busy("train"):
            clock(2.0)
        clock(5.0)
    assert (busy.seconds("train"), busy.seconds("never begun")) == (6.0, 0.0)
    busy.begin("score")
    clock(1.0)
    with busy("score"):
        clock(1.0)
        busy.end("score")
        clock(1.0)
    clock(10.0)
    assert busy.seconds("score") == 3.0


def test_a_running_piece_counts_up_to_the_scrape_and_one_that_raises_to_its_end(clock):
    busy, registry = Busy(clock), CollectorRegistry()
    registry.register(busy)
    with contextlib.suppress(RuntimeError), busy("score"):
        clock(1.0)
        raise RuntimeError
    busy.begin("train")
    clock(7.5)
    text = generate_latest(registry)
    assert b'areal_busy_seconds_total{activity="train"} 7.5' in text
    assert b'areal_busy_seconds_total{activity="score"} 1.0' in text


def test_a_taken_port_is_an_error_that_names_the_setting():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(MetricsPortError, match=r"observe\.metrics_port"):
            start_metrics_server(taken.getsockname()[1])


BUSY_PROCESS = """
import sys
from areal_async.base.metrics import start_metrics_server
print(start_metrics_server(0), flush=True)
for line in sys.stdin:
    files = [open("/dev/null") for _ in range(60)]
    print(len(files), flush=True)
"""


def test_idle_connections_take_nothing_from_the_process():
    """With as many of them as the process may open files, it still opens its own and answers a scrape."""
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", BUSY_PROCESS],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200)),
            )
        )
        stack.callback(process.kill)
        port = int(process.stdout.readline())
        for _ in range(300):
            idle = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S))
            idle.send(b"GET /metrics HTTP/1.1\r\n")
        for _ in range(3):
            process.stdin.write("work\n")
            process.stdin.flush()
            assert process.stdout.readline() == "60\n"
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT_S).read()
            assert b"areal_busy_seconds" in text


def test_a_scraper_is_answered_on_loopback_only_and_in_the_form_it_asks_for():
    port = start_metrics_server(0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))

    def ask(data=None, **headers):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", data=data, headers=headers)
        return urllib.request.urlopen(request, timeout=LIMIT_S)

    with busy("asked"):
        pass
    plain = ask()
    assert plain.headers["content-type"].startswith("text/plain")
    text = plain.read()
    assert b'areal_busy_seconds_total{activity="asked"}' in text
    assert b"areal_busy_seconds_created" not in text
    opened = ask(accept="application/openmetrics-text; version=1.0.0", **{"accept-encoding": "gzip"})
    assert opened.headers["content-type"].startswith("application/openmetrics-text")
    assert gzip.decompress(opened.read()).endswith(b"# EOF\n")
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(data=b"x")
    assert refused.value.code == 405


def test_every_series_is_documented_and_every_documented_series_exists():
    root = Path(__file__).parents[3]
    sources = [path for path in root.glob("*_*/**/metrics.py") if "tests" not in path.parts]
    declared = names("\n".join(re.findall(r'"(areal_[a-z_]+)"', "\n".join(map(Path.read_text, sources)))))
    assert names((root / "docs" / "metrics.md").read_text()) == declared


def names(text):
    """Series as declared: the client library adds `_total` to a counter by itself."""
    found = re.findall(r"\bareal_[a-z]+_[a-z_]+", text)
    return {name.removesuffix("_total") for name in found} - {"areal_async"}
