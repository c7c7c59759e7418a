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
from typing import Any, Literal

from areal_async.errors import ArealError
from areal_async.registry import REWARDS

Kind = Literal["plain", "batch", "group"]

N_TASKS = 64
GROUP_SIZE = 8
MODEL = Path("runs", "quickstart-warm", "model")
"""Where `areal-async quickstart` leaves a model that can add a little."""


class RewardFilesError(ArealError):
    """The files of a new reward cannot be made: the text says why, and what to do."""


def write_reward_files(name: str, parent: Path, kind: Kind) -> Path:
    """Make the folder `parent/name` and return it. Raises `RewardFilesError`."""
    _check_name(name)
    folder = parent / name
    texts = {
        f"{name}.py": SOURCES[kind].replace("NAME", name),
        f"test_{name}.py": TESTS[kind].replace("NAME", name),
        "tasks.jsonl": "".join(json.dumps(row) + "\n" for row in task_rows(kind)),
        "job.yaml": _job(name, folder, kind),
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


def task_rows(kind: Kind) -> list[dict[str, Any]]:
    """Sums of two numbers, with answers as a model might give them: right, wrong, too long, in turn none."""
    rng = random.Random(0)
    rows = []
    for _ in range(N_TASKS):
        left, right = rng.randint(10, 99), rng.randint(10, 99)
        carries = left % 10 + right % 10 > 9
        answers = [_answer(rng, left + right) for _ in range(GROUP_SIZE)]
        rows.append(
            {
                "data_source": "sums/carry" if carries else "sums/plain",
                "prompt": f"{left}+{right}=",
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(left + right)},
                "response": answers if kind == "group" else answers[0],
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


def _job(name: str, folder: Path, kind: Kind) -> str:
    model = Path(os.path.relpath(MODEL, folder)).as_posix()
    runs = Path(os.path.relpath(MODEL.parts[0], folder)).as_posix()
    scope = "\n  scope: group" if kind == "group" else ""
    job_name = name.lower()
    return JOB.format(job=job_name, runs=runs, model=model, name=name, scope=scope, group_size=GROUP_SIZE)


_HEAD = '''"""The reward NAME. `areal-async reward test NAME.py:NAME --data tasks.jsonl` tries it."""

from areal_async import Abstain, RewardInput, Score, reward

'''

SOURCES: dict[Kind, str] = {
    "plain": _HEAD
    + '''
@reward
def NAME(given: RewardInput, *, longest: int = 20) -> Score | Abstain:
    """1 when the answer's last word is the ground truth and the answer has at most `longest` characters."""
    if given.ground_truth is None:
        return Abstain("the task has no ground truth")
    words = given.response.split()
    right = bool(words) and words[-1] == str(given.ground_truth)
    short = len(given.response) <= longest
    return Score(float(right and short), {"right": right, "short": short})
''',
    "batch": _HEAD
    + '''
@reward(batch=64)
def NAME(given: list[RewardInput], *, longest: int = 20) -> list[Score | Abstain]:
    """Of up to 64 episodes a call: 1 when the answer's last word is the ground truth and the answer has at
    most `longest` characters."""
    return [judge(one, longest) for one in given]


def judge(given: RewardInput, longest: int) -> Score | Abstain:
    if given.ground_truth is None:
        return Abstain("the task has no ground truth")
    words = given.response.split()
    right = bool(words) and words[-1] == str(given.ground_truth)
    short = len(given.response) <= longest
    return Score(float(right and short), {"right": right, "short": short})
''',
    "group": '''"""The reward NAME. `areal-async reward test NAME.py:NAME --data tasks.jsonl` tries it."""

from areal_async import RewardInput, Score, reward


@reward(scope="group")
def NAME(given: list[RewardInput], *, bonus: float = 0.2) -> list[Score]:
    """Of all episodes of a group: 1 for the ground truth as the last word, and `bonus` for the shortest of
    those."""
    right = [one.response.split()[-1:] == [str(one.ground_truth)] for one in given]
    lengths = [len(one.response) for one in given]
    shortest = min((length for length, is_right in zip(lengths, right) if is_right), default=0)
    return [
        Score(is_right * (1 + bonus * (length == shortest)), {"right": is_right})
        for length, is_right in zip(lengths, right)
    ]
''',
}

_TEST_HEAD = '''"""`python -m pytest` runs these; a reward is a plain function."""

from pathlib import Path

from areal_async import Abstain, RewardInput, load_reward

NAME = load_reward(f"{Path(__file__).with_name('NAME.py')}:NAME")
'''

TESTS: dict[Kind, str] = {
    "plain": _TEST_HEAD
    + """

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
""",
    "batch": _TEST_HEAD
    + """

def test_each_episode_of_a_call_gets_its_own_result():
    right = RewardInput(response="57", ground_truth="57")
    wrong = RewardInput(response="58", ground_truth="57")
    assert [score.value for score in NAME([right, wrong, right])] == [1.0, 0.0, 1.0]


def test_a_long_answer_gets_nothing_although_it_is_right():
    (score,) = NAME([RewardInput(response="after some thought, it is 57", ground_truth="57")], longest=10)
    assert score.value == 0.0
    assert score.components == {"right": True, "short": False}


def test_a_task_without_ground_truth_is_not_judged():
    assert isinstance(NAME([RewardInput(response="57")])[0], Abstain)
""",
    "group": _TEST_HEAD.replace("Abstain, ", "")
    + """

def values(*responses):
    return [score.value for score in NAME([RewardInput(response=r, ground_truth="57") for r in responses])]


def test_the_shortest_right_answer_gets_the_bonus():
    assert values("57", "it is 57", "58") == [1.2, 1.0, 0.0]


def test_a_group_without_a_right_answer_gets_nothing():
    assert values("58", "") == [0.0, 0.0]
""",
}

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
  name: {name}.py:{name}{scope}
evaluation:
  sampling: {{temperature: 0.0, max_new_tokens: 6}}
trainer:
  steps: 80
  micro_batch_tokens: 8192
  optimizer: {{lr: 1.2e-4, warmup_steps: 5, clip_grad_norm: 0.2}}
  objective: {{advantage: grpo, loss: ppo, correction: decoupled, prox: reuse}}
"""
