"""Dashboards, rules and alerts for Prometheus and Grafana, as files that come with the package.

`grafana/` is made by `deploy/grafana/build.py`; the rest is written by hand. `files.py` gives them to a user,
and `serving.py` starts the two programs with them."""
