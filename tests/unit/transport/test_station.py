import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import zmq

from areal_async.errors import EndpointError, SnapshotError
from areal_async.rpc import endpoints
from areal_async.rpc.endpoints import CurveKeys
from areal_async.weights.snapshot import open_snapshot
from areal_async.weights.transport import frames
from areal_async.weights.transport.frames import Kind
from areal_async.weights.transport.holding import Growing, Holding
from areal_async.weights.transport.keys import make_keys, read_keys
from areal_async.weights.transport.table import key_of
from tests.unit.transport.world import LIMIT_S, SECRET, fetch, files_of, publisher, station, table_of, written


def test_what_arrives_is_byte_for_byte_what_was_published(tmp_path):
    snapshot = written(tmp_path / "p")
    with publisher(snapshot) as p, station() as a:
        path = fetch(a, snapshot, tmp_path / "a", [p.endpoint]).result.result(LIMIT_S)
        assert path == tmp_path / "a" / snapshot.path.name
        assert files_of(path) == files_of(snapshot.path)
        assert open_snapshot(path, manifest_hash=snapshot.manifest_hash).tag == snapshot.tag
        assert p.bytes_sent == a.bytes_received == snapshot.size_bytes
    assert [entry.name for entry in (tmp_path / "a").iterdir()] == [path.name], "nothing is left beside it"


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_the_sender_sends_every_byte_once_however_many_receive(tmp_path, n):
    snapshot = written(tmp_path / "p", mib=2)
    with publisher(snapshot) as p:
        receivers = [station() for _ in range(n)]
        stations = [r.__enter__() for r in receivers]
        try:
            line = [p.endpoint, *[s.endpoint for s in stations]]
            fetches = [
                fetch(s, snapshot, tmp_path / f"r{i}", line[i::-1], patience_s=10)
                for i, s in enumerate(stations)
            ]
            for one in fetches:
                assert files_of(one.result.result(LIMIT_S)) == files_of(snapshot.path)
            assert p.bytes_sent == snapshot.size_bytes
            assert [s.bytes_sent for s in stations] == [snapshot.size_bytes] * (n - 1) + [0]
        finally:
            for r in receivers:
                r.__exit__(None, None, None)


