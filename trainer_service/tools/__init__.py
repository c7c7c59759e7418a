"""Command-line tools of the trainer."""
