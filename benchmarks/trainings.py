"""Whether each training beside plain RL improves what it is measured by, on the quickstart's sums.

    python benchmarks/trainings.py [--files runs/trainings-files] [--only dpo,prime] [--out FILE.json]

Run `make quickstart` first: its tasks and its warm start, which answers 42 to 45 % of the held-out sums, lie
in the folder of `--files`. From there it is trained on chats, on preferences with each loss, to reward models
from pairs and from scores, by online DPO, by distillation from a teacher (the same model trained on by SFT),
by PRIME, and by PPO with the reward model of the recipe `recipes/rm-ppo`. Everything runs as a job of
its own by `areal-async run`. Two numbers are those before and after, of the held-out file; of an RL job's
other figures the means of the first and of the last five steps: `kl_teacher` is the policy's divergence from
its teacher in nats per token, `process_auc` the share of pairs of a right and a wrong fresh episode that the
process reward model orders rightly before it learns from them. `accuracy` of `ppo` is the mean of the true
reward.
"""

from __future__ import annotations

import argparse
import json
import random
import runpy
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from areal_async.service.record import read_run_log

RECIPES = Path(__file__).parents[1] / "recipes"
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
EDGE = 5
OPTIMIZER = {"lr": 3e-4, "warmup_steps": 10}
ROLLOUT = {
    "engine": "local",
    "group_size": 8,
    "max_concurrent": 256,
    "max_model_len": 32,
    "sampling": {"temperature": 1.0, "max_new_tokens": 6},
}
RL = {
    "rollout": ROLLOUT,
    "buffer": {"max_staleness": 1, "batch_groups": 32},
    "reward": {"name": "exact_match"},
    "evaluation": {"every_steps": 20, "sampling": {"temperature": 0.0, "max_new_tokens": 6}},
}


def write_data(files: Path) -> None:
    """The recipe's files, and sums in the other forms."""
    subprocess.run([sys.executable, str(RECIPES / "rm-ppo" / "prepare.py"), "--out", str(files)], check=True)
    rng = random.Random(1)
    for name in ("train", "held_out"):
        slip = runpy.run_path(str(RECIPES / "dpo" / "prepare.py"))["wrong"]
        forms: dict[str, list[dict[str, Any]]] = {"chats": [], "sums": [], "labelled": [], "scored": []}
        for task in map(json.loads, (files / f"{name}.jsonl").read_text().splitlines()):
            prompt, answer, more = task["prompt"], task["reward_model"]["ground_truth"], rng.randint(10, 99)
            said = (prompt, answer, f"+{more}=", str(int(answer) + more))
            roles = ("user", "assistant", "user", "assistant")
            turns = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
            forms["chats"].append({"messages": turns})
            other = str(slip(int(answer), rng))
            forms["sums"].append({"prompt": prompt, "chosen": answer, "rejected": other})
            for good, given in ((True, answer), (False, other)):
                forms["labelled"].append({"prompt": prompt, "completion": given, "label": good})
        for pair in map(json.loads, (files / f"{name}_pairs.jsonl").read_text().splitlines()):
            digits = pair["chosen"]
            score = sum(digit in "02468" for digit in digits) / len(digits)
            forms["scored"].append({"prompt": pair["prompt"], "completion": digits, "score": score})
        for form, rows in forms.items():
            lines = (json.dumps(row) + "\n" for row in rows)
            (files / f"{name}_{form}.jsonl").write_text("".join(lines))
    shutil.copytree(files.parent / "quickstart-warm" / "model", files / "chats", dirs_exist_ok=True)
    (files / "chats" / "chat_template.jinja").write_text(TEMPLATE)


def from_files(kind: str, rows: str, steps: int, *, model: str, **section: Any) -> dict[str, Any]:
    lr = section.pop("lr", OPTIMIZER["lr"])
    return {
        "kind": kind,
        "model": model,
        "tasks": {"train": f"train{rows}.jsonl", "evaluation": f"held_out{rows}.jsonl"},
        "trainer": {"steps": steps, "torch_threads": 1, "optimizer": {**OPTIMIZER, "lr": lr}},
        kind: {"batch_size": 64, "evaluate_every": 25, **section},
    }


def by_rl(steps: int, objective: Mapping[str, Any], **trainer: Any) -> dict[str, Any]:
    section = {
        "steps": steps,
        "torch_threads": 1,
        "optimizer": {"lr": 1e-4, "warmup_steps": 30, "clip_grad_norm": 0.2},
        "objective": objective,
        **trainer,
    }
    tasks = {"train": "train.jsonl", "evaluation": "held_out.jsonl"}
    return {**RL, "model": "../quickstart-warm/model", "tasks": tasks, "trainer": section}


