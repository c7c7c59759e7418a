"""What weight updates cost a generator: throughput with an update every 1, 5 and 20 s, over that without.

    python benchmarks/interruption.py --engine local --out benchmarks/results/interruption_local.json

One engine in this process, or a server below it, is kept full: `--lanes` requests at a time, whose lengths
are lognormal (median `--median`, sigma `--sigma`, seeded, cut at `--longest`) and are forced, on a model that
has no end-of-sequence token. Two snapshots that were written beforehand take turns. The ways of updating:

    keep, recompute  the engine's own: requests in flight survive
    drain            what a system does that cannot interrupt: nothing new is begun, all that runs is waited
                     for, then the weights are exchanged

Every window with updates lies between two without; `ratio` is to the mean of those two. A machine that others
share changes its speed by more than an update costs. So with `--far-apart` seconds or more between updates
`within` compares inside each period: its throughput over that of the half of it that no update is near, with
the standard error over the updates. Time in which the machine as a whole stood still, to be seen by a process
that only sleeps, is taken out and stated.

Tokens are counted per request as it ends, what is in flight at a window's edges by its share of the time. The
stall of an update is what its exchange took, split into pause, load and resume; of a drain also the wait
before it. What an engine recomputes after its resume is in the throughput.

The bar: at 20 s, keep and recompute each give 0.97 of the throughput without updates, by `within`. Exit
status 1 below it, or when a request was lost or cut short.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Beside this file: python puts a script's own folder on its path.
from interruption_load import PROMPT_TOKENS, Load, draw_lengths, prepare
from interruption_pauses import Pauses
from interruption_window import Mode, Window, show

from areal_async.base.versions import VersionTag
from areal_async.config.job import JobConfig
from rollout_service.engines import make_engine
from rollout_service.engines.base import Engine, Weights
from rollout_service.replicas import exchange
from tests.contexts import context_for_test

BAR, BAR_EVERY_S = 0.97, 20.0


@dataclass(frozen=True)
class Turn:
    """A snapshot under the version of its turn: versions never go back."""

    tag: VersionTag
    tensors: Mapping[str, torch.Tensor]
    path: Path


async def updates(
    engine: Engine, load: Load, window: Window, snapshots: Sequence[Weights], first: int
) -> None:
    """Exchange the weights every `window.every_s`, for ever; late ones at once."""
    assert window.every_s is not None
    due_s = time.monotonic() + window.every_s / 2
    while True:
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        due_s = max(due_s + window.every_s, time.monotonic())
        source = snapshots[(first + window.updates) % len(snapshots)]
        turn = Turn(VersionTag("policy", 0, first + window.updates), source.tensors, source.path)
        if window.mode == "drain":
            began_s = time.monotonic()
            await load.drain()
            window.drain_waits_s.append(time.monotonic() - began_s)
        window.updated_s.append(time.monotonic())
        try:
            window.stalls.append(await exchange(engine, turn))
        finally:
            load.go_on()
        window.updates += 1


async def measure(
    mode: Mode,
    engine: Engine,
    snapshots: Sequence[Weights],
    lengths: Sequence[int],
    options: argparse.Namespace,
    pauses: Pauses,
) -> tuple[list[Window], list[str]]:
    """Windows with and without updates in turn, on an engine that is never idle between them."""
    await engine.start(snapshots[0])
    load = Load(engine, lengths, options.lanes)
    running = asyncio.ensure_future(load.run())
    plan: list[float | None] = [None]
    for every_s in options.every:
        plan += [every_s, None]
    windows: list[Window] = []
    spans: list[tuple[float, float]] = []
    version = 1
    try:
        await _unless_broken(running, options.warmup)
        for every in plan:
            window = Window(mode, every)
            begin_s = time.monotonic()
            updating = (
                None
                if every is None
                else asyncio.ensure_future(updates(engine, load, window, snapshots, version))
            )
            try:
                await _unless_broken(running, options.quiet if every is None else options.window, updating)
            finally:
                spans.append((begin_s, time.monotonic()))
                if updating is not None:
                    updating.cancel()
                    await asyncio.gather(updating, return_exceptions=True)
            load.go_on()
            version += window.updates + 1
            windows.append(window)
        await load.drain()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await engine.stop()

    def per_s(begin_s: float, end_s: float) -> float:
        return load.tokens_between(begin_s, end_s)[0] / (end_s - begin_s - pauses.between(begin_s, end_s))

    for window, (begin_s, end_s) in zip(windows, spans, strict=True):
        window.paused_s = pauses.between(begin_s, end_s)
        window.seconds = end_s - begin_s - window.paused_s
        window.tokens, window.requests = load.tokens_between(begin_s, end_s)
        if mode != "drain" and window.every_s is not None and window.every_s >= options.far_apart:
            window.compare_halves(per_s)
    for before, window, after in zip(windows, windows[1:], windows[2:], strict=False):
        if window.every_s is not None:
            window.ratio = window.per_s / statistics.mean([before.per_s, after.per_s])
    return windows, load.broken


async def _unless_broken(
    running: asyncio.Future[None], seconds: float, other: asyncio.Future[None] | None = None
) -> None:
    """Wait; raise what a request or an update raised meanwhile."""
    watched = [one for one in (running, other) if one is not None]
    done, _ = await asyncio.wait(watched, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for one in done:
        one.result()


def make(mode: Mode, model: Path, folder: Path, options: argparse.Namespace) -> Engine:
    rollout: dict[str, Any] = {
        "engine": options.engine,
        "max_concurrent": options.lanes,
        "max_model_len": PROMPT_TOKENS + options.longest,
        "update_mode": "keep" if mode == "keep" else "recompute",
        "torch_threads": options.threads,
        "device": options.device,
        "dtype": options.dtype,
    }
    if options.server:
        rollout["server"] = json.loads(options.server)
    content = {"job": "interruption", "model": model, "tasks": {"train": "none"}, "rollout": rollout}
    job = JobConfig.model_validate(content)
    place = context_for_test(job, folder / mode, "rollout", "rollout-0")
    return make_engine(job, slots=options.lanes, activity="rollout", place=place)


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engine", choices=["local", "sglang", "vllm"], default="local")
    parser.add_argument("--modes", nargs="+", choices=["keep", "recompute", "drain"])
    parser.add_argument("--every", type=float, nargs="+", default=[20.0, 5.0, 1.0])
    parser.add_argument("--window", type=float, default=60.0, help="seconds of one window")
    parser.add_argument("--quiet", type=float, help="seconds of one without updates; default: the same")
    parser.add_argument("--far-apart", type=float, default=10.0, help="from which time `within` is taken")
    parser.add_argument("--warmup", type=float, default=10.0)
    parser.add_argument("--lanes", type=int, default=64, help="requests at once")
    parser.add_argument("--median", type=float, default=64.0, help="tokens of an answer")
    parser.add_argument("--sigma", type=float, default=0.8)
    parser.add_argument("--longest", type=int, default=496)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; default: a random tiny one")
    parser.add_argument("--server", help="`rollout.server` of the job, as JSON")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.modes = options.modes or ["keep", "recompute", "drain"]
    options.quiet = options.quiet or options.window
    return options


def main() -> None:
    options = options_of()
    torch.set_num_threads(options.threads)
    lengths = draw_lengths(options)
    windows: list[Window] = []
    broken: list[str] = []
    with tempfile.TemporaryDirectory(prefix="interruption-") as name:
        folder = Path(name)
        model, snapshots = prepare(folder, options)
        for mode in options.modes:
            engine = make(mode, model, folder, options)
            with Pauses(folder / "pauses") as pauses:
                more, lost = asyncio.run(measure(mode, engine, snapshots, lengths, options, pauses))
            windows += more
            broken += lost
            show(more)
    below = [
        f"{window.mode}: {window.within[0]:.3f} ± {window.within[1]:.3f}"
        for window in windows
        if window.every_s == BAR_EVERY_S and window.within is not None and window.within[0] < BAR
    ]
    beside = [
        f"{window.mode}: {window.ratio:.3f}"
        for window in windows
        if window.every_s == BAR_EVERY_S and window.ratio is not None and window.ratio < BAR
    ]
    print(f"requests lost or cut short: {len(broken)}; below {BAR} at {BAR_EVERY_S:g} s: {below or 'none'}")
    print(f"by the neighbouring windows, which decide nothing, below {BAR}: {beside or 'none'}")
    if options.out:
        stated = {
            "command": "python benchmarks/interruption.py " + " ".join(sys.argv[1:]),
            "engine": options.engine,
            "cores": len(os.sched_getaffinity(0)),
            "lanes": options.lanes,
            "lengths": {
                "mean": round(statistics.mean(lengths), 1),
                "median": statistics.median(lengths),
                "p99": float(np.quantile(lengths, 0.99)),
                "most": max(lengths),
            },
            "requests_broken": broken,
            "windows": [window.figures() for window in windows],
        }
        options.out.write_text(json.dumps(stated, indent=2) + "\n")
    if broken or below:
        sys.exit(1)


if __name__ == "__main__":
    main()
