"""A real Prometheus reads what a process serves, through the scrape file of this repository."""

import json
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from hostile_http import free_port, until

CONFIG = Path(__file__).parents[3] / "deploy" / "prometheus" / "prometheus.yml"

needs_prometheus = pytest.mark.skipif(
    not shutil.which("prometheus"), reason="needs the Debian package prometheus"
)

SERVICE = """
import sys
from areal_async.runtime.metrics import busy, start_metrics_server
with busy("train"):
    print(start_metrics_server(0), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def service_port():
    command = [sys.executable, "-c", SERVICE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as service:
        yield int(service.stdout.readline())
        service.stdin.close()


@pytest.fixture
def checkout(tmp_path, service_port):
    """A copy of the scrape file at its place in a checkout, beside a run that lists one process."""
    config = tmp_path / "deploy" / "prometheus" / "prometheus.yml"
    config.parent.mkdir(parents=True)
    shutil.copy(CONFIG, config)
    targets = tmp_path / "runs" / "prometheus" / "demo.json"
    targets.parent.mkdir(parents=True)
    labels = {"job": "demo", "process": "trainer"}
    targets.write_text(json.dumps([{"targets": [f"127.0.0.1:{service_port}"], "labels": labels}]))
    return tmp_path


@needs_prometheus
def test_a_real_prometheus_finds_a_run_and_answers_for_its_series(checkout):
    port = free_port()
    command = [
        "prometheus",
        f"--config.file={checkout / 'deploy' / 'prometheus' / 'prometheus.yml'}",
        f"--storage.tsdb.path={checkout / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    prometheus = subprocess.Popen(command)
    try:
        until(lambda: query(port, "areal_busy_seconds_total"), "no answer", 60.0)
        [series] = query(port, "areal_busy_seconds_total")
        assert series["metric"].items() >= {"job": "demo", "process": "trainer", "activity": "train"}.items()
        assert float(series["value"][1]) > 0
        [up] = query(port, "up")
        assert up["value"][1] == "1"
    finally:
        prometheus.terminate()
        prometheus.wait(60)


def query(port, expression):
    url = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(expression)}"
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return json.load(reply)["data"]["result"]
    except OSError:
        return []
