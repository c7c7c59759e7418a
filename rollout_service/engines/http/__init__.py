"""Engines behind a server: the shared life cycle (`engine.py`) and the differences of each server
(`adapter.py`)."""
