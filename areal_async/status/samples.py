"""Reading a service's Prometheus endpoint: our own series only, as a flat mapping."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator, Mapping

Samples = Mapping[str, float]
"""Value by series, as exposed: `areal_buffer_groups{state="queued"}`."""

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def fetch_samples(port: int, timeout_s: float = 0.5) -> dict[str, float]:
    """The `areal_…` series served at a loopback port. Raises OSError or http.client.HTTPException."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("GET", "/metrics")
        return parse_samples(connection.getresponse().read().decode("utf-8"))
    finally:
        connection.close()


def parse_samples(text: str) -> dict[str, float]:
    """The `areal_…` series of a text exposition, without the buckets of histograms."""
    samples = {}
    for line in text.splitlines():
        if line.startswith("areal_") and "_bucket{" not in line:
            series, _, value = line.rpartition(" ")
            samples[series] = float(value)
    return samples


def by_label(samples: Samples, name: str, label: str) -> Iterator[tuple[str, float]]:
    """(label value, value) of each series of metric `name`."""
    for series, value in samples.items():
        metric, brace, labels = series.partition("{")
        if metric == name and brace:
            for key, text in _LABEL.findall(labels):
                if key == label:
                    yield text, value
