"""The files of a new reward: the function, its test, a few tasks, and a job that trains with it.

Everything works as it is written: the test passes, `areal-async reward test` has answers to judge, and the
job trains the quickstart's warmed-up model. Nothing that exists is replaced.
"""

from __future__ import annotations

import importlib.util
import json
import keyword
import os
import random
from pathlib import Path
from typing import Any

from areal_async.base.errors import ArealError
from areal_async.config.registry import REWARDS

N_TASKS = 64
GROUP_SIZE = 8
MODEL = Path("runs", "quickstart-warm", "model")
"""Where `areal-async quickstart` leaves a model that can add a little."""


class RewardFilesError(ArealError):
    """The files of a new reward cannot be made: the text says why, and what to do."""


def write_reward_files(name: str, parent: Path) -> Path:
    """Make the folder `parent/name` and return it. Raises `RewardFilesError`."""
    _check_name(name)
    folder = parent / name
    texts = {
        f"{name}.py": SOURCE.replace("NAME", name),
        f"test_{name}.py": TEST.replace("NAME", name),
        "tasks.jsonl": "".join(json.dumps(row) + "\n" for row in task_rows()),
        "job.yaml": _job(name, folder),
    }
    try:
        folder.mkdir(parents=True)
        for file_name, text in texts.items():
            (folder / file_name).write_text(text, encoding="utf-8")
    except FileExistsError:
        raise RewardFilesError(
            f"{folder} exists: choose another name, or another folder with --in."
        ) from None
    except OSError as error:
        raise RewardFilesError(
            f"{folder} cannot be made: {error.strerror}. Choose another with --in."
        ) from error
    return folder


def _check_name(name: str) -> None:
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        raise RewardFilesError(f"{name!r} is no name for a Python function: use letters, digits and _.")
    if name in REWARDS.names:
        raise RewardFilesError(f"{name!r} is a built-in reward: choose another name.")
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:
        raise RewardFilesError(
            f"{name!r} is the name of a Python module that is installed, which a file of that name would "
            "stand in for: choose another name."
        )


def task_rows() -> list[dict[str, Any]]:
    """Sums of two numbers, with answers as a model might give them: right, wrong, too long, in turn none."""
    rng = random.Random(0)
    rows = []
    for _ in range(N_TASKS):
        left, right = rng.randint(10, 99), rng.randint(10, 99)
        carries = left % 10 + right % 10 > 9
        rows.append(
            {
                "data_source": "sums/carry" if carries else "sums/plain",
                "prompt": f"{left}+{right}=",
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(left + right)},
                "response": _answer(rng, left + right),
            }
        )
    return rows


def _answer(rng: random.Random, total: int) -> str:
    chance = rng.random()
    if chance < 0.6:
        return str(total)
    if chance < 0.8:
        return str(total + rng.choice([-10, -1, 1, 10]))
    return f"Let me add the tens, then the ones: that is {total}" if chance < 0.95 else ""


def _job(name: str, folder: Path) -> str:
    model = Path(os.path.relpath(MODEL, folder)).as_posix()
    runs = Path(os.path.relpath(MODEL.parts[0], folder)).as_posix()
    return JOB.format(job=name.lower(), runs=runs, model=model, name=name, group_size=GROUP_SIZE)


SOURCE = '''"""The reward NAME. `areal-async reward test NAME.py:NAME --data tasks.jsonl` tries it."""

from areal_async import Abstain, RewardInput, Score, reward


@reward
def NAME(given: RewardInput, *, longest: int = 20) -> Score | Abstain:
    """1 when the answer's last word is the ground truth and the answer has at most `longest` characters."""
    if given.ground_truth is None:
        return Abstain("the task has no ground truth")
    words = given.response.split()
    right = bool(words) and words[-1] == str(given.ground_truth)
    short = len(given.response) <= longest
    return Score(float(right and short), {"right": right, "short": short})
'''

TEST = '''"""Tests of the reward as it was made; `python -m pytest` runs them. Change them with the reward."""

from pathlib import Path

from areal_async import Abstain, RewardInput, load_reward

NAME = load_reward(f"{Path(__file__).with_name('NAME.py')}:NAME")


def test_a_right_and_short_answer_gets_one():
    assert NAME(RewardInput(response="57", ground_truth="57")).value == 1.0


def test_a_wrong_answer_gets_nothing():
    assert NAME(RewardInput(response="58", ground_truth="57")).value == 0.0


def test_a_long_answer_gets_nothing_although_it_is_right():
    score = NAME(RewardInput(response="after some thought, it is 57", ground_truth="57"), longest=10)
    assert score.value == 0.0
    assert score.components == {"right": True, "short": False}


def test_a_task_without_ground_truth_is_not_judged():
    assert isinstance(NAME(RewardInput(response="57")), Abstain)
'''

JOB = """# Trains with the reward: `areal-async run` on this file. `areal-async quickstart` makes the model.
job: {job}
run_dir: {runs}
model: {model}
tasks: {{train: tasks.jsonl}}
rollout:
  group_size: {group_size}
  max_concurrent: 256
  max_model_len: 32
  sampling: {{temperature: 0.7, max_new_tokens: 6}}
buffer:
  max_staleness: 4
  batch_groups: 32
reward:
  name: {name}.py:{name}
evaluation:
  sampling: {{temperature: 0.0, max_new_tokens: 6}}
trainer:
  steps: 80
  micro_batch_tokens: 8192
  optimizer: {{lr: 1.2e-4, warmup_steps: 5, clip_grad_norm: 0.2}}
  objective: {{advantage: grpo, loss: ppo, correction: decoupled, prox: reuse}}
"""
