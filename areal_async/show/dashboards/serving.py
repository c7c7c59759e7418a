"""Prometheus and Grafana as child processes, configured for this project, until Ctrl-C.

Both listen only on loopback. Neither outlives this process. If one exits by itself, the other is ended too,
and an error names the log. If Grafana is not installed, Prometheus starts without it, and a message tells the
user how to install it. Without Prometheus nothing starts."""

from __future__ import annotations

import os
import select
import shutil
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from areal_async.base.addresses import LOOPBACK
from areal_async.base.errors import ArealError
from areal_async.base.processes import ChildProcess, exit_text
from areal_async.launch.supervisor import caught_signals
from areal_async.show.dashboards.files import ListedJobs, write_files

READY_S, TICK_S, END_S = 60.0, 0.2, 10.0
NO_PROMETHEUS = (
    "prometheus is not on the PATH. Install it (Debian and Ubuntu: apt install prometheus; elsewhere the "
    "archive of prometheus.io), or give the files of `areal-async dashboards write DIR` to one that "
    "runs elsewhere."
)
NO_GRAFANA = (
    "grafana is not on the PATH, so there is Prometheus alone. Install it from grafana.com and start this "
    "again, or give your Grafana the dashboards in {folder}/grafana (Dashboards > New > Import) and {url} as "
    "a Prometheus data source."
)


class DashboardsError(ArealError):
    """Error if Prometheus or Grafana cannot be started, or exits by itself."""


@dataclass(frozen=True)
class Ports:
    prometheus: int = 9090
    grafana: int = 3000


def serve(
    folder: Path,
    run_dirs: Sequence[Path],
    ports: Ports,
    tell: Callable[[str], None],
    *,
    listed: ListedJobs | None = None,
    jobs: int = 0,
) -> None:
    """Write the files into `folder`, start the installed programs, report their URLs with `tell`, and return
    after a signal. `listed` is the controller whose jobs are shown too; `jobs` is the number of its running
    jobs. Raises `DashboardsError`."""
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        raise DashboardsError(NO_PROMETHEUS)
    _check_free(ports.prometheus, "--port")
    url = f"http://{LOOPBACK}:{ports.prometheus}"
    write_files(folder, run_dirs, url, listed)
    with caught_signals() as signals, ExitStack() as stack:
        running: dict[str, ChildProcess] = {}

        def start(
            name: str, command: Sequence[str], ready: str, environment: Mapping[str, str] | None
        ) -> None:
            child = ChildProcess(command, environment=environment, output=folder / f"{name}.log")
            running[name] = child
            stack.callback(_end, child)
            _await(lambda: _answers(ready), running, folder, signals)

        start("prometheus", prometheus_command(prometheus, folder, ports.prometheus), f"{url}/-/ready", None)
        tell(f"Prometheus, with the rules: {url}")
        if (command := grafana_command(folder)) is None:
            tell(NO_GRAFANA.format(folder=folder, url=url))
        else:
            _check_free(ports.grafana, "--grafana-port")
            grafana_url = f"http://{LOOPBACK}:{ports.grafana}"
            settings = os.environ | grafana_environment(folder, ports.grafana)
            start("grafana", command, f"{grafana_url}/api/health", settings)
            tell(f"Grafana, with the dashboards: {grafana_url}")
        tell(told_of(run_dirs, listed, jobs))
        _await(lambda: False, running, folder, signals, limit_s=None)


def told_of(run_dirs: Sequence[Path], listed: ListedJobs | None = None, jobs: int = 0) -> str:
    """Return a line that names the jobs with figures. The user notices a wrong folder in it."""
    n = sum(len([*folder.glob("prometheus/*.json")]) for folder in run_dirs)
    where = ", ".join(str(folder.resolve()) for folder in run_dirs)
    running = f"{n} now" if n else "none now; --runs names the run_dir of your job files"
    also = f" and those of the controller at {listed.url} ({jobs} now)" if listed is not None else ""
    return f"It shows the jobs that run in {where} ({running}){also}, until Ctrl-C."


def _check_free(port: int, option: str) -> None:
    """Raise `DashboardsError` if the port is in use, because its server would be mistaken for the new one."""
    try:
        socket.create_server((LOOPBACK, port)).close()
    except OSError as error:
        raise DashboardsError(
            f"cannot listen on port {port}: {error.strerror}. Give another {option}, or end what serves it."
        ) from error


def prometheus_command(program: str, folder: Path, port: int) -> list[str]:
    return [
        program,
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={LOOPBACK}:{port}",
    ]


def grafana_command(folder: Path) -> list[str] | None:
    """Return the command that starts Grafana with the files in `folder`, or None if it is not installed."""
    program, words = shutil.which("grafana"), ["server"]
    if program is None:  # The name until version 10
        program, words = shutil.which("grafana-server"), []
    if program is None:
        return None
    homes = (Path(program).resolve().parents[1], Path("/usr/share/grafana"))
    home = next((home for home in homes if (home / "conf" / "defaults.ini").exists()), None)
    return [program, *words, f"--config={folder / 'grafana.ini'}", *([f"--homepath={home}"] if home else [])]


def grafana_environment(folder: Path, port: int) -> dict[str, str]:
    """Return the settings that grafana.ini leaves open. GF_<SECTION>_<KEY> replaces a line of the file."""
    folder = folder.absolute()
    return {
        "GF_SERVER_HTTP_ADDR": LOOPBACK,
        "GF_SERVER_HTTP_PORT": str(port),
        "GF_PATHS_DATA": str(folder / "grafana-data"),
        "GF_PATHS_LOGS": str(folder / "grafana-data" / "logs"),
        "GF_PATHS_PROVISIONING": str(folder / "provisioning"),
        "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": str(folder / "grafana" / "areal-overview.json"),
    }


def _await(
    done: Callable[[], bool],
    running: Mapping[str, ChildProcess],
    folder: Path,
    signals: int,
    limit_s: float | None = READY_S,
) -> None:
    """Return when `done()` is true or a signal has arrived. The next caller can still read the signal. Raises
    `DashboardsError` if a process exits first, or after `limit_s`."""
    deadline_s = time.monotonic() + limit_s if limit_s is not None else float("inf")
    while not done():
        for name, child in running.items():
            if (status := child.poll()) is not None:
                last = (folder / f"{name}.log").read_text(errors="replace").strip().splitlines()[-1:]
                said = f": {last[0][:500]}" if last else ""
                raise DashboardsError(f"{name} {exit_text(status)}{said}. Its log is {folder / name}.log")
        if time.monotonic() > deadline_s:
            raise DashboardsError(
                f"{[*running][-1]} does not serve. Its log is {folder / [*running][-1]}.log"
            )
        if select.select([signals], [], [], TICK_S)[0]:
            return


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=TICK_S * 5):
            return True
    except OSError:
        return False


def _end(child: ChildProcess) -> None:
    child.terminate()
    deadline_s = time.monotonic() + END_S
    while child.alive and time.monotonic() < deadline_s:
        time.sleep(TICK_S / 4)
    child.kill()
    child.join()
    child.close()
