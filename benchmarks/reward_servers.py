"""The cost of a reward in another process: calls per second and time of a request, by server.

    python benchmarks/reward_servers.py [--calls N]

The reward is the cheapest there is (the share of one character), so what is measured is the way there: by
HTTP and JSON to plain Node.js and to `areal-async reward serve`, beside the pool of this process. Prints one
JSON object for each, with the milliseconds of a request (median and 99 %).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from areal_async.base.verdicts import Score, Verdict
from areal_async.config.reward import RewardSection
from areal_async.config.reward_routing import RewardSpec
from reward_service.backends import ScoringBackend
from reward_service.backends.remote.client import RemoteBackend
from reward_service.pool.pool import WorkerPool
from reward_service.sdk import RewardInput

SERVERS = Path(__file__).parents[1] / "examples" / "reward_servers"
REWARD = """
from reward_service.sdk import reward

@reward
def share_of_ones(given):
    return given.response.count("1") / max(1, len(given.response))
"""
RESPONSE = "0123456789" * 40
"""400 characters, about those of a short answer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=5000)
    calls = parser.parse_args().calls
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "own.py"
        own.write_text(REWARD)
        reward = f"{own}:share_of_ones"
        report("pool", asyncio.run(in_the_pool(reward, calls)), calls)
        serve = [sys.executable, "-m", "areal_async.cli.main", "reward", "serve", reward]
        servers = {
            "serve": [*serve, "--listen", "127.0.0.1:0"],
        }
        if node := shutil.which("node"):
            servers["node"] = [node, str(SERVERS / "server.js")]
        for name, command in servers.items():
            with running(command) as url:
                report(name, asyncio.run(at_a_server(url, calls)), calls)


@contextmanager
def running(command: list[str]) -> Iterator[str]:
    """The address of a server, which is ended after."""
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if line.startswith("serves "):
                yield line.split()[1]
                return
        raise RuntimeError(f"{command} does not serve")
    finally:
        server.terminate()
        server.wait()


async def at_a_server(url: str, calls: int) -> tuple[float, list[float]]:
    args = {"urls": [url], "max_in_flight": 8}
    spec = RewardSpec("remote", args, "episode", 10.0)
    async with RemoteBackend(spec, RewardSection(name="remote")) as backend:
        return await measure(backend, calls)


async def in_the_pool(reward: str, calls: int) -> tuple[float, list[float]]:
    async with WorkerPool([RewardSpec(reward)], workers=1) as pool:
        return await measure(pool, calls)


async def measure(backend: ScoringBackend, calls: int) -> tuple[float, list[float]]:
    """(seconds for all, milliseconds of each)."""
    given = RewardInput(prompt="p", response=RESPONSE, ground_truth="1")
    await score(backend, [given] * 200)
    began_s = time.monotonic()
    took_ms = await score(backend, [given] * calls)
    return time.monotonic() - began_s, took_ms


async def score(backend: ScoringBackend, inputs: list[RewardInput]) -> list[float]:
    took_ms: list[float] = []
    done = asyncio.Event()

    def take(index: int, verdicts: list[Verdict], elapsed_ms: float) -> None:
        assert isinstance(verdicts[0], Score), verdicts
        took_ms.append(elapsed_ms)
        if len(took_ms) == len(inputs):
            done.set()

    await backend.submit(list(inputs), take)
    await done.wait()
    return took_ms


def report(name: str, measured: tuple[float, list[float]], calls: int) -> None:
    seconds, took_ms = measured
    took_ms.sort()
    found = {
        "server": name,
        "calls_per_s": round(calls / seconds),
        "request_ms_median": round(took_ms[len(took_ms) // 2], 2),
        "request_ms_p99": round(took_ms[int(len(took_ms) * 0.99)], 2),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
