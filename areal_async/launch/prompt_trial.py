"""A trial of the model's tokenizer on the prompts of a job, in a separate process.

    python -P -m areal_async.launch.prompt_trial < JOB.json      prints the mistakes as a list in JSON

The preflight (`preflight.py`) starts it, so that the command line loads no transformers. Torch is hidden from
transformers unless prompts have images: a tokenizer does not need torch, whose import would take most of the
process's time."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from areal_async.base.mistakes import Mistake
from areal_async.base.records import Task
from areal_async.config.files import image_mistake
from areal_async.config.job import JobConfig
from areal_async.data.chats import ChatError, answer_ids, whole_ids
from areal_async.data.examples import Example, read_examples, tools_of
from areal_async.data.tasks import (
    IMAGES,
    TaskFileError,
    TaskTable,
    drawn,
    spread_rows,
    task_file,
    task_row,
)
from areal_async.models.answers import (
    GENERATION_CONFIG,
    TEMPLATE,
    TOKENIZER,
    end_ids,
    end_sources,
    turn_closing,
)
from areal_async.models.files import reads_images
from areal_async.models.prompts import (
    message_texts,
    prompt_ids,
    prompt_text,
    text_ids,
    with_plain_marks,
    with_template_args,
)
from areal_async.models.tokenizer import keep_class

if TYPE_CHECKING:
    from areal_async.models.vision import ImageProcessor

MOST_ROWS = 200_000  # Most rows that are checked in one task file
MOST_IMAGE_ROWS = 2_000  # First rows of a file with images that are checked, because each image is read
SAMPLE = 256  # Number of randomly drawn prompts whose tokens are checked
TEMPLATE_TOKENS = 256  # Tokens that a chat template may add to a prompt
UNKNOWN_SHARE = 0.1  # Share of unknown characters in sampled prompts that shows a wrong tokenizer


def tokenizer_mistakes(job: JobConfig) -> list[Mistake]:
    """Return the mistakes found in the model's tokenizer and configuration, and in the tokenized prompts."""
    from transformers import AutoConfig, AutoTokenizer  # takes seconds, so no other command imports it

    try:
        config = AutoConfig.from_pretrained(job.model, local_files_only=True, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(job.model, local_files_only=True, trust_remote_code=False)
        keep_class(job.model, tokenizer)
        tokenizer = with_template_args(tokenizer, job.rollout.template_args)
        if job.kind == "rl" and reads_images(job.model):
            tokenizer = with_plain_marks(tokenizer)
    except Exception as error:  # a broken file can make the library raise anything
        return [_not_loaded(job.model, error)]
    mistakes = [*_end_warnings(job, tokenizer)] if job.kind == "rl" else []
    for name in ("train", "evaluation"):
        if (path := getattr(job.tasks, name)) is not None:
            size = getattr(config, "vocab_size", None)
            mistakes += _prompt_mistakes(job, f"tasks.{name}", path, tokenizer, size)
    if job.kind == "rl" and job.tasks.evaluation is not None and all(each.warns for each in mistakes):
        mistakes += _overlap(job.tasks.train, job.tasks.evaluation)
    return mistakes


def _overlap(train: Path, evaluation: Path) -> Iterator[Mistake]:
    """Warn of held-out prompts that are in the training file too."""
    learned, held = ({_prompt_key(each.task) for each in _prompts(path)} for path in (train, evaluation))
    if both := learned & held:
        problem = f"{len(both)} of {len(held)} held-out prompts are in {train.name} too"
        fix = "Split again, all rows of a prompt on one side (docs/your-task.md#convert-a-data-set)"
        yield Mistake("tasks.evaluation", problem, fix, warns=True)


def _prompt_key(task: Task) -> bytes:
    """Return a key that is equal for equal prompts with equal images."""
    prompt = task.prompt
    text = prompt.strip() if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=repr)
    text += "".join(image.facts.digest for image in task.images)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _end_warnings(job: JobConfig, tokenizer: Any) -> Iterator[Mistake]:
    """Warn if the model's files, tokenizer and chat template disagree on the token that ends an answer."""
    sources, shown = end_sources(tokenizer, job.model), partial(_shown, tokenizer)
    union: set[int] = set().union(*sources.values())
    where = f"the eos_token_id in {job.model / GENERATION_CONFIG}"
    stops = job.rollout.sampling.stop
    if not union and not stops:
        problem = "nothing names a token that ends an answer: each has rollout.sampling.max_new_tokens"
        yield Mistake("model", problem, f"Give {where}, or rollout.sampling.stop", warns=True)
    named = sources[GENERATION_CONFIG]
    for who in (TOKENIZER, TEMPLATE):
        if named and (missing := sources[who] - named):
            problem = f"{who} ends an answer with {shown(missing)}, and {where} names {shown(named)} alone"
            fix = f"This job ends answers with each of them. Add {sorted(missing)} there for other programs"
            yield Mistake("model", problem, fix, warns=True)
            named |= missing
    closing = turn_closing(tokenizer)
    if closing is None:
        return
    if (end := closing.strip()) and not sources[TEMPLATE] and not any(stop in end for stop in stops):
        problem = f"the chat template ends a turn with {end!r:.80}, which is no token of its own"
        fix = f"Add that text to rollout.sampling.stop, or a template that ends turns with {shown(union)}"
        yield Mistake("model", problem, fix, warns=True)


