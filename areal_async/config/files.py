"""Rules about what a job file points at: the model, the task files, the user's code, the run folder.

Only reads, and imports no user code: a function is looked up in the syntax tree.
"""

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
from areal_async.config.job import JobConfig
from areal_async.config.parallel import RankGrid
from areal_async.config.parts import own_part_mistakes
from areal_async.config.registry import CHANNELS, TOOLS, WORKFLOWS
from areal_async.config.reward_routing import Routing
from areal_async.config.rewardcheck import part_of, reward_file_mistakes
from areal_async.data.examples import FORMS, Form, read_examples
from areal_async.data.tasks import TaskFileError, read_tasks, task_file, task_row, task_rows
from areal_async.models.files import (
    INDEX,
    ONE_FILE,
    cannot_be_packed,
    is_mixture,
    looks_beyond_tokens,
    mixture_of,
    most_positions,
    no_folder,
    stored_tensors,
)

READ_WHOLE_BYTES = 16 << 20
"""Task files up to this size are checked row by row; of larger ones only the first row."""
OWN_CODE = re.compile(r"\S+\.py:[A-Za-z_]\w*")  # What names code of the user's: `path.py:name`
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


def check_files(job: JobConfig) -> list[Mistake]:
    """Every mistake about the files that `job` names."""
    mistakes = [*_check_run_dir(job.run_dir), *_check_model(job), *_check_lora_targets(job)]
    rows, problems = _check_tasks(job, "tasks.train", job.tasks.train)
    mistakes += problems
    if rows is not None and job.kind == "rl":
        mistakes += _check_passes(job, rows)
    if job.tasks.evaluation is not None:
        mistakes += _check_tasks(job, "tasks.evaluation", job.tasks.evaluation)[1]
        if job.kind != "rl" and not mistakes:
            mistakes += _check_forms(job, job.tasks.evaluation)
    if job.kind == "rl":
        mistakes += [*_check_secret_files(job), *_check_further_models(job)]
        mistakes += reward_file_mistakes(job.reward)
        if (check := getattr(CHANNELS.known(job.weights.channel), "check_files", None)) is not None:
            mistakes += check(job.weights.channel_args, "weights.channel_args")
        mistakes += _check_arguments(job)
    mistakes += own_part_mistakes(job)
    return mistakes


def check_config(job: JobConfig) -> list[Mistake]:
    """Every mistake about the `config.json` of the job's model, whatever else is there of it."""
    return [*_check_model(job, weights=False)]


def _check_run_dir(run_dir: Path) -> Iterator[Mistake]:
    nearest = run_dir
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        yield Mistake("run_dir", f"{nearest} is a file", "Give a folder")
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield Mistake("run_dir", f"{nearest} cannot be written to", "Change its permissions, or give another")


def _check_secret_files(job: JobConfig) -> Iterator[Mistake]:
    """That the named secrets and certificates can be read; what is in them is never shown."""
    login, tls = job.buffer.redis_login, job.buffer.redis_tls
    for field, path in (
        ("buffer.redis_login.password_file", login.password_file),
        ("buffer.redis_tls.ca_file", tls.ca_file),
        ("buffer.redis_tls.cert_file", tls.cert_file),
        ("buffer.redis_tls.key_file", tls.key_file),
    ):
        if path is not None and not (path.is_file() and os.access(path, os.R_OK)):
            problem = f"{path} does not exist or cannot be read"
            yield Mistake(field, problem, "Correct the path or its permissions")


def _check_model(job: JobConfig, *, weights: bool = True) -> Iterator[Mistake]:
    model = job.model
    if not model.is_dir():
        fix = (
            "Give a Hugging Face model directory; `hf download NAME --local-dir DIR` makes one of a hub model"
        )
        if model.name == "model" and model.parent.parent == job.run_dir:
            fix += f". If the run {model.parent.name} is to make it, run its job first"
        yield Mistake("model", no_folder(model), fix)
        return
    config = json_in(model / "config.json")
    if weights or config is None:
        yield from model_mistakes(model, config, "model")
    if isinstance(config, dict):
        yield from _check_model_config(job, config)


