"""Worlds for a policy to act in: the table of the built-in ones, and the protocol of any."""

from rollout_service.environments.base import (
    Environment,
    EnvironmentFactory,
    EnvironmentFailure,
    Step,
    group_seed,
    level_seed,
    load_environment,
)

BUILT_IN = {
    "countdown": "rollout_service.environments.countdown:Countdown",
    "arithmetic": "rollout_service.environments.arithmetic:Arithmetic",
    "frozenlake": "rollout_service.environments.frozenlake:FrozenLake",
    "sokoban": "rollout_service.environments.sokoban:Sokoban",
    "gymnasium": "rollout_service.environments.gymnasium:Gymnasium",
    "reasoning_gym": "rollout_service.environments.reasoning_gym:ReasoningGym",
}
"""Name → class; found by `areal_async.registry.ENVIRONMENTS`."""

__all__ = [
    "BUILT_IN",
    "Environment",
    "EnvironmentFactory",
    "EnvironmentFailure",
    "Step",
    "group_seed",
    "level_seed",
    "load_environment",
]