def test_chunks_are_handed_on_before_the_directory_is_complete(tmp_path):
    """The first in line has its own source cut off in the middle; what it has reaches the second."""
    snapshot = written(tmp_path / "p")
    with publisher(snapshot) as p, station() as a, station() as b:
        n = len(table_of(snapshot).digests) // 32
        send, sent = p._send_chunk, []

        def first_half(fetcher, holding, index):
            sent.append(index)
            if len(sent) <= n // 2:
                send(fetcher, holding, index)

        p._send_chunk = first_half
        first = fetch(a, snapshot, tmp_path / "a", [p.endpoint], patience_s=2)
        second = fetch(b, snapshot, tmp_path / "b", [a.endpoint], patience_s=30)
        deadline_s = time.monotonic() + LIMIT_S
        while second.progress < (n // 2) / n and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert second.progress == (n // 2) / n
        assert not first.result.done()
        assert not second.result.done()
        p._send_chunk = send
        assert second.result.result(LIMIT_S).exists()


def test_nothing_waits_for_a_station_whose_thread_failed(tmp_path):
    snapshot = written(tmp_path / "p")
    with publisher(snapshot) as p, station() as a:

        def fails(fetch, sock):
            raise zmq.ZMQError(zmq.EFAULT)

        a._receive = fails
        with pytest.raises(SnapshotError, match="station of this process ends"):
            fetch(a, snapshot, tmp_path / "a", [p.endpoint]).result.result(LIMIT_S)
        with pytest.raises(SnapshotError, match="no chunks now"):
            fetch(a, snapshot, tmp_path / "a", [p.endpoint]).result.result(LIMIT_S)


def test_a_wish_that_comes_before_its_source_has_begun_waits_for_it(tmp_path):
    snapshot = written(tmp_path / "p")
    with publisher(snapshot) as p, station() as a, station() as b:
        second = fetch(b, snapshot, tmp_path / "b", [a.endpoint, p.endpoint], patience_s=10)
        deadline_s = time.monotonic() + LIMIT_S
        while not a._early and time.monotonic() < deadline_s:
            time.sleep(0.01)
        fetch(a, snapshot, tmp_path / "a", [p.endpoint], patience_s=10)
        assert second.result.result(LIMIT_S).exists()
        assert second.failed == set()
        assert p.bytes_sent == a.bytes_sent == snapshot.size_bytes


def test_a_source_that_lies_is_left_and_counted_and_nothing_of_it_is_kept(tmp_path):
    good, evil = written(tmp_path / "p"), written(tmp_path / "evil", seed=1)
    table = table_of(good)
    with publisher(good) as p, station() as liar, station() as a:
        liar.hold(Holding(evil.path, table))  # says it is the good one
        endpoints = [liar.endpoint, p.endpoint]
        one = fetch(a, good, tmp_path / "a", endpoints, table, patience_s=LIMIT_S)
        assert files_of(one.result.result(LIMIT_S)) == files_of(good.path)
        assert one.failed == {liar.endpoint}


def test_a_right_chunk_that_comes_while_a_wrong_one_is_verified_is_not_missed(tmp_path):
    good, evil = written(tmp_path / "p"), written(tmp_path / "evil", seed=1)
    table = table_of(good)
    (tmp_path / "a").mkdir()
    growing = Growing(tmp_path / "a" / good.path.name, table)
    growing.resume()
    put, fetches, wrong = growing.put, queue.SimpleQueue(), []

    def slow_with_wrong_ones(index, data):
        if growing.layout.matches(index, data):
            return put(index, data)
        wrong.append(index)
        if index != wrong[0]:  # with that one the liar is left
            fetch = fetches.get(timeout=LIMIT_S)
            fetches.put(fetch)
            deadline_s = time.monotonic() + LIMIT_S
            while index not in fetch._passed_over and time.monotonic() < deadline_s:
                time.sleep(0.001)
        return False

    growing.put = slow_with_wrong_ones
    with publisher(good) as p, station() as liar, station() as a:
        liar.hold(Holding(evil.path, table))
        # No wait for what was missed would end in time.
        one = a.fetch(growing, [liar.endpoint, p.endpoint], patience_s=2 * LIMIT_S)
        fetches.put(one)
        assert files_of(one.result.result(LIMIT_S)) == files_of(good.path)
        assert one.failed == {liar.endpoint}
        assert len(wrong) > 1


def test_a_fetch_whose_every_source_lies_fails_and_leaves_no_directory(tmp_path):
    good, evil = written(tmp_path / "p"), written(tmp_path / "evil", seed=1)
    with station() as liar, station() as a:
        liar.hold(Holding(evil.path, table_of(good)))
        one = fetch(a, good, tmp_path / "a", [liar.endpoint], table_of(good))
        with pytest.raises(SnapshotError, match="other bytes"):
            one.result.result(LIMIT_S)
    assert not (tmp_path / "a" / good.path.name).exists()


def test_sources_that_are_dead_silent_or_without_the_snapshot_are_stepped_over(tmp_path):
    snapshot = written(tmp_path / "p")
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        publisher(snapshot) as p,
        station() as a,
        station() as other,
    ):
        silent_endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with socket.create_server(("127.0.0.1", 0)) as closed:
            dead = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
        one = fetch(a, snapshot, tmp_path / "a", [dead, silent_endpoint, other.endpoint, p.endpoint])
        assert one.result.result(LIMIT_S).exists()
        assert one.failed == {dead, silent_endpoint, other.endpoint}


def test_a_fetch_from_nobody_ends_with_the_reason(tmp_path):
    snapshot = written(tmp_path / "p")
    with station() as a:
        one = fetch(a, snapshot, tmp_path / "a", ["tcp://127.0.0.1:9"], give_up_s=0.5)
        with pytest.raises(SnapshotError, match=r"no source sent anything for 0\.5 s: 0 % of e1-v0 are here"):
            one.result.result(LIMIT_S)


def test_a_cancelled_fetch_is_gone_on_with_where_it_was(tmp_path):
    snapshot = written(tmp_path / "p")
    table = table_of(snapshot)
    with publisher(snapshot) as p, station() as a:
        send, sent = p._send_chunk, []

        def seven(fetcher, holding, index):
            sent.append(index)
            if len(sent) <= 7:
                send(fetcher, holding, index)

        p._send_chunk = seven
        one = fetch(a, snapshot, tmp_path / "a", [p.endpoint], table, patience_s=30)
        deadline_s = time.monotonic() + LIMIT_S
        while one.progress * len(table.digests) / 32 < 7 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        a.cancel(one).result(LIMIT_S)
        with pytest.raises(SnapshotError, match="ended"):
            one.result.result(LIMIT_S)
        p._send_chunk = send
        again = fetch(a, snapshot, tmp_path / "a", [p.endpoint], table)
        assert files_of(again.result.result(LIMIT_S)) == files_of(snapshot.path)
        assert p.bytes_sent == snapshot.size_bytes, "no verified chunk was sent twice"


def test_resume_believes_no_mark(tmp_path):
    snapshot = written(tmp_path / "p")
    with publisher(snapshot) as p, station() as a:
        p._send_chunk = lambda *_: None
        one = fetch(a, snapshot, tmp_path / "a", [p.endpoint], patience_s=30)
        a.cancel(one).result(LIMIT_S)
    marks = next((tmp_path / "a").glob(".marks-*"))
    marks.write_bytes(b"\1" * marks.stat().st_size)
    with publisher(snapshot) as p, station() as a:
        path = fetch(a, snapshot, tmp_path / "a", [p.endpoint]).result.result(LIMIT_S)
        assert files_of(path) == files_of(snapshot.path)


