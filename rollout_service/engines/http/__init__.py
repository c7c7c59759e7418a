"""Engines behind a server: the common life cycle (`engine.py`) and the differences between servers
(`adapter.py`)."""
