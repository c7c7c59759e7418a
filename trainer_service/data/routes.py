"""Replayed routes, which replace a router's choice of experts by the engine's.

A router gives each expert a score, takes the best K, and weighs their outputs by their scores. A replay takes
the engine's K instead, and weighs them by the scores of the trainer's own router: the gradient of the weights
reaches that router, and the choice, which has none, is the one under which the token was sampled.

The arithmetic is here for every back end: `rules_of` finds the rules of a model's routers from their results
for some tokens, `replayed` applies one. `mixture_to_replay` decides whether a job's trainer replays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from areal_async.base.log import get_logger
from areal_async.config.job import JobConfig
from areal_async.config.routes import replayed_mixture
from areal_async.models.files import Mixture
from areal_async.models.routers import routers_of, tried
from trainer_service.errors import ModelError

log = get_logger("trainer")

AGREES = 1e-4
"""Largest relative difference of a rule's weights from the router's own, in f32."""


@dataclass(frozen=True)
class RouterRule:
    """The rule by which a router's logits give the weights of chosen experts."""

    score: Literal["softmax", "sigmoid"]
    """Over all experts, or of each."""
    normalise: bool
    """Whether the weights of a token are divided by their sum."""
    scale: float = 1.0

    def weights(self, logits: Tensor, experts: Tensor, present: Tensor | None = None) -> Tensor:
        """f32 [T, K] of logits [T, E] and the chosen experts i64 [T, K]; 0 where not `present` (bool
        [T, K])."""
        scores = logits.float()
        scores = scores.softmax(-1) if self.score == "softmax" else scores.sigmoid()
        chosen = scores.gather(1, experts)
        if present is not None:
            chosen = chosen.masked_fill(~present, 0.0)
        if self.normalise:
            chosen = chosen / chosen.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        return chosen * self.scale


def rule_of(logits: Tensor, weights: Tensor, experts: Tensor) -> RouterRule | None:
    """Return the rule of a router that gave these; None if no rule fits. If several rules agree (with one
    expert per token), any of them is returned."""
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
    """Return the rule of each kind of router of a transformers model. Raises `ModelError` with the kind if it
    has no routers, or routers with an unknown rule."""
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
    """Return the structure of the model whose routes the job's trainer replays. Return None if it replays
    none, as with `auto` for a model whose routers have another rule. Raises `ModelError` if the job requires
    routes of such a model."""
    mixture = replayed_mixture(job)
    if mixture is None or not _has_rules(job.model, must=job.rollout.routes == "replay"):
        return None
    return mixture


@cache
def _has_rules(folder: Path, *, must: bool) -> bool:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))
    try:
        rules_of(model)
    except ModelError as error:
        if must:
            raise
        log.warning("routes are not replayed", why=str(error))
        return False
    return True


def replayed(logits: Tensor, own: Tensor, routes: Tensor, rule: RouterRule) -> tuple[Tensor, Tensor]:
    """Return weights f32 [T, K] and experts i64 [T, K] of tokens whose router gives `logits` [T, E] and would
    choose `own` i64 [T, K]. `routes` [T, K], of any integer type, are the engine's; -1 is none.

    A token without any route keeps its own experts. If a token has fewer than K experts (the engine masked
    one, or dropped the token), or names one twice, the missing ones weigh 0 and the weights are normalised
    over the rest.
    """
    routes = routes.to(own.dtype)
    known = (routes >= 0).any(-1, keepdim=True)
    same = routes[:, :, None] == routes[:, None, :]
    present = (routes >= 0) & ~same.tril(-1).any(-1)
    experts = torch.where(present, routes, routes.amax(-1, keepdim=True))
    experts = torch.where(known, experts, own)
    return rule.weights(logits, experts, present | ~known), experts
