"""Writer of the files that Prometheus and Grafana need, for one folder and the runs to show.

The files are complete, so that both programs can start with them and find each other. Writing again replaces
only files of an earlier call."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import yaml

from areal_async.base.addresses import LOOPBACK
from areal_async.base.mistakes import ConfigError, Mistake

HERE = Path(__file__).parent
PARTS = ("grafana", "rules", "provisioning", "alertmanager", "grafana.ini")
SCRAPE_S, EVALUATE_S = 2, 5


class ListedJobs(NamedTuple):
    """A controller that lists the processes of its jobs for Prometheus, and the token for requests to this
    controller."""

    url: str
    token_file: Path


def write_files(
    folder: Path, run_dirs: Sequence[Path], prometheus_url: str, listed: ListedJobs | None = None
) -> list[Path]:
    """Write dashboards, rules, provisioning and `prometheus.yaml` into `folder`, and return all files in
    order. Prometheus scrapes the jobs with a `run_dir` in `run_dirs` and the jobs of a controller. Raises
    `ConfigError` if writing fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for part in PARTS:
            if (HERE / part).is_dir():
                shutil.copytree(HERE / part, folder / part, dirs_exist_ok=True)
            else:
                shutil.copy(HERE / part, folder / part)
        _change(
            folder / "provisioning" / "datasources" / "areal.yaml", "datasources", {"url": prometheus_url}
        )
        dashboards = {"options": {"path": str((folder / "grafana").absolute())}}
        _change(folder / "provisioning" / "dashboards" / "areal.yaml", "providers", dashboards)
        (folder / "prometheus.yaml").write_text(_prometheus(run_dirs, listed), encoding="utf-8")
    except OSError as error:
        problem = f"{folder} cannot be written: {error.strerror}"
        fix = "Name a folder of yours"
        raise ConfigError("the command line", [Mistake("DIR", problem, fix)]) from error
    return sorted(path for path in folder.rglob("*") if path.is_file())


def start_commands(folder: Path) -> list[str]:
    """Return the shell commands that start both programs with the files in `folder`, on loopback only."""
    folder = folder.absolute()
    settings = {
        "GF_SERVER_HTTP_ADDR": LOOPBACK,
        "GF_PATHS_PROVISIONING": folder / "provisioning",
        "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": folder / "grafana" / "areal-overview.json",
    }
    environment = " ".join(f"{name}={value}" for name, value in settings.items())
    return [
        f"  prometheus --config.file={folder / 'prometheus.yaml'} --storage.tsdb.path={folder / 'data'} "
        f"--web.listen-address={LOOPBACK}:9090",
        f"  {environment} grafana server --config={folder / 'grafana.ini'} --homepath=/usr/share/grafana",
    ]


def _change(path: Path, section: str, values: Mapping[str, object]) -> None:
    """Replace fields of the only entry of a list in a provisioning file."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    content[section][0].update(values)
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def _prometheus(run_dirs: Sequence[Path], listed: ListedJobs | None) -> str:
    """Return the text of prometheus.yaml. A running job lists its processes in
    `<run_dir>/prometheus/<job>.json`, and removes that file at its end. A controller serves the lists of its
    jobs."""
    lists = [str(folder.absolute() / "prometheus" / "*.json") for folder in run_dirs]
    scrapes: list[dict[str, object]] = [
        {"job_name": "areal", "file_sd_configs": [{"files": lists, "refresh_interval": "5s"}]}
    ]
    if listed is not None:
        shown = {"authorization": {"credentials_file": str(listed.token_file)}}
        found = {"url": f"{listed.url}/v1/targets", "refresh_interval": "5s", **shown}
        scrapes.append({"job_name": "areal-jobs", "http_sd_configs": [found]})
        address = urlsplit(listed.url)
        own = {"scheme": address.scheme, "static_configs": [{"targets": [address.netloc]}], **shown}
        scrapes.append({"job_name": "controller", **own})
    content = {
        "global": {
            "scrape_interval": f"{SCRAPE_S}s",
            "scrape_timeout": f"{SCRAPE_S}s",
            "evaluation_interval": f"{EVALUATE_S}s",
        },
        "rule_files": ["rules/*.yaml"],
        "scrape_configs": scrapes,
    }
    return str(yaml.safe_dump(content, sort_keys=False))
