"""`areal-async dashboards`: Prometheus and Grafana with this project's dashboards, rules and alerts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from areal_async.base.addresses import LOOPBACK
from areal_async.cli.tools import AsJson, readable_errors, show

dashboards = typer.Typer(
    help="Dashboards, rules and alerts for Prometheus and Grafana.", no_args_is_help=True
)

Runs = Annotated[list[Path], Option("--runs", metavar="DIR", help="A `run_dir` of jobs; again for each.")]


@dashboards.command()
def up(
    runs: Runs = [Path("runs")],  # noqa: B006
    folder: Annotated[
        Path | None, Option("--in", metavar="DIR", help="Where its files and data lie.")
    ] = None,
    port: Annotated[int, Option(min=1, max=65535, help="Of Prometheus.")] = 9090,
    grafana_port: Annotated[int, Option(min=1, max=65535, help="Of Grafana.")] = 3000,
) -> None:
    """Start Prometheus, and Grafana if it is installed, with everything set up, until Ctrl-C."""
    with readable_errors():
        from areal_async.cluster.client import ControllerClient, ControllerGone
        from areal_async.show.dashboards.files import ListedJobs
        from areal_async.show.dashboards.serving import Ports, serve

        listed, running = None, 0
        with suppress(ControllerGone):  # No controller is running
            client = ControllerClient.find()
            running = sum(job.state == "RUNNING" for job in client.jobs(ended=False))
            if client.folder is not None:
                listed = ListedJobs(client.url, client.folder.path / "look.token")
        serve(
            folder or runs[0] / "dashboards",
            runs,
            Ports(port, grafana_port),
            lambda line: print(line, flush=True),
            listed=listed,
            jobs=running,
        )


@dashboards.command()
def write(
    folder: Annotated[Path, Argument(metavar="DIR", help="Where to write; made if it is not there.")],
    runs: Runs = [Path("runs")],  # noqa: B006
    prometheus: Annotated[
        str, Option(metavar="URL", help="Where Grafana is to find Prometheus.")
    ] = f"http://{LOOPBACK}:9090",
    as_json: AsJson = False,
) -> None:
    """Write dashboards, rules, alerts and provisioning for Prometheus and Grafana on another machine."""
    with readable_errors():
        from areal_async.show.dashboards.files import write_files

        written = write_files(folder, runs, prometheus)
        lines = [
            f"{folder}/ has {len(written)} file{'s' * (len(written) > 1)}:",
            "  grafana/        dashboards, to be imported or provisioned",
            "  provisioning/   of Grafana, by which it finds Prometheus and the dashboards",
            "  rules/          recording and alert rules of Prometheus",
            "  prometheus.yaml scrapes the jobs of this machine",
            "  alertmanager/   an example of who is told what",
        ]
        show({"folder": folder, "files": written}, "\n".join(lines), as_json)
