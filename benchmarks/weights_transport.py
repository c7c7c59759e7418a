"""Weights over tcp: our chunks beside raw ZMQ messages of the same size, and what relays cost the trainer.

    python benchmarks/weights_transport.py [--mib 64,256,1024] [--receivers 1,2,4,8] [--repeat 3]

One process sends, each receiver is a process of its own, all on loopback. `raw` are ZMQ messages of our chunk
size between the same two kinds of socket, with the same number under way, which the receiver
  drop    lets go of as they come,
  store   writes to a file in shared memory, as we do,
  verify  writes after hashing them with BLAKE3, as we do.
`ours` is a fetch: chunk table known, from the first wish until the directory has its name. `table` is the
sender's hashing, once per snapshot whatever the number of receivers. Several receivers form the chain that
the publisher would plan; `sender_bytes_over_snapshot` are those that left the first process."""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import zmq
from blake3 import blake3

from areal_async.base.versions import VersionTag
from areal_async.rpc.client import Client
from areal_async.rpc.secret import CurveKeys
from areal_async.weights.channels.chunks import ChunkStore, ChunkTable, PartialDownload, build_table, map_file
from areal_async.weights.channels.fetching import Download
from areal_async.weights.channels.serving import ChunkServer
from areal_async.weights.snapshot import SnapshotInfo
from tests.snapshots import write_snapshot

WINDOW_BYTES = 16 << 20
MAX_UNDER_WAY = 64
CONTEXT = mp.get_context("forkserver")


def raw_sender(pipe: Connection, path: Path, chunk: int, keys: CurveKeys) -> None:
    size = path.stat().st_size
    mapped = map_file(path, size)
    assert mapped is not None
    data = memoryview(mapped)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as sock:
        sock.curve_server, sock.curve_secretkey, sock.curve_publickey = True, keys.secret, keys.public
        sock.setsockopt(zmq.SNDHWM, 2 * MAX_UNDER_WAY)
        pipe.send(f"tcp://127.0.0.1:{sock.bind_to_random_port('tcp://127.0.0.1')}")
        while True:
            who, index = sock.recv_multipart()
            if not index:
                return
            at = int(index) * chunk
            sock.send(who, zmq.SNDMORE)
            sock.send(data[at : at + chunk], copy=False)


