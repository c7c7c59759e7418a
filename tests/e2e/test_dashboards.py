"""A real Prometheus scrapes a stand-in whose figures are bad, and each alert fires."""

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request

import pytest
from hostile_http import free_port, until
from prometheus_client import start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from areal_async.dashboards.files import write_files
from areal_async.rpc.endpoints import LOOPBACK
from tests.panels import rules

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("prometheus"), reason="needs the Debian package prometheus"),
]


class Faults(Collector):
    """What every alert but that of a dead process is about."""

    def __init__(self) -> None:
        self.scrapes = 0

    def collect(self):
        self.scrapes += 1
        now = self.scrapes
        yield gauge("areal_stall_seconds", 301.0 + now, edge="reward -> buffer")
        yield gauge("areal_trainer_staleness_mean", 3.9, policy="p")
        yield gauge("areal_buffer_staleness_bound", 4, policy="p")
        yield gauge("areal_buffer_payload_bytes", 95e6)
        yield gauge("areal_buffer_limit_bytes", 100e6)
        yield counter("areal_reward_verdicts_total", now, reward="r", kind="error")
        yield counter("areal_supervisor_restarts_total", now, died="rollout-0")
        yield gauge("areal_trainer_version", 100, policy="p")
        yield gauge("areal_rollout_version", 3, policy="p")
        yield gauge("areal_trainer_loss", float("nan"), policy="p")
        yield gauge("areal_run_disk_free_bytes", max(4e9 - 1e8 * now, 0))
        yield gauge("areal_run_disk_size_bytes", 100e9)
        yield gauge("areal_trainer_effective_sample_share", 0.05, policy="p")
        yield gauge("areal_evaluation_accuracy", 0.9 if now == 1 else 0.5, policy="p")


def gauge(name, value, **labels):
    family = GaugeMetricFamily(name, "", labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def counter(name, value, **labels):
    family = CounterMetricFamily(name, "", labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """Its port; it scrapes and evaluates each second, and no alert waits. Each
    stand-in is a job of its own."""
    folder, port = tmp_path_factory.mktemp("dashboards"), free_port()
    runs = folder / "runs"
    write_files(folder, [runs], "")
    config = folder / "prometheus.yaml"
    config.write_text(re.sub(r"(interval|timeout): \d+s", r"\1: 1s", config.read_text()))
    alerts = folder / "rules" / "alerts.yaml"
    alerts.write_text(re.sub(r"for: \w+", "for: 0s", alerts.read_text()))
    served = []
    (runs / "prometheus").mkdir(parents=True, exist_ok=True)
    for job, service, collector in (("bad", "rollout", Faults()),):
        registry = CollectorRegistry(auto_describe=False)
        collector.describe = lambda: []  # what registers asks for it, and would count as a scrape
        registry.register(collector)
        server, _ = start_http_server(0, LOOPBACK, registry)
        served.append(server)
        targets = {f"{service}-0": server.server_port} | ({"gone": free_port()} if job == "bad" else {})
        content = [
            {
                "targets": [f"{LOOPBACK}:{number}"],
                "labels": {"job": job, "service": service, "process": process, "host": "h"},
            }
            for process, number in targets.items()
        ]
        (runs / "prometheus" / f"{job}.json").write_text(json.dumps(content))
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with subprocess.Popen([*command, f"--web.listen-address={LOOPBACK}:{port}"]) as process:
        try:
            until(lambda: ask(port, "alerts") is not None, "Prometheus does not serve", 60.0)
            yield port
        finally:
            process.terminate()
            for server in served:
                server.shutdown()


def ask(port, what, **parameters):
    url = f"http://{LOOPBACK}:{port}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return json.load(reply)["data"]
    except urllib.error.HTTPError as error:
        if error.code == 503:  # it is not ready
            return None
        raise AssertionError(f"{parameters}: {error.read().decode()}") from error
    except OSError:
        return None


def test_every_alert_fires_and_says_of_which_job(prometheus):
    wanted = {rule["alert"] for rule in rules("alerts")}
    until(lambda: {alert["labels"]["alertname"] for alert in firing(prometheus)} == wanted, "alerts", 60.0)
    for alert in firing(prometheus):
        told = " ".join(alert["annotations"].values())
        assert "<" not in told
        assert "bad" in told


def firing(port):
    alerts = ask(port, "alerts")["alerts"]
    return [a for a in alerts if a["state"] == "firing" and a["labels"]["job"] == "bad"]
