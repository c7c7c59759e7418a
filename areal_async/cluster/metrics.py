"""Prometheus series of the controller."""

import prometheus_client

JOBS = prometheus_client.Gauge("areal_controller_jobs", "Jobs in each state.", ["state"])
REFUSED = prometheus_client.Counter(
    "areal_controller_refused_total",
    "Requests refused: for the `token`, the `right` of the token, or the `request` itself.",
    ["reason"],
)
RECONCILE_FAILURES = prometheus_client.Counter(
    "areal_controller_failures_total", "Looks at the jobs that an error of ours or of the disk broke off."
)
