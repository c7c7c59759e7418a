"""Replay of routes in a transformers model: a hook replaces each router's own choice in its output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from areal_async.models.routers import routers_of
from trainer_service.data.routes import RouterRule, replayed, rules_of
from trainer_service.errors import ModelError


class RouteReplay:
    """Replay of routes in the routers of one model. Outside `using` the routers choose for themselves."""

    def __init__(self, model: Any) -> None:
        """Raises the errors of `rules_of`."""
        rules, routers = rules_of(model), routers_of(model)
        self._kind, self._layers = type(model).__name__, len(routers)
        self._routes: Tensor | None = None
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._replay, layer, rules[type(router)]))

    @contextmanager
    def using(self, routes: Tensor | None) -> Iterator[None]:
        """Replay `routes` [L, T, K] (`MicroBatch.routes`) in all passes of the block: forward, backward and
        recomputation."""
        if routes is not None and len(routes) != self._layers:
            raise ModelError(
                f"the engine told routes of {len(routes)} layers, and {self._kind} has {self._layers} "
                "routers: set rollout.routes to off."
            )
        self._routes = routes
        try:
            yield
        finally:
            self._routes = None

    def _replay(self, layer: int, rule: RouterRule, router: nn.Module, inputs: Any, said: Any) -> Any:
        if self._routes is None:
            return None
        logits, weights, experts = said
        new, experts = replayed(logits, experts, self._routes[layer], rule)
        return logits, new.to(weights.dtype), experts
