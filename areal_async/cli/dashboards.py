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
def write(
    folder: Annotated[Path, Argument(metavar="DIR", help="Where to write; made if it is not there.")],
    runs: Runs = [Path("runs")],  # noqa: B006
    prometheus: Annotated[
        str, Option(metavar="URL", help="Where Grafana is to find Prometheus.")
    ] = f"http://{LOOPBACK}:9090",
    as_json: AsJson = False,
) -> None:
    """Write dashboards, rules and provisioning for Prometheus and Grafana, and print how to start both."""
    with readable_errors():
        from areal_async.cluster.client import ControllerClient, ControllerGone
        from areal_async.show.dashboards.files import ListedJobs, start_commands, write_files

        listed = None
        with suppress(ControllerGone):  # No controller is running
            client = ControllerClient.find()
            if client.folder is not None:
                listed = ListedJobs(client.url, client.folder.path / "look.token")
        written = write_files(folder, runs, prometheus, listed)
        lines = [
            f"{folder}/ has {len(written)} file{'s' * (len(written) > 1)}:",
            "  grafana/        dashboards, to be imported or provisioned",
            "  provisioning/   of Grafana, by which it finds Prometheus and the dashboards",
            "  rules/          recording and alert rules of Prometheus",
            "  prometheus.yaml scrapes the jobs of this machine and of a running controller",
            "  alertmanager/   an example of who is told what",
            "To start both here:",
            *start_commands(folder),
        ]
        show({"folder": folder, "files": written}, "\n".join(lines), as_json)
