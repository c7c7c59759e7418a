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

from areal_async.base.metrics import elsewhere
from tests.waiting import LIMIT_S

CONFIG = Path(__file__).parents[3] / "deploy" / "prometheus" / "prometheus.yml"

needs_prometheus = pytest.mark.skipif(
    not shutil.which("prometheus"), reason="needs the Debian package prometheus"
)

SERVICE = """
import sys
from areal_async.base.metrics import busy, other_hosts, start_metrics_server
async def read(name):
    if name == "rollout-1":
        raise TimeoutError("after 1.5 s")
    return b'areal_told{by="rollout-0"} 7\\n'
other_hosts[:] = [read]
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
    """A copy of the scrape file at its place in a checkout, beside a run that lists a process here and two on
    another host, of which one does not answer."""
    config = tmp_path / "deploy" / "prometheus" / "prometheus.yml"
    config.parent.mkdir(parents=True)
    shutil.copy(CONFIG, config)
    targets = tmp_path / "runs" / "prometheus" / "demo.json"
    targets.parent.mkdir(parents=True)
    listed = []
    for name in ("trainer", "rollout-0", "rollout-1"):
        labels = {"job": "demo", "process": name}
        if name != "trainer":
            labels["__metrics_path__"] = elsewhere(name)
        listed.append({"targets": [f"127.0.0.1:{service_port}"], "labels": labels})
    targets.write_text(json.dumps(listed))
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
        until(lambda: len(query(port, "up")) == 3, "not all were scraped", 60.0)
        up = {one["metric"]["process"]: one["value"][1] for one in query(port, "up")}
        assert up == {"trainer": "1", "rollout-0": "1", "rollout-1": "0"}
        [told] = query(port, "areal_told")
        assert (told["metric"]["process"], told["value"][1]) == ("rollout-0", "7")
    finally:
        prometheus.terminate()
        prometheus.wait(LIMIT_S)


def query(port, expression):
    url = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(expression)}"
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return json.load(reply)["data"]["result"]
    except OSError:
        return []
