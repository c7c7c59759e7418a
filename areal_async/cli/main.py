"""The command line: `areal-async run | submit | ps | resume | scale | drain | validate | doctor | …`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from areal_async import __version__
from areal_async.cli.fields import config
from areal_async.cli.jobs import jobs, of_controller, told
from areal_async.cli.tools import (
    AdviseRequest,
    CheckpointRequest,
    PlanRequest,
    SimulateRequest,
    add_command,
    buffer,
    readable_errors,
    reward,
)

if TYPE_CHECKING:
    from areal_async.config.job import JobConfig

app = typer.Typer(
    name="areal-async",
    help="Fully asynchronous, decoupled reinforcement learning for language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"areal-async {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.add_typer(buffer, name="buffer")
app.add_typer(reward, name="reward")
app.add_typer(config, name="config")
app.registered_commands += jobs.registered_commands

JobFile = Annotated[Path, typer.Argument(metavar="JOB.YAML", help="The job file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Fields to change, e.g. buffer.max_staleness=0."),
]
Plain = Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live view.")]
Cluster = Annotated[
    Path | None, typer.Option(metavar="CLUSTER.YAML", help="A cluster's file; else it runs on this machine.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Delete what an earlier run of this job left in its folder.")
]


def print_warnings(job: JobConfig) -> None:
    """One line on standard error for everything that `job` may say but will regret."""
    from areal_async.config.checks import advise
    from areal_async.config.files import advise_on_lora
    from areal_async.launch.preflight import machine_advice

    console = Console(stderr=True, soft_wrap=True)
    for warning in [*advise(job), *advise_on_lora(job), *machine_advice(job)]:
        console.print("warning:", style="bold yellow", end=" ")
        console.print(str(warning), markup=False, highlight=False)


@app.command()
def run(
    job_file: JobFile,
    overrides: Overrides = None,
    overwrite: Overwrite = False,
    plain: Plain = False,
    cluster: Cluster = None,
) -> None:
    """Run a job until it is done, on this machine or on a cluster that this machine is a node of."""
    with readable_errors():
        from areal_async.config.cluster import load_cluster
        from areal_async.config.load import load_job
        from areal_async.launch.preflight import check_contents
        from areal_async.launch.run import run_job

        job = load_job(job_file, overrides or ())
        check_contents(job, source=str(job_file))
        print_warnings(job)
        where = load_cluster(cluster) if cluster is not None else None
        run_job(job, overwrite=overwrite, plain=plain, cluster=where)


@app.command()
def resume(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN_FOLDER|JOB.YAML|JOB",
            help="The run's folder, its URL or its job file, or a job of the controller.",
        ),
    ],
    overrides: Overrides = None,
    plain: Plain = False,
    cluster: Cluster = None,
) -> None:
    """Go on with a run that was killed, interrupted or failed, or queue a job of the controller again."""
    with readable_errors():
        if (client := of_controller(target)) is not None:
            print(told(client.resume(str(target), overrides or ())))
            return
        from areal_async.config.cluster import load_cluster
        from areal_async.launch.run import run_job
        from areal_async.launch.runs import job_to_resume
        from areal_async.storage.urls import shown

        job = job_to_resume(target, overrides or ())
        if Path(target).is_file():
            recorded = shown(job.run_dir / job.job / "job.yaml")
            print(f"note: it goes on as {recorded} says; to change a field, name it: key=value", flush=True)
        print_warnings(job)
        where = load_cluster(cluster) if cluster is not None else None
        run_job(job, resume=True, plain=plain, cluster=where)


@app.command()
def validate(job_file: JobFile, overrides: Overrides = None) -> None:
    """Check a job file, what it names and what it needs, and print it with every field resolved."""
    with readable_errors():
        from areal_async.config.load import dump_job, load_job
        from areal_async.launch.preflight import check_contents

        job = load_job(job_file, overrides or ())
        check_contents(job, source=str(job_file))
        print_warnings(job)
        print(dump_job(job), end="")


add_command(app, "plan", PlanRequest)
add_command(app, "simulate", SimulateRequest)
add_command(app, "advise", AdviseRequest)
add_command(app, "export", CheckpointRequest)

RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run's folder, its URL or its job file, or a job of the controller.",
        show_default=False,
    ),
]
Within = Annotated[
    float,
    typer.Option("--timeout", min=0, help="Seconds in which a worker that leaves may finish what it has."),
]


@app.command()
def scale(
    run: RunArgument,
    workers: Annotated[int, typer.Option(min=1, help="Rollout workers that the run is to have.")],
    timeout_s: Within = 60.0,
) -> None:
    """Have more or fewer rollout workers in a run that goes on; the newest leave first."""
    with readable_errors():
        if (client := of_controller(run)) is not None:
            request = {"workers": workers, "timeout_s": timeout_s}
            print(client.change(str(run), "scale", request, timeout_s).text)
            return
        from areal_async.launch.runs import change_workers
        from areal_async.rpc.control_messages import ScaleWorkers

        print(change_workers(run, ScaleWorkers(workers, int(timeout_s * 1000))).text)


@app.command()
def drain(
    run: RunArgument,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Its name, e.g. rollout-1.")],
    timeout_s: Within = 60.0,
    outside: Annotated[
        bool, typer.Option("--outside", help="A worker that was started by hand; it is not waited for.")
    ] = False,
) -> None:
    """Have a rollout worker finish what it has, hand back the rest and end, and wait for that."""
    with readable_errors():
        if (client := of_controller(run)) is not None:
            request = {"worker": worker, "timeout_s": timeout_s, "outside": outside}
            print(client.change(str(run), "drain", request, timeout_s).text)
            return
        from areal_async.launch.runs import change_workers
        from areal_async.rpc.control_messages import DrainWorker

        print(change_workers(run, DrainWorker(worker, int(timeout_s * 1000), outside)).text)


@app.command()
def doctor(
    clean: Annotated[bool, typer.Option("--clean", help="Delete what dead runs left behind.")] = False,
) -> None:
    """Look whether this machine is ready, and say what to do where it is not."""
    with readable_errors():
        from areal_async.cli.doctor import examine, remove_leftovers
        from areal_async.launch.one_host import volatile_roots

        console = Console(soft_wrap=True)
        for folder in remove_leftovers(volatile_roots()) if clean else ():
            console.print(f"removed {folder}", highlight=False)
        failed = False
        for finding in examine():
            failed = failed or finding.level == "fail"
            color = {"ok": "green", "warn": "yellow", "fail": "bold red"}[finding.level]
            told = f"{finding.found}. {finding.fix}." if finding.fix else finding.found
            console.print(Text.assemble((f"{finding.level:4}", color), f"  {finding.about:13}  {told}"))
        if failed:
            raise typer.Exit(1)


@app.command()
def quickstart(
    overrides: Overrides = None,
    seed: Annotated[int, typer.Option(help="Seed of model, tasks and training.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for everything it makes.")] = Path("runs"),
    plain: Plain = False,
) -> None:
    """Make a tiny model and train it through all five services: a few minutes on two cores."""
    with readable_errors():
        from areal_async.quickstart.main import quickstart as start

        start(seed=seed, out=out, plain=plain, overrides=overrides or ())


@reward.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the function, its file and its folder.")],
    parent: Annotated[Path, typer.Option("--in", metavar="DIR", help="Where to make the folder.")] = Path(),
) -> None:
    """Make a folder with a reward that works, its test, a few tasks and a job file."""
    with readable_errors():
        from areal_async.rewardfiles import write_reward_files

        shown = write_reward_files(name, parent).as_posix()
        console = Console(soft_wrap=True, highlight=False)
        console.print(f"{shown}/ has {name}.py, test_{name}.py, tasks.jsonl and job.yaml. What next:")
        console.print(f"  python -m pytest {shown}", markup=False)
        console.print(
            f"  areal-async reward test {shown}/{name}.py:{name} --data {shown}/tasks.jsonl", markup=False
        )


if __name__ == "__main__":
    app()
