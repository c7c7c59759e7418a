"""`areal-async data prepare`: convert data sets to the files of a job."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import msgspec
import typer
from typer.core import TyperCommand

from areal_async.cli.tools import AsJson, readable_errors, show

if TYPE_CHECKING:
    from areal_async.data.prepare import Prepared

data = typer.Typer(help="Make the data files of a job.", no_args_is_help=True)

Model = Annotated[
    str | None, typer.Option(metavar="DIR|NAME", help="Model whose tokenizer counts: a folder or a hub name.")
]
KindOption = Annotated[
    str | None,
    typer.Option(
        metavar="KIND", help="rl, sft, preference or reward_model; by default chosen by the columns."
    ),
]
REMOVED = {
    "--held-out-file": "the file is `held_out.jsonl` beside --out. Rename it afterwards.",
    "--rows": "take the first rows of the result, which is shuffled: `head -n 1000 FILE`.",
    "--form": "prompts become messages if the model of --model has a chat template.",
    "--system": "write a column `system` into the source, or use --instruction.",
    "--data-source": "name the source: `gsm8k=openai/gsm8k/main`.",
    "--ability": "write a column `ability` into the source.",
    "--keep": "all other columns are in `extra_info`.",
    "--keep-duplicates": "a job repeats its tasks by itself (trainer.steps).",
    "--template-arg": "set rollout.template_args in the job file; `areal-async validate` counts with it.",
}
"""Former options of `data prepare`, and their replacements."""


class PrepareCommand(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for given in args:
            if said := REMOVED.get(given.partition("=")[0]):
                raise typer.BadParameter(f"{given.partition('=')[0]} was removed: {said}", ctx)
        return super().parse_args(ctx, args)


class Preparation(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments and options of `data prepare`."""

    sources: Annotated[
        list[str],
        typer.Argument(metavar="[NAME=]SOURCE...", help="Files, globs, folders, or owner/name of the hub."),
    ]
    out: Annotated[Path, typer.Option(metavar="FILE", help="The training file, .jsonl.")]
    held_out: Annotated[
        float, typer.Option(min=0, metavar="N|SHARE", help="Rows for `held_out.jsonl`; below 1 a share.")
    ] = 0
    mapping: Annotated[
        str, typer.Option("--map", metavar="OURS=THEIRS,...", help="prompt=context+question,answer=solution")
    ] = ""
    answer: Annotated[
        str, typer.Option(help="Place of the answer: auto, whole, hash (#### 42), boxed, number (the last).")
    ] = "auto"
    kind: KindOption = None
    split: Annotated[str, typer.Option(help="Split of folders that have several.")] = "train"
    where: Annotated[
        str, typer.Option(metavar="COLUMN=VALUE,...", help="Take only rows with these values: ability=code")
    ] = ""
    weights: Annotated[
        str, typer.Option(metavar="W,W,...", help="Shares of the sources in a mixture without repeats.")
    ] = ""
    instruction: Annotated[str, typer.Option(help="A line after each prompt.")] = ""
    seed: Annotated[int, typer.Option(help="Draws the mixture, the split and the order.")] = 0
    model: Model = None
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Leave out longer prompts (needs --model).")
    ] = None
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out rows that cannot be used.")] = False
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the files.")] = False
    as_json: AsJson = False


