"""How a run can end other than well. The text of each is the paragraph that the person at the terminal
reads."""

from __future__ import annotations

from areal_async.errors import ArealError


class RunError(ArealError):
    """Base of everything that keeps a run from starting or from finishing."""


class RunFolderError(RunError):
    """The run folder cannot be used: busy, finished before, or not ours."""


class RunFailed(RunError):
    """A service did not start, or ended before the job was done."""


class RunInterrupted(RunError):
    """A person or the system asked the run to stop."""
