"""Programs that look into a run's buffer: `stats`, `peek`, `export`. They only read."""
