"""Engines behind a server: one life (`engine.py`), and what each server says differently (`adapter.py`)."""
