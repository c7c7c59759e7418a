"""Our losses beside TRL's, on the same ragged numbers: `make trl-env`, then

    python benchmarks/against_trl_losses.py

Of each loss that both have, the loss of a batch and its gradient by every log-prob (and entropy), over
`CASES` batches of answers of 1 to 12 tokens; writes the largest differences to `results/trl_losses.json`.
TRL's side is `GRPOTrainer._compute_loss` itself, which is handed the log-probs that a model would give; it
runs in TRL's own environment, by this file with `--trl`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ROOT = Path(__file__).parent.parent
TRL_PYTHON = ROOT / ".trl-env" / "bin" / "python"
RESULT = ROOT / "benchmarks" / "results" / "trl_losses.json"
CASES, ANSWERS, LONGEST, LENGTH = 200, 8, 12, 16
LIMIT_S = 300.0

TRL: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "grpo, clip-higher and dual clip": {"loss_type": "grpo", "epsilon_high": 0.28, "delta": 1.6},
    "bnpo": {"loss_type": "bnpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "gspo": {"loss_type": "grpo", "level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.08},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.5},
    "sapo": {"loss_type": "sapo"},
    "gmpo": {"trainer": "GMPOTrainer", "epsilon_low": 0.2, "epsilon_high": 0.2},
    "grpo, KL k3": {"loss_type": "grpo", "beta": 0.3},
    "bnpo, entropy": {"loss_type": "bnpo", "entropy": 0.1},
    "dapo, truncated importance sampling": {"loss_type": "dapo", "cap": 1.3},
}
"""What TRL is told, by what is compared."""
OURS: dict[str, dict[str, Any]] = {
    "grpo": {"normaliser": "sequence"},
    "grpo, clip-higher and dual clip": {
        "normaliser": "sequence",
        "loss_args": {"clip_high": 0.28, "dual_clip": 1.6},
    },
    "bnpo": {},
    "dapo": {"loss_args": {"clip_high": 0.28}},
    "dr_grpo": {"normaliser": "constant", "normaliser_args": {"length": LENGTH}},
    "gspo": {"loss": "gspo", "normaliser": "sequence", "loss_args": {"clip_low": 0.05, "clip_high": 0.08}},
    "cispo": {"loss": "cispo", "loss_args": {"clip_high": 0.5}},
    "sapo": {"loss": "sapo", "normaliser": "sequence"},
    "gmpo": {"loss": "gmpo", "normaliser": "rollout", "loss_args": {"clip_low": 0.2, "clip_high": 0.2}},
    "grpo, KL k3": {"normaliser": "sequence", "kl": {"coefficient": 0.3}},
    "bnpo, entropy": {"entropy": 0.1},
    "dapo, truncated importance sampling": {"correction": "tis", "correction_args": {"cap": 1.3}},
}


def numbers(case: int) -> dict[str, Tensor]:
    """A batch of answers, padded on the right; f32 [B, T], and one advantage for each answer."""
    generator = torch.Generator().manual_seed(case)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(ANSWERS, LONGEST, generator=generator)

    spread = (0.02, 0.3, 1.5)[case % 3]
    old = -torch.rand(ANSWERS, LONGEST, generator=generator) * 3
    lengths = torch.randint(1, LONGEST + 1, (ANSWERS, 1), generator=generator)
    return {
        "mask": (torch.arange(LONGEST)[None] < lengths).long(),
        "old": old,
        "logp": old + normal(spread),
        "ref": old + normal(spread),
        "behaviour": old + normal(spread),
        "entropy": torch.rand(ANSWERS, LONGEST, generator=generator),
        "advantage": torch.randn(ANSWERS, generator=generator) * (torch.arange(ANSWERS) != 3),
    }


def by_trl(given: dict[str, Tensor], told: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and its gradients by log-probs and entropies."""
    from trl import GRPOTrainer
    from trl.experimental.gmpo import GMPOTrainer

    logp, entropy = (given[name].clone().requires_grad_() for name in ("logp", "entropy"))
    mask = given["mask"]
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, entropy, None),
        accelerator=SimpleNamespace(
            num_processes=1, sync_gradients=False, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        args=SimpleNamespace(
            delta=told.get("delta"),
            use_bias_correction_kl=False,
            steps_per_generation=1,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
        ),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        loss_type=told.get("loss_type"),
        importance_sampling_level=told.get("level", "token"),
        epsilon_low=told.get("epsilon_low", 0.2),
        epsilon_high=told.get("epsilon_high", 0.2),
        beta=told.get("beta", 0.0),
        entropy_coef=told.get("entropy", 0.0),
        _entropy_bonus_enabled="entropy" in told,
        use_vllm="cap" in told,
        vllm_importance_sampling_correction=True,
        max_completion_length=LENGTH,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_adaptive_entropy=False,
        aux_loss_enabled=False,
    )
    inputs = {
        "prompt_ids": torch.zeros(ANSWERS, 1).long(),
        "prompt_mask": torch.ones(ANSWERS, 1).long(),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": given["advantage"],
        "old_per_token_logps": given["old"],
        "ref_per_token_logps": given["ref"],
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": (given["old"] - given["behaviour"])
        .exp()
        .clamp(max=told.get("cap", 2.0)),
    }
    kind = GMPOTrainer if "trainer" in told else GRPOTrainer
    loss = kind._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.detach(), _gradient(logp), _gradient(entropy)


