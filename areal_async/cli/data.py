"""`areal-async data prepare | check`: data sets of the field as files of a job, and whether one is right."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
import yaml

from areal_async.cli.tools import AsJson, readable_errors, show

if TYPE_CHECKING:
    from areal_async.config.data_check import DataReport, Expected, FileReport
    from areal_async.data.prepare import Prepared

data = typer.Typer(help="Make the data files of a job, and look whether one is right.", no_args_is_help=True)

Model = Annotated[
    str | None, typer.Option(metavar="DIR|NAME", help="Whose tokenizer counts: a folder, or a hub name.")
]
TemplateArgs = Annotated[
    list[str] | None,
    typer.Option("--template-arg", metavar="KEY=VALUE", help="For the chat template: enable_thinking=false."),
]
KindOption = Annotated[
    str | None,
    typer.Option(metavar="KIND", help="rl, sft, preference or reward_model; else as the columns are."),
]


@data.command()
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="[NAME=]SOURCE...", help="Files, globs, folders, or owner/name of the hub."),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The training file, .jsonl or .parquet.")],
    held_out: Annotated[
        float,
        typer.Option(min=0, metavar="N|SHARE", help="Rows for a file of held-out tasks; below 1 a share."),
    ] = 0,
    held_out_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="That file; else held_out beside --out.")
    ] = None,
    mapping: Annotated[
        str, typer.Option("--map", metavar="OURS=THEIRS,...", help="prompt=context+question,answer=solution")
    ] = "",
    answer: Annotated[
        str,
        typer.Option(help="Where the answer stands: auto, whole, hash (#### 42), boxed, number (the last)."),
    ] = "auto",
    kind: KindOption = None,
    split: Annotated[str, typer.Option(help="Split of folders that have several.")] = "train",
    where: Annotated[
        str, typer.Option(metavar="COLUMN=VALUE,...", help="Take rows that have these: ability=code")
    ] = "",
    weights: Annotated[
        str, typer.Option(metavar="W,W,...", help="Shares of the sources in a mixture, none repeated.")
    ] = "",
    rows: Annotated[int | None, typer.Option(min=1, help="Rows of both files together.")] = None,
    seed: Annotated[int, typer.Option(help="Draws the mixture, the split and the order.")] = 0,
    model: Model = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Leave out longer prompts (needs --model).")
    ] = None,
    template_args: TemplateArgs = None,
    form: Annotated[
        str,
        typer.Option(
            help="Text prompts as `messages` or `text`; auto: messages where --model has a template."
        ),
    ] = "auto",
    system: Annotated[str, typer.Option(help="A system message for each prompt that has none.")] = "",
    instruction: Annotated[str, typer.Option(help="A line behind each prompt.")] = "",
    data_source: Annotated[str, typer.Option(help="data_source of every row; else the source's name.")] = "",
    ability: Annotated[str, typer.Option(help="ability of every row.")] = "",
    keep: Annotated[str, typer.Option(metavar="COLUMN,...", help="Columns to keep, in extra_info.")] = "",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out rows that cannot be used.")] = False,
    keep_duplicates: Annotated[
        bool, typer.Option("--keep-duplicates", help="Keep rows whose prompt came before.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the files.")] = False,
    as_json: AsJson = False,
) -> None:
    """Convert data sets to the file of a job: mapped, mixed, filtered, without duplicates, and split."""
    with readable_errors():
        from areal_async.data import prepare as preparing
        from areal_async.data.sources import DataError, find_source, source_rows
        from areal_async.data.styles import TASK, Answer, DataKind, Style, kind_of
        from areal_async.show.progress import track

        columns = dict(_pairs("--map", mapping.split(",") if mapping else ()))
        if unknown := [name for name in columns if name not in TASK]:
            raise DataError(f"--map {unknown[0]}: rows have no such column. Choose of {', '.join(TASK)}.")
        if max_prompt_tokens is not None and model is None:
            raise DataError("--max-prompt-tokens needs a tokenizer to count them. Add --model.")
        found = [find_source(each, split) for each in sources]
        tokenizer = None
        if model is not None:
            tokenizer = preparing.load_tokenizer(_model_folder(model), _values(template_args or ()))
        if kind is None:
            kind = next((kind_of(row, columns) for _, row in source_rows(found[0], [])), "rl")
        _one_of("--answer", answer, Answer)
        _one_of("--kind", kind, DataKind)
        if form not in ("auto", "text", "messages"):
            raise DataError(f"--form is {form!r}. Choose of auto, text, messages.")
        style = Style(
            kind=msgspec.convert(kind, DataKind),
            columns=columns,
            answer=msgspec.convert(answer, Answer),
            as_messages=bool(tokenizer is not None and tokenizer.chat_template)
            if form == "auto"
            else form == "messages",
            system=system,
            instruction=instruction,
            keep=tuple(filter(None, keep.split(","))),
            data_source=data_source,
            ability=ability,
        )
        recipe = preparing.Recipe(
            seed=seed,
            weights=_numbers("--weights", weights),
            rows=rows,
            held_out=held_out,
            skip_bad=skip_bad,
            keep_duplicates=keep_duplicates,
            max_prompt_tokens=max_prompt_tokens,
            where=dict(_pairs("--where", where.split(",") if where else ())),
        )
        done = preparing.prepare(found, style, recipe, tokenizer, track)
        files = {out: done.train}
        if held_out:
            second = held_out_file or out.with_name(f"held_out{out.suffix}")
            if second == out:
                raise DataError(f"{out} cannot hold both. Name the other with --held-out-file.")
            files[second] = done.held_out
        preparing.write_rows(files, overwrite=overwrite)
        answer_json = {
            "kind": kind,
            "files": {str(path): len(made) for path, made in files.items()},
            "sources": {name: vars(counts) for name, counts in done.counts.items()},
        }
        show(answer_json, "\n".join(_prepared(done, files)), as_json)


@data.command()
def check(
    target: Annotated[
        Path, typer.Argument(metavar="FILE|JOB.YAML", help="A data file, or a job file for those it names.")
    ],
    held_out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The held-out file, which must not overlap.")
    ] = None,
    model: Model = None,
    kind: KindOption = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of prompt and answer; else what the model takes.")
    ] = None,
    template_args: TemplateArgs = None,
    as_json: AsJson = False,
) -> None:
    """Count rows and tokens, and find what would stop a job: broken rows, missing answers, long prompts,
    overlap with the held-out file. Status 2 where there is any."""
    with readable_errors():
        from areal_async.config.data_check import check_data
        from areal_async.show.progress import track

        if target.suffix in (".yaml", ".yml"):
            files, expected = _of_job(target)
        else:
            files = [target, *([held_out] if held_out is not None else [])]
            expected = _expected(model, kind, max_model_len, template_args or ())
        report = check_data(files, expected, track)
        show(report, "\n".join(_checked(report)), as_json)
        if report.stops:
            raise typer.Exit(2)


def _of_job(job_file: Path) -> tuple[list[Path], Expected]:
    """The files of a job, and what it expects of them."""
    from areal_async.base.mistakes import ConfigError
    from areal_async.config.content import content_mistakes
    from areal_async.config.data_check import Expected
    from areal_async.config.load import load_job
    from areal_async.data.prepare import load_tokenizer

    job = load_job(job_file, files=False)
    if mistakes := content_mistakes(job, ("model", "tasks.train", "tasks.evaluation")):
        raise ConfigError(str(job_file), mistakes)
    tokenizer = load_tokenizer(job.model, job.rollout.template_args) if job.model.is_dir() else None
    missing = f"the job's model, {job.model}, is not there (yet)"
    is_rl = job.kind == "rl"
    length = job.rollout.max_model_len if is_rl else None
    files = [path for path in (job.tasks.train, job.tasks.evaluation) if path is not None]
    kind: Any = job.kind
    return files, Expected(kind, tokenizer, missing, length, job.reward if is_rl else None)


def _expected(
    model: str | None, kind: str | None, max_model_len: int | None, template_args: Sequence[str]
) -> Expected:
    from areal_async.config.data_check import Expected
    from areal_async.config.files import json_in
    from areal_async.data.prepare import load_tokenizer
    from areal_async.data.styles import DataKind

    if kind is not None:
        _one_of("--kind", kind, DataKind)
    tokenizer = None
    if model is not None:
        folder = _model_folder(model)
        tokenizer = load_tokenizer(folder, _values(template_args))
        config = json_in(folder / "config.json")
        known = config.get("max_position_embeddings") if isinstance(config, dict) else None
        max_model_len = max_model_len or (known if isinstance(known, int) else None)
    return Expected(msgspec.convert(kind, DataKind | None), tokenizer, max_model_len=max_model_len)


def _model_folder(text: str) -> Path:
    """A folder, or the one in the cache of a model of the hub."""
    from areal_async.data.sources import DataError
    from areal_async.models.files import no_folder
    from areal_async.storage.hub import hub_url, model_folder
    from areal_async.storage.remote import StorageError

    if Path(text).is_dir():
        return Path(text)
    if hub_url(text, Path(), is_data=False) is None:
        raise DataError(f"--model: {no_folder(Path(text))}. Give a model's folder, or owner/name of the hub.")
    try:
        return model_folder(text, lambda: print(f"fetching {text}", file=sys.stderr, flush=True))
    except StorageError as error:
        raise DataError(str(error)) from None


def _pairs(option: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    from areal_async.data.sources import DataError

    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not (key and equals and value):
            raise DataError(f"{option} {text!r} is not KEY=VALUE. Write it so.")
        yield key, value


def _values(texts: Sequence[str]) -> dict[str, Any]:
    return {key: yaml.safe_load(value) for key, value in _pairs("--template-arg", texts)}


def _numbers(option: str, text: str) -> tuple[float, ...]:
    from areal_async.data.sources import DataError

    try:
        return tuple(float(each) for each in text.split(",")) if text else ()
    except ValueError:
        raise DataError(f"{option} {text!r} is no list of numbers. Write 3,1.") from None


def _one_of(option: str, value: str, words: Any) -> None:
    from areal_async.data.sources import DataError

    if value not in words.__args__:
        raise DataError(f"{option} is {value!r}. Choose of {', '.join(words.__args__)}.")


def _prepared(done: Prepared, files: dict[Path, Any]) -> Iterator[str]:
    from areal_async.config.data_check import length_figures

    for name, counts in done.counts.items():
        out = {
            "of other --where": counts.others,
            "bad": counts.bad,
            "duplicates": counts.duplicates,
            "too long": counts.too_long,
        }
        left = "".join(f", {number} {why}" for why, number in out.items() if number)
        yield f"{name}: {counts.read} rows read{left}, {counts.taken} taken"
        if counts.first_bad:
            yield f"  the first bad one: {counts.first_bad}"
        if counts.other_answers:
            yield f"  {counts.other_answers} duplicates have another answer; the first: {counts.first_other}"
        if counts.whole:
            yield f"  {counts.whole} answers are whole texts; the first: {counts.first_whole}"
        if counts.unused:
            yield f"  columns not used: {', '.join(counts.unused)} (--keep puts them into extra_info)"
    if done.tokens:
        told = ", ".join(f"{name} {value}" for name, value in length_figures(done.tokens).items())
        yield f"prompts in tokens: {told}"
    for path, made in files.items():
        yield f"{path}: {len(made)} rows"
    first, *second = (str(path) for path in files)
    held = f" --held-out {second[0]}" if second else ""
    yield f"What next: areal-async data check {first}{held}"
    yield f"In the job file: tasks: {{train: {first}{f', evaluation: {second[0]}' if second else ''}}}"


def _checked(report: DataReport) -> Iterator[str]:
    for file in report.files:
        yield from _file_lines(file)
    if len(report.files) > 1:
        yield f"overlap: {report.overlap} held-out prompts are in the training file"
    problems = [*(each for file in report.files for each in file.problems), *report.problems]
    yield from (f"remark: {each}" for each in report.remarks)
    yield from (f"problem: {each}" for each in problems)
    yield f"{len(problems)} problem{'s' * (len(problems) > 1)} would stop a job" if problems else "ok"


def _file_lines(file: FileReport) -> Iterator[str]:
    yield f"{file.file}: {file.rows} rows for a job of kind {file.kind}"
    if file.tokens:
        told = ", ".join(f"{name} {value}" for name, value in file.tokens.items())
        yield f"  prompts in tokens: {told}"
    yield f"  {file.broken} broken, {file.duplicates} duplicates, {file.no_answer} without answer"
    for name, found in list(file.sources.items())[:20]:
        yield f"  data_source {name or '(none)'}: {found.rows} rows, reward {found.reward}"
        yield f"    {found.example}"
    yield from (f"  remark: {each}" for each in file.remarks)
