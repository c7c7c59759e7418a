"""A buffer for tests of the reward service: it hands out what a test stores, and takes verdicts."""

import asyncio
import time

from areal_async.base.errors import RpcTimeout
from areal_async.base.records import Task
from areal_async.rpc.messages import ClaimedEpisode, Claims, FetchedMedia, Refusal, VerdictAck
from reward_service.router import Router, watch
from reward_service.server import RewardServer
from tests.callers import FakeCaller
from tests.scoring import episode_blob, processes_below
from tests.waiting import deadline_s

DEADLINE_S = deadline_s(120)


class FakeBuffer(FakeCaller):
    """Hands out episodes and takes verdicts; `away` makes it unreachable, `refuse` names what it refuses."""

    def __init__(self):
        self.waiting = []
        self.claims = []
        self.taken = {}
        self.messages = 0
        self.away = False
        self.turned_away = 0
        self.fault = None
        self.media = {}
        self.media_asked = []
        self.holds = []
        self.refuse = set()
        self.arrived = asyncio.Event()
        self.changed = asyncio.Event()

    def store(self, response, group="t", sample=None, scope="episode", source="", blob=None, **extra):
        n = len(self.claims) + len(self.waiting) if sample is None else sample
        task = Task("t", "p", data_source=source, ground_truth="57", extra_info=extra)
        item = ClaimedEpisode(f"{group}.{n}", f"C-{group}", task, 50_000, scope=scope)
        self.waiting.append((item, episode_blob(response, prompt="p") if blob is None else blob))
        self.arrived.set()
        return item.episode_id

    async def claim(self, scorer, max_episodes, *, wait_ms=0, holds=None):
        self.holds = list(holds)
        self.changed.set()
        self.answer()
        if not self.waiting:
            self.arrived.clear()
            try:
                await asyncio.wait_for(self.arrived.wait(), wait_ms / 1000)
            except TimeoutError:
                return Claims([]), []
        self.answer()
        items, n = [item for item, _ in self.waiting], min(max_episodes, len(self.waiting))
        while 0 < n < len(items) and items[n].scope == "group" and items[n].claim_id == items[n - 1].claim_id:
            n += 1  # a group is claimed whole
        out, self.waiting = self.waiting[:n], self.waiting[n:]
        self.claims += [item.episode_id for item, _ in out]
        self.changed.set()
        return Claims([item for item, _ in out]), [memoryview(blob) for _, blob in out]

    async def fetch_media(self, groups):
        self.answer()
        self.media_asked.append(groups)
        wanted = list(dict.fromkeys(digest for some in groups.values() for digest in some))
        found = [digest for digest in wanted if digest in self.media]
        lost = [digest for digest in wanted if digest not in self.media]
        return FetchedMedia(found, lost), [memoryview(self.media[digest]) for digest in found]

    async def put_verdicts(self, scorer, verdicts):
        self.answer()
        self.messages += 1
        refused = [Refusal(v.episode_id, "expired") for v in verdicts if v.episode_id in self.refuse]
        for verdict in verdicts:
            assert verdict.episode_id not in self.taken, "a second verdict"
            self.taken[verdict.episode_id] = verdict
        self.changed.set()
        return VerdictAck(refused)

    def answer(self):
        if self.away:
            self.turned_away += 1
            self.changed.set()
            raise RpcTimeout("nobody answers")
        if self.fault:
            raise self.fault

    async def has(self, *episode_ids):
        await self.until(lambda: set(episode_ids) <= set(self.taken))

    async def until(self, holds):
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                self.changed.clear()
                await self.changed.wait()


def serve(section, drive, **settings):
    """Run the service with a fake buffer while `drive(buffer)` goes on, then stop it; returns the buffer."""

    async def run():
        buffer, stop = FakeBuffer(), asyncio.Event()
        async with Router(section.model_copy(update=settings)) as router:
            watch(router)
            serving = asyncio.ensure_future(RewardServer(buffer, router, scorer="reward-0").run(stop))
            driving = asyncio.ensure_future(drive(buffer))
            await asyncio.wait({serving, driving}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                driving.result()
            driving.cancel()
            stop.set()
            began_s = time.monotonic()
            await serving
            buffer.stop_s = time.monotonic() - began_s
            return buffer

    before = processes_below()
    try:
        return asyncio.run(run())
    finally:
        assert processes_below() <= before, "the service left processes"
