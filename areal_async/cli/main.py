"""The command line: `areal-async run | submit | ps | resume | scale | drain | validate | doctor | …`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer import Argument, Option
from typer.core import TyperGroup

from areal_async import __version__
from areal_async.cli.dashboards import dashboards
from areal_async.cli.gpu import gpu
from areal_async.cli.jobs import jobs, told
from areal_async.cli.keys import keys
from areal_async.cli.page import page
from areal_async.cli.targets import of_controller
from areal_async.cli.tools import (
    AsJson,
    Overrides,
    RunArgument,
    add_programs,
    note,
    own_tracebacks,
    print_json,
    readable_errors,
    show,
)

if TYPE_CHECKING:
    from areal_async.base.mistakes import Mistake
    from areal_async.config.job import JobConfig
    from areal_async.rpc.control_messages import DrainWorker, ScaleWorkers

SWEEP = "for lr in 1e-6 3e-6; do areal-async submit JOB.YAML job=NAME-$lr trainer.optimizer.lr=$lr; done"
DIFF = "diff <(areal-async validate A.YAML) <(areal-async validate B.YAML); a run has a job.yaml"
MOVED = {
    "buffer replay": "areal-async buffer export --batches, which writes the recorded batches to a file",
    "compare": "areal-async view RUN RUN --report FILE.HTML",
    "config diff": DIFF,
    "config show": "areal-async validate JOB.YAML or areal-async status JOB --json",
    "data check": "areal-async validate JOB.YAML",
    "data prepare": "a script: docs/your-task.md#convert-a-data-set",
    "logs --list": "areal-async logs JOB NAME with any name: if there is no such log, the error lists them",
    "diff": DIFF,
    "dashboards up": "areal-async dashboards write DIR, which prints how to start both programs",
    "objectives": "areal-async validate JOB.YAML trainer.objective=NAME, or docs/objectives.md",
    "reward new": "areal-async init DIR, which makes a reward, too",
    "sweep": f"a loop of the shell: {SWEEP}",
    "submit --memory-gb": "placement.ROLE.memory_gb=N, which Ray reserves",
    "submit --sweep": f"a loop of the shell: {SWEEP}",
    "top": "areal-async ps --watch",
}
"""Commands and options of earlier releases, each with its replacement."""
PANELS = {
    "Start": "quickstart init reward doctor gpu validate plan simulate",
    "Train": "run resume stop scale drain",
    "Look": "status logs view advise evaluate generate export buffer dashboards",
    "Cluster": "up down submit ps pause keys",
}
"""The commands in the order of use, by heading of the help."""
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names.split()}


def _without_types(parameters: list[Any]) -> list[Any]:
    """Remove the type from the help of flags, because flags take no value. Return the parameters."""
    for option in parameters:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    return parameters


UsageError: Any = typer.BadParameter.__base__


class CommandGroup(TyperGroup):
    """Group of commands that lists them in the order of use. If a command or an option comes from an
    earlier release, the error gives its replacement."""

    def list_commands(self, ctx: Any) -> list[str]:
        return super().list_commands(ctx) if ctx.parent else list(PANEL_OF)

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            words = [ctx.command.name, *args] if ctx.parent else args
            for name in (" ".join(words[:2]), words[0]):
                if name in MOVED:
                    ctx.fail(f"No such command {name!r}. Use {MOVED[name]}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            option = getattr(error, "option_name", "")
            if moved := MOVED.get(f"{getattr(error.ctx, 'info_name', '')} {option}"):
                error.ctx.fail(f"No such option: {option}. Use {moved}")
            raise

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if (found := super().get_command(ctx, cmd_name)) is not None:
            if not ctx.parent:
                found.rich_help_panel = PANEL_OF[cmd_name]  # type: ignore[attr-defined]
            for each in (found, *getattr(found, "commands", {}).values()):
                _without_types(each.get_params(ctx))
        return found


app = typer.Typer(
    name="areal-async",
    cls=CommandGroup,
    help="Fully asynchronous, decoupled reinforcement learning for language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
buffer = typer.Typer(help="Look into the buffer of a run, and take episodes out of it.", no_args_is_help=True)
reward = typer.Typer(help="Try a reward on a file, or serve it.", no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"areal-async {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


groups = {"buffer": buffer, "reward": reward, "keys": keys, "dashboards": dashboards, "gpu": gpu}
for name, group in groups.items():
    app.add_typer(group, name=name, cls=CommandGroup)
for each in (jobs, page):
    app.registered_commands += each.registered_commands
add_programs({"": app, **groups})

JobFile = Annotated[Path, Argument(metavar="JOB.YAML", help="The job file.")]
Plain = Annotated[bool, Option("--plain", help="Plain lines instead of the live view.")]
Summary = Annotated[
    bool, Option("--json", help="Nothing but summary.json on standard output; the rest goes to the other.")
]
Cluster = Annotated[
    Path | None, Option(metavar="CLUSTER.YAML", help="A cluster's file; else it runs on this machine.")
]
Inline = Annotated[
    bool, Option("--inline", help="All roles in this process, for breakpoint() and profilers (docs/cli.md).")
]
Overwrite = Annotated[
    bool, Option("--overwrite", help="Delete what an earlier run of this job left in its folder.")
]


def print_warnings(job: JobConfig, found: Sequence[Mistake] = ()) -> None:
    """Print warnings about a job on standard error. There is one line for each doubtful setting of the job,
    and one for each warning or note about the job's files (`found`)."""
    from areal_async.config.advice import advise

    console = Console(stderr=True, soft_wrap=True)
    for warning in [*advise(job), *found]:
        console.print("warning:" if warning.fix else "note:", style="bold yellow", end=" ")
        console.print(str(warning), markup=False, highlight=False)


