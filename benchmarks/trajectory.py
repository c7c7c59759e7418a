"""Cost of the trajectory codec: bytes per token, and microseconds to build, pack and unpack.

    python benchmarks/trajectory.py [--json FILE] [--seconds 0.3]

Three episodes: `tiny` (one short answer, the quickstart's), `turns` (8k tokens in 16 turns with tools) and
`flat` (8k tokens in one answer). Beside each figure stand its target, where there is one, and its ratio to
two baselines of the same run: copying the blob once, and one bare `np.frombuffer` over it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from areal_async.trajectory import (
    Call,
    Episode,
    EpisodeBuilder,
    Sampling,
    SegmentKind,
    pack,
    training_rows,
    unpack,
)

SAMPLING = Sampling(temperature=1.0, max_new_tokens=4096, stop=("\n",), seed=2**40 + 7)
BATCH = 20
TARGETS = {
    "tiny": {"build+pack": 60.0, "unpack": 30.0},
    "turns": {"unpack": 100.0, "bytes_per_token": 15.0},
    "flat": {"unpack": 100.0, "bytes_per_token": 15.0},
}


def build_tiny() -> Episode:
    """6 prompt tokens and 3 sampled, as lists: what the built-in workflow hands over."""
    builder = EpisodeBuilder("quickstart", "9f86d081:1234:2", "9f86d081:1234:2#0", 17)
    prompt = builder.prompt([5, 6, 7, 8, 9, 10])
    builder.sampled(
        [11, 12, 13],
        [-0.1, -0.2, -0.3],
        [41, 41, 42],
        parent=prompt,
        call=Call(sampling=SAMPLING),
        epoch=1,
    )
    builder.text(prompt="12+34=", response="46\n")
    return builder.build()


def build_long(turns: int, sampled: int, observed: int) -> Callable[[], Episode]:
    """`turns` times `observed` tokens read and `sampled` written, as arrays."""
    rng = np.random.default_rng(0)
    read = rng.integers(0, 150_000, observed).astype(np.int32)
    ids = rng.integers(0, 150_000, sampled).astype(np.int32)
    logprobs = -rng.random(sampled).astype(np.float32)
    versions = np.repeat(np.array([41, 42], np.int32), (sampled - sampled // 2, sampled // 2))
    epochs = np.zeros(sampled, np.int32)

    def build() -> Episode:
        builder = EpisodeBuilder("agentic", "9f86d081:1234:2", "9f86d081:1234:2#0", 17)
        segment = None
        for turn in range(turns):
            kind = SegmentKind.TOOL if turn else SegmentKind.PROMPT
            segment = builder.observed(kind, read, segment, turn=turn)
            segment = builder.sampled(
                ids,
                logprobs,
                versions,
                parent=segment,
                call=Call(sampling=SAMPLING),
                epoch=epochs,
                turn=turn,
            )
        return builder.build()

    return build


def microseconds(call: Callable[[], object], seconds: float) -> dict[str, float]:
    """Best and median over batches of calls: the best is the cost, the median what load made of it."""
    call()
    batches: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(batches) < 5:
        start = time.perf_counter()
        for _ in range(BATCH):
            call()
        batches.append((time.perf_counter() - start) / BATCH * 1e6)
    return {"best_us": min(batches), "median_us": float(np.median(batches))}


def measure(name: str, build: Callable[[], Episode], seconds: float) -> dict[str, Any]:
    episode = build()
    blob = pack(episode)
    calls: dict[str, Callable[[], object]] = {
        "memcpy": lambda: bytearray(blob),
        "frombuffer": lambda: np.frombuffer(blob, "<i4"),
        "build": build,
        "pack": lambda: pack(episode),
        "build+pack": lambda: pack(build()),
        "unpack": lambda: unpack(blob),
        "rows": lambda: training_rows(episode),
    }
    times = {label: microseconds(call, seconds) for label, call in calls.items()}
    for timing in times.values():
        for baseline in ("memcpy", "frombuffer"):
            timing[f"x_{baseline}"] = timing["best_us"] / times[baseline]["best_us"]
    return {
        "episode": name,
        "units": episode.n_units,
        "segments": len(episode.segments),
        "size_bytes": len(blob),
        "bytes_per_token": len(blob) / episode.n_units,
        "times": times,
        "targets": TARGETS[name],
    }


def table(results: list[dict[str, Any]]) -> str:
    lines = []
    for result in results:
        targets = result["targets"]
        share = f", target {targets['bytes_per_token']:.0f}" if "bytes_per_token" in targets else ""
        lines.append(
            f"{result['episode']}: {result['units']} tokens in {result['segments']} segments, "
            f"{result['size_bytes']} bytes, {result['bytes_per_token']:.2f} bytes/token{share}"
        )
        columns = ("best µs", "median µs", "x memcpy", "x frombuffer", "target µs")
        lines.append("  {:<12}{:>10}{:>11}{:>10}{:>14}{:>11}".format("", *columns))
        for label, timing in result["times"].items():
            target = f"{targets[label]:.0f}" if label in targets else ""
            lines.append(
                f"  {label:<12}{timing['best_us']:>10.2f}{timing['median_us']:>11.2f}"
                f"{timing['x_memcpy']:>10.1f}{timing['x_frombuffer']:>14.1f}{target:>11}"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the figures here ('-' for standard output)")
    parser.add_argument("--seconds", type=float, default=0.3, help="time spent on each figure")
    arguments = parser.parse_args()
    builds = {"tiny": build_tiny, "turns": build_long(16, 312, 200), "flat": build_long(1, 8064, 128)}
    results = [measure(name, build, arguments.seconds) for name, build in builds.items()]
    print(table(results))
    if arguments.json:
        record = {
            "benchmark": "trajectory",
            "python": platform.python_version(),
            "numpy": np.__version__,
            "cpus": os.cpu_count(),
            "results": results,
        }
        text = json.dumps(record, indent=1)
        if str(arguments.json) == "-":
            print(text)
        else:
            arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
