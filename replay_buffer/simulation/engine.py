"""An engine with continuous batching, on a simulated clock."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from replay_buffer.simulation.clock import Clock
from replay_buffer.simulation.costs import EngineCosts

DONE = 1e-6  # A request counts as finished with at most this many tokens missing


@dataclass(slots=True)
class SimulatedAnswer:
    """A request: its sampled tokens, its prompt's tokens, and a callback for its end."""

    tokens: float
    prompt: float
    done: Callable[[], object]


class SimulatedEngine:
    """Engine that samples for up to `slots` requests at once, one token each per pass. Other requests wait.

    A pass with n requests takes `pass_s + n · request_s`. In this time, every request advances by one token.
    `_moved` is the number of tokens that a request would have if it had run since time 0. This number grows
    evenly between two changes of n, and stands still while the engine does other work.

    Prompts are computed in separate passes. One such pass takes all prompts that arrived during the pass
    before, and gives each request its first token. If `costs` has no costs for prompts, the first token costs
    as much as any other token."""

    def __init__(self, clock: Clock, costs: EngineCosts, slots: int) -> None:
        self._clock = clock
        self._costs = costs
        self._slots = slots
        self._waiting: deque[SimulatedAnswer] = deque()
        self._running: list[
            tuple[float, int, SimulatedAnswer]
        ] = []  # Sorted by the value of `_moved` at their last token
        self._order = itertools.count()
        self._moved = 0.0
        self._from_work_ms = 0.0  # Value of the clock's work from which `_moved` grows
        self._prompts_from_ms = -1.0  # Value of the clock's work when the newest pass over prompts begins
        # Tokens that such a pass samples per request
        self._sampled = float(costs.prefill_s > 0 or costs.prompt_token_s > 0)
        self._contexts = 0.0  # Tokens of the contexts in flight, minus `_moved` for each
        self._turn = 0
        self._busy_since_ms: float | None = None
        self._busy_ms = 0.0

    @property
    def load(self) -> int:
        """Number of requests that run or wait."""
        return len(self._running) + len(self._waiting)

    @property
    def busy_ms(self) -> float:
        """Time so far with at least one request running."""
        since = self._busy_since_ms
        return self._busy_ms + (self._clock.now_ms - since if since is not None else 0.0)

    def submit(self, answers: Sequence[SimulatedAnswer], *, shared_prompt: float) -> None:
        """Accept requests with a common prompt of `shared_prompt` tokens, computed once for all of them."""
        self._move()
        # The last pass over prompts has begun, so these prompts go into the next one
        if self._clock.work_ms > self._prompts_from_ms:
            self._prompts_from_ms = self._from_work_ms + (self._pass_ms if self._running else 0.0)
            self._hold(self._costs.prefill_s)
        self._hold(shared_prompt * self._costs.prompt_token_s)
        self._waiting.extend(answers)
        self._go_on()

    def exchange(self, pause_s: float) -> None:
        """Load other weights. Running requests continue with the new weights."""
        if self._running:
            self._move()
            contexts = self._contexts + len(self._running) * self._moved
            self._hold(pause_s + contexts * self._costs.prompt_token_s * self._costs.recompute)
            self._go_on()

    def interrupt(self, seconds: float) -> bool:
        """Let the engine's process do other work for `seconds`. Return False if the engine is idle."""
        if self._busy_since_ms is None:
            return False
        self._move()
        self._hold(seconds)
        self._go_on()
        return True

    def _move(self) -> None:
        work_ms = self._clock.work_ms
        if work_ms > self._from_work_ms:
            if self._running:
                self._moved += (work_ms - self._from_work_ms) / self._pass_ms
            self._from_work_ms = work_ms

    def _hold(self, seconds: float) -> None:
        self._from_work_ms += 1000 * seconds

    @property
    def _pass_ms(self) -> float:
        return 1000 * (self._costs.pass_s + len(self._running) * self._costs.request_s)

    def _go_on(self) -> None:
        """Start requests that have a slot, and schedule the next end of a request."""
        while self._waiting and len(self._running) < self._slots:
            answer = self._waiting.popleft()
            end = self._moved + max(0.0, answer.tokens - self._sampled)
            heapq.heappush(self._running, (end, next(self._order), answer))
            self._contexts += answer.prompt - self._moved
        self._turn += 1
        if (self._busy_since_ms is None) == bool(self._running):
            self._keep_time()
        if self._running:
            left = max(0.0, self._running[0][0] - self._moved)
            due_ms = self._from_work_ms + left * self._pass_ms
            self._clock.when_worked(due_ms, partial(self._finish, self._turn))

    def _keep_time(self) -> None:
        if self._busy_since_ms is None:
            self._busy_since_ms = self._clock.now_ms
            self._clock.demand(1)
        else:
            self._busy_ms += self._clock.now_ms - self._busy_since_ms
            self._busy_since_ms = None
            self._clock.demand(-1)

    def _finish(self, turn: int) -> None:
        if turn != self._turn:
            return  # The set of requests has changed since
        self._move()
        done = []
        while self._running and self._running[0][0] <= self._moved + DONE:
            end, _, answer = heapq.heappop(self._running)
            self._contexts -= answer.prompt + answer.tokens - end
            done.append(answer)
        if not self._running:
            self._contexts = 0.0
        self._go_on()
        for answer in done:
            answer.done()
