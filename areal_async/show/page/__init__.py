"""Runs in the browser: a served page, and a single file to send to others."""
