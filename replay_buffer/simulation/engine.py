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

DONE = 1e-6  # Tokens by which a request may be short of its last and has it all the same


@dataclass(slots=True)
class SimulatedAnswer:
    """A request: the number of tokens to sample, the number in its prompt, and the callback for its end."""

    tokens: float
    prompt: float
    done: Callable[[], object]


class SimulatedEngine:
    """Samples for up to `slots` requests at once, one token each in a pass; the others wait their turn.

    A pass with n requests takes `pass_s + n · request_s`, and so every request moves on by one token in
    that time: `_moved` counts the tokens of one that would have run from the start. Between two changes of n
    it moves evenly; what has the engine do something else makes it stand still.

    Prompts are computed in passes between those: one takes all that came while the engine was at its last
    pass, and gives each request its first token. Where prompts have no costs of their own, that token costs
    what any other does."""

    def __init__(self, clock: Clock, costs: EngineCosts, slots: int) -> None:
        self._clock = clock
        self._costs = costs
        self._slots = slots
        self._waiting: deque[SimulatedAnswer] = deque()
        self._running: list[
            tuple[float, int, SimulatedAnswer]
        ] = []  # By where `_moved` is at their last token
        self._order = itertools.count()
        self._moved = 0.0
        self._from_work_ms = 0.0  # It moves on from here of the clock's work
        self._prompts_from_ms = -1.0  # The clock's work when the newest pass over prompts begins
        self._sampled = float(costs.prefill_s > 0 or costs.prompt_token_s > 0)  # Tokens of such a pass
        self._contexts = 0.0  # Tokens of the contexts under way, less `_moved` of each
        self._turn = 0
        self._busy_since_ms: float | None = None
        self._busy_ms = 0.0

    @property
    def load(self) -> int:
        """Requests that run or wait."""
        return len(self._running) + len(self._waiting)

    @property
    def busy_ms(self) -> float:
        """Time until now in which a request was computed."""
        since = self._busy_since_ms
        return self._busy_ms + (self._clock.now_ms - since if since is not None else 0.0)

    def submit(self, answers: Sequence[SimulatedAnswer], *, shared_prompt: float) -> None:
        """Take requests whose prompt, so many tokens, is computed once for all of them."""
        self._move()
        if self._clock.work_ms > self._prompts_from_ms:  # It has begun: these prompts are in the next
            self._prompts_from_ms = self._from_work_ms + (self._pass_ms if self._running else 0.0)
            self._hold(self._costs.prefill_s)
        self._hold(shared_prompt * self._costs.prompt_token_s)
        self._waiting.extend(answers)
        self._go_on()

    def exchange(self, pause_s: float) -> None:
        """Load other weights; running requests continue under them."""
        if self._running:
            self._move()
            contexts = self._contexts + len(self._running) * self._moved
            self._hold(pause_s + contexts * self._costs.prompt_token_s * self._costs.recompute)
            self._go_on()

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
        """Begin what there is a slot for, and look when the next is done."""
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
            return  # Others have come or gone since
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
