"""The folder of a user's task: its data and the script that creates them, a reward, and a job.

The files contain an example task, which runs unchanged and which the user replaces. If the user names no
model, the folder also gets a tiny model and a job that warms it up. The tiny model has random weights and a
token for each ASCII character. No existing file is replaced."""

from __future__ import annotations

import os
import re
import runpy
import string
from pathlib import Path
from tempfile import TemporaryDirectory

from areal_async.data.tasks import DataError
from areal_async.models.files import no_folder
from areal_async.storage.hub import hub_url
from areal_async.storage.urls import is_url

MAKER = "make_data.py"
BASE, WARM, RL = "base", "warm_start.yaml", "job.yaml"
TINY_POSITIONS = 256
REPLY_END = "{{ eos_token if m['role'] == 'assistant' else '=' }}"
TINY_TEMPLATE = f"{{% for m in messages %}}{{{{ m['content'] }}}}{REPLY_END}{{% endfor %}}"
"""Chat template of the tiny model. A prompt ends with `=`, like a text prompt."""
SPACES = {" ": "Ġ", "\n": "Ċ", "\t": "ĉ"}  # In the spelling of Qwen2's pre-tokenizer


def write_task_files(folder: Path, model: str | None) -> list[str]:
    """Create the folder, and return the next commands. Raises `DataError` if it is not empty."""
    local = model is not None and Path(model).expanduser().is_dir()
    if not (model is None or local or is_url(model) or hub_url(model, Path(), is_data=False)):
        raise DataError(
            f"--model: {no_folder(Path(model))}. Give a model's folder, or owner/name of the hub."
        )
    named = Path(os.path.relpath(Path(model).expanduser(), folder)).as_posix() if model and local else model
    job = TINY_JOB | {"model": f"runs/{job_name(folder)}-warm/model"} if model is None else MODEL_JOB
    texts = {
        MAKER: DATA.replace("PROMPT", TINY_PROMPT if model is None else CHAT_PROMPT),
        "reward.py": REWARD,
        RL: JOB.format_map({"name": job_name(folder), "model": named} | job),
    }
    if model is None:
        texts[WARM] = WARM_JOB.replace("NAME", job_name(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if there := sorted(each.name for each in folder.iterdir()):
            raise DataError(f"{folder} holds {there[0]} already. Name a folder that is new or empty.")
        # Files are created elsewhere first, so an interruption leaves no incomplete folder.
        with TemporaryDirectory(dir=folder.absolute().parent, prefix=f".{folder.name}-") as place:
            made = Path(place, "made")
            made.mkdir()
            for name, text in texts.items():
                (made / name).write_text(text, encoding="utf-8")
            runpy.run_path(str(made / MAKER), run_name="__main__")
            if model is None:
                _write_tiny(made / BASE)
            made.replace(folder.absolute())
    except OSError as error:
        raise DataError(f"{folder} cannot be made: {error.strerror}. Name another.") from error
    shown = folder.as_posix()
    steps = [
        f"areal-async reward test {shown}/reward.py:score --data {shown}/train.jsonl",
        f"areal-async validate {shown}/{RL}",
        f"areal-async run {shown}/{RL}",
    ]
    return steps[:1] + ([f"areal-async run {shown}/{WARM}"] if model is None else []) + steps[1:]


def job_name(folder: Path) -> str:
    """Return the folder's name, reduced to the characters that a job name may have."""
    return re.sub(r"[^a-z0-9-]", "-", folder.absolute().name.lower()).strip("-")[:40] or "own-task"


def _write_tiny(folder: Path) -> None:
    from areal_async.cli.quickstart.model import make_tokenizer, write_model  # Imports torch, which is slow

    signs = string.digits + string.ascii_letters + string.punctuation + "".join(SPACES.values())
    tokenizer = make_tokenizer(signs)
    tokenizer.chat_template = TINY_TEMPLATE
    write_model(folder, 0, tokenizer, TINY_POSITIONS)


DATA = '''"""Makes train.jsonl and held_out.jsonl: `python make_data.py`. Change `question` and `solve`.

For a data set that is there already, convert its rows here (docs/your-task.md#convert-a-data-set).
"""

import json
import random
from pathlib import Path

LETTERS = "abcdefgh"
N_TRAIN, N_HELD_OUT = 16000, 256


def question(rng):
    """What one task is about, at random."""
    return "".join(rng.choices(LETTERS, k=rng.randint(2, 5)))


def solve(word):
    """The right answer: each letter becomes the next one of the alphabet."""
    return "".join(chr(ord(letter) + 1) for letter in word)


def prompt(word):
    """What the model is given."""
    PROMPT


def row(word, index, split):
    return {
        "data_source": "own_task",
        "prompt": prompt(word),
        "ability": "",
        "reward_model": {"style": "rule", "ground_truth": solve(word)},
        "extra_info": {"split": split, "index": index},
        "response": random.Random(index).choice([solve(word), word]),  # for `reward test` alone
    }


def main():
    rng, words = random.Random(0), {}
    for _ in range(100 * (N_TRAIN + N_HELD_OUT)):
        words[question(rng)] = None  # each question once
        if len(words) == N_TRAIN + N_HELD_OUT:
            break
    held_out = max(1, len(words) * N_HELD_OUT // (N_TRAIN + N_HELD_OUT))
    order = rng.sample(list(words), len(words))  # short ones are found first
    parts = {"held_out": order[:held_out], "train": order[held_out:]}
    for split, chosen in parts.items():
        lines = [json.dumps(row(word, index, split)) + "\\n" for index, word in enumerate(chosen)]
        Path(__file__).with_name(f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
'''
TINY_PROMPT = 'return f"{word}="'
CHAT_PROMPT = """asked = "Replace each letter of this word by the next one of the alphabet, nothing else."
    return [{"role": "user", "content": f"{asked}\\n{word}"}]"""

REWARD = '''"""How an answer is scored; try it with `areal-async reward test reward.py:score --data FILE`."""

from areal_async import Abstain, RewardInput, Score, reward


@reward
def score(given: RewardInput) -> Score | Abstain:
    """1 for the right answer; else up to 0.5: half the share of characters in their right place."""
    if not given.ground_truth:
        return Abstain("the task has no ground truth")
    answer, truth = given.response.strip(), str(given.ground_truth)
    exact = answer == truth
    right = sum(said == meant for said, meant in zip(answer, truth, strict=False))
    share = right / max(len(answer), len(truth))
    return Score(1.0 if exact else share / 2, {"exact": exact, "share": share})
'''

WARM_JOB = """# First job: teach the random model in base/ a little of the task, for RL to go on from.
# A model that can already answer now and then needs no such job.
job: NAME-warm
kind: sft
seed: 1
model: base
tasks: {train: train.jsonl, evaluation: held_out.jsonl}
trainer:
  steps: 2000
  micro_batch_tokens: 8192
  torch_threads: 1
  optimizer: {lr: 1.0e-3, warmup_steps: 20, clip_grad_norm: 1.0}
sft:
  batch_size: 128
  evaluate_every: 1
  stop_between: [0.25, 0.4]             # right answers of held-out tasks
"""

JOB = """# {about}Asynchronous RL with the reward in reward.py.
job: {name}
seed: 1
# A folder, or a model of the hub: Qwen/Qwen2.5-0.5B-Instruct
model: {model}
tasks: {{train: train.jsonl, evaluation: held_out.jsonl}}
rollout:
  group_size: 8
  max_concurrent: {concurrent}
  max_model_len: {length}                     # prompt and answer, in tokens
  sampling: {{temperature: 1.0, max_new_tokens: {answer}}}
  # template_args: {{enable_thinking: false}}   # for chat templates that take it
  # device: cuda                        # and trainer.device, where there are GPUs
buffer: {{max_staleness: {staleness}, batch_groups: {groups}}}
reward:
  name: reward.py:score
  timeout_s: 5
trainer:
  steps: {steps}
  micro_batch_tokens: 8192
  optimizer: {{{optimizer}}}
evaluation: {{every_steps: {every}}}
"""
Values = dict[str, object]
TINY_JOB: Values = {"about": "Second job: ", "concurrent": 512, "length": 64, "answer": 12, "every": 25}
TINY_JOB |= {"staleness": 1, "groups": 64, "steps": 150}
TINY_JOB["optimizer"] = "lr: 4.0e-4, warmup_steps: 20, schedule: linear, clip_grad_norm: 0.2"
MODEL_JOB: Values = {"about": "", "concurrent": 64, "length": 512, "answer": 128, "every": 20}
MODEL_JOB |= {"staleness": 2, "groups": 16, "steps": 100}
MODEL_JOB["optimizer"] = "lr: 1.0e-6, warmup_steps: 10, clip_grad_norm: 1.0"
"""Values of the job for the tiny model, and for a user's model."""
