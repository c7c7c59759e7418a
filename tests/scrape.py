"""What a Prometheus server would read of a process."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def fetch_samples(port: int, timeout_s: float = 5.0, path: str = "/metrics") -> dict[str, float]:
    """Value by series, as exposed at a path of a loopback port: `areal_buffer_groups{state="queued"}`."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=timeout_s) as answer:
        text = answer.read().decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
            samples[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return samples
