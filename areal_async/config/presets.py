"""Presets: algorithms named as in their papers, each with the job fields that it sets.

`trainer.objective.preset` sets the fields that the job file and its overrides omit. A preset's arguments for
a part apply only if the job uses the preset's part. Other fields, such as the correction of stale samples,
have their usual defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from areal_async.base.mistakes import Mistake
from areal_async.config.dotted import get, put
from areal_async.config.rollout import SamplingSection

OBJECTIVE = "trainer.objective."
FIELD = f"{OBJECTIVE}preset"
LONGEST = "rollout.sampling.max_new_tokens"
"""Name of a field of the job. If a preset's value is this name, the value of that field is used."""


def _preset(advantage: str, loss: str = "ppo", normaliser: str = "token", **more: Any) -> Mapping[str, Any]:
    """Return the values of a preset by dotted field of the job file. `more` are fields of the objective with
    `__` for dots. If a name begins with `job__`, it is a field of the job."""
    named = {"advantage": advantage, "loss": loss, "normaliser": normaliser, **more}
    dotted = {(OBJECTIVE + name).replace("__", "."): value for name, value in named.items()}
    return {name.removeprefix(f"{OBJECTIVE}job."): value for name, value in dotted.items()}


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "ppo": _preset("gae"),  # Schulman et al. 2017
    "grpo": _preset("grpo", normaliser="rollout", kl__coefficient=0.04),  # Shao et al. 2024, DeepSeekMath
    # Yu et al. 2025. Its soft penalty for long answers is the reward `overlong`.
    "dapo": _preset("grpo", loss_args__clip_high=0.28, job__buffer__dynamic_filtering=True),
    "dr_grpo": _preset("dr_grpo", normaliser="constant", normaliser_args__length=LONGEST),  # Liu et al. 2025
    "gspo": _preset("grpo", "gspo", "rollout"),  # Zheng et al. 2025
    "cispo": _preset("grpo", "cispo"),  # MiniMax 2025, MiniMax-M1
    "rloo": _preset("rloo", "reinforce"),  # Ahmadian et al. 2024
    # Hu et al. 2025
    "reinforce_pp": _preset("reinforce_pp", kl__coefficient=0.01, kl__estimator="k1", kl__place="reward"),
    "reinforce_pp_baseline": _preset("reinforce_pp_baseline", kl__coefficient=0.01, kl__estimator="k2"),
    "remax": _preset("remax", "reinforce", job__rollout__greedy_baseline=True),  # Li et al. 2023
    # Le Roux et al. 2025. The baseline is for rewards of 0 and 1: bad answers may not count for much more
    # than good ones, or the policy breaks down.
    "topr": _preset("reward", "topr", advantage_args__baseline=0.2, correction="none"),
    "raft_pp": _preset("reward", "raft_pp"),  # Xiong et al. 2025
    "sapo": _preset("grpo", "sapo", "rollout"),  # Gao et al. 2025
    "opo": _preset("opo", "reinforce"),  # Hao et al. 2025
    "a3po": _preset("grpo", prox="loglinear"),  # Li et al. 2025, A-3PO
    "gigpo": _preset("gigpo"),  # Feng et al. 2025. The workflow names states with ctx.anchor().
    "kimi": _preset("dr_grpo", "kimi", "constant", normaliser_args__length=LONGEST),  # Kimi k1.5, 2025
    "gmpo": _preset("grpo", "gmpo", "rollout"),  # Zhao et al. 2025
    "dppo": _preset("grpo", "dppo", correction="bypass"),  # Qi et al. 2026
    "gdpo": _preset("gdpo"),  # Liu et al. 2026. Its rewards are the components of the score.
    "magrpo": _preset("dr_grpo", "reinforce", group_by="task_turn"),  # Liu et al. 2025
    "marti": _preset("marti"),  # Zhang et al. 2025. Each turn of an agent has a reward.
}
"""Values of each preset by dotted field of the job file."""


def name_preset(content: dict[str, Any]) -> None:
    """Replace an objective that is only a word by a section with the word as its preset."""
    if isinstance(word := get(content, OBJECTIVE[:-1]), str):
        content["trainer"]["objective"] = {"preset": word}


def fill_preset(content: dict[str, Any]) -> list[Mistake]:
    """Set the fields of the preset that `content`, a job with one policy, omits. Return a mistake for an
    unknown preset."""
    name_preset(content)
    name = get(content, FIELD)
    preset = PRESETS.get(name) if isinstance(name, str) else None
    if preset is None:
        return [_unknown_preset(name)] if name is not None else []
    own = {field: get(content, field) for field in preset}
    for field, value in preset.items():
        part, is_argument, _ = field.partition("_args.")
        if own[field] is None and not (is_argument and own.get(part) not in (None, preset[part])):
            if value == LONGEST:
                value = get(content, LONGEST) or SamplingSection().max_new_tokens
            put(content, field.split("."), value)
    return []


def _unknown_preset(name: object) -> Mistake:
    word = re.sub(r"\W+", "_", str(name)).lower()
    fix = f"Did you mean {word}?" if word in PRESETS else f"Use one of {', '.join(PRESETS)}"
    if word == "dpo":
        fix = "Write kind: preference, or advantage: dpo with what docs/other-trainings.md has beside it"
    return Mistake(FIELD, f"there is no preset {name!r}", fix)
