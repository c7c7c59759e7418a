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
from areal_async.runtime.log import setup_logging
from areal_async.trajectory import EpisodeBuilder, Sampling
from rollout_service.engines.base import GenerateRequest, GenerateResult
from rollout_service.gateway import Gateway

SAID = "<tool_call>[[["


class Bytes:
    """A tokenizer whose tokens are bytes."""

    chat_template = "{% if tools %}<tool_call>{% endif %}"

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> str:
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)


class Same:
    async def generate(self, request: GenerateRequest, tell: object = None) -> GenerateResult:
        ids = np.frombuffer(SAID.encode(), np.uint8).astype(np.int32)[: request.sampling.max_new_tokens]
        zeros = np.zeros(len(ids), np.int32)
        text = SAID[: len(ids)]
        return GenerateResult(ids, zeros.astype(np.float32), zeros, zeros, "length", text)


async def main() -> None:
    gateway = Gateway(GatewaySection(), Bytes(), job="hostile", max_model_len=1 << 20)
    how: Any = {"sampling": Sampling(max_new_tokens=64), "seed": 0, "attempt": 0, "requests": "r"}
    async with AsyncExitStack() as stack:
        keys = []
        for sample in range(2):
            episode = EpisodeBuilder("hostile", "t", "t#0", sample)
            access = gateway.session(Same(), episode, sample=sample, **how)  # type: ignore[arg-type]
            keys.append((await stack.enter_async_context(access)).api_key)
        print(json.dumps({"url": gateway.address, "keys": keys}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    await gateway.close()


if __name__ == "__main__":
    setup_logging("hostile", "gateway")
    asyncio.run(main())