def by_ours(given: dict[str, Tensor], section: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The same by `trainer_service.algorithms`, on the units alone."""
    from areal_async.config.objective import ObjectiveSection
    from trainer_service.algorithms.normalisers import Totals
    from trainer_service.algorithms.objective import Objective
    from trainer_service.algorithms.table import EpisodeTable, UnitTable
    from trainer_service.ranks import join_ranks

    keep = given["mask"].bool()
    episode = torch.arange(ANSWERS)[:, None].expand(-1, LONGEST)[keep]
    lengths = given["mask"].sum(1)
    nothing = torch.zeros(ANSWERS, dtype=torch.float64)
    units = UnitTable(
        {
            "prox": given["old"][keep],
            "ref": given["ref"][keep],
            "behaviour": given["behaviour"][keep],
            "advantage": given["advantage"][episode],
            "mask": torch.ones(len(episode), dtype=torch.bool),
            "episode": episode,
            "row_units": lengths[episode],
        },
        EpisodeTable(nothing, torch.arange(ANSWERS), nothing > 0),
        None,
        join_ranks(0, 1),
    )
    objective = Objective(ObjectiveSection(**{"correction": "none", **section}), minibatches=2)
    logp, entropy = (given[name].clone().requires_grad_() for name in ("logp", "entropy"))
    found = objective.statistic(logp[keep], units)
    if found is not None:
        mean = units.mean_of_episode(found.detach()).float()
        size = units.by_episode(torch.ones_like(found))[units.episode].float()
        units = units.with_columns(episode_mean=mean + found - found.detach(), episode_units=size)
    terms = objective.terms({"logp": logp[keep], "entropy": entropy[keep]}, units)
    totals = Totals(lengths, ANSWERS, int(lengths.sum()), ANSWERS)
    loss = (terms.loss * objective.coefficients(units, totals)).sum()
    loss.backward()
    return loss.detach(), _gradient(logp), _gradient(entropy)


def _gradient(values: Tensor) -> Tensor:
    return torch.zeros_like(values) if values.grad is None else values.grad


PARTS = ("loss", "by_logp", "by_entropy")


def write_trls(out: Path, cases: int) -> None:
    found = {
        f"{name}/{case}/{part}": value
        for name, told in TRL.items()
        for case in range(cases)
        for part, value in zip(PARTS, by_trl(numbers(case), told), strict=True)
    }
    save_file(found, out)


def compare(cases: int = CASES, trl_python: Path = TRL_PYTHON) -> dict[str, dict[str, float]]:
    """The largest absolute differences, by what is compared: of the loss, and of the gradients as a share of
    the batch's largest. Raises `SystemExit` without TRL's environment."""
    if not trl_python.exists():
        raise SystemExit("TRL has no environment yet: run make trl-env")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "trl.safetensors"
        subprocess.run([trl_python, __file__, "--trl", out, str(cases)], check=True, timeout=LIMIT_S)
        theirs = load_file(out)
    found = {}
    for name, section in OURS.items():
        largest = dict.fromkeys(PARTS, 0.0)
        for case in range(cases):
            for part, ours in zip(PARTS, by_ours(numbers(case), section), strict=True):
                wanted = theirs[f"{name}/{case}/{part}"]
                scale = 1.0 if part == "loss" else max(1e-6, float(wanted.abs().max()))
                largest[part] = max(largest[part], float((ours - wanted).abs().max()) / scale)
        found[name] = largest
    return found


def main() -> None:
    found = compare()
    print(f"{'':<38}" + "".join(f"{part:>12}" for part in PARTS))
    for name, largest in found.items():
        print(f"{name:<38}" + "".join(f"{value:12.1e}" for value in largest.values()))
    content = {
        "command": "python benchmarks/against_trl_losses.py",
        "trl": "1.16.0",
        "cases": CASES,
        "largest_differences": found,
    }
    RESULT.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trl"]:
        write_trls(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
