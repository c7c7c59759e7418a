"""What manifests use that the product does not have yet. Where the real thing is there, it alone counts."""

OPTIONS = {("run", "--cluster"), ("resume", "--cluster")}
"""Options of commands."""
CLUSTER_FIELDS = {"ray"}
"""Sections and fields of a cluster file."""
JOB_FIELDS = {"checkpoint.store"}
"""Fields of a job file."""
ROUTES = {"/v1/targets": "look"}
"""Paths of the controller's API, and what a token must allow."""
