"""`areal-async diff`: the fields in which two jobs differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument

from areal_async.cli.targets import of_controller
from areal_async.cli.tools import AsJson, print_json, readable_errors

fields = typer.Typer()


@fields.command()
def diff(
    source: Annotated[
        str, Argument(metavar="JOB.YAML|RUN|JOB", help="A job file, a run, or a job of the controller.")
    ],
    other: Annotated[
        str | None, Argument(metavar="[OTHER]", help="What to compare it with; else the defaults.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the fields in which two jobs differ, or in which a job differs from the defaults. Exits with
    status 1 if there are any."""
    with readable_errors():
        from pydantic_core import to_jsonable_python

        from areal_async.base.yaml_file import dump_yaml
        from areal_async.config.fields import leaves_of
        from areal_async.config.job import JobConfig, job_fields

        first = dict(leaves_of(JobConfig, content_of(source)))
        if other is None:
            second = {path: to_jsonable_python(field.default) for path, field in job_fields().items()}
        else:
            second = dict(leaves_of(JobConfig, content_of(other)))
        changed = [path for path in job_fields() if first.get(path) != second.get(path)]
        if as_json:
            print_json({path: [first.get(path), second.get(path)] for path in changed})
        for path in () if as_json else changed:
            old, new = (dump_yaml(each.get(path)).removesuffix("...\n").strip() for each in (first, second))
            print(f"{path}: {old}  |  {new}" if "\n" not in old + new else f"{path}:\n{old}\n|\n{new}")
        if changed:
            raise typer.Exit(1)


def content_of(source: str) -> dict[str, Any]:
    """Return the resolved job of a file, of a run folder or of the controller, as JSON values. Raises
    `ConfigError` or `RunFolderError`."""
    from areal_async.config.load import load_job

    path = Path(source)
    if (client := of_controller(source)) is not None:
        found = client.job(source).config
        job = load_job(found, source=f"job {source}", base=Path("/"), files=False)
    else:
        job = load_job(path / "job.yaml" if path.is_dir() else path, files=False)
    return job.model_dump(mode="json")
