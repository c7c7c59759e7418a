"""What the weights codecs cost: copy, hash and verify a snapshot; encode and apply deltas of it.

    python benchmarks/weights.py [--sizes 64,256,1024] [--shares 0.001,0.01,0.05,0.1] [--json FILE]

Bytes per second are of the weights, whatever the wire carries. Shared memory is warm in all but the `first`
figure: a publisher fills the allocation of a retired snapshot. Rates are those of the best round. Ratios to
`memcpy` (numpy's, one thread, both sides warm) are taken round by round beside it, and their median counts.
A changed element of bf16 moves by one unit in the last place, up or down; one of fp32 by up to 3000 (about
2^-12 of its value), which is what an optimizer's step does to it. Each delta is applied and the result
compared bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from areal_async.base.versions import VersionTag
from areal_async.rpc.secret import RunSecret
from areal_async.weights.delta import apply_delta, write_delta
from areal_async.weights.manifest import HASH_PREFIX
from areal_async.weights.snapshot import SnapshotInfo, open_snapshot
from areal_async.weights.tensor_file import MAX_THREADS, MappedFile
from tests.snapshots import write_snapshot
from trainer_service.publishing.publisher import Publisher

MB = 1 << 20
TENSOR_BYTES = 16 * MB
ROUNDS = 5
FLOAT32_STEP = 3000
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


def model(size_bytes: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors of 16 MB, normal values."""
    generator = torch.Generator().manual_seed(0)
    n = TENSOR_BYTES // dtype.itemsize
    values = torch.randn(n, generator=generator).to(dtype)
    return {f"layer.{i}.weight": values.roll(i).clone() for i in range(size_bytes // TENSOR_BYTES)}


def change(tensors: dict[str, torch.Tensor], share: float, seed: int) -> int:
    """Move a share of the elements, in place; returns how many."""
    generator = torch.Generator().manual_seed(seed)
    changed = 0
    for tensor in tensors.values():
        at = torch.rand(len(tensor), generator=generator) < share
        n = int(at.sum())
        if tensor.dtype == torch.bfloat16:
            steps = torch.randint(0, 2, (n,), generator=generator) * 2 - 1
        else:
            steps = torch.randint(1, FLOAT32_STEP, (n,), generator=generator)
        bits = tensor.view(BITS[tensor.dtype])
        bits[at] += steps.to(bits.dtype)
        changed += n
    return changed


class Rounds:
    """The best rate of each named action, and the median of its ratio to the memcpy of the same round."""

    def __init__(self, size_bytes: int) -> None:
        self._size = size_bytes
        self._a, self._b = (np.full(size_bytes, fill, np.uint8) for fill in (1, 2))
        self._memcpy_s = 0.0
        self.rates: dict[str, float] = {}
        self.ratios: dict[str, list[float]] = {}

    def begin(self) -> None:
        self._memcpy_s = _seconds(lambda: np.copyto(self._b, self._a))
        self._keep("memcpy", self._memcpy_s)

    def take(self, name: str, action: Callable[[], Any]) -> Any:
        kept: list[Any] = []
        seconds = _seconds(lambda: kept.append(action()))
        self._keep(name, seconds)
        return kept[0]

    def _keep(self, name: str, seconds: float) -> None:
        self.rates[name] = max(self.rates.get(name, 0.0), self._size / seconds)
        self.ratios.setdefault(name, []).append(self._memcpy_s / seconds)

    def figures(self) -> dict[str, Any]:
        return {
            "GB_per_s": {name: round(rate / 1e9, 3) for name, rate in self.rates.items()},
            "of_memcpy": {name: round(statistics.median(taken), 3) for name, taken in self.ratios.items()},
        }


def measure_copies(root: Path, size_bytes: int) -> dict[str, Any]:
    """Publishing and verifying whole snapshots."""
    tensors = model(size_bytes, torch.bfloat16)
    source = np.concatenate([t.view(torch.uint8).numpy() for t in tensors.values()])
    rounds = Rounds(size_bytes)
    shared = MappedFile(root / "copy", size_bytes)
    secret = RunSecret(bytes(32))
    publisher = Publisher(root / "shm", f"ipc://{root}/socket", job="weights", access=secret)
    publisher.start()
    with closing(publisher):
        for number in range(ROUNDS):
            rounds.begin()
            first = "" if number else ", first"
            rounds.take(f"shm copy{first}", lambda: shared.write(0, source.data))
            rounds.take("hash, 1 thread", lambda: blake3(source.data).digest())
            rounds.take(
                "hash, its own threads", lambda: blake3(source.data, max_threads=blake3.AUTO).digest()
            )
            tag = VersionTag("policy", 1, number)
            name = f"publish (copy, then hash){first}"
            written: SnapshotInfo = rounds.take(name, partial(publisher.publish, tag, tensors))
            rounds.take("verify (hash in place)", partial(open_snapshot, written.path, tensors=False))
            rounds.take("open (copy to private memory + hash)", partial(open_snapshot, written.path))
    shared.close()
    return {"size_MB": size_bytes // MB, **rounds.figures()}


def measure_delta(root: Path, size_bytes: int, dtype: str, share: float, threads: int) -> dict[str, Any]:
    """Encoding and applying the delta of one publication."""
    tensors = model(size_bytes, DTYPES[dtype])
    base = write_snapshot(root, VersionTag("policy", 1, 0), tensors)
    changed = change(tensors, share, seed=1)
    new = write_snapshot(root, VersionTag("policy", 1, 1), tensors)
    want = (new.path / "model.safetensors").read_bytes()
    (root / "node").mkdir()
    delta: SnapshotInfo | None = None
    encode_s = apply_s = float("inf")
    exact = True
    for _ in range(ROUNDS):
        shutil.rmtree(root / "policy-e1-v1.delta", ignore_errors=True)
        began_s = time.perf_counter()
        delta = write_delta(base.path, new.path, threads=threads)
        encode_s = min(encode_s, time.perf_counter() - began_s)
        assert delta is not None
        began_s = time.perf_counter()
        made = apply_delta(base.path, delta.path, root / "node" / "policy-e1-v1")
        apply_s = min(apply_s, time.perf_counter() - began_s)
        exact &= (made.path / "model.safetensors").read_bytes() == want
        shutil.rmtree(made.path)
    assert delta is not None
    return {
        "size_MB": size_bytes // MB,
        "dtype": dtype,
        "changed_share": round(changed / sum(t.numel() for t in tensors.values()), 5),
        "wire_bytes": delta.size_bytes,
        "wire_share": round(delta.size_bytes / new.size_bytes, 5),
        "encode_GB_per_s": round(size_bytes / encode_s / 1e9, 3),
        "apply_and_verify_GB_per_s": round(size_bytes / apply_s / 1e9, 3),
        "bit_exact": exact,
    }


def _seconds(action: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s


@contextmanager
def shared_memory() -> Iterator[Path]:
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="areal-weights-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", default="64,256,1024", help="MB of weights")
    parser.add_argument("--delta-sizes", default="256", help="MB of weights")
    parser.add_argument("--shares", default="0.001,0.01,0.05,0.1")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cores = len(os.sched_getaffinity(0))
    threads = max(1, min(4, cores // 2))
    results: dict[str, Any] = {
        "cores": cores,
        "hash": HASH_PREFIX.rstrip(":"),
        "hash_threads": min(MAX_THREADS, cores),
        "encode_threads": threads,
        "copies": [],
        "deltas": [],
    }
    print(f"{cores} cores; hash {results['hash']}; figures are GB/s (share of memcpy in the same round)")
    for size in map(int, options.sizes.split(",")):
        with shared_memory() as root:
            row = measure_copies(root, size * MB)
        results["copies"].append(row)
        print(f"\n{size} MB")
        for name, rate in row["GB_per_s"].items():
            print(f"  {name:40s} {rate:7.2f} {row['of_memcpy'][name]:6.2f}")
    print(f"\n{'MB':>5} {'dtype':>5} {'changed':>8} {'wire':>8} {'encode':>7} {'apply':>6}  bit-exact")
    for size in map(int, options.delta_sizes.split(",")):
        for dtype in DTYPES:
            for share in map(float, options.shares.split(",")):
                with shared_memory() as root:
                    row = measure_delta(root, size * MB, dtype, share, threads)
                results["deltas"].append(row)
                rates = f"{row['encode_GB_per_s']:7.2f} {row['apply_and_verify_GB_per_s']:6.2f}"
                shares = f"{row['changed_share']:8.2%} {row['wire_share']:8.3%}"
                print(f"{size:5} {dtype:>5} {shares} {rates}  {row['bit_exact']}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
