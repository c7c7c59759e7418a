"""Replay of routes in a transformers model: a hook replaces each router's own choice in its output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from areal_async.models.routers import routers_of
from trainer_service.data.routes import RouterRule, replayed, rules_of
from trainer_service.errors import ModelError


class RouteReplay:
    """Replay of routes in the routers of one model. Outside `using` the routers choose for themselves."""

    def __init__(self, model: Any) -> None:
        """Raises the errors of `rules_of`."""
        rules, self._routers = rules_of(model), routers_of(model)
        self._kind = type(model).__name__
        self._use(None)
        for router in self._routers:
            router.register_forward_hook(partial(_replay, rules[type(router)]))

    @contextmanager
    def using(self, routes: Tensor | None) -> Iterator[None]:
        """Replay `routes` [L, T, K] (`MicroBatch.routes`) in all passes of the block: forward, backward and
        recomputation."""
        if routes is not None and len(routes) != len(self._routers):
            raise ModelError(
                f"the engine told routes of {len(routes)} layers, and {self._kind} has {len(self._routers)} "
                "routers: set rollout.routes to off."
            )
        self._use(routes)
        try:
            yield
        finally:
            self._use(None)

    def _use(self, routes: Tensor | None) -> None:
        for layer, router in enumerate(self._routers):
            # On the router, so that the compiled code of all layers is the same.
            router._replayed = None if routes is None else routes[layer]  # type: ignore[assignment]


def _replay(rule: RouterRule, router: Any, inputs: Any, said: Any) -> Any:
    if router._replayed is None:
        return None
    logits, weights, experts = said
    new, experts = replayed(logits, experts, router._replayed, rule)
    return logits, new.to(weights.dtype), experts
