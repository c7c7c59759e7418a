"""A gateway with two open sessions and a policy that always says the same, for `hostile_http.py`: its address
and the keys as one line of JSON, then it serves until its input ends."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from gateway import write_tokenizer
from transformers import AutoTokenizer

from areal_async.base.log import setup_logging
from areal_async.base.versions import VersionTag
from areal_async.config.rollout import GatewaySection
from areal_async.launch.one_host import make_host
from areal_async.rpc.secret import RunSecret
from areal_async.trajectory import EpisodeBuilder, Sampling
from rollout_service.engines.base import EngineStats, GenerateRequest, GenerateResult
from rollout_service.gateway import Gateway
from rollout_service.gateway.access import GatewaySetup, ServedModel
from rollout_service.workflows.context import Context, PolicyEngine
from rollout_service.workflows.turns import Renderer

SAID = "<tool_call>[[["


TEMPLATE = (
    "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)


class Same:
    version = VersionTag("policy", 0, 0)

    def __init__(self, ids: list[int]) -> None:
        self.ids = np.asarray(ids, np.int32)

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 1, 0.0, 0, 0, 0.0)

    async def generate(self, request: GenerateRequest, tell: object = None) -> GenerateResult:
        ids = self.ids[: request.sampling.max_new_tokens]
        zeros = np.zeros(len(ids), np.int32)
        return GenerateResult(ids, zeros.astype(np.float32), zeros, zeros, "length", SAID)


async def main(folder: Path) -> None:
    write_tokenizer(folder, TEMPLATE)
    host = make_host("local", run_dir=folder, socket_dir=folder, shm_dir=folder)
    models = {"policy": ServedModel(str(folder), 1 << 20)}
    section = GatewaySection().model_dump(mode="json")
    gateway = Gateway(GatewaySetup("hostile", "w", host, RunSecret.generate().of("rollout"), section, models))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    render, engine = Renderer(tokenizer), Same(tokenizer(SAID)["input_ids"])
    async with AsyncExitStack() as stack:
        keys = []
        for sample in range(2):
            voice = PolicyEngine(engine, render, Sampling(max_new_tokens=64))  # type: ignore[arg-type]
            builder = EpisodeBuilder("hostile", "t", "t#0", sample)
            ctx = Context(
                {"policy": voice}, builder, episode_id=f"t#0.{sample}", seed=0, sample=sample, agents=gateway
            )
            keys.append((await stack.enter_async_context(ctx.gateway())).api_key)
        print(json.dumps({"url": gateway.address, "keys": keys}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    await gateway.close()


if __name__ == "__main__":
    setup_logging("hostile", "gateway")
    with TemporaryDirectory() as scratch:
        asyncio.run(main(Path(scratch)))
