"""Programs that read a run's buffer: `stats`, `peek`, `export`. They change nothing."""
