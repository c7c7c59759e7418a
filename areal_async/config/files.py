"""Rules about the files of a job: the model, the task files, the user's code, the run folder.

The checks only read. They import no user code; they look up a function in the syntax tree."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

from areal_async.base.mistakes import Mistake
from areal_async.base.records import Task
from areal_async.config.content import OF_TRAINER
from areal_async.config.dotted import get
from areal_async.config.job import JobConfig
from areal_async.config.parallel import RankGrid
from areal_async.config.parts import own_part_mistakes
from areal_async.config.registry import ADVANTAGES, CHANNELS, TOOLS, WORKFLOWS
from areal_async.config.reward_routing import Routing
from areal_async.config.rewardcheck import part_of, reward_file_mistakes, truth_fault
from areal_async.data.examples import FORMS, Form, read_examples
from areal_async.data.tasks import TaskFileError, TaskTable, read_tasks, task_file, task_row, task_rows
from areal_async.models.files import (
    INDEX,
    ONE_FILE,
    cannot_be_packed,
    is_mixture,
    looks_beyond_tokens,
    mixture_of,
    most_positions,
    no_folder,
    reads_images,
    stored_tensors,
    text_part,
    weight_files,
)

READ_WHOLE_BYTES = 16 << 20
"""Task files up to this size are checked row by row. In larger files only the first row is checked here, and
more rows by `launch/prompt_trial.py`."""
TRUTHS_READ = 256
"""Most different ground truths of a file that are given to their reward."""
OWN_CODE = re.compile(r"\S+\.py:[A-Za-z_]\w*")  # Name of user code: `path.py:name`
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


def check_files(job: JobConfig) -> list[Mistake]:
    """Return every mistake in the files that `job` names."""
    train, held_out = job.tasks.train, job.tasks.evaluation
    mistakes = [*_check_run_dir(job.run_dir), *check_config(job, weights=True), *_check_lora_targets(job)]
    mistakes += _check_tasks(job, "tasks.train", train)
    if held_out is not None:
        mistakes += _check_tasks(job, "tasks.evaluation", held_out)
    if held_out is not None and job.kind == "reward_model" and not mistakes:
        mistakes += _check_forms(train, held_out)
    if job.kind == "rl":
        mistakes += [*_check_secret_files(job), *_check_further_models(job)]
        mistakes += reward_file_mistakes(job.reward)
        if (check := getattr(CHANNELS.known(job.weights.channel), "check_files", None)) is not None:
            mistakes += check(job.weights.channel_args, "weights.channel_args")
        mistakes += _check_arguments(job)
    return [*mistakes, *own_part_mistakes(job)]


def _check_run_dir(run_dir: Path) -> Iterator[Mistake]:
    nearest = next(each for each in (run_dir, *run_dir.parents) if each.exists() or each == each.parent)
    if not nearest.is_dir():
        yield Mistake("run_dir", f"{nearest} is a file", "Give a folder")
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield Mistake("run_dir", f"{nearest} cannot be written to", "Change its permissions, or give another")


def _check_secret_files(job: JobConfig) -> Iterator[Mistake]:
    """Check that the named secrets and certificates are readable. Their content is never shown."""
    for name in ("redis_login.password_file", *(f"redis_tls.{each}_file" for each in ("ca", "cert", "key"))):
        path: Path | None = attrgetter(name)(job.buffer)
        if path is not None and not (path.is_file() and os.access(path, os.R_OK)):
            problem = f"{path} does not exist or cannot be read"
            yield Mistake(f"buffer.{name}", problem, "Correct the path or its permissions")


def check_config(job: JobConfig, *, weights: bool = False) -> list[Mistake]:
    """Return every mistake in the `config.json` of the job's model. With `weights`, return the mistakes in
    its other files too."""
    model, config = job.model, json_in(job.model / "config.json")
    if not model.is_dir():
        fix = (
            "Give a Hugging Face model directory; `hf download NAME --local-dir DIR` makes one of a hub model"
        )
        if model.name == "model" and model.parent.parent == job.run_dir:
            fix += f". If the run {model.parent.name} is to make it, run its job first"
        return [Mistake("model", no_folder(model), fix)]
    mistakes = [*model_mistakes(model, config, "model")] if weights or config is None else []
    return mistakes + ([*_check_model_config(job, config)] if isinstance(config, dict) else [])


def _check_further_models(job: JobConfig) -> Iterator[Mistake]:
    """Check the models that the trainer holds in addition to the policy. Each of them, except the critic,
    must have the same tokenizer as the policy."""
    for field in OF_TRAINER:
        model: Path | None = attrgetter(field)(job)
        if model is None:
            continue
        if not model.is_dir():
            yield Mistake(field, no_folder(model), "Give a Hugging Face model directory")
            continue
        config = json_in(model / "config.json")
        yield from model_mistakes(model, config, field)
        yield from _check_packing(model, config, field)
        yield from _check_heads(job, model, config)
        own, other = (_vocabulary(json_in(each / "tokenizer.json")) for each in (job.model, model))
        if field != "trainer.critic.model" and own != other and None not in (own, other):
            problem = f"{model} has another vocabulary than the policy's {job.model}"
            yield Mistake(field, problem, "Give a model with the policy's tokenizer")


def _vocabulary(tokenizer: Any) -> Any:
    """Return the vocabulary in a tokenizer file. The result is empty if the file has no vocabulary, and None
    if there is no file."""
    return get(tokenizer, "model.vocab") or {} if tokenizer else None


def model_mistakes(model: Path, config: object, field: str) -> Iterator[Mistake]:
    """Yield what is missing in a Hugging Face model directory. `config` is the content of config.json, or
    None."""
    if config is None:
        readable = "readable " if (model / "config.json").exists() else ""
        problem = f"{model} has no {readable}config.json"
        yield Mistake(field, problem, "Give a complete Hugging Face model directory")
        return
    if not ((model / ONE_FILE).is_file() or (model / INDEX).is_file()):
        problem = f"{model} has no .safetensors weights (pickled .bin files are never loaded)"
        yield Mistake(field, problem, "Save it again with save_pretrained(..., safe_serialization=True)")
    if not any((model / name).is_file() for name in TOKENIZER_FILES):
        fix = "Save the tokenizer into the same directory with tokenizer.save_pretrained"
        yield Mistake(field, f"{model} has no tokenizer", fix)
    yield from _check_shards(model, field)


def json_in(path: Path) -> Any:
    """Return the content of a JSON file, or None if it cannot be read."""
    with suppress(OSError, ValueError, RecursionError):
        return json.loads(path.read_bytes())
    return None


def _check_shards(model: Path, field: str) -> Iterator[Mistake]:
    """Check that every file in the index of a sharded model exists."""
    try:
        files = weight_files(model)
    except (OSError, ValueError) as error:
        yield Mistake(field, str(error), "Give a complete Hugging Face model directory")
        return
    if missing := [path.name for path in files if not path.is_file()]:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        problem = f"{model} lacks {missing[0]}{more} of the {len(files)} files that its index names"
        yield Mistake(field, problem, "Download or copy the model again, with all its files")


def _has_chat_template(model: Path) -> bool:
    if any((model / f"chat_template.{ending}").is_file() for ending in ("jinja", "json")):
        return True
    return bool(get(json_in(model / "tokenizer_config.json"), "chat_template"))


def _check_model_config(job: JobConfig, config: dict[str, Any]) -> Iterator[Mistake]:
    architectures, length = config.get("architectures") or [], job.rollout.max_model_len
    wanted = ["ForCausalLM"]
    if job.kind == "reward_model":
        wanted.append("ForSequenceClassification")
    if text_part(config) is not config:  # a language model with, for example, a vision tower
        wanted.append("ForConditionalGeneration")
    if architectures and not any(str(name).endswith((*wanted,)) for name in architectures):
        problem = f"{', '.join(map(str, architectures))} is not a causal language model"
        yield Mistake("model", problem, "Give a model of a ...ForCausalLM class")
    if job.kind == "rl":
        if job.rollout.routes == "replay":
            yield from _check_mixture(job.model)
        positions, longest = text_part(config).get("max_position_embeddings"), most_positions(config)
        if isinstance(positions, int) and length > positions:
            problem = f"{length} is more than the {positions} positions of the model"
            yield Mistake("rollout.max_model_len", problem, f"Set it to {positions} or less")
        if longest is not None and longest < length:
            problem = (
                "rotary positions of the model depend on the longest row of a pass if that has more than "
                f"{longest} tokens, and rows of {length} are allowed"
            )
            yield Mistake("rollout.max_model_len", problem, f"Set it to {longest} or less")
    yield from _check_packing(job.model, config, "model")
    sequence = RankGrid.of(job.trainer).sequence
    if sequence > 1 and (why := looks_beyond_tokens(config)):
        fix = "Set it to 1, and give more ranks to trainer.parallel.shard, or take another model"
        yield Mistake("trainer.parallel.sequence", f"{job.model} {why}", fix)
    yield from _check_heads(job, job.model, config)


def _check_heads(job: JobConfig, model: Path, config: Any) -> Iterator[Mistake]:
    """Check that the ranks that split each row (`trainer.parallel.sequence`) can share the model's attention
    heads equally."""
    sequence = RankGrid.of(job.trainer).sequence
    heads = text_part(config).get("num_attention_heads") if isinstance(config, dict) else None
    if sequence > 1 and isinstance(heads, int) and heads % sequence:
        problem = f"{sequence} ranks cannot share the {heads} attention heads of {model}"
        yield Mistake("trainer.parallel.sequence", problem, f"Set a divisor of {heads}")


def _check_packing(model: Path, config: Any, field: str) -> Iterator[Mistake]:
    """Refuse a model of the trainer whose log-probs would change if rows were packed together."""
    if isinstance(config, dict) and (why := cannot_be_packed(config)):
        fix = "Give a model of a family that docs/models.md lists as trained"
        yield Mistake(field, f"{model} {why}", fix)


def _check_mixture(model: Path) -> Iterator[Mistake]:
    """Refuse a model that has no experts to route to."""
    with suppress(OSError):  # Another rule reports a broken model
        try:
            if is_mixture(model):
                mixture_of(model)
                return
            problem = f"{model} is no mixture of experts: nothing is routed in it"
        except ValueError as error:
            problem = str(error)
        yield Mistake("rollout.routes", problem, "Set it to off or auto")


def _check_lora_targets(job: JobConfig) -> Iterator[Mistake]:
    """Check that each target is a layer of the model. For a mixture of experts, and for files that cannot be
    read here, the trainer checks the targets when it builds the layers."""
    with suppress(OSError, ValueError):
        if job.trainer.lora.targets and job.model.is_dir():
            shapes = {name: tensor.shape for name, tensor in stored_tensors(job.model).items()}
            yield from lora_target_mistakes(job, shapes)


def lora_target_mistakes(job: JobConfig, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Mistake]:
    """Check each target for a model that has tensors with these names and shapes."""
    linear = _linear_layers(job.model, shapes) if job.trainer.lora.targets else set()
    if linear and (unknown := [target for target in job.trainer.lora.targets if target not in linear]):
        problem = f"the model has no layer called {', '.join(unknown)} that can have an adapter"
        yield Mistake("trainer.lora.targets", problem, f"Choose of {', '.join(sorted(linear))}")


def _linear_layers(model: Path, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Return the last part of the name of each linear layer except the output layer. The result is empty for
    a mixture of experts, for a model with other parts than its language model, and for files that cannot be
    read."""
    found: set[str] = set()
    config = json_in(model / "config.json")
    if is_mixture(model) or not isinstance(config, dict) or text_part(config) is not config:
        return found
    vocabulary = get(config, "vocab_size")
    for name, shape in shapes.items():
        *above, last, kind = ["", *name.split(".")]
        # Embeddings and output layer are as wide as the vocabulary, and are not in a numbered block.
        is_block = any(part.isdigit() for part in above)
        if kind == "weight" and len(shape) == 2 and (is_block or shape[0] != vocabulary):
            found.add(last)
    return found


