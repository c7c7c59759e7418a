"""Prometheus series of the RPC."""

from __future__ import annotations

from prometheus_client import Counter

REFUSED = Counter(
    "areal_rpc_refused",
    "Connections without a key of the run (stranger), and requests that the asker's role may not make "
    "(forbidden).",
    ["service", "reason"],
)
