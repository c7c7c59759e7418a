"""`areal-async config show | diff`: a job's fields, and what two jobs differ in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from areal_async.cli.tools import AsJson, Overrides, print_json, readable_errors, show

config = typer.Typer(help="Look at the fields of jobs, and at what jobs differ in.", no_args_is_help=True)

Source = Annotated[
    str,
    typer.Argument(metavar="JOB.YAML|RUN|JOB", help="A job file, a run folder, or a job of the controller."),
]


@config.command("show")
def show_fields(source: Source, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print a job with every field resolved; what it points at need not be there."""
    with readable_errors():
        from areal_async.base.yaml_file import dump_yaml

        content = content_of(source, overrides or [])
        show(content, dump_yaml(content).rstrip("\n"), as_json)


@config.command()
def diff(
    source: Source,
    other: Annotated[
        str | None, typer.Argument(metavar="[OTHER]", help="What to compare it with; else the defaults.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the fields in which two jobs differ. Status 1 where they do, as of `diff`."""
    with readable_errors():
        from areal_async.base.yaml_file import dump_yaml
        from areal_async.config.fields import leaves_of
        from areal_async.config.job import JobConfig, job_fields

        first = dict(leaves_of(JobConfig, content_of(source, [])))
        if other is None:
            second = {path: _plain(field.default) for path, field in job_fields().items()}
        else:
            second = dict(leaves_of(JobConfig, content_of(other, [])))
        fields = [path for path in job_fields() if first.get(path) != second.get(path)]
        if as_json:
            print_json({path: [first.get(path), second.get(path)] for path in fields})
        else:
            for path in fields:
                old, new = (
                    dump_yaml(each.get(path)).removesuffix("...\n").strip() for each in (first, second)
                )
                print(f"{path}: {old}  |  {new}" if "\n" not in old + new else f"{path}:\n{old}\n|\n{new}")
        if fields:
            raise typer.Exit(1)


def content_of(source: str, overrides: list[str]) -> dict[str, Any]:
    """The resolved job of a file, a run folder or a job of the controller, as JSON values. Raises
    `ConfigError`, `RunFolderError`."""
    from areal_async.cli.jobs import of_controller
    from areal_async.config.load import load_job

    path = Path(source)
    if (client := of_controller(source)) is not None:
        found = client.job(source).config
        job = load_job(found, overrides, source=f"job {source}", base=Path("/"), files=False)
    else:
        job = load_job(path / "job.yaml" if path.is_dir() else path, overrides, files=False)
    return job.model_dump(mode="json")


def _plain(value: Any) -> Any:
    """A default as JSON has it."""
    from pydantic_core import to_jsonable_python

    return to_jsonable_python(value)
