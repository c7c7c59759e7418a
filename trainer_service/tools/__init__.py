"""Programs on recorded batches: `export` and `replay`."""
