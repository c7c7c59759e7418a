"""`areal-async data check`: check the data files of a job."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from areal_async.cli.tools import AsJson, readable_errors, show
from areal_async.data.examples import Kind

if TYPE_CHECKING:
    from areal_async.config.data_check import DataReport, Expected, FileReport

data = typer.Typer(help="Check the data files of a job.", no_args_is_help=True)


@data.command()
def check(
    target: Annotated[
        Path, typer.Argument(metavar="FILE|JOB.YAML", help="A data file, or a job file for those it names.")
    ],
    held_out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The held-out file, which must not overlap.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="DIR|NAME", help="Model whose tokenizer counts: a folder or a hub name."),
    ] = None,
    kind: Annotated[
        Kind | None, typer.Option(help="The kind of job; by default chosen by the columns.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Count rows and tokens, and find problems that would stop a job: broken rows, missing answers, long
    prompts, overlap with the held-out file. Exits with status 2 if there are any."""
    with readable_errors():
        from areal_async.config.data_check import Expected, check_data
        from areal_async.show.progress import track

        if target.suffix in (".yaml", ".yml"):
            files, expected = _of_job(target)
        else:
            files = [target, *([held_out] if held_out is not None else [])]
            tokenizer, known = _tokenizer(model)
            expected = Expected(kind, tokenizer, max_model_len=known)
        report = check_data(files, expected, track)
        show(report, "\n".join(_checked(report)), as_json)
        if report.stops:
            raise typer.Exit(2)


def _of_job(job_file: Path) -> tuple[list[Path], Expected]:
    """Return the files of a job, and the requirements on them."""
    from areal_async.base.mistakes import ConfigError
    from areal_async.config.content import content_mistakes
    from areal_async.config.data_check import Expected
    from areal_async.config.load import load_job

    job = load_job(job_file, files=False)
    if mistakes := content_mistakes(job, ("model", "tasks.train", "tasks.evaluation")):
        raise ConfigError(str(job_file), mistakes)
    tokenizer = _loaded(job.model, job.rollout.template_args) if job.model.is_dir() else None
    missing = f"the job's model, {job.model}, is not there (yet)"
    is_rl = job.kind == "rl"
    length = job.rollout.max_model_len if is_rl else None
    files = [path for path in (job.tasks.train, job.tasks.evaluation) if path is not None]
    kind: Any = job.kind
    return files, Expected(kind, tokenizer, missing, length, job.reward if is_rl else None)


def _tokenizer(model: str | None) -> tuple[Any, int | None]:
    """Return the tokenizer of a model folder or hub model, and the model's largest number of tokens."""
    from areal_async.config.files import json_in
    from areal_async.data.tasks import DataError
    from areal_async.models.files import no_folder
    from areal_async.storage.hub import hub_url, model_folder
    from areal_async.storage.remote import StorageError

    if model is None:
        return None, None
    folder = Path(model)
    if not folder.is_dir():
        if hub_url(model, Path(), is_data=False) is None:
            raise DataError(f"--model: {no_folder(folder)}. Give a model's folder, or owner/name of the hub.")
        try:
            folder = model_folder(model, lambda: print(f"fetching {model}", file=sys.stderr, flush=True))
        except StorageError as error:
            raise DataError(str(error)) from None
    config = json_in(folder / "config.json")
    known = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return _loaded(folder, {}), known if isinstance(known, int) else None


def _loaded(model: Path, template_args: Any) -> Any:
    from areal_async.data.tasks import DataError
    from areal_async.models.prompts import with_template_args
    from areal_async.models.tokenizer import TokenizerError, load_tokenizer

    try:
        return with_template_args(load_tokenizer(model), template_args)
    except TokenizerError as error:
        raise DataError(str(error)) from None


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
