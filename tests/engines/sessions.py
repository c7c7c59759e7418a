"""Two turns of a session with an update between them, on any server: what is cached, and the log-probs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from areal_async.base.versions import VersionTag
from areal_async.trajectory import Sampling
from rollout_service.engines.base import GenerateRequest, GenerateResult
from rollout_service.engines.http.engine import HttpEngine
from rollout_service.replicas import exchange
from tests.engines.servers import Model, logprobs_under

FIRST_TURN, SECOND_TURN = 20, 12  # Most units of their answers
TOOL = (9, 4, 11)  # What comes between them
_numbers = itertools.count()


async def answer(
    engine: HttpEngine, prompt: Sequence[int], session: str, n: int, began: tuple[int, int] | None = None
) -> GenerateResult:
    name = f"turn-{next(_numbers)}"
    sampling = Sampling(temperature=1.0, max_new_tokens=n, seed=7)
    return await engine.generate(GenerateRequest(name, list(prompt), sampling, session=session, began=began))


@torch.no_grad()
def logits_after_kept(
    model: Model, old: VersionTag, new: VersionTag, prompt: Sequence[int], result: GenerateResult
) -> torch.Tensor:
    """f64 `[n, V]`: what the units are drawn from under `new` where the cached tokens have KV of `old`."""
    ids, cached = [*prompt, *result.token_ids.tolist()], result.cached_tokens
    assert cached
    kept = model.network(old)(torch.tensor([ids[:cached]]), use_cache=True).past_key_values
    rows = model.network(new)(torch.tensor([ids[cached:]]), past_key_values=kept, use_cache=True).logits[0]
    found: torch.Tensor = rows.double()[len(prompt) - cached - 1 : -1]
    return found


async def assert_sessions_keep_their_cache(
    engine: HttpEngine, model: Model, prompt: Sequence[int], *, epoch: int, block: int
) -> None:
    """In mode `session`, by an engine that serves version 0 and caches whole blocks of so many tokens."""
    old, new = (VersionTag("policy", epoch, version) for version in (0, 1))
    first = await answer(engine, prompt, "g.0", FIRST_TURN)
    assert set(first.versions) == {0}
    model.assert_true(prompt, first)
    await exchange(engine, model.snapshot(1, epoch))
    turn = [*prompt, *first.token_ids.tolist(), *TOOL]
    computed = len(turn) - len(TOOL) - 1  # the last unit of an answer is never fed

    second = await answer(engine, turn, "g.0", SECOND_TURN, (epoch, 0))
    assert second.cached_tokens == computed // block * block
    # The version is of what samples; the log-probs are approximate, and exactly what the label says.
    assert set(second.versions) == {1}
    assert set(second.epochs) == {epoch}
    labelled = logprobs_under(logits_after_kept(model, old, new, turn, second), second)
    np.testing.assert_allclose(second.logprobs, labelled, atol=1e-4)
    assert np.abs(second.logprobs - model.logprobs(turn, second)).max() > 1e-2

    # A session that begins now meets nothing of it, whatever it has in common with it.
    begun = await answer(engine, turn, "g.1", SECOND_TURN)
    assert begun.cached_tokens == 0
    assert set(begun.versions) == {1}
    model.assert_true(turn, begun)
    # Nor does one that began under weights that this server never had: it came from another one.
    moved = await answer(engine, turn, "g.2", SECOND_TURN, (epoch, 77))
    assert moved.cached_tokens
    model.assert_true(turn, moved)


async def assert_turns_are_recomputed(
    engine: HttpEngine, model: Model, prompt: Sequence[int], *, epoch: int
) -> None:
    """In mode `recompute`, by an engine that serves version 0."""
    first = await answer(engine, prompt, "g.0", FIRST_TURN)
    turn = [*prompt, *first.token_ids.tolist(), *TOOL]
    same = await answer(engine, turn, "g.0", SECOND_TURN, (epoch, 0))
    assert same.cached_tokens
    await exchange(engine, model.snapshot(1, epoch))
    second = await answer(engine, turn, "g.0", SECOND_TURN, (epoch, 0))
    assert second.cached_tokens == 0
    assert set(second.versions) == {1}
    model.assert_true(turn, second)
