import socket
import threading
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from areal_async.observe.metrics import Busy, MetricsPortError, busy, start_metrics_server


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_busy_adds_up_pieces_of_one_activity():
    clock = Clock()
    busy = Busy(clock)
    for _ in range(3):
        with busy("train"):
            clock.now += 2.0
        clock.now += 5.0
    assert busy.seconds("train") == 6.0
    assert busy.seconds("never begun") == 0.0


def test_pieces_that_overlap_count_once():
    clock = Clock()
    busy = Busy(clock)
    busy.begin("score")
    clock.now += 1.0
    with busy("score"):
        clock.now += 1.0
        busy.end("score")
        clock.now += 1.0
    clock.now += 10.0
    assert busy.seconds("score") == 3.0


def test_a_running_piece_counts_up_to_the_scrape():
    clock = Clock()
    busy = Busy(clock)
    registry = CollectorRegistry()
    registry.register(busy)
    busy.begin("train")
    clock.now += 7.5
    assert b'areal_busy_seconds_total{activity="train"} 7.5' in generate_latest(registry)


def test_busy_ends_when_the_piece_raises():
    clock = Clock()
    busy = Busy(clock)

    def fail():
        with busy("train"):
            clock.now += 1.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    clock.now += 1.0
    assert busy.seconds("train") == 1.0


def test_busy_holds_under_threads():
    busy = Busy()
    start = threading.Barrier(8)

    def work():
        start.wait()
        for _ in range(2000):
            with busy("x"):
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before = busy.seconds("x")
    assert busy.seconds("x") == before


def test_the_server_serves_the_default_registry_on_loopback_only():
    with busy("test"):
        pass
    port = start_metrics_server(0)
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    assert 'areal_busy_seconds_total{activity="test"}' in text
    assert "areal_busy_seconds_created" not in text


def test_a_taken_port_is_an_error_that_names_the_setting():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(MetricsPortError, match=r"observe\.metrics_port"):
            start_metrics_server(taken.getsockname()[1])