def _check_tasks(job: JobConfig, field: str, path: Path) -> Iterator[Mistake]:
    if not path.exists():
        fix = (
            "Give the path of a .parquet or .jsonl file of tasks; "
            "`hf download NAME --repo-type dataset --local-dir DIR` fetches a data set of the hub"
        )
        yield Mistake(field, f"{path} does not exist", fix)
        return
    table: TaskTable | None = None
    mistake = None
    try:
        whole = task_file(path).stat().st_size <= READ_WHOLE_BYTES
        if job.kind != "rl":
            form, examples = read_examples(path, job.kind)
            prompts = [one.answers[0].prompt for one in (examples if whole else islice(examples, 1))]
            mistake = _form_mistake(job, form, path)
        elif whole:
            table = read_tasks(path)
            prompts = [task.prompt for task in table]
            named = ((f"row {row} of {path}", task) for row, task in enumerate(table, 1))
            mistake = _truth_mistake(job, field, path, table) or image_mistake(job, field, named)
        else:
            where, row = next(task_rows(path), (f"task file {path}, row 1", {}))
            prompts = [task_row(where, row)["prompt"]]
    except TaskFileError as error:  # The text of the error consists of a problem and a fix
        problem, _, fix = str(error).rstrip(".").rpartition(". ")
        yield Mistake(field, problem or fix, fix if problem else "Correct the file, or choose another")
        return
    are_messages = any(not isinstance(prompt, str) for prompt in prompts)
    if mistake is not None:
        yield mistake
    elif are_messages and job.model.is_dir() and not _has_chat_template(job.model):
        problem = f"the prompts of {path} are messages, and the tokenizer in {job.model} has no chat template"
        fix = "Add one to the tokenizer (chat_template.jinja), or write the prompts as texts"
        yield Mistake(field, problem, fix)
    if table is not None and field == "tasks.train":
        yield from _check_passes(job, len(table))


