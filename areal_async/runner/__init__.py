"""One run from start to end: the supervisor with its view, loggers and report."""