WARM, TEACHER, SCORER = "../quickstart-warm/model", "../teacher/model", "../reward-model/model"
SUM = {"normaliser": "constant", "normaliser_args": {"length": 1}}
SEEDS = (1, 2, 3)  # Of PRIME and of its control
JOBS: dict[str, dict[str, Any]] = {
    "teacher": from_files("sft", "", 600, model=WARM, lr=1e-3, batch_size=256, stop_between=[0.85, 1.0]),
    "sft-chats": from_files("sft", "_chats", 150, model="chats", lr=1e-3),
    "dpo": from_files("preference", "_sums", 100, model=WARM, beta=0.1),
    "ipo": from_files("preference", "_sums", 100, model=WARM, loss="ipo", beta=0.1),
    "hinge": from_files("preference", "_sums", 100, model=WARM, loss="hinge", beta=0.1),
    "orpo": from_files("preference", "_sums", 100, model=WARM, loss="orpo", beta=0.5),
    "kto": from_files("preference", "_labelled", 80, model=WARM, loss="kto", beta=0.3, batch_size=256),
    "reward-model": from_files("reward_model", "_pairs", 100, model=WARM, lr=1e-3),
    "reward-scores": from_files("reward_model", "_scored", 100, model=WARM, lr=1e-3),
    "online-dpo": by_rl(
        60, {"advantage": "dpo", "loss": "reinforce", "correction": "none", "allow_uncorrected": True, **SUM}
    ),
    "distill": by_rl(60, {"advantage": "distill"}, teacher={"model": TEACHER}),
    **{
        f"prime-{seed}": by_rl(
            60,
            {"advantage": "prime", "advantage_args": {"beta": 0.005}},
            process_reward={"optimizer": {"lr": 1e-4}},
        )
        | {"seed": seed}
        for seed in SEEDS
    },
    # The same without the process reward model: what is left of PRIME is its leave-one-out advantage.
    **{f"prime-control-{seed}": by_rl(60, {"advantage": "rloo"}) | {"seed": seed} for seed in SEEDS},
    "ppo": yaml.safe_load((RECIPES / "rm-ppo" / "tiny.yaml").read_text()),
}
JOBS["ppo"]["model"], JOBS["ppo"]["reward"]["args"]["model"] = WARM, SCORER
JOBS["ppo"]["trainer"]["critic"]["model"] = SCORER
JOBS["ppo"]["trainer"]["steps"], JOBS["ppo"]["buffer"]["batch_groups"] = 60, 64


def run_once(files: Path, name: str) -> dict[str, Any]:
    """The figures of one job."""
    job = {"seed": 0} | JOBS[name] | {"job": name, "run_dir": ".."}
    (files / f"{name}.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
    begun_s = time.monotonic()
    command = [sys.executable, "-m", "areal_async.cli.main", "run", str(files / f"{name}.yaml")]
    subprocess.run([*command, "--overwrite", "--plain"], check=True, stdout=subprocess.DEVNULL)
    records = read_run_log(files.parent / name / "metrics.jsonl")
    found: dict[str, Any] = {"seconds": round(time.monotonic() - begun_s, 1)}
    if job.get("kind", "rl") != "rl":
        measured = [record for record in records if "held_out_loss" in record]
        found["steps"] = measured[-1]["step"]
        for figure in ("held_out_loss", "accuracy", "margin"):
            if figure in measured[0]:
                found[figure] = [round(record[figure], 4) for record in (measured[0], measured[-1])]
        return found
    steps = [record for record in records if record["kind"] == "step"]
    found["steps"] = len(steps)
    evaluated = sorted(
        (record["version"], record["accuracy"]) for record in records if record["kind"] == "evaluation"
    )
    found["accuracy"] = [round(evaluated[0][1], 4), round(evaluated[-1][1], 4)]
    figures = {
        "reward_mean": lambda record: record["reward_mean"],
        "kl_teacher": lambda record: record["correction"].get("kl_teacher"),
        "process_auc": lambda record: record.get("process_reward", {}).get("auc"),
        "process_loss": lambda record: record.get("process_reward", {}).get("loss"),
    }
    for figure, of in figures.items():
        values = [value for record in steps if (value := of(record)) is not None]
        if values:
            found[figure] = [round(statistics.mean(part), 4) for part in (values[:EDGE], values[-EDGE:])]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--files", type=Path, default=Path("runs/trainings-files"))
    parser.add_argument("--only", default=",".join(JOBS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not (options.files / "chats").exists():
        write_data(options.files)
    rows = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    for name in options.only.split(","):
        rows[name] = run_once(options.files, name)
        print(name, json.dumps(rows[name]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