def test_a_fetcher_that_takes_nothing_holds_up_nobody_and_is_queued_only_what_it_asked_for(tmp_path):
    snapshot = written(tmp_path / "p", mib=8)
    with publisher(snapshot) as p, station() as a, zmq.Context() as context:
        asleep = context.socket(zmq.DEALER)
        asleep.setsockopt(zmq.LINGER, 0)
        asleep.setsockopt(zmq.RCVHWM, 1)
        endpoints.connect(asleep, p.endpoint, SECRET)
        asleep.send(frames.want(key_of(snapshot.manifest_hash), range(1, 6)))
        assert fetch(a, snapshot, tmp_path / "a", [p.endpoint]).result.result(LIMIT_S).exists()
        assert p.bytes_sent == snapshot.size_bytes + 5 * (256 << 10)
        asleep.close()


def test_what_is_no_message_is_refused_and_the_station_goes_on(tmp_path):
    snapshot = written(tmp_path / "p")
    key = key_of(snapshot.manifest_hash)
    with publisher(snapshot) as p, station() as a, zmq.Context() as context:
        with context.socket(zmq.DEALER) as hostile:
            hostile.setsockopt(zmq.LINGER, 0)
            hostile.setsockopt(zmq.RCVTIMEO, 5000)
            endpoints.connect(hostile, p.endpoint, SECRET)
            for message in ([b""], [b"AC"], [b"x" * 40], [frames.head(Kind.WANT, key)], [b"", b"", b""]):
                hostile.send_multipart(message)
            hostile.send(frames.head(Kind.WANT, key) + b"\0" * 4 * 65)
            hostile.send(frames.want(key, [1 << 31]))
            assert frames.read(hostile.recv()).kind == Kind.GONE
            hostile.send(frames.want(b"k" * 32, [0]))
            assert frames.read(hostile.recv()).kind == Kind.GONE
        assert fetch(a, snapshot, tmp_path / "a", [p.endpoint]).result.result(LIMIT_S).exists()


def test_a_released_snapshot_is_not_served_and_its_files_may_be_used_again(tmp_path):
    snapshot = written(tmp_path / "p")
    with publisher(snapshot) as p, station() as a:
        assert fetch(a, snapshot, tmp_path / "a", [p.endpoint]).result.result(LIMIT_S).exists()
        deadline_s = time.monotonic() + LIMIT_S
        key = key_of(snapshot.manifest_hash)
        held = p._holdings[key]
        while not held.quiet and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert p.release(key)
        one = fetch(a, snapshot, tmp_path / "b", [p.endpoint], give_up_s=0.5)
        with pytest.raises(SnapshotError):
            one.result.result(LIMIT_S)
        assert one.failed == {p.endpoint}


def test_with_curve_keys_only_the_jobs_own_hosts_are_served(tmp_path: Path):
    make_keys(tmp_path / "keys")
    keys = read_keys(tmp_path / "keys")
    stranger = CurveKeys.generate((keys.public,))
    snapshot = written(tmp_path / "p")
    with publisher(snapshot, access=keys) as p, station(access=keys) as a, station(access=stranger) as b:
        assert fetch(a, snapshot, tmp_path / "a", [p.endpoint]).result.result(LIMIT_S).exists()
        one = fetch(b, snapshot, tmp_path / "b", [p.endpoint], give_up_s=1)
        with pytest.raises(SnapshotError, match="no source sent anything"):
            one.result.result(LIMIT_S)


def test_a_station_beyond_loopback_needs_keys_and_a_key_file_must_be_private(tmp_path):
    with pytest.raises(EndpointError, match="CURVE"), station(listen="tcp://0.0.0.0:0"):
        pass
    make_keys(tmp_path / "keys")
    (tmp_path / "keys").chmod(0o644)
    with pytest.raises(EndpointError, match="chmod 600"):
        read_keys(tmp_path / "keys")


def test_the_command_that_makes_keys_says_what_it_wrote(tmp_path):
    command = [sys.executable, "-m", "areal_async.weights.transport.keys", str(tmp_path / "keys")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout
    assert str(tmp_path / "keys") in said
    assert read_keys(tmp_path / "keys").public


def test_closing_leaves_no_thread(tmp_path):
    snapshot = written(tmp_path / "p")
    before = threading.active_count()
    with publisher(snapshot), station() as a:
        one = fetch(a, snapshot, tmp_path / "a", ["tcp://127.0.0.1:9"])
    with pytest.raises(SnapshotError, match="ends"):
        one.result.result(LIMIT_S)
    assert threading.active_count() == before
