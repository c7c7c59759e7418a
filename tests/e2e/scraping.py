"""A Prometheus that scrapes a running job, a stand-in that serves every declared series, and a job whose
figures are bad."""

import json
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager

from hostile_http import free_port, until
from prometheus_client import start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from areal_async.base.addresses import LOOPBACK
from areal_async.show.dashboards.files import write_files
from tests.panels import Asked, declared
from tests.waiting import LIMIT_S

NOT_IN_THIS_RUN = {
    "areal_controller_failures_total": "no controller started it",
    "areal_controller_jobs": "no controller started it",
    "areal_controller_refused_total": "no controller started it",
    "areal_gateway_calls_total": "its episodes are no agents'",
    "areal_gateway_roots_total": "its episodes are no agents'",
    "areal_reward_judge_requests_total": "its reward asks no judge",
    "areal_reward_overdue_calls_total": "its reward is no other program's",
    "areal_reward_remote_ready": "its reward is a function",
    "areal_reward_remote_request_seconds_bucket": "its reward is a function",
    "areal_reward_remote_requests_total": "its reward is a function",
    "areal_reward_remote_resent_calls_total": "its reward is a function",
    "areal_reward_sandboxed_verdicts_total": "its reward runs no programs of the model",
    "areal_rollout_cached_tokens_total": "an engine in the worker's process says nothing of a prefix cache",
    "areal_rollout_engine_memory_bytes": "its engine and its trainer share no device",
    "areal_rollout_tool_calls_total": "its workflow has no tools",
    "areal_trainer_mfu": "nobody knows the peak of a CPU",
}
"""Series that this run cannot have, with the reason."""
ONLY_IN_TROUBLE = {
    "areal_buffer_waits_for_redis": "Redis does not answer",
    "areal_rollout_episodes_refused_total": "episodes come twice or too late",
    "areal_rpc_refused_total": "a stranger asks",
    "areal_weights_chunks_refused_total": "bytes are wrong, or their source is left",
    "areal_weights_waits": "nothing comes for a while",
}
"""Series that a run has only while something is wrong: on a slow machine this one may or may not."""


class Everything(Collector):
    """Each declared series once, with a value that grows with every scrape."""

    def __init__(self) -> None:
        self.scrapes = 0

    def collect(self):
        self.scrapes += 1
        values = {"kind": "error", "data_source": "*", "activity": "train"}
        for name, labels in declared().items():
            labels = sorted(labels - {"le"})
            given = [values.get(label, "one") for label in labels]
            if name.endswith("_bucket"):
                family = HistogramMetricFamily(name.removesuffix("_bucket"), "", labels=labels)
                family.add_metric(given, [("1.0", self.scrapes), ("+Inf", self.scrapes)], self.scrapes)
                yield family
            elif name.endswith("_total"):
                yield counter(name, self.scrapes, **dict(zip(labels, given, strict=True)))
            elif not name.endswith(("_sum", "_count")):
                yield gauge(name, self.scrapes, **dict(zip(labels, given, strict=True)))


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


@contextmanager
def scraped(folder, runs):
    """Run Prometheus on the run folder `runs` and give its port; it scrapes and evaluates each second, and no
    alert waits. Each stand-in is a job of its own."""
    port = free_port()
    write_files(folder, [runs], "")
    config = folder / "prometheus.yaml"
    config.write_text(re.sub(r"(interval|timeout): \d+s", r"\1: 1s", config.read_text()))
    alerts = folder / "rules" / "alerts.yaml"
    alerts.write_text(re.sub(r"for: \w+", "for: 0s", alerts.read_text()))
    served = []
    (runs / "prometheus").mkdir(parents=True, exist_ok=True)
    for job, service, collector in (("everything", "rollout", Everything()), ("bad", "rollout", Faults())):
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
    with subprocess.Popen(
        [*command, f"--web.listen-address={LOOPBACK}:{port}", "--log.level=error"]
    ) as process:
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
        with urllib.request.urlopen(url, timeout=LIMIT_S) as reply:
            return json.load(reply)["data"]
    except urllib.error.HTTPError as error:
        if error.code == 503:  # it is not ready
            return None
        raise AssertionError(f"{parameters}: {error.read().decode()}") from error
    except OSError:
        return None


def has_data(port, query: Asked, job: str) -> bool:
    """Whether a query has had data of a job since the beginning."""
    text, now_s = query.expression.replace('job=~".*"', f'job="{job}"'), time.time()
    found = ask(port, "query_range", query=text, start=now_s - 600, end=now_s, step=1)["result"]
    return any(series["metric"].get("job") == job for series in found)


def firing(port):
    alerts = ask(port, "alerts")["alerts"]
    return [a for a in alerts if a["state"] == "firing" and a["labels"]["job"] == "bad"]