def _shown(tokenizer: Any, ids: Collection[int]) -> str:
    return ", ".join(repr(tokenizer.decode([token])) for token in sorted(ids)) or "nothing"


def _not_loaded(model: Path, error: Exception) -> Mistake:
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        why = "code that comes with a model is never run: it would have the rights of the job"
        fix = "Give a model that transformers itself knows"
        return Mistake("model", f"{model} needs code of its own, and {why}", fix)
    problem = f"transformers cannot read the configuration or tokenizer of {model} ({type(error).__name__}: "
    return Mistake("model", f"{problem}{text:.300})", "Give a complete Hugging Face model directory")


def _prompt_mistakes(
    job: JobConfig, field: str, path: Path, tokenizer: Any, vocab_size: int | None
) -> Iterator[Mistake]:
    prompts: list[TaskPrompt] = []
    sizes: dict[str, list[int]] = {}
    try:
        if job.kind == "rl":
            prompts = [*_prompts(path)]
            if image_rows := [each for each in prompts if each.task.images]:
                tokens_of = _image_processor(job, image_rows[0].where).tokens_of
                sizes = {each.where: [tokens_of(*size) for size in each.sizes] for each in image_rows}
            some = drawn(prompts, SAMPLE)
            spelled = tokens = [_prompt_tokens(tokenizer, each) for each in some]
            texts = [prompt_text(tokenizer, each.task.prompt, each.tools) for each in some]
        else:
            examples = itertools.islice(read_examples(path, job.kind)[1], MOST_ROWS)
            chosen = drawn(list(examples), SAMPLE)
            ends = end_ids(tokenizer, job.model)
            tokens = [ids for one in chosen for ids in _answer_tokens(job, tokenizer, one, ends)]
            parts = [part for one in chosen for each in one.answers for part in (each.prompt, each.answer)]
            texts = [message_texts(part).replace("\n", "") for part in parts]
            spelled = [text_ids(tokenizer, text, special=False) for text in texts]
    except (TaskFileError, ChatError) as error:
        problem, _, fix = str(error).rstrip(".").rpartition(". ")
        yield Mistake(field, problem or fix, fix if problem else "Correct the file, or choose another")
        return
    largest = max(itertools.chain.from_iterable(tokens), default=0)
    if vocab_size is not None and largest >= vocab_size:
        problem = f"its tokenizer gives token {largest} in prompts of {path}, and the model has {vocab_size}"
        yield Mistake("model", problem, "Give the model with the tokenizer that it was trained with")
        return
    # Some tokenizers map unknown characters to a token, others omit them.
    known = [tokenizer.decode([token for token in ids if token != tokenizer.unk_token_id]) for ids in spelled]
    lost = 1 - sum(map(len, known)) / max(1, sum(map(len, texts)))
    if lost > UNKNOWN_SHARE:
        of = f"of the characters of {len(texts)} prompts, drawn at random from {path},"
        fix = "Give tasks in the characters that it knows, or another model"
        yield Mistake(field, f"{lost:.0%} {of} are unknown to the model's tokenizer", fix)
    if job.kind == "rl":
        yield from _too_long(job, field, path, tokenizer, prompts, sizes)
    if sizes:
        counts = [*itertools.chain.from_iterable(sizes.values())]
        width, height = max((size for each in prompts for size in each.sizes), key=prod)
        told = f"images of {len(sizes)} rows of {path}, the largest {width} x {height} pixels, take "
        low, high, mean = min(counts), max(counts), sum(counts) / len(counts)
        told += f"{low} tokens each" if low == high else f"{low} to {high} each, {mean:.0f} tokens on average"
        wrong = image_mistake(job, field, [(each.where, each.task) for each in prompts])
        yield wrong or Mistake(field, told, "", warns=True)


