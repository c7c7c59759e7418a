"""What a job's files hold, tried with what will read them, before anything is started: the model's tokenizer
on the prompts, and the job's own rewards. Each in a process of its own, so that the command line loads
neither torch nor the user's code.

Reading a file is not enough for these: a prompt is too long in tokens, a reward fails when it is imported.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from areal_async.config.errors import ConfigError, Mistake
from areal_async.config.job import JobConfig
from areal_async.config.rewardcheck import asked
from areal_async.launch.preflight import installed_mistakes
from areal_async.prompts import message_texts, prompt_ids, prompt_text
from areal_async.rewards import RewardSpec
from areal_async.tasks import TaskFileError, task_rows

MOST_ROWS = 200_000
"""Of one task file that are looked at."""
SAMPLE = 256
"""Prompts whose tokens are looked at, evenly spaced."""
TEMPLATE_TOKENS = 256
"""Allowance for what a chat template adds to a prompt."""
UNKNOWN_SHARE = 0.1
"""Of the characters of the sampled prompts: with more unknown ones the tokenizer is the wrong one."""
TRIAL_LIMIT_S = 600.0
"""For loading a tokenizer or a reward."""


def check_contents(job: JobConfig, *, source: str) -> None:
    """Raise `ConfigError` with every reason why the job would fail once it runs."""
    mistakes = [*installed_mistakes(job), *_model_mistakes(job)]
    if job.kind == "rl":
        mistakes += reward_load_mistakes(job)
    if mistakes:
        raise ConfigError(source, mistakes)


def _model_mistakes(job: JobConfig) -> list[Mistake]:
    """What `tokenizer_mistakes` finds, in a process of its own."""
    try:
        said = _answer(["areal_async.launch.contents"], job.model_dump_json().encode())
        return msgspec.json.decode(said, type=list[Mistake])
    except (TrialFailed, msgspec.DecodeError) as error:
        return [Mistake("model", f"reading the model's tokenizer failed: {error}", "Correct the model")]


class TrialFailed(Exception):
    """A process that tries something did not answer."""


def _answer(arguments: Sequence[str], given: bytes) -> bytes:
    """The last line that a module of ours prints. Raises `TrialFailed`."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", *arguments],
            input=given,
            capture_output=True,
            timeout=TRIAL_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TrialFailed(f"it takes longer than {TRIAL_LIMIT_S:g} s") from None
    if done.returncode != 0 or not done.stdout.strip():
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise TrialFailed(f"its process ended with {done.returncode} ({last:.200})")
    return done.stdout.splitlines()[-1]


def tokenizer_mistakes(job: JobConfig) -> list[Mistake]:
    """Whether the model's tokenizer and configuration load, and what is wrong with the prompts as it reads
    them."""
    from transformers import AutoConfig, AutoTokenizer  # seconds, which no other command pays

    try:
        config = AutoConfig.from_pretrained(job.model, local_files_only=True, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(job.model, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a broken file makes the library raise
        return [_not_loaded(job.model, error)]
    mistakes = []
    for field, path in (("tasks.train", job.tasks.train), ("tasks.evaluation", job.tasks.evaluation)):
        if path is not None:
            mistakes += list(
                _prompt_mistakes(job, field, path, tokenizer, getattr(config, "vocab_size", None))
            )
    return mistakes


def _not_loaded(model: Path, error: Exception) -> Mistake:
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        problem = (
            f"{model} needs code of its own, and code that comes with a model is never run: it would have "
        )
        return Mistake(
            "model", problem + "the rights of the job", "Give a model that transformers itself knows"
        )
    problem = f"transformers cannot read the configuration or tokenizer of {model} ({type(error).__name__}: "
    return Mistake("model", f"{problem}{text:.300})", "Give a complete Hugging Face model directory")


def _prompt_mistakes(
    job: JobConfig, field: str, path: Path, tokenizer: Any, vocab_size: int | None
) -> Iterator[Mistake]:
    try:
        prompts = [row["prompt"] for row in itertools.islice(task_rows(path, ("prompt",)), MOST_ROWS)]
    except TaskFileError as error:
        yield Mistake(field, str(error).rstrip("."), "Correct the file, or choose another")
        return
    spaced = prompts[:: max(1, len(prompts) // SAMPLE)]
    tokens = [prompt_ids(tokenizer, prompt) for prompt in spaced]
    flat = list(itertools.chain.from_iterable(tokens))
    largest = max(flat, default=0)
    if vocab_size is not None and largest >= vocab_size:
        yield Mistake(
            "model",
            f"its tokenizer gives the token {largest} for prompts of {path}, and the model has {vocab_size}",
            "Give the model with the tokenizer that it was trained with",
            (field,),
        )
        return
    # Some tokenizers have a token for what they do not know, and some leave it out.
    texts = [prompt_text(tokenizer, prompt) for prompt in spaced]
    known = [tokenizer.decode([token for token in ids if token != tokenizer.unk_token_id]) for ids in tokens]
    lost = 1 - sum(map(len, known)) / max(1, sum(map(len, texts)))
    if lost > UNKNOWN_SHARE:
        yield Mistake(
            field,
            f"{lost:.0%} of the characters of the prompts in {path} are unknown to the model's tokenizer",
            "Give tasks in the characters that it knows, or another model",
            ("model",),
        )
    if job.kind == "rl":
        yield from _too_long(job, field, path, tokenizer, prompts)


def _too_long(
    job: JobConfig, field: str, path: Path, tokenizer: Any, prompts: list[Any]
) -> Iterator[Mistake]:
    """Prompts that leave no room for an answer: each would fail in every worker that gets it."""
    length = job.rollout.max_model_len
    # A token is at least one byte, so only long texts have to be tokenised.
    may_be = [p for p in prompts if len(message_texts(p).encode()) + TEMPLATE_TOKENS >= length]
    lengths = [count for prompt in may_be if (count := len(prompt_ids(tokenizer, prompt))) >= length]
    if lengths:
        yield Mistake(
            field,
            f"{len(lengths)} of {len(prompts)} prompts in {path} have {length} tokens or more (the longest "
            f"{max(lengths)}), which leaves no room for an answer in rollout.max_model_len = {length}",
            "Raise rollout.max_model_len, or take them out of the file",
            ("rollout.max_model_len",),
        )


class RewardTrial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `reward_service.tools.loads` is asked: rewards to load."""

    rewards: list[RewardSpec]


def reward_load_mistakes(job: JobConfig) -> list[Mistake]:
    """What a scoring process would say of the job's own rewards, and of those inside built-in ones."""
    own = [
        (field, section)
        for field, section in asked(job.reward)
        if ".py:" in section.name or ".py:" in json.dumps(section.args, default=str)
    ]
    trial = RewardTrial([RewardSpec(s.name, dict(s.args), s.scope) for _, s in own])
    if not own:
        return []
    fix = "Correct the file"
    try:
        answer = _answer(["reward_service.tools.loads"], msgspec.json.encode(trial))
        said = msgspec.json.decode(answer, type=list[str])
    except (TrialFailed, msgspec.DecodeError) as error:
        return [Mistake(f"{own[0][0]}.name", f"the reward cannot be loaded: {error}", fix)]
    return [
        Mistake(f"{field}.name", problem.rstrip("."), fix)
        for (field, _), problem in zip(own, said, strict=True)
        if problem
    ]


if __name__ == "__main__":
    print(
        msgspec.json.encode(
            tokenizer_mistakes(JobConfig.model_validate_json(sys.stdin.buffer.read()))
        ).decode()
    )