def _prepare(**given: Any) -> None:
    """Convert data sets to the files of a job: map columns, mix, filter, drop duplicates, split."""
    with readable_errors():
        from areal_async.data.convert import OURS, Answer, Style
        from areal_async.data.examples import Kind
        from areal_async.data.prepare import Recipe, prepare, write_rows
        from areal_async.data.sources import DataError, find_source, source_rows
        from areal_async.show.progress import track

        asked = Preparation(**given)
        columns = _pairs("--map", asked.mapping.split(","))
        if unknown := [name for name in columns if name not in OURS]:
            raise DataError(f"--map {unknown[0]}: rows have no such column. Choose of {', '.join(OURS)}.")
        if asked.max_prompt_tokens is not None and asked.model is None:
            raise DataError("--max-prompt-tokens needs a tokenizer to count them. Add --model.")
        sources = [find_source(each, asked.split) for each in asked.sources]
        tokenizer = _tokenizer(asked.model)
        first = next((row for _, row in source_rows(sources[0], [])), {})
        is_pair = all(columns.get(name, name) in first for name in ("chosen", "rejected"))
        style = Style(
            kind=_one_of("--kind", asked.kind or ("preference" if is_pair else "rl"), get_args(Kind)),
            columns=columns,
            answer=_one_of("--answer", asked.answer, get_args(Answer)),
            as_messages=tokenizer is not None and bool(tokenizer.chat_template),
            instruction=asked.instruction,
        )
        recipe = Recipe(
            seed=asked.seed,
            weights=_numbers("--weights", asked.weights),
            held_out=asked.held_out,
            skip_bad=asked.skip_bad,
            max_prompt_tokens=asked.max_prompt_tokens,
            where=_pairs("--where", asked.where.split(",")),
        )
        done = prepare(sources, style, recipe, tokenizer, track)
        files = {asked.out: done.train}
        if asked.held_out:
            files[asked.out.with_name("held_out.jsonl")] = done.held_out
        if len(files) == 1 and asked.held_out:
            raise DataError(f"{asked.out} is the name of the held-out file. Give another --out.")
        write_rows(files, overwrite=asked.overwrite)
        answer = {
            "kind": style.kind,
            "files": {str(path): len(made) for path, made in files.items()},
            "sources": {name: {**counts.rows, "first": counts.first} for name, counts in done.counts.items()},
        }
        show(answer, "\n".join(_prepared(done, files)), asked.as_json)


setattr(_prepare, "__signature__", signature(Preparation))  # noqa: B010
data.command("prepare", cls=PrepareCommand)(_prepare)


def _tokenizer(model: str | None) -> Any:
    """Return the tokenizer of a model folder or hub model."""
    from areal_async.data.sources import DataError
    from areal_async.models.files import no_folder
    from areal_async.models.tokenizer import TokenizerError, load_tokenizer
    from areal_async.storage.hub import hub_url, model_folder
    from areal_async.storage.remote import StorageError

    if model is None:
        return None
    folder = Path(model)
    try:
        if not folder.is_dir():
            if hub_url(model, Path(), is_data=False) is None:
                fix = "Give a model's folder, or owner/name of the hub."
                raise DataError(f"--model: {no_folder(folder)}. {fix}")
            folder = model_folder(model, lambda: print(f"fetching {model}", file=sys.stderr, flush=True))
        return load_tokenizer(folder)
    except (StorageError, TokenizerError) as error:
        raise DataError(str(error)) from None


def _pairs(option: str, texts: Iterable[str]) -> dict[str, str]:
    from areal_async.data.sources import DataError

    found = {}
    for text in filter(None, texts):
        key, _, value = (part.strip() for part in text.partition("="))
        if not (key and value):
            raise DataError(f"{option} {text!r} is not KEY=VALUE. Write it so.")
        found[key] = value
    return found


def _numbers(option: str, text: str) -> tuple[float, ...]:
    from areal_async.data.sources import DataError

    try:
        return tuple(float(each) for each in text.split(",")) if text else ()
    except ValueError:
        raise DataError(f"{option} {text!r} is no list of numbers. Write 3,1.") from None


def _one_of(option: str, value: Any, words: Iterable[str]) -> Any:
    from areal_async.data.sources import DataError

    if value not in words:
        raise DataError(f"{option} is {value!r}. Choose one of {', '.join(words)}.")
    return value


LEFT_OUT = {"other": "of other --where", "bad": "bad", "duplicates": "duplicates", "too long": "too long"}


def _prepared(done: Prepared, files: dict[Path, Any]) -> Iterator[str]:
    from areal_async.data.prepare import length_figures

    for name, counts in done.counts.items():
        left = "".join(f", {counts.rows[what]} {why}" for what, why in LEFT_OUT.items() if counts.rows[what])
        yield f"{name}: {counts.rows['read']} rows read{left}, {counts.rows['taken']} taken"
        if "bad" in counts.first:
            yield f"  the first bad one: {counts.first['bad']}"
        if other := counts.rows["other answers"]:
            yield f"  {other} duplicates have another answer; the first: {counts.first['other answers']}"
    if done.tokens:
        told = ", ".join(f"{name} {value}" for name, value in length_figures(done.tokens).items())
        yield f"prompts in tokens: {told}"
    yield from (f"{path}: {len(made)} rows" for path, made in files.items())
    first, *second = (str(path) for path in files)
    yield f"In the job file: tasks: {{train: {first}{f', evaluation: {second[0]}' if second else ''}}}"