def raw_receive(endpoint: str, size: int, chunk: int, how: str, into: Path, keys: CurveKeys) -> float:
    """Seconds for all messages."""
    n = -(-size // chunk)
    under_way = min(n, MAX_UNDER_WAY, max(4, WINDOW_BYTES // chunk))
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.curve_serverkey, sock.curve_secretkey, sock.curve_publickey = (
            keys.public,
            keys.secret,
            keys.public,
        )
        sock.setsockopt(zmq.RCVHWM, 2 * MAX_UNDER_WAY)
        sock.connect(endpoint)
        fd = os.open(into, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.ftruncate(fd, size)
        began_s = time.perf_counter()
        for index in range(under_way):
            sock.send(b"%d" % index)
        for index in range(n):
            frame = sock.recv(copy=False)
            if index + under_way < n:
                sock.send(b"%d" % (index + under_way))
            if how == "verify":
                blake3(frame.buffer).digest()
            if how != "drop":
                os.pwrite(fd, frame.buffer, index * chunk)
        took_s = time.perf_counter() - began_s
        sock.send(b"")
        os.close(fd)
    into.unlink()
    return took_s


def our_sender(pipe: Connection, path: Path, table: ChunkTable, keys: CurveKeys) -> None:
    async def main() -> None:
        server = ChunkServer("tcp://127.0.0.1:0", job="j", source="publisher", access=keys)
        await server.start()
        server.add(ChunkStore(path, table))
        pipe.send(server.endpoint)
        await asyncio.to_thread(pipe.recv)
        pipe.send(server.bytes_sent)
        await server.close()

    asyncio.run(main())


def our_receiver(pipe: Connection, root: Path, name: str, table: ChunkTable, keys: CurveKeys) -> None:
    """Told its sources, it fetches; told again, it ends."""

    async def main() -> None:
        server = ChunkServer("tcp://127.0.0.1:0", job="j", source="peer", access=keys)
        await server.start()
        pipe.send(server.endpoint)
        sources = await asyncio.to_thread(pipe.recv)
        store = PartialDownload(root / name, table)
        store.resume()
        server.add(store)
        client = partial(Client, job="j", role="peer", name=root.name, access=keys)
        began_s = time.perf_counter()
        path = await Download(store, sources, origin=sources[-1], client=client, patience_s=60.0).run()
        pipe.send((began_s, time.perf_counter(), server.bytes_sent, str(path)))
        await asyncio.to_thread(pipe.recv)
        await server.close()

    asyncio.run(main())


def measure_raw(folder: Path, source: Path, chunk: int, how: str, keys: CurveKeys) -> float:
    """Seconds."""
    ours, theirs = mp.Pipe()
    sender = CONTEXT.Process(target=raw_sender, args=(theirs, source, chunk, keys))
    sender.start()
    took_s = raw_receive(ours.recv(), source.stat().st_size, chunk, how, folder / "raw", keys)
    sender.join(20)
    return took_s


def measure_ours(
    folder: Path, snapshot: SnapshotInfo, table: ChunkTable, n: int, keys: CurveKeys
) -> tuple[float, float]:
    """Seconds until the last of `n` receivers is complete, and the sender's bytes over the snapshot's."""
    pipes, processes = [], []
    for i in range(-1, n):
        ours, theirs = mp.Pipe()
        if i < 0:
            process = CONTEXT.Process(target=our_sender, args=(theirs, snapshot.path, table, keys))
        else:
            root = folder / f"receiver-{i}"
            root.mkdir()
            arguments = (theirs, root, snapshot.path.name, table, keys)
            process = CONTEXT.Process(target=our_receiver, args=arguments)
        process.start()
        pipes.append(ours)
        processes.append(process)
    endpoints = [pipe.recv() for pipe in pipes]
    for i, pipe in enumerate(pipes[1:]):
        pipe.send(endpoints[i::-1])
    results = [pipe.recv() for pipe in pipes[1:]]
    for _, _, _, path in results:
        files = sorted(entry.name for entry in Path(path).iterdir())
        assert files == sorted(name for name, _ in table.files)
    for pipe in pipes:
        pipe.send(None)
    sent = pipes[0].recv()
    for process in processes:
        process.join(20)
    for i in range(n):
        shutil.rmtree(folder / f"receiver-{i}")
    took_s = max(end for _, end, _, _ in results) - min(begin for begin, _, _, _ in results)
    return took_s, sent / snapshot.size_bytes


def measure(mib: int, receivers: Sequence[int], repeat: int) -> dict[str, Any]:
    keys = CurveKeys.shared(secrets.token_bytes(32))
    shm = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="areal-bench-", dir=shm if shm.is_dir() else None))
    try:
        tensors = {f"w{i}": torch.randn(mib << 15, dtype=torch.float32) for i in range(8)}
        snapshot = write_snapshot(folder, VersionTag("policy", 0, 0), tensors)
        del tensors
        began_s = time.perf_counter()
        table = build_table(snapshot.path, snapshot.manifest_hash)
        table_s = time.perf_counter() - began_s
        size, chunk = table.size_bytes, table.chunk_bytes
        source = snapshot.path / "model.safetensors"
        rates: dict[str, list[float]] = {how: [] for how in ("drop", "store", "verify", "ours")}
        for _ in range(repeat):  # in turn, so that a change of the machine's speed meets all alike
            for how in ("drop", "store", "verify"):
                rates[how].append(size / 1e9 / measure_raw(folder, source, chunk, how, keys))
            rates["ours"].append(size / 1e9 / measure_ours(folder, snapshot, table, 1, keys)[0])
        median = {how: statistics.median(values) for how, values in rates.items()}
        row: dict[str, Any] = {
            "mib": mib,
            "chunk_kib": chunk >> 10,
            "table_gb_s": round(size / 1e9 / table_s, 2),
            "gb_s": {how: round(value, 3) for how, value in median.items()},
            "ours_over_raw": {
                how: round(
                    statistics.median(a / b for a, b in zip(rates["ours"], rates[how], strict=True)), 3
                )
                for how in ("drop", "store", "verify")
            },
            "relay": [],
        }
        for n in receivers:
            if (n + 2) * mib <= 5500:  # the snapshot and a copy for each receiver in shared memory
                took_s, sent = measure_ours(folder, snapshot, table, n, keys)
                row["relay"].append(
                    {"receivers": n, "sender_bytes_over_snapshot": round(sent, 4), "wall_s": round(took_s, 3)}
                )
        return row
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", default="64,256,1024")
    parser.add_argument("--receivers", default="1,2,4,8")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    CONTEXT.set_forkserver_preload(["areal_async.weights.channels.fetching", "areal_async.weights.snapshot"])
    receivers = [int(n) for n in options.receivers.split(",")]
    rows = []
    for mib in options.mib.split(","):
        rows.append(measure(int(mib), receivers, options.repeat))
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        command = "python benchmarks/weights_transport.py --json benchmarks/results/weights_transport.json"
        result = {"command": command, "cores": os.cpu_count(), "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
