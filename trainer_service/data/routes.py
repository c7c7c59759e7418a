"""Replay of routes: the trainer uses the experts that the engine chose instead of those that its own router
would choose.

A router scores every expert, chooses the best K and weighs their outputs by the scores. A replay uses the K
experts that the engine chose when it sampled the token, and weighs them by the scores of the trainer's
router. So the gradient of the weights still reaches that router. The choice itself has no gradient in either
case.

All back ends share this arithmetic. `rules_of` finds out how a model's routers compute weights, from their
outputs for a few tokens. `replayed` applies such a rule. `mixture_to_replay` decides whether a job's trainer
replays routes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from areal_async.base.log import get_logger
from areal_async.config.job import JobConfig
from areal_async.config.routes import replayed_mixture
from areal_async.models.classes import auto_class
from areal_async.models.files import Mixture
from areal_async.models.routers import routers_of, tried
from trainer_service.errors import ModelError

log = get_logger("trainer")

AGREES = 1e-4
"""Largest relative difference between a rule's weights and the router's own, in f32."""


@dataclass(frozen=True)
class RouterRule:
    """Rule that computes the weights of chosen experts from a router's logits."""

    score: Literal["softmax", "sigmoid"]
    """`softmax` over all experts, or `sigmoid` of each expert's logit."""
    normalise: bool
    """Whether the weights of a token are divided by their sum."""
    scale: float = 1.0

    def weights(self, logits: Tensor, experts: Tensor, present: Tensor | None = None) -> Tensor:
        """Return f32 [T, K] from logits [T, E] and the chosen experts i64 [T, K]. The weight is 0 where
        `present` (bool [T, K]) is False."""
        scores = logits.float()
        scores = scores.softmax(-1) if self.score == "softmax" else scores.sigmoid()
        chosen = scores.gather(1, experts)
        if present is not None:
            chosen = chosen.masked_fill(~present, 0.0)
        if self.normalise:
            chosen = chosen / chosen.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        return chosen * self.scale


def rule_of(logits: Tensor, weights: Tensor, experts: Tensor) -> RouterRule | None:
    """Return the rule that gives these weights; None if no known rule does. Several rules may give these
    weights, for example with one expert per token; any of them is correct then."""
    for score in ("softmax", "sigmoid"):
        for normalise in (False, True):
            rule = RouterRule(score, normalise)
            plain = rule.weights(logits, experts)
            scale = float((weights.float() / plain).detach().median())
            rule = rule if abs(scale - 1) < AGREES else replace(rule, scale=scale)
            if torch.allclose(weights.float(), plain * rule.scale, rtol=AGREES, atol=0):
                return rule
    return None


def rules_of(model: Any) -> dict[type[nn.Module], RouterRule]:
    """Return the rule of each kind of router in a transformers model. Raises `ModelError` if the model has no
    routers, or if a kind of router follows no known rule."""
    kind, found = type(model).__name__, dict[type[nn.Module], RouterRule]()
    for router in routers_of(model):
        if type(router) in found:
            continue
        said = tried(router, model.config.get_text_config())
        rule = None if said is None else rule_of(*said)
        if rule is None:
            raise ModelError(
                f"the weights that {type(router).__name__} of {kind} gives to experts are no softmax or "
                "sigmoid of its logits, so routes cannot be replayed in it: set rollout.routes to off."
            )
        found[type(router)] = rule
    if not found:
        raise ModelError(f"{kind} does not say where its routers are: set rollout.routes to off.")
    return found


def mixture_to_replay(job: JobConfig) -> Mixture | None:
    """Return the structure of the model whose routes the job's trainer replays.

    The result is None if the trainer replays no routes. With `auto`, this is also so for a model whose
    routers follow no known rule. With `replay`, such a model raises `ModelError`."""
    mixture = replayed_mixture(job)
    if mixture is None or not _has_rules(job.model, must=job.rollout.routes == "replay"):
        return None
    return mixture


@cache
def _has_rules(folder: Path, *, must: bool) -> bool:
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    try:
        rules_of(model)
    except ModelError as error:
        if must:
            raise
        log.warning("routes are not replayed", why=str(error))
        return False
    return True


def replayed(logits: Tensor, own: Tensor, routes: Tensor, rule: RouterRule) -> tuple[Tensor, Tensor]:
    """Return the weights f32 [T, K] and the experts i64 [T, K] of tokens.

    The trainer's router gives `logits` [T, E] and would choose `own` i64 [T, K]. `routes` [T, K], of any
    integer type, are the engine's choices; -1 is none. A token without any route keeps its own experts. A
    missing or repeated expert gets the weight 0, and the other weights are normalised. An expert is missing
    if the engine masked it, or if the engine dropped the token in that layer."""
    routes = routes.to(own.dtype)
    known = (routes >= 0).any(-1, keepdim=True)
    same = routes[:, :, None] == routes[:, None, :]
    present = (routes >= 0) & ~same.tril(-1).any(-1)
    experts = torch.where(present, routes, routes.amax(-1, keepdim=True))
    experts = torch.where(known, experts, own)
    return rule.weights(logits, experts, present | ~known), experts
