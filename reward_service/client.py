"""Scoring on behalf of the calling process, with the same rewards and rules as the reward service."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

from areal_async.base.verdicts import Verdict
from areal_async.config.reward_routing import RewardSpec
from reward_service.router import Router
from reward_service.sdk import RewardInput


class LocalScorer(Router):
    """A scorer: `async with LocalScorer(job.reward, workers=1) as scorer: verdicts = await
    scorer.score(inputs)`.

    `async with` starts the rewards, raises `RewardLoadError` if one cannot be loaded, and stops them at its
    end. `workers` defaults to the value in the job's section `reward`. A verdict without a score is not
    retried.
    """

    async def score(
        self, inputs: Sequence[RewardInput], groups: Sequence[Hashable] | None = None
    ) -> list[Verdict]:
        """Return one verdict for each input, in the order of the inputs.

        Each input goes to the reward of its task. `groups` has one entry for each input. For a reward with
        the scope `group`, inputs with equal entries are scored in one call. Without `groups`, each input is
        its own group. Concurrent calls of this method share the workers.
        """
        return [verdict for verdict, _ in await self.score_timed(inputs, groups)]

    async def score_timed(
        self,
        inputs: Sequence[RewardInput],
        groups: Sequence[Hashable] | None = None,
        judged: Callable[[], None] = lambda: None,
    ) -> list[tuple[Verdict, float]]:
        """Score as `score` does, and return each verdict with the milliseconds of its call.

        `judged` is called after each verdict.
        """
        results: dict[int, tuple[Verdict, float]] = {}
        done = asyncio.Event()
        calls: dict[str, dict[Hashable, list[int]]] = defaultdict(lambda: defaultdict(list))
        for place, given in enumerate(inputs):
            spec = self.routing.of(given)
            group: Hashable = groups[place] if groups is not None and spec.scope == "group" else (place,)
            calls[spec.key][group].append(place)

        async def ask(spec: RewardSpec, places: list[list[int]]) -> None:
            def take(index: int, verdicts: list[Verdict], elapsed_ms: float) -> None:
                for place, verdict in zip(places[index], verdicts, strict=True):
                    results[place] = (verdict, elapsed_ms)
                    judged()
                if len(results) == len(inputs):
                    done.set()

            together = [[inputs[place] for place in call] for call in places]
            await self.submit(spec, together if spec.scope == "group" else [one for (one,) in together], take)

        for spec in self.specs:
            if spec.key in calls:
                await ask(spec, list(calls[spec.key].values()))
        if inputs:
            await done.wait()
        return [results[place] for place in range(len(inputs))]
