"""Does a job whose reward fails learn as well as one whose reward does not, on as many good verdicts?

    python benchmarks/faulty_reward.py [--steps 120] [--groups 64] [--warm DIR] [--seeds 1] [--out FILE.json]

The quickstart's job from its warm start, twice a seed. `faulty`: groups of 8 and a reward that raises on 20 %
of the calls and hangs on 5 % of them, drawn from the bytes of each episode, its id among them; what gets no
score is masked. `clean`: groups of 6 and the same reward without faults, so that both train on as many
verdicts. Compared are the mean rewards of the last third of the steps, some 15,000 episodes of training
problems each; beside them stands the held-out accuracy at the end, of 512 problems judged without faults, and
its 95 % interval.

Both run at a `max_staleness` of 1. A job whose trainer waits for rewards trains data as old as its bound
allows, whether the rewards hang or are slow, and what that costs is another question.

Ends with status 1 when the faulty jobs' late rewards are lower, over all seeds, than two standard errors of
the difference allow, when one of them did not learn, or trained an episode without a score, or when the
terminal or the figures do not say why episodes were lost.
`--warm` names the folder of a `make quickstart` (or a seed's folder of `--keep`) to take the warm start from;
without it one is made (a minute or two).
"""

from __future__ import annotations

import argparse
import io
import json
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from areal_async.cli.quickstart.main import prepare
from areal_async.config.load import load_job
from areal_async.runner.run_job import run_job

FAILS, HANGS = 0.20, 0.05
GROUP_SIZE = 8
GOOD_SIZE = round(GROUP_SIZE * (1 - FAILS - HANGS))
KINDS = ("score", "error", "timeout", "abstain")
REWARD = f"""
import hashlib
import time

from reward_service.sdk import RewardInput, reward
from reward_service.verifiers.arithmetic import arithmetic


@reward
def faulty(given: RewardInput):
    if given.extra_info["split"] != "train":
        return arithmetic(given)
    draw = int.from_bytes(hashlib.blake2b(given.blob, digest_size=4).digest(), "little") / 2**32
    if draw < {HANGS}:
        time.sleep(3600)
    if draw < {HANGS + FAILS}:
        raise RuntimeError("the grader lost its connection")
    return arithmetic(given)
"""


def warm_start(folder: Path, warm: Path | None, seed: int) -> None:
    """The quickstart's files and warm model in `folder`."""
    prepare(folder / "files", seed)
    (folder / "files" / "faulty.py").write_text(REWARD, encoding="utf-8")
    if warm is not None:
        shutil.copytree(warm / "quickstart-warm" / "model", folder / "quickstart-warm" / "model")
        return
    job = load_job(folder / "files" / "warm_start.yaml", [f"seed={seed}"])
    run_job(job, overwrite=True, plain=True, console=Console(stderr=True))


def overrides(name: str, options: argparse.Namespace, seed: int) -> list[str]:
    common = [
        f"job={name}",
        f"seed={seed}",
        f"trainer.steps={options.steps}",
        f"buffer.batch_groups={options.groups}",
        f"buffer.max_staleness={options.staleness}",
        f"trainer.optimizer.lr={options.lr}",
        f"evaluation.every_steps={options.steps}",
        f"reward.workers={options.workers}",
        "observe.metrics_port=0",
    ]
    if name.startswith("clean"):
        return [*common, f"rollout.group_size={GOOD_SIZE}"]
    masked = "{retries: 0, then: mask}"
    return [
        *common,
        f"rollout.group_size={GROUP_SIZE}",
        "reward.name=faulty.py:faulty",
        f"reward.timeout_s={options.timeout_s}",
        f"reward.on_error={masked}",
        f"reward.on_timeout={masked}",
        "reward.min_scored=2",
    ]


def rewards_of_steps(metrics: Path) -> list[float]:
    rows = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return [row["reward_mean"] for row in rows if row["kind"] == "step"]


