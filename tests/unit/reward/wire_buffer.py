"""A buffer that speaks the real wire, for tests of the processes that score."""

import asyncio
import contextlib
from pathlib import Path

from areal_async.rpc.messages import Arrived, Claim, ClaimedEpisode, Claims, PutVerdicts, VerdictAck
from areal_async.rpc.schema import Ok, Task
from areal_async.rpc.secret import RunSecret
from areal_async.rpc.server import Server
from areal_async.trajectory import EpisodeBuilder, Sampling, pack

DEADLINE_S = 40.0


def blob(response):
    builder = EpisodeBuilder("demo", "t", "t#0", 0)
    prompt = builder.prompt([1, 2, 3])
    sampling = Sampling(1.0, 1.0, 0, 8, (), 7)
    builder.sampled([5, 6], [-0.5, -0.5], [3, 4], parent=prompt, sampling=sampling, finish_reason="stop")
    builder.text(prompt="12 + 45 =", response=response)
    return pack(builder.build())


class WireBuffer:
    """A buffer that holds `total` episodes and takes verdicts."""

    def __init__(self, endpoint, total, job="demo"):
        self.endpoint = endpoint
        self.job = job
        self.left = [f"t#0.{n}" for n in range(total)]
        self.claimed = []
        self.taken = {}
        self.arrivals = 0
        self.verdicts = 0
        self.changed = asyncio.Event()
        self.blob = blob("57")

    async def handle(self, peer, message, attachments):
        match message:
            case Arrived():
                # What an earlier process of this name had claimed and not judged is to be claimed again.
                back = [name for name in self.claimed if name not in self.taken and name not in self.left]
                self.left += back
                self.arrivals += 1
                return Ok()
            case Claim():
                ids, self.left = self.left[: message.max_episodes], self.left[message.max_episodes :]
                self.claimed += ids
                self.changed.set()
                if not ids:
                    await asyncio.sleep(0.02)
                task = Task("t", "12 + 45 =", ground_truth="57")
                items = [ClaimedEpisode(name, "C1", task, 50_000) for name in ids]
                return Claims(items), [self.blob] * len(items)
            case PutVerdicts():
                self.verdicts += len(message.verdicts)
                for verdict in message.verdicts:
                    # A request may come again when its reply was lost; never with another verdict.
                    before = self.taken.setdefault(verdict.episode_id, verdict.verdict)
                    assert before == verdict.verdict
                self.changed.set()
                return VerdictAck()

    @contextlib.asynccontextmanager
    async def serving(self):
        secret = RunSecret.read(Path(self.endpoint.removeprefix("ipc://")).parent)
        server = Server(self.endpoint, service="buffer", job=self.job, handler=self.handle, access=secret)
        await server.start()
        try:
            yield
        finally:
            await server.stop()

    async def until(self, holds):
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                self.changed.clear()
                await self.changed.wait()
