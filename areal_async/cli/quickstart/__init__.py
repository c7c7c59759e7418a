"""The quickstart: a tiny model, a task set and two jobs that need no download and no GPU."""
