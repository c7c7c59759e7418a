"""Data sets, tasks and examples: reading, checking and converting."""
