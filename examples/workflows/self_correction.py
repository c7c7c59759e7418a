"""Self-correction: the policy answers again after a verifier has said that it is wrong.

    workflow: examples/workflows/self_correction.py:self_correction
    workflow_args: {verifier: arithmetic, attempts: 3, discount: 0.5}

The last answer is the episode's response; its score, times `discount` for every retry, is the episode's own
reward (`reward.name: environment`). A verifier that raises or abstains fails the episode.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from areal_async import Abstain, Context, RewardInput, Score, Task, load_reward


async def self_correction(
    ctx: Context,
    task: Task,
    *,
    verifier: str,
    verifier_args: Mapping[str, Any] | None = None,
    attempts: int = 2,
    retry: str = "\nThat is wrong. Try again.\n",
    right_from: float = 1.0,
    discount: float = 1.0,
    timeout_s: float = 10.0,
) -> None:
    """`verifier` is a built-in reward that is a function, or `path.py:name` of one. A score from `right_from`
    on is right; after any other the model reads `retry`, and makes `attempts` answers at most."""
    function = load_reward(verifier)
    reply = await ctx.generate(task.prompt)
    retries = 0
    while True:
        given = RewardInput(
            prompt=task.prompt if isinstance(task.prompt, str) else str(task.prompt[-1]["content"]),
            response=reply.text,
            ground_truth=task.ground_truth,
            data_source=task.data_source,
            extra_info=task.extra_info,
        )
        result = await ctx.resources.blocking(
            lambda given=given: function(given, **(verifier_args or {})), timeout_s=timeout_s
        )
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, Abstain):
            raise RuntimeError(f"the verifier abstains: {result.reason}")
        score = float(result.value if isinstance(result, Score) else result)
        ctx.reward(score, segment=reply.segment)
        if score >= right_from or retries + 1 >= attempts or ctx.room(reply.segment) < 1:
            break
        retries += 1
        # A chat whose template renders earlier turns otherwise goes on as a new path.
        reply = await ctx.generate(
            ctx.as_user(retry.strip() if ctx.is_chat(reply.segment) else retry, reply.segment),
            parent=reply.segment,
            turn=retries,
            rewritten="root",
        )
    ctx.reward(score * discount**retries)
    ctx.builder.meta(retries=retries, first_try=retries == 0)
