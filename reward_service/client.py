"""Scoring inside a process of one's own, by the same rewards and rules as the reward service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence

from areal_async.config.reward_routing import RewardSpec
from areal_async.trajectory.verdicts import Verdict
from reward_service.backends import Call, OnVerdicts
from reward_service.router import Router
from reward_service.sdk import RewardInput


class LocalScorer(Router):
    """`async with LocalScorer(job.reward, workers=1) as scorer: verdicts = await scorer.score(inputs)`.

    Entering starts what the rewards need and raises `RewardLoadError` when one cannot be loaded; leaving ends
    it. `workers` defaults to the section's. Verdicts are not retried."""

    async def score(
        self, inputs: Sequence[RewardInput], groups: Sequence[Hashable] | None = None
    ) -> list[Verdict]:
        """One verdict for each input, in the order of the inputs. Each goes to the reward that its task is
        routed to. Under scope `group` those with the same entry in `groups` (one for each input) are one
        call; without `groups` each is a group of its own. Concurrent calls share the workers."""
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

        def taker(calls: list[list[int]]) -> OnVerdicts:
            def take(index: int, verdicts: list[Verdict], elapsed_ms: float) -> None:
                for place, verdict in zip(calls[index], verdicts, strict=True):
                    results[place] = (verdict, elapsed_ms)
                    judged()
                if len(results) == len(inputs):
                    done.set()

            return take

        for spec, calls in self._calls(inputs, groups):
            given: list[Call] = [
                [inputs[place] for place in call] if spec.scope == "group" else inputs[call[0]]
                for call in calls
            ]
            await self.submit(spec, given, taker(calls))
        if inputs:
            await done.wait()
        return [results[place] for place in range(len(inputs))]

    def _calls(
        self, inputs: Sequence[RewardInput], groups: Sequence[Hashable] | None
    ) -> list[tuple[RewardSpec, list[list[int]]]]:
        """The calls of each reward, each as the places of its inputs."""
        calls: dict[str, dict[Hashable, list[int]]] = {}
        specs: dict[str, RewardSpec] = {}
        for place, given in enumerate(inputs):
            spec = self.routing.of(given)
            specs[spec.key] = spec
            group: Hashable = groups[place] if groups is not None and spec.scope == "group" else (place,)
            calls.setdefault(spec.key, {}).setdefault(group, []).append(place)
        return [(specs[key], list(of_spec.values())) for key, of_spec in calls.items()]
