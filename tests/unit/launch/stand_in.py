"""A service for the supervisor's tests: does what the test says in AREAL_TEST_BEHAVIOUR, a JSON object
from process name to a behaviour; the rest serve until they are stopped."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing

from areal_async.base.errors import ArealError
from areal_async.service.context import ServiceContext
from areal_async.service.main import run_service
from areal_async.service.record import open_records

HELPER = "import time; time.sleep(600)"


async def main(ctx: ServiceContext) -> None:
    behaviour = json.loads(os.environ.get("AREAL_TEST_BEHAVIOUR", "{}")).get(ctx.name, "serve")
    (ctx.shm_dir / f"{ctx.name}.shm").write_bytes(b"x" * 100)
    (ctx.run_dir / f"{ctx.name}.pid").write_text(str(os.getpid()))
    match behaviour:
        case "dies at start":
            raise ArealError("the model directory /nowhere has no config.json. Give another.")
        case "crashes at start":
            raise RuntimeError("an index was out of range")
        case "never ready":
            await ctx.stop.wait()
            return
        case "trains":
            ctx.ready()
            await all_serve(ctx)
            train(ctx)
            return
        case "counts the steps":
            ctx.ready()
            found = [json.loads(line)["kind"] for line in (ctx.run_dir / "metrics.jsonl").open()]
            (ctx.run_dir / "seen").write_text(str(found.count("step")))
            return
        case "trains until told":
            ctx.ready()
            with closing(open_records(ctx)) as records:
                for step in itertools.count():
                    if (ctx.run_dir / "enough").exists():
                        return
                    times = {"step_s": 0.05, "wait_s": 0.0, "busy_s": 0.05}
                    records.write("sft", step=step, version=step + 1, loss=0.1, tokens=100, **times)
                    await asyncio.sleep(0.05)
        case "killed":
            ctx.ready()
            await all_serve(ctx)
            os.kill(os.getpid(), signal.SIGKILL)
        case "killed once":
            if not ctx.served_before:
                ctx.ready()
                await all_serve(ctx)  # so that the supervisor knows that this one served
                os.kill(os.getpid(), signal.SIGKILL)
            (ctx.run_dir / "again").touch()
            ctx.ready()
            if ctx.role == "trainer":
                return
        case "stops once":
            ctx.ready()
            if not ctx.served_before:
                os.kill(os.getpid(), signal.SIGSTOP)
            (ctx.run_dir / "again").touch()
            if ctx.role in ("trainer", "evaluator"):
                return
        case "waits for the next" | "serves until told":
            ctx.ready()
            awaited = ctx.run_dir / ("again" if behaviour == "waits for the next" else "enough")
            while not awaited.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            return
        case "ends by itself" | "finishes":
            ctx.ready()
            await all_serve(ctx)
            return
        case "ignores SIGTERM":
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            ctx.ready()
            threading.Event().wait()
        case "ignores stop":
            ctx.ready()
            await asyncio.Event().wait()
        case "blocks in native code":
            ctx.ready()
            while not ctx.stopping.is_set():
                time.sleep(0.01)  # noqa: ASYNC251 - the loop is blocked on purpose
            return
        case "drains":
            ctx.ready()
            await wait_for_fewer_workers(ctx)
            return
        case "leaves helpers":
            start_helpers()
    ctx.ready()
    await ctx.stop.wait()
    with (ctx.run_dir / "order").open("a") as file:
        file.write(f"{ctx.name}\n")


def train(ctx: ServiceContext) -> None:
    """Write the records of a run of `trainer.steps` steps, and a model."""
    steps = ctx.job.trainer.steps
    with closing(open_records(ctx)) as records:
        records.write("evaluation", version=0, accuracy=0.25, n=100, wall_s=0.1)
        for step in range(steps):
            figures = {"reward_mean": 0.5, "loss": 0.1, "tokens": 100, "episodes": 8, "staleness_max": 1}
            times = {"step_s": 0.01, "wait_s": 0.0, "busy_s": 0.008, "share_stale": 0.5}
            records.write("step", step=step, version=step + 1, **figures, **times)
        records.write("evaluation", version=steps, accuracy=0.75, n=100, wall_s=0.1)
    (ctx.run_dir / "model").mkdir()


def start_helpers() -> None:
    subprocess.Popen([sys.executable, "-c", HELPER])
    subprocess.Popen([sys.executable, "-c", HELPER], start_new_session=True)


async def all_serve(ctx: ServiceContext) -> None:
    """Until the supervisor has named the endpoints, which it does once all serve."""
    while not (ctx.run_dir.parent / "prometheus" / f"{ctx.job.job}.json").exists():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def wait_for_fewer_workers(ctx: ServiceContext) -> None:
    """Until one of the workers is to leave: no buffer is there to say which."""
    most = 0
    while True:
        context = json.loads((ctx.run_dir / "topology.json").read_text())
        workers = context["job"]["rollout"]["workers"]
        most = max(most, workers)
        if workers < most:
            return
        await asyncio.sleep(0.02)


if __name__ == "__main__":
    name = sys.argv[sys.argv.index("--name") + 1]
    run_service(name.partition("-")[0], main)  # type: ignore[arg-type]