def _check_further_models(job: JobConfig) -> Iterator[Mistake]:
    """The models that the trainer holds beside the policy; those that score its tokens have its tokens."""
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
        own, other = (json_in(folder / "tokenizer.json") for folder in (job.model, model))
        if field != "trainer.critic.model" and own and other and _vocabulary(own) != _vocabulary(other):
            problem = f"{model} has another vocabulary than the policy's {job.model}"
            yield Mistake(field, problem, "Give a model with the policy's tokenizer", ("model",))


def _vocabulary(tokenizer: Any) -> Any:
    model = tokenizer.get("model") if isinstance(tokenizer, dict) else None
    return model.get("vocab") if isinstance(model, dict) else None


def model_mistakes(model: Path, config: object, field: str) -> Iterator[Mistake]:
    """What a Hugging Face model directory lacks, of which `config.json` holds `config` (None: nothing)."""
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
    """What a JSON file holds; None where it cannot be read."""
    with suppress(OSError, ValueError, RecursionError):
        return json.loads(path.read_bytes())
    return None


def _check_shards(model: Path, field: str) -> Iterator[Mistake]:
    """That every file is there that the index of a model in several files names."""
    index = model / INDEX
    if (model / ONE_FILE).is_file() or not index.is_file():
        return
    try:
        named = set(json_in(index)["weight_map"].values())
        missing = sorted(name for name in named if not (model / Path(name).name).is_file())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        yield Mistake(field, f"{index} cannot be read", "Give a complete Hugging Face model directory")
        return
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        problem = f"{model} lacks {missing[0]}{more} of the {len(named)} files that {index.name} names"
        yield Mistake(field, problem, "Download or copy the model again, with all its files")


def _has_chat_template(model: Path) -> bool:
    if (model / "chat_template.jinja").is_file() or (model / "chat_template.json").is_file():
        return True
    config = json_in(model / "tokenizer_config.json")
    return isinstance(config, dict) and bool(config.get("chat_template"))


def _check_model_config(job: JobConfig, config: dict[str, Any]) -> Iterator[Mistake]:
    architectures = config.get("architectures") or []
    wanted = ("ForCausalLM", *(("ForSequenceClassification",) if job.kind == "reward_model" else ()))
    if architectures and not any(str(name).endswith(wanted) for name in architectures):
        names = ", ".join(map(str, architectures))
        yield Mistake(
            "model", f"{names} is not a causal language model", "Give a model of a ...ForCausalLM class"
        )
    if job.rollout.routes == "replay" and job.kind == "rl":
        yield from _check_mixture(job.model)
    positions = config.get("max_position_embeddings")
    if job.kind == "rl" and isinstance(positions, int) and job.rollout.max_model_len > positions:
        yield Mistake(
            "rollout.max_model_len",
            f"{job.rollout.max_model_len} is more than the {positions} positions of the model",
            f"Set it to {positions} or less",
            ("model",),
        )
    longest = most_positions(config)
    if job.kind == "rl" and longest is not None and longest < job.rollout.max_model_len:
        yield Mistake(
            "rollout.max_model_len",
            f"rotary positions of the model depend on the longest row of a pass if that has more than "
            f"{longest} tokens, and rows of {job.rollout.max_model_len} are allowed",
            f"Set it to {longest} or less",
            ("model",),
        )
    yield from _check_packing(job.model, config, "model")
    if RankGrid.of(job.trainer).sequence > 1 and (why := looks_beyond_tokens(config)):
        fix = "Set it to 1, and give more ranks to trainer.parallel.shard, or take another model"
        yield Mistake("trainer.parallel.sequence", f"{job.model} {why}", fix, ("model",))


def _check_packing(model: Path, config: Any, field: str) -> Iterator[Mistake]:
    """Refuse a model of the trainer whose packed rows would not have the log-probs of the model."""
    if isinstance(config, dict) and (why := cannot_be_packed(config)):
        fix = "Give a model of a family that docs/models.md lists as trained"
        yield Mistake(field, f"{model} {why}", fix)


