"""How many inputs go into one request. Pure."""

from __future__ import annotations

SHARE = 0.25
"""A request holds at most as many inputs as took this share of the deadline of late: so that one slow input
does not make those beside it late, on a server that runs them one after another."""
WEIGHT = 0.2


class Pace:
    """A running mean of the seconds that a request takes for each of its inputs."""

    def __init__(self, most: int, deadline_s: float) -> None:
        self.most = most
        self._deadline_s = deadline_s
        self.input_s = 0.0
        self.request_s = 0.05
        """Of a whole request: a guess until the first."""

    def note(self, elapsed_s: float, n_inputs: int) -> None:
        self.input_s += WEIGHT * (elapsed_s / n_inputs - self.input_s)
        self.request_s += WEIGHT * (elapsed_s - self.request_s)

    @property
    def inputs(self) -> int:
        """For the next request; at least 1."""
        fitting = int(SHARE * self._deadline_s / self.input_s) if self.input_s > 0 else self.most
        return max(1, min(self.most, fitting))
