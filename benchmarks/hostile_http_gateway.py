"""A gateway with two open sessions and a policy that always says the same, for `hostile_http.py`: its address
and the keys as one line of JSON, then it serves until its input ends."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from typing import Any

import numpy as np

from areal_async.config.rollout import GatewaySection
from areal_async.rpc.schema import VersionTag
from areal_async.runtime.log import setup_logging
from areal_async.trajectory import EpisodeBuilder, Sampling
from rollout_service.engines.base import EngineStats, GenerateRequest, GenerateResult
from rollout_service.gateway import Gateway
from rollout_service.workflows.context import Context
from rollout_service.workflows.turns import Renderer

SAID = "<tool_call>[[["


class Bytes:
    """A tokenizer whose tokens are bytes."""

    chat_template = "{% if tools %}<tool_call>{% endif %}"

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def apply_chat_template(self, conversation: list[dict[str, Any]], **_: Any) -> str:
        return "".join(f"{message['role']}: {message['content']}\n" for message in conversation)


class Same:
    version = VersionTag("policy", 0, 0)

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 1, 0.0, 0, 0, 0.0)

    async def generate(self, request: GenerateRequest, tell: object = None) -> GenerateResult:
        ids = np.frombuffer(SAID.encode(), np.uint8).astype(np.int32)[: request.sampling.max_new_tokens]
        zeros = np.zeros(len(ids), np.int32)
        text = SAID[: len(ids)]
        return GenerateResult(ids, zeros.astype(np.float32), zeros, zeros, "length", text)


async def main() -> None:
    gateway = Gateway(GatewaySection(), Bytes(), job="hostile", max_model_len=1 << 20)
    render = Renderer(Bytes())
    async with AsyncExitStack() as stack:
        keys = []
        for sample in range(2):
            ctx = Context(
                Same(),  # type: ignore[arg-type]
                render,
                EpisodeBuilder("hostile", "t", "t#0", sample),
                episode_id=f"t#0.{sample}",
                sampling=Sampling(max_new_tokens=64),
                seed=0,
                sample=sample,
                gateway=gateway,
            )
            keys.append((await stack.enter_async_context(ctx.gateway())).api_key)
        print(json.dumps({"url": gateway.address, "keys": keys}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    await gateway.close()


if __name__ == "__main__":
    setup_logging("hostile", "gateway")
    asyncio.run(main())
