"""Prometheus series of the transfer of weights, for publishers and receivers."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

SENT = Counter(
    "areal_weights_sent_bytes_total",
    "Bytes of snapshots handed to sockets, by channel and what this process is.",
    ["channel", "source"],
)
RECEIVED = Counter(
    "areal_weights_received_bytes_total",
    "Bytes of snapshots received, by channel and whom they came from.",
    ["channel", "source"],
)
REFUSED = Counter(
    "areal_weights_chunks_refused_total",
    "Chunks with another hash, which were fetched again, and sources left since they sent nothing.",
    ["reason"],
)
FETCH_SECONDS = Histogram(
    "areal_weights_fetch_seconds",
    "From the first wish for a chunk until the directory has its name.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0),
)
WAITS = Gauge("areal_weights_waits", "1 while a snapshot is on its way here and nothing comes.", ["what"])
"""The label `what` is a text that describes the wait of the receiver."""
