"""Algorithms by the names of their papers: which fields of a job file each of them sets.

`trainer.objective.preset` fills in what the job file and its overrides leave out; whatever they say stays.
What a preset says of a part's arguments counts while the job has that part from it. A field that no preset
names, such as the correction of stale samples, has its usual default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal_async.base.mistakes import Mistake
from areal_async.base.yaml_file import dump_yaml
from areal_async.config.rollout import SamplingSection

if TYPE_CHECKING:
    from areal_async.config.job import JobConfig

OBJECTIVE = "trainer.objective."
FIELD = f"{OBJECTIVE}preset"
LONGEST = "rollout.sampling.max_new_tokens"
"""As a value: that of this field of the job."""


@dataclass(frozen=True)
class Preset:
    """What one paper's algorithm consists of."""

    paper: str
    fields: Mapping[str, Any]
    """By dotted field of the job file."""
    beside: str = ""
    """What belongs to it and depends on the task, so that the job file has to say it."""

    def to_yaml(self) -> str:
        """As a job file has it."""
        content: dict[str, Any] = {}
        for field, value in self.fields.items():
            *sections, last = field.split(".")
            inner = content
            for name in sections:
                inner = inner.setdefault(name, {})
            inner[last] = value
        return dump_yaml(content)


def _preset(
    paper: str, advantage: str, loss: str = "ppo", normaliser: str = "token", *, beside: str = "", **more: Any
) -> Preset:
    """`more` are fields of the objective with `__` for dots, or of the job where they begin with `job__`."""
    named = {"advantage": advantage, "loss": loss, "normaliser": normaliser, **more}
    fields = {(OBJECTIVE + name).replace("__", "."): value for name, value in named.items()}
    return Preset(
        paper, {name.removeprefix(f"{OBJECTIVE}job."): value for name, value in fields.items()}, beside
    )


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


def fill_preset(content: dict[str, Any]) -> list[Mistake]:
    """Set in the flat form of a job's mapping what its preset says and it does not; a name that no preset has
    is returned as a mistake. A word as the objective is the name of a preset."""
    if isinstance(word := _get(content, OBJECTIVE[:-1]), str):
        content["trainer"]["objective"] = {"preset": word}
    name = _get(content, FIELD)
    if name is None:
        return []
    preset = PRESETS.get(name) if isinstance(name, str) else None
    if preset is None:
        return [unknown_preset(name)]
    own = {field: _get(content, field) for field in preset.fields}
    for field, value in preset.fields.items():
        part, is_argument, _ = field.partition("_args.")
        if own[field] is None and not (is_argument and own.get(part) not in (None, preset.fields[part])):
            if value == LONGEST:
                value = _get(content, LONGEST) or SamplingSection().max_new_tokens
            _put(content, field, value)
    return []


def unknown_preset(name: object) -> Mistake:
    word = re.sub(r"\W+", "_", str(name)).lower()
    fix = f"Did you mean {word}?" if word in PRESETS else f"Use one of {', '.join(PRESETS)}"
    if word == "dpo":
        fix = "Write kind: preference, or advantage: dpo with what docs/other-trainings.md has beside it"
    return Mistake(FIELD, f"there is no preset {name!r}", fix)


def expansion(job: JobConfig) -> list[str]:
    """What the job's preset comes to in it, a line for each field, and where the job says otherwise."""
    name = job.trainer.objective.preset
    if name is None or name not in PRESETS or job.kind != "rl":
        return []
    content, lines = job.model_dump(mode="json"), []
    for field, value in PRESETS[name].fields.items():
        found, meant = _get(content, field), _get(content, LONGEST) if value == LONGEST else value
        lines.append(
            f"{field}: {found}" + ("" if found == meant else f" (the job's own; {name} has {meant})")
        )
    return lines


def _get(content: Any, field: str) -> Any:
    for name in field.split("."):
        content = content.get(name) if isinstance(content, dict) else None
    return content


def _put(content: dict[str, Any], field: str, value: Any) -> None:
    """Set it, unless something that is no section is in the way, which is a mistake of its own."""
    *sections, last = field.split(".")
    inner: Any = content
    for name in sections:
        following = inner.get(name)
        if following is None:
            following = inner[name] = {}
        if not isinstance(following, dict):
            return
        inner = following
    inner[last] = value
