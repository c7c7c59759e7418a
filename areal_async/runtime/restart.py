"""Whether, and after which pause, a process that died is started again. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from areal_async.config.run import SupervisorSection

INCURABLE_STATUS = 1
"""Exit status by which a service says that starting it again would not help (see `runtime/service.py`)."""


@dataclass(frozen=True)
class RestartPolicy:
    """Deaths of one process that are survived (`limit` within `window_s`), and the pauses after them."""

    limit: int
    window_s: float = 300.0
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0
    steady_s: float = 10.0
    """A process that served so long before it died was well: it is not dying in a loop, and starts again at
    once."""

    @classmethod
    def of(cls, section: SupervisorSection) -> RestartPolicy:
        return cls(section.restarts, section.window_s, section.first_pause_s, section.longest_pause_s)

    def recent(self, deaths_s: Sequence[float], now_s: float) -> list[float]:
        """The deaths that still count."""
        return [death_s for death_s in deaths_s if now_s - death_s < self.window_s]


NO_RESTARTS = RestartPolicy(limit=0)


@dataclass
class Restarts:
    """The deaths of one process under a policy. Times are of one monotonic clock."""

    policy: RestartPolicy
    deaths_s: list[float] = field(default_factory=list)
    """When it died, within the policy's window."""
    early: int = 0
    """Deaths in a row that came before it had served for `policy.steady_s`."""

    def died(self, now_s: float, *, served_s: float | None = None, status: int | None = None) -> float | None:
        """Count a death of the process, which served since `served_s` (None: it did not) and ended with
        `status`. Returns the seconds to wait before it is started again; None: give up."""
        self.deaths_s = [*self.policy.recent(self.deaths_s, now_s), now_s]
        steady = served_s is not None and now_s - served_s >= self.policy.steady_s
        self.early = 0 if steady else self.early + 1
        if status == INCURABLE_STATUS or len(self.deaths_s) > self.policy.limit:
            return None
        if not self.early:
            return 0.0
        return min(self.policy.longest_pause_s, self.policy.first_pause_s * 2.0 ** (self.early - 1))