def run(folder: Path, name: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One job; its summary and what its terminal said."""
    screen = io.StringIO()
    job = load_job(folder / "files" / "train.yaml", overrides(name, options, seed))
    summary = run_job(job, overwrite=True, plain=True, console=Console(file=screen, width=200)).summary
    counted = summary["transitions"]
    lost = {kind: counted.get(f"episode_masked:{kind}", 0) for kind in ("error", "timeout")}
    rewards = rewards_of_steps(folder / name / "metrics.jsonl")
    late = rewards[-len(rewards) // 3 :]
    return {
        "name": name,
        "reward_first": statistics.mean(rewards[: len(late)]),
        "reward_late": statistics.mean(late),
        "reward_late_error": statistics.stdev(late) / math.sqrt(len(late)),
        "accuracy_start": summary["accuracy_start"],
        "accuracy_end": summary["accuracy_end"],
        "interval": summary["accuracy_interval"],
        "steps": summary["steps"],
        "wall_s": summary["wall_s"],
        "scores": counted.get("verdict:score", 0),
        "episodes_trained": summary["episodes_trained"],
        "episodes_masked": lost,
        "verdicts": {
            kind: counted.get(f"verdict:{kind}", 0) for kind in ("score", "error", "timeout", "abstain")
        },
        "groups_dropped": {name: n for name, n in counted.items() if name.startswith("dropped:")},
        "said": summary["no_scores"],
        "screen": [line for line in screen.getvalue().splitlines() if "masked" in line or "no score" in line][
            -3:
        ],
    }


def difference(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> tuple[float, float]:
    """Late reward of the faulty jobs less that of the clean ones, mean over the seeds, and its standard error
    from the scatter of the steps."""
    mean = statistics.mean(faulty["reward_late"] - clean["reward_late"] for clean, faulty in pairs)
    errors = [row["reward_late_error"] for pair in pairs for row in pair]
    return mean, math.hypot(*errors) / len(pairs)


def problems(faulty: dict[str, Any]) -> list[str]:
    """What is not as it should be with one job, in words."""
    found = []
    start, end = faulty["accuracy_start"], faulty["accuracy_end"]
    if faulty["interval"][0] <= start:
        found.append(f"faulty did not learn: {start:.3f} → {end:.3f} {faulty['interval']}")
    if faulty["episodes_trained"] > faulty["scores"]:
        found.append(f"{faulty['episodes_trained']} episodes trained on {faulty['scores']} scores")
    calls = sum(faulty["verdicts"].values())
    for kind, share in (("error", FAILS), ("timeout", HANGS)):
        seen = faulty["verdicts"][kind] / calls
        if not 0.7 * share < seen < 1.3 * share:
            found.append(f"{seen:.1%} of the verdicts are {kind}, not about {share:.0%}")
        if not any(name.split(":")[0] == kind for name in faulty["said"]):
            found.append(f"nothing is said of the verdicts {kind}")
    if not faulty["screen"]:
        found.append("the terminal does not say what was lost")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--groups", type=int, default=64, help="groups in one step")
    parser.add_argument("--staleness", type=int, default=1, help="buffer.max_staleness")
    parser.add_argument("--workers", type=int, default=8, help="scoring processes")
    parser.add_argument("--timeout-s", type=float, default=0.3)
    parser.add_argument("--lr", type=float, default=1.2e-4)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--warm", type=Path, help="folder with quickstart-warm/model")
    parser.add_argument("--keep", type=Path, help="folder for the runs; without it they are thrown away")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    pairs, found = [], []
    with tempfile.TemporaryDirectory() as name:
        for seed in range(options.seeds):
            folder = (options.keep or Path(name)) / f"seed-{seed}"
            warm_start(folder, options.warm, seed)
            clean, faulty = (run(folder, f"{kind}-{seed}", options, seed) for kind in ("clean", "faulty"))
            found += problems(faulty)
            pairs.append((clean, faulty))
            for row in (clean, faulty):
                print(json.dumps(row), flush=True)
    less, error = difference(pairs)
    print(f"late reward, faulty less clean: {less:+.4f} ± {error:.4f}")
    if less < -2 * error:
        found.append(f"the faulty jobs learn less: {less:+.4f} ± {error:.4f} in the late reward")
    result = {
        "command": " ".join(["python", "benchmarks/faulty_reward.py", *sys.argv[1:]]),
        "fails": FAILS,
        "hangs": HANGS,
        "late_reward_difference": {"mean": less, "standard_error": error},
        "rows": [row for pair in pairs for row in pair],
        "problems": found,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for problem in found:
        print(f"NOT AS IT SHOULD BE: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
