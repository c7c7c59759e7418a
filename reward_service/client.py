"""Scoring inside a process of one's own, by the same rewards and rules as the reward service."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

from areal_async.base.verdicts import Verdict
from areal_async.config.reward_routing import RewardSpec
from reward_service.router import Router
from reward_service.sdk import RewardInput


class LocalScorer(Router):
    """A scorer for scripts: `async with LocalScorer(job.reward, workers=1) as scorer: verdicts = await
    scorer.score(inputs)`.

    Entering starts the rewards' processes and raises `RewardLoadError` if a reward cannot be loaded; leaving
    ends them. `workers` defaults to the section's. Verdicts are not retried.
    """

    async def score(
        self, inputs: Sequence[RewardInput], groups: Sequence[Hashable] | None = None
    ) -> list[Verdict]:
        """Return one verdict for each input, in the order of the inputs. Each goes to the reward of its task.
        Under scope `group`, inputs with the same entry in `groups` (one for each input) are one call; without
        `groups` each is a group of its own. Concurrent calls share the workers."""
        return [verdict for verdict, _ in await self.score_timed(inputs, groups)]

    async def score_timed(
        self,
        inputs: Sequence[RewardInput],
        groups: Sequence[Hashable] | None = None,
        judged: Callable[[], None] = lambda: None,
    ) -> list[tuple[Verdict, float]]:
        """`score`, each verdict with the milliseconds that its call took; `judged` is called at each."""
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