def _truth_mistake(job: JobConfig, field: str, path: Path, tasks: Iterable[Task]) -> Mistake | None:
    """Refuse tasks whose reward needs a ground truth that is not there, or that it cannot read. Of the ground
    truths, `TRUTHS_READ` different ones are looked at."""
    routing, faults, found = Routing(job.reward), dict[tuple[str, str], str](), list[str]()
    for row, task in enumerate(tasks, 1):
        spec = routing.of(task)
        key = spec.key, repr(task.ground_truth)
        if key not in faults and len(faults) < TRUTHS_READ:
            faults[key] = truth_fault(spec.name, spec.args, task)
        if fault := faults.get(key):
            found.append(f"the first is row {row}, by the reward {spec.name}: {fault}")
    if not found:
        return None
    fix = "Correct reward_model.ground_truth, take the rows out, or choose another reward"
    return Mistake(field, f"{len(found)} rows of {path} cannot be judged; {found[0]}", fix)


def image_mistake(job: JobConfig, field: str, tasks: Iterable[tuple[str, Task]]) -> Mistake | None:
    """Refuse tasks with images if the model, the back end, the critic, the teacher or the reward cannot use
    them. Each task comes with the name of its row."""
    seen = [(row, task) for row, task in tasks if task.images]
    if not seen:
        return None
    found, trainer = f"{seen[0][0]} has images", job.trainer
    routing = Routing(job.reward)
    for row, name in ((row, routing.of(task).name) for row, task in seen):
        if getattr(part_of(name), "texts_only", False):
            problem = f"{row} has images, and the reward {name} reads only texts"
            return Mistake(field, problem, "Use the reward judge or one of your own, or tasks without images")
    if job.model.is_dir() and not reads_images(job.model):
        fix = "Give a model that reads images, or tasks without images"
        return Mistake(field, f"{found}, and the model in {job.model} reads none", fix)
    if trainer.backend == "megatron":
        return Mistake("trainer.backend", f"megatron trains on texts alone, and {found}", "Set it to fsdp")
    advantage = ADVANTAGES.known(trainer.objective.advantage)
    if trainer.critic.kind == "model" and "value" in getattr(advantage, "columns", ()):
        problem = f"a critic that is a model of its own reads no images, and {found}"
        return Mistake("trainer.critic.kind", problem, "Set it to head, or train without a critic")
    for other in OF_TRAINER:
        folder: Path | None = attrgetter(other)(job)
        if folder is not None and folder.is_dir() and not reads_images(folder):
            return Mistake(other, f"{found}, and the model in {folder} reads none", "Give one that does")
    if trainer.teacher.urls:
        fix = "Name the teacher's folder in trainer.teacher.model"
        return Mistake("trainer.teacher.urls", f"servers are asked by the ids of tokens, and {found}", fix)
    return None