def _checked_job(job_file: Path, overrides: Sequence[str] | None) -> tuple[JobConfig, list[Mistake]]:
    """Read and check a job file. Return the job and warnings about its files. Raises `ConfigError`, whose
    text says if other checks are still to come."""
    from areal_async.base.mistakes import WHOLE_FILE, ConfigError
    from areal_async.config.load import load_job
    from areal_async.launch.preflight import check_contents
    from areal_async.show.progress import progress

    try:
        job = load_job(job_file, overrides or ())
    except ConfigError as error:
        if any(each.field == WHOLE_FILE for each in error.mistakes):
            raise
        then = "More is checked once this is mended: your code, tokenizer, weights, prompts and servers."
        raise ConfigError(error.source, error.mistakes, then=then) from error
    with progress("checking the job"):
        return job, check_contents(job, source=str(job_file))


@app.command()
def run(
    job_file: JobFile,
    overrides: Overrides = None,
    overwrite: Overwrite = False,
    plain: Plain = False,
    cluster: Cluster = None,
    inline: Inline = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Check the job and this machine, and start nothing.")
    ] = False,
    as_json: Summary = False,
) -> None:
    """Run a job until it is done, on this machine or on a Ray cluster that includes this machine."""
    with readable_errors(), ExitStack() as stack:
        if not (dry_run or inline or cluster):
            from areal_async.launch.forks import prepared

            stack.enter_context(prepared())  # it imports while the job is checked
        job, found = _checked_job(job_file, overrides)
        if not dry_run:
            return _run(job, cluster, inline, as_json, found, plain=plain, overwrite=overwrite)
        from areal_async.config.cluster import load_cluster
        from areal_async.runner.run_job import check_start

        check_start(job, cluster=load_cluster(cluster) if cluster else None, inline=inline)
        print_warnings(job, found)
        show({"job": job.job, "starts": False}, f"{job_file} can run here; nothing was started", as_json)


@app.command()
def resume(
    target: Annotated[
        str,
        Argument(
            metavar="RUN_FOLDER|JOB.YAML|JOB",
            help="The run's folder, its URL or its job file, or a job of the controller.",
        ),
    ],
    overrides: Overrides = None,
    plain: Plain = False,
    cluster: Cluster = None,
    inline: Inline = False,
    as_json: Summary = False,
) -> None:
    """Continue a run that was killed, interrupted or failed, or queue a job of the controller again."""
    with readable_errors():
        if (client := of_controller(target)) is not None:
            queued = client.resume(str(target), overrides or ())
            return show(queued, told(queued), as_json)
        from areal_async.launch.run_handle import job_to_resume
        from areal_async.storage.urls import shown

        job = job_to_resume(target, overrides or ())
        if Path(target).is_file():
            recorded = shown(job.run_dir / job.job / "job.yaml")
            note(f"note: it goes on as {recorded} says; to change a field, name it: key=value")
        _run(job, cluster, inline, as_json, plain=plain, resume=True)


def _run(
    job: JobConfig,
    cluster_file: Path | None,
    inline: bool,
    as_json: bool,
    found: Sequence[Mistake] = (),
    **how: Any,
) -> None:
    from areal_async.config.cluster import load_cluster
    from areal_async.runner.run_job import run_job
    from areal_async.show.view import RunConsole

    print_warnings(job, found)
    cluster = load_cluster(cluster_file) if cluster_file is not None else None
    where: dict[str, Any] = {"cluster": cluster, "cluster_file": cluster_file, "inline": inline}
    with own_tracebacks() if inline else nullcontext():
        result = run_job(job, console=RunConsole(stderr=as_json), **where, **how)
    if as_json:
        print_json(result.summary, RunConsole())