def _check_mixture(model: Path) -> Iterator[Mistake]:
    """That routes can be told of the model."""
    problem = "" if is_mixture(model) else f"{model} is no mixture of experts: nothing is routed in it"
    if not problem:
        try:
            mixture_of(model)
        except ValueError as error:
            problem = str(error)
        except OSError:
            return  # said of the model itself
    if problem:
        yield Mistake("rollout.routes", problem, "Set it to off or auto", ("model",))


def _check_lora_targets(job: JobConfig) -> Iterator[Mistake]:
    """That each target is a layer of the model. Of a mixture of experts the trainer says so, which knows what
    the layers of its files become; so it does of files that cannot be read."""
    with suppress(OSError, ValueError):
        if job.trainer.lora.targets and job.model.is_dir():
            yield from lora_target_mistakes(job, _stored_shapes(job.model))


def lora_target_mistakes(job: JobConfig, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Mistake]:
    """`_check_lora_targets` for a model whose tensors have these names and shapes."""
    linear = _linear_layers(job.model, shapes) if job.trainer.lora.targets else {}
    if linear and (unknown := [target for target in job.trainer.lora.targets if target not in linear]):
        yield Mistake(
            "trainer.lora.targets",
            f"the model has no layer called {', '.join(unknown)} that can have an adapter",
            f"Choose of {', '.join(sorted(linear))}",
            ("model",),
        )


def advise_on_lora(job: JobConfig) -> Iterator[Mistake]:
    """A warning where an adapter would be no smaller than its layer."""
    lora, widths = job.trainer.lora, {}
    with suppress(OSError, ValueError):
        widths = _linear_layers(job.model, _stored_shapes(job.model)) if lora.rank else {}
    adapted = {name: width for name, width in widths.items() if not lora.targets or name in lora.targets}
    if small := {name: width for name, width in adapted.items() if width <= lora.rank}:
        yield Mistake(
            "trainer.lora.rank",
            f"{lora.rank} is not below the smaller side of {', '.join(sorted(small))} (from "
            f"{min(small.values())}): an adapter there has more numbers than the layer itself",
            f"Give less than {min(small.values())}, or other trainer.lora.targets",
            ("model",),
        )


def _stored_shapes(model: Path) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in stored_tensors(model).items()}


