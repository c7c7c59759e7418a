"""Dashboards, rules and alerts for Prometheus and Grafana, as files of this package.

`deploy/grafana/build.py` generates `grafana/`; the other files are written by hand. `files.py` writes the
files for a user."""