def _image_processor(job: JobConfig, where: str) -> ImageProcessor:
    """Return the processor of the job's model, with the job's bounds of an image's pixels. `where` names a
    row with images. Raises `ChatError`."""
    from areal_async.models.vision import ImageProcessor, NoImages  # loads torch

    try:
        processor = ImageProcessor(job.model)
    except NoImages as error:
        fix = "Give a model that reads images, or tasks without images"
        raise ChatError(f"{where} has images, and {error}. {fix}") from error
    try:
        processor.bound(*job.rollout.images.pixels)
    except NoImages as error:
        raise ChatError(f"rollout.images: {error}. Change rollout.images, or remove it") from error
    return processor


class TaskPrompt(NamedTuple):
    """Name of a task's row, the task, and the tool schemas for its template."""

    where: str
    task: Task
    tools: Sequence[Any]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Width and height of each image."""
        return [(image.facts.width, image.facts.height) for image in self.task.images]


def has_images(path: Path) -> bool:
    """Return whether rows of a task file may have images, by a column or field of this name."""
    with suppress(TaskFileError, OSError, ValueError):
        if (path := task_file(path)).suffix == ".parquet":
            import pyarrow.parquet as pq  # large

            return IMAGES in pq.read_schema(path).names
        with path.open("rb") as lines:
            return any(b'"images"' in line for line in itertools.islice(lines, MOST_ROWS))
    return False


def _prompts(path: Path) -> Iterator[TaskPrompt]:
    """Yield the prompts of a task file, up to a limit. Raises `TaskFileError`."""
    most = MOST_IMAGE_ROWS if has_images(path) else MOST_ROWS
    for where, row in spread_rows(path, most):
        yield TaskPrompt(where, TaskTable(path, "", [task_row(where, row)], {}).task(0), tools_of(row, where))


def _prompt_tokens(tokenizer: Any, given: TaskPrompt) -> list[int]:
    try:
        return prompt_ids(tokenizer, given.task.prompt, given.tools)
    except Exception as error:  # a template can raise anything
        raise ChatError(
            f"{given.where}: the chat template fails on its prompt ({type(error).__name__}: {error!s:.200}). "
            "Mend the row, or the template"
        ) from error


def _answer_tokens(
    job: JobConfig, tokenizer: Any, example: Example, ends: Collection[int]
) -> list[list[int]]:
    """Return the tokens of each answer of an example. Raises `ChatError`, which names the row."""
    train_on = job.sft.train_on if job.kind == "sft" else "all"
    try:
        if job.kind == "reward_model":
            return [whole_ids(tokenizer, answer) for answer in example.answers]
        return [answer_ids(tokenizer, answer, train_on=train_on, ends=ends)[0] for answer in example.answers]
    except ChatError as error:
        raise ChatError(f"{example.where}: {error}") from error


def _too_long(
    job: JobConfig,
    field: str,
    path: Path,
    tokenizer: Any,
    prompts: list[TaskPrompt],
    sizes: Mapping[str, list[int]],
) -> Iterator[Mistake]:
    """Yield a mistake if prompts leave no room for an answer. Such a prompt would fail in every worker.
    `sizes` has the tokens of each image by the name of its row."""
    length, limit = job.rollout.max_model_len, "rollout.max_model_len"
    least = length - TEMPLATE_TOKENS
    # A token has at least one byte, so only long texts are tokenized.
    may_be = (
        each
        for each in prompts
        if each.tools or each.task.images or len(message_texts(each.task.prompt).encode()) >= least
    )
    counts = []
    for each in may_be:
        images = sizes.get(each.where, [])
        # The template has one token for each image.
        text = len(prompt_ids(tokenizer, each.task.prompt, each.tools)) - len(images)
        counts.append((text + sum(images), sum(images), each.where.rpartition(", ")[2]))
    if too_long := [count for count in counts if count[0] >= length]:
        longest, of_images, place = max(too_long)
        found = f"{len(too_long)} of {len(prompts)} prompts in {path} have {length} tokens or more"
        found += f" (the longest {longest} in {place}"
        found += f", {of_images} of them for images)" if of_images else ")"
        why = f"which leaves no room for an answer in {limit} = {length}"
        fix = f"Raise {limit}, {'lower rollout.images.max_pixels, ' if of_images else ''}or take them out"
        yield Mistake(field, f"{found}, {why}", f"{fix} of the file")


if __name__ == "__main__":
    gc.disable()  # The process runs for a second or two, mostly for imports
    job = JobConfig.model_validate_json(sys.stdin.buffer.read())
    files = [path for path in (job.tasks.train, job.tasks.evaluation) if path is not None]
    if job.kind != "rl" or not any(map(has_images, files)):
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    found = tokenizer_mistakes(job)
    print(msgspec.json.encode(found).decode(), flush=True)
    os._exit(0)