def _linear_layers(model: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The last part of the name of each linear layer but the output layer, with its smallest side; empty for
    a mixture of experts and for files that cannot be read."""
    found: dict[str, int] = {}
    if is_mixture(model):
        return found
    with suppress(AttributeError):
        config = json_in(model / "config.json")
        vocabulary = (config.get("text_config") or config).get("vocab_size")
        for name, shape in shapes.items():
            *above, last, kind = ["", *name.split(".")]
            # Embeddings and output layer are as wide as the vocabulary, and in no numbered block.
            is_block = any(part.isdigit() for part in above)
            if kind == "weight" and len(shape) == 2 and (is_block or shape[0] != vocabulary):
                found[last] = min(*shape, found.get(last, shape[0]))
    return found


def _check_tasks(job: JobConfig, field: str, path: Path) -> tuple[int | None, list[Mistake]]:
    """The number of rows where it is cheap to know, and the mistakes."""
    if not path.exists():
        fix = (
            "Give the path of a .parquet or .jsonl file of tasks; "
            "`hf download NAME --repo-type dataset --local-dir DIR` fetches a data set of the hub"
        )
        return None, [Mistake(field, f"{path} does not exist", fix)]
    rows: int | None = None
    try:
        whole = task_file(path).stat().st_size <= READ_WHOLE_BYTES
        if job.kind != "rl":
            form, examples = read_examples(path, job.kind)
            chosen = list(examples if whole else islice(examples, 1))
            are_messages = any(not isinstance(one.answers[0].prompt, str) for one in chosen)
            if (mistake := _form_mistake(job, form, path)) is not None:
                return None, [mistake]
        elif whole:
            table = read_tasks(path)
            rows = len(table)
            are_messages = any(not isinstance(task.prompt, str) for task in table)
            if (mistake := _truth_mistake(job, field, path, table)) is not None:
                return rows, [mistake]
        else:
            where, row = next(task_rows(path), (f"task file {path}, row 1", {}))
            are_messages = not isinstance(task_row(where, row)["prompt"], str)
    except TaskFileError as error:
        return None, [Mistake(field, *_split(str(error)))]
    if are_messages and job.model.is_dir() and not _has_chat_template(job.model):
        problem = f"the prompts of {path} are messages, and the tokenizer in {job.model} has no chat template"
        fix = "Add one to the tokenizer (chat_template.jinja), or make texts (data prepare --form text)"
        return rows, [Mistake(field, problem, fix, ("model",))]
    return rows, []


def _truth_mistake(job: JobConfig, field: str, path: Path, tasks: Iterable[Task]) -> Mistake | None:
    """Tasks that their reward would not judge, for want of a ground truth."""
    routing = Routing(job.reward)
    needs = {spec.name: getattr(part_of(spec.name), "needs_truth", False) for spec in routing.specs}
    names = [
        (row, routing.of(task).name) for row, task in enumerate(tasks, start=1) if task.ground_truth is None
    ]
    if not (found := [(row, name) for row, name in names if needs[name]]):
        return None
    problem = f"{len(found)} rows of {path} have no ground truth, which the reward {found[0][1]} needs"
    fix = "Fill in reward_model.ground_truth, or take the rows out"
    return Mistake(field, f"{problem} (the first: row {found[0][0]})", fix, ("reward.name",))


def _form_mistake(job: JobConfig, form: Form, path: Path) -> Mistake | None:
    """Whether the loss of a job learns from examples of this form."""
    wanted: Form = "labelled" if job.preference.loss == "kto" else "pairs"
    if job.kind != "preference" or form == wanted:
        return None
    needed = ", ".join(FORMS["preference"][wanted])
    problem = f"the loss {job.preference.loss} learns from the columns {needed}, which {path} lacks"
    other = "one of the others" if wanted == "labelled" else "kto"
    return Mistake("preference.loss", problem, f"Set it to {other}, or give such a file", ("tasks.train",))


def _check_forms(job: JobConfig, held_out: Path) -> Iterator[Mistake]:
    """That training and held-out examples are measured by one loss."""
    train, held = (read_examples(path, job.kind)[0] for path in (job.tasks.train, held_out))
    if train != held and job.kind == "reward_model":
        problem = f"it has {held} examples, and tasks.train {train} ones, which another loss measures"
        yield Mistake("tasks.evaluation", problem, "Give files of one form", ("tasks.train",))


def _split(text: str) -> tuple[str, str]:
    """The problem and the fix of a reader's error, which are its sentences or the halves of one."""
    problem, _, fix = text.rstrip(".").rpartition(". ")
    if problem:
        return problem, fix
    return text.rstrip("."), "Correct the file, or choose another"


def _check_passes(job: JobConfig, rows: int) -> Iterator[Mistake]:
    passes, batch = job.tasks.passes, job.buffer.batch_groups
    needed = job.trainer.steps * batch
    if passes is not None and passes * rows < batch:
        problem = f"{passes} × {rows} tasks do not fill one batch of {batch}"
        fix = f"Set it to {passes * rows} or less, raise or remove tasks.passes, or give more tasks"
        yield Mistake("buffer.batch_groups", problem, fix, ("tasks.passes", "tasks.train"))
    elif passes is not None and passes * rows < needed:
        yield Mistake(
            "tasks.passes",
            f"{passes} × {rows} tasks are fewer than trainer.steps × buffer.batch_groups = {needed}",
            f"Set it to {-(-needed // rows)} or more, remove it, or lower trainer.steps",
            ("trainer.steps", "buffer.batch_groups", "tasks.train"),
        )


def _check_arguments(job: JobConfig) -> Iterator[Mistake]:
    """Code of the user's that the workflow's arguments name."""
    for key, value in job.rollout.workflow_args.items():
        # An agent is a coroutine function, as a workflow is; all else is looked up alike.
        kind = WORKFLOWS if key == "agent" else TOOLS
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and OWN_CODE.fullmatch(name):
                field = f"rollout.workflow_args.{key}"
                yield from kind.mistakes(name, None, field=field, args_field=field)
