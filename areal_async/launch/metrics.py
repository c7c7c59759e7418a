"""Prometheus series of the supervisor: those of autoscaling."""

from prometheus_client import Counter, Gauge

WORKERS = Gauge("areal_autoscale_workers", "Rollout workers that autoscaling wants now.")
CHANGES = Counter(
    "areal_autoscale_changes", "Changes of the number of rollout workers by autoscaling.", ["reason"]
)