def _form_mistake(job: JobConfig, form: Form, path: Path) -> Mistake | None:
    """Refuse examples with a form that the job's loss cannot use."""
    wanted: Form = "labelled" if job.preference.loss == "kto" else "pairs"
    if job.kind != "preference" or form == wanted:
        return None
    needed = ", ".join(FORMS["preference"][wanted])
    problem = f"the loss {job.preference.loss} learns from the columns {needed}, which {path} lacks"
    other = "one of the others" if wanted == "labelled" else "kto"
    return Mistake("preference.loss", problem, f"Set it to {other}, or give such a file")


def _check_forms(train: Path, held_out: Path) -> Iterator[Mistake]:
    """Check that training and held-out examples of a reward model use the same loss."""
    learned, held = (read_examples(path, "reward_model")[0] for path in (train, held_out))
    if learned != held:
        problem = f"it has {held} examples, and tasks.train {learned} ones, which another loss measures"
        yield Mistake("tasks.evaluation", problem, "Give files of one form")


def _check_passes(job: JobConfig, rows: int) -> Iterator[Mistake]:
    passes, batch = job.tasks.passes, job.buffer.batch_groups
    needed, there = job.trainer.steps * batch, (passes or 0) * rows
    if passes is not None and there < batch:
        problem = f"{passes} × {rows} tasks do not fill one batch of {batch}"
        fix = f"Set it to {there} or less, raise or remove tasks.passes, or give more tasks"
        yield Mistake("buffer.batch_groups", problem, fix)
    elif passes is not None and there < needed:
        problem = f"{passes} × {rows} tasks are fewer than trainer.steps × buffer.batch_groups = {needed}"
        fix = f"Set it to {-(-needed // rows)} or more, remove it, or lower trainer.steps"
        yield Mistake("tasks.passes", problem, fix)


def _check_arguments(job: JobConfig) -> Iterator[Mistake]:
    """Check the user code that the workflow's arguments name."""
    for key, value in job.rollout.workflow_args.items():
        # An agent is a coroutine function, like a workflow. Everything else is looked up as a tool.
        kind, field = WORKFLOWS if key == "agent" else TOOLS, f"rollout.workflow_args.{key}"
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and OWN_CODE.fullmatch(name):
                yield from kind.mistakes(name, None, field=field, args_field=field)
