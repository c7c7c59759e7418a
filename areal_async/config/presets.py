"""Presets: algorithms named as in their papers, each with the job fields that it sets.

`trainer.objective.preset` sets the fields that the job file and its overrides omit. A preset's arguments for
a part apply only if the job uses the preset's part. Other fields, such as the correction of stale samples,
have their usual defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal_async.base.mistakes import Mistake
from areal_async.base.yaml_file import dump_yaml
from areal_async.config.dotted import get, put
from areal_async.config.rollout import SamplingSection

OBJECTIVE = "trainer.objective."
FIELD = f"{OBJECTIVE}preset"
LONGEST = "rollout.sampling.max_new_tokens"
"""Field of the job. As a value in a preset, it stands for the value of that field."""


@dataclass(frozen=True)
class Preset:
    """The algorithm of one paper."""

    paper: str
    fields: Mapping[str, Any]
    """Values by dotted field of the job file."""
    beside: str = ""
    """Hint about further settings of the algorithm that depend on the task."""

    def to_yaml(self) -> str:
        """Return the fields as YAML of a job file."""
        content: dict[str, Any] = {}
        for field, value in self.fields.items():
            put(content, field.split("."), value)
        return dump_yaml(content)


def _preset(
    paper: str, advantage: str, loss: str = "ppo", normaliser: str = "token", *, beside: str = "", **more: Any
) -> Preset:
    """Return a preset. `more` are fields of the objective with `__` for dots. If a name begins with `job__`,
    it is a field of the job."""
    named = {"advantage": advantage, "loss": loss, "normaliser": normaliser, **more}
    dotted = {(OBJECTIVE + name).replace("__", "."): value for name, value in named.items()}
    fields = {name.removeprefix(f"{OBJECTIVE}job."): value for name, value in dotted.items()}
    return Preset(paper, fields, beside)


PRESETS: Mapping[str, Preset] = {
    "ppo": _preset("Schulman et al. 2017", "gae"),
    "grpo": _preset("Shao et al. 2024, DeepSeekMath", "grpo", normaliser="rollout", kl__coefficient=0.04),
    "dapo": _preset(
        "Yu et al. 2025",
        "grpo",
        loss_args__clip_high=0.28,
        job__buffer__dynamic_filtering=True,
        beside="Its soft penalty for long answers is the reward `overlong`, weighed with your own: see "
        "docs/rewards.md#use-built-in-rewards.",
    ),
    "dr_grpo": _preset("Liu et al. 2025", "dr_grpo", normaliser="constant", normaliser_args__length=LONGEST),
    "gspo": _preset("Zheng et al. 2025", "grpo", "gspo", "rollout"),
    "cispo": _preset("MiniMax 2025, MiniMax-M1", "grpo", "cispo"),
    "rloo": _preset("Ahmadian et al. 2024", "rloo", "reinforce"),
    "reinforce_pp": _preset(
        "Hu et al. 2025", "reinforce_pp", kl__coefficient=0.01, kl__estimator="k1", kl__place="reward"
    ),
    "reinforce_pp_baseline": _preset(
        "Hu et al. 2025", "reinforce_pp_baseline", kl__coefficient=0.01, kl__estimator="k2"
    ),
    "remax": _preset("Li et al. 2023", "remax", "reinforce", job__rollout__greedy_baseline=True),
    "topr": _preset(
        "Le Roux et al. 2025",
        "reward",
        "topr",
        advantage_args__baseline=0.2,
        correction="none",
        beside="Its baseline is for rewards of 0 and 1: bad answers may not count for much more than good "
        "ones, or the policy breaks down.",
    ),
    "raft_pp": _preset("Xiong et al. 2025", "reward", "raft_pp"),
    "sapo": _preset("Gao et al. 2025", "grpo", "sapo", "rollout"),
    "opo": _preset("Hao et al. 2025", "opo", "reinforce"),
    "a3po": _preset("Li et al. 2025, A-3PO", "grpo", prox="loglinear"),
    "gigpo": _preset("Feng et al. 2025", "gigpo", beside="The workflow names states with ctx.anchor()."),
    "kimi": _preset(
        "Kimi team 2025, Kimi k1.5", "dr_grpo", "kimi", "constant", normaliser_args__length=LONGEST
    ),
    "gmpo": _preset("Zhao et al. 2025", "grpo", "gmpo", "rollout"),
    "dppo": _preset("Qi et al. 2026", "grpo", "dppo", correction="bypass"),
    "gdpo": _preset("Liu et al. 2026", "gdpo", beside="Its rewards are the components of the score."),
    "magrpo": _preset("Liu et al. 2025, MAGRPO", "dr_grpo", "reinforce", group_by="task_turn"),
    "marti": _preset("Zhang et al. 2025, MARTI", "marti", beside="Each turn of an agent has a reward."),
}


def name_preset(content: dict[str, Any]) -> None:
    """Replace an objective that is only a word by a section with the word as its preset."""
    if isinstance(word := get(content, OBJECTIVE[:-1]), str):
        content["trainer"]["objective"] = {"preset": word}


def fill_preset(content: dict[str, Any]) -> list[Mistake]:
    """Set the preset's fields that the flat form of a job omits. Return a mistake for an unknown preset."""
    name_preset(content)
    name = get(content, FIELD)
    preset = PRESETS.get(name) if isinstance(name, str) else None
    if preset is None:
        return [unknown_preset(name)] if name is not None else []
    own = {field: get(content, field) for field in preset.fields}
    for field, value in preset.fields.items():
        part, is_argument, _ = field.partition("_args.")
        if own[field] is None and not (is_argument and own.get(part) not in (None, preset.fields[part])):
            if value == LONGEST:
                value = get(content, LONGEST) or SamplingSection().max_new_tokens
            put(content, field.split("."), value)
    return []


def unknown_preset(name: object) -> Mistake:
    word = re.sub(r"\W+", "_", str(name)).lower()
    fix = f"Did you mean {word}?" if word in PRESETS else f"Use one of {', '.join(PRESETS)}"
    if word == "dpo":
        fix = "Write kind: preference, or advantage: dpo with what docs/other-trainings.md has beside it"
    return Mistake(FIELD, f"there is no preset {name!r}", fix)


def expansion(content: Mapping[str, Any]) -> list[str]:
    """Return a line for each field that the job's preset sets. The line notes if the job has another value.
    `content` has the job's JSON values."""
    name, lines = get(content, FIELD), []
    known = name in PRESETS and content["kind"] == "rl"
    for field, value in PRESETS[name].fields.items() if known else ():
        found, meant = get(content, field), get(content, LONGEST) if value == LONGEST else value
        differs = f" (the job's own; {name} has {meant})" if found != meant else ""
        lines.append(f"{field}: {found}{differs}")
    return lines
