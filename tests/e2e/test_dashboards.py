"""A real Prometheus scrapes a real run, a stand-in that serves every series, and one whose figures are bad:
each query has data, and each alert fires."""

import contextlib
import json
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
from hostile_http import free_port, until
from prometheus_client import start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from areal_async.dashboards.files import write_files
from areal_async.rpc.endpoints import LOOPBACK
from tests.panels import Asked, declared, panel_queries, rules, uses

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("prometheus"), reason="needs the Debian package prometheus"),
]

REWARD = """
import random

from reward_service.sdk import RewardInput, Score, reward


@reward
def parts(given: RewardInput) -> Score:
    if random.random() < 0.02:
        raise ValueError("now and then")
    ones = given.response.count("1") / max(1, len(given.response))
    return Score(ones, {"ones": ones, "twos": given.response.count("2") / 32})
"""
"""Its verdicts have components, and some are errors."""
RUN = {
    "rollout__autoscale": {"max": 2},
    "buffer__batch_groups": 4,
    "reward": {"name": "parts.py:parts", "on_error": {"then": "mask"}},
    "trainer__objective": {"prox": "reuse", "kl": {"coefficient": 1e-3}},
    "trainer__steps": 5000,
    "checkpoint": {"every_steps": 10, "keep": 1},
    "evaluation": {"every_steps": 2, "sampling": {"temperature": 0.0, "max_new_tokens": 8}},
    "observe": {"metrics_port": 0, "stall_s": 0.2},
    "placement": {"pretend": {"rollout-0": "host-1"}},
}
"""Weights go to another host, there is a reference, and the number of workers may change."""
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
DATA_S = 120.0


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


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory, workspace):
    """Its port; it scrapes and evaluates each second, and no alert waits. Each
    stand-in is a job of its own."""
    folder, port, runs = tmp_path_factory.mktemp("dashboards"), free_port(), workspace.folder / "runs"
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
        with urllib.request.urlopen(url, timeout=30) as reply:
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


def test_every_query_and_recording_rule_has_data_of_a_real_run(prometheus, workspace, running):
    """What this run does not have is shown of a stand-in with the series that the product declares."""
    (workspace.folder / "parts.py").write_text(REWARD, encoding="utf-8")
    recorded = [Asked(rule["record"], rule["record"] + '{job=~".*"}') for rule in rules("recording")]
    queries = [*panel_queries(), *recorded]
    names = {query: {name for name, _ in uses(query.expression).series} for query in queries}
    impossible = [query for query in queries if names[query] & NOT_IN_THIS_RUN.keys()]
    troubles = [query for query in queries if names[query] & ONLY_IN_TROUBLE.keys()]
    excused = {name for query in impossible + troubles for name in names[query]}
    assert {*NOT_IN_THIS_RUN, *ONLY_IN_TROUBLE} - excused == set(), "nothing asks for them"
    left = [query for query in queries if query not in impossible + troubles]

    def all_have_data():
        while left and has_data(prometheus, left[-1], "watched"):
            left.pop()
        return not left

    with running("run", workspace.job("watched", evaluated=True, **RUN)) as job:
        job.wait_for_steps(1)
        job.service("reward").kill()
        with contextlib.suppress(TimeoutError):
            until(all_have_data, "data", DATA_S)
        assert [query.where for query in left if not has_data(prometheus, query, "watched")] == []
        job.process.send_signal(signal.SIGINT)
        job.end(status=130)
    assert [query.where for query in impossible if has_data(prometheus, query, "watched")] == []
    unheard = [
        query.where for query in impossible + troubles if not has_data(prometheus, query, "everything")
    ]
    assert unheard == []


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