@app.command()
def validate(job_file: JobFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check a job file, its files and its requirements. Print the job with every field resolved."""
    with readable_errors():
        from areal_async.config.load import dump_job, resolved

        job, found = _checked_job(job_file, overrides)
        shown = resolved(job)
        show(shown.model_dump(mode="json"), dump_job(shown).rstrip("\n"), as_json)
        print_warnings(job, found)  # at the end, where they are seen


Within = Annotated[
    float, Option("--timeout", min=0, help="Seconds in which a worker that leaves may finish what it has.")
]


@app.command()
def scale(
    run: RunArgument,
    workers: Annotated[int, Option(min=1, help="Rollout workers that the run is to have.")],
    timeout_s: Within = 60.0,
    as_json: AsJson = False,
) -> None:
    """Change the number of rollout workers of a run. The newest workers leave first."""
    from areal_async.rpc.control_messages import ScaleWorkers

    _change(run, ScaleWorkers(workers, int(timeout_s * 1000)), as_json)


@app.command()
def drain(
    run: RunArgument,
    worker: Annotated[str, Argument(metavar="WORKER", help="Its name, e.g. rollout-1.")],
    timeout_s: Within = 60.0,
    outside: Annotated[
        bool, Option("--outside", help="A worker that was started by hand; it is not waited for.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove a rollout worker: it finishes its groups, returns the rest and exits. Wait until it has
    exited."""
    from areal_async.rpc.control_messages import DrainWorker

    _change(run, DrainWorker(worker, int(timeout_s * 1000), outside), as_json)


def _change(run: str, change: ScaleWorkers | DrainWorker, as_json: bool) -> None:
    with readable_errors():
        if (client := of_controller(run)) is not None:
            done = client.change(run, change)
        else:
            from areal_async.launch.run_handle import change_workers

            done = change_workers(run, change)
        show({"text": done.text, "workers": done.workers}, done.text, as_json)


@app.command()
def doctor(
    clean: Annotated[bool, Option("--clean", help="Delete what dead runs left behind.")] = False,
    gpu: Annotated[bool, Option("--gpu", help="Check GPUs and builds against the version matrix.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check whether this machine is ready, and print a fix for each problem."""
    with readable_errors():
        from areal_async.cli.doctor import examine, remove_leftovers
        from areal_async.cli.doctor_gpu import examine_gpu, matrix_table
        from areal_async.launch.one_host import volatile_roots

        removed = remove_leftovers(volatile_roots()) if clean else []
        console, findings = Console(soft_wrap=True, highlight=False), []
        for folder in () if as_json else removed:
            console.print(f"removed {folder}")
        if gpu and not as_json:
            console.print(matrix_table())
        for finding in chain(examine(), examine_gpu() if gpu else ()):
            findings.append(finding)
            if not as_json:
                color = {"ok": "green", "warn": "yellow", "fail": "bold red"}[finding.level]
                told = f"{finding.found}. {finding.fix}." if finding.fix else finding.found
                console.print(Text.assemble((f"{finding.level:4}", color), f"  {finding.about:13}  {told}"))
        if as_json:
            print_json({"removed": removed, "findings": findings})
        if any(finding.level == "fail" for finding in findings):
            raise typer.Exit(1)


@app.command()
def quickstart(
    overrides: Overrides = None,
    seed: Annotated[int, Option(help="Seed of model, tasks and training.")] = 0,
    out: Annotated[Path, Option(help="Folder for everything it makes.")] = Path("runs"),
    plain: Plain = False,
    as_json: Summary = False,
) -> None:
    """Create a tiny model and train it through all five services. This takes a few minutes on two cores."""
    with readable_errors():
        from areal_async.cli.quickstart.main import quickstart as start
        from areal_async.show.view import RunConsole

        console = RunConsole(stderr=as_json)
        result = start(seed=seed, out=out, plain=plain, overrides=overrides or (), console=console)
        if as_json:
            print_json(result.summary, RunConsole())


@app.command()
def init(
    folder: Annotated[Path, Argument(metavar="DIR", help="The folder to make.")],
    model: Annotated[
        str | None, Option(metavar="DIR|NAME", help="A model's folder or hub name; else a tiny one is made.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a folder for your own task: data, a reward, and a job that learns."""
    with readable_errors():
        from areal_async.cli.new_task import write_task_files

        steps = write_task_files(folder, model)
        lines = [f"{folder.as_posix()}/ has a task to change into yours (docs/your-task.md). What next:"]
        lines += [f"  {step}" for step in steps]
        show({"folder": folder.as_posix(), "next": steps}, "\n".join(lines), as_json)


if __name__ == "__main__":
    app()
