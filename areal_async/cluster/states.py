"""The states of a job, and the events that change them. Pure: time is passed in.

    PENDING → STARTING → RUNNING → SUCCEEDED | FAILED | STOPPED
       ↑                    ↓
       └───── resume ─── PAUSED      (FAILED and STOPPED can be resumed as well)

If a user asks to pause or stop a job, the job keeps its state until its processes have exited. Until then,
the request is stored as the *wish* of the job, in the same database as the state. Each start is an *attempt*
with its own number."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from areal_async.base.errors import ArealError

State = Literal["PENDING", "STARTING", "RUNNING", "PAUSED", "SUCCEEDED", "FAILED", "STOPPED"]
Wish = Literal["run", "pause", "stop"]
Verb = Literal["pause", "stop", "resume"]

ACTIVE: tuple[State, ...] = ("STARTING", "RUNNING")
"""States in which a job may have processes and holds its resources."""
ENDED: tuple[State, ...] = ("SUCCEEDED", "FAILED", "STOPPED")
STATES: tuple[State, ...] = ("PENDING", *ACTIVE, "PAUSED", *ENDED)


class JobRefused(ArealError):
    """The request is not possible at present, and had no effect."""

    exit_status = 2


class UnknownJob(JobRefused):
    """No job has the requested name or id."""


@dataclass(frozen=True)
class Standing:
    """State, wish and number of starts of a job. `attempt` is the number of the present or last attempt."""

    state: State = "PENDING"
    wish: Wish = "run"
    attempt: int = 0


@dataclass(frozen=True)
class TurnCame:
    """Event: the job is next in the queue, and its resources are free."""


@dataclass(frozen=True)
class AllServe:
    """Event: all services of the job's run serve."""


@dataclass(frozen=True)
class Asked:
    """A request of a user."""

    verb: Verb
    why: str = ""
    more: bool = False
    """True if the request gives the job more steps than it had."""


@dataclass(frozen=True)
class RunEnded:
    """Event: the run of the present attempt has ended, with all its processes. `lost` means that the run's
    process died without writing an ending. `unstarted` means that no process has run the attempt."""

    how: Literal["finished", "interrupted", "failed", "lost", "unstarted"]
    words: str = ""


JobEvent = TurnCame | AllServe | Asked | RunEnded


@dataclass(frozen=True)
class Move:
    """A change that an event makes: the new standing, its time, and the reason for the history."""

    standing: Standing
    at_s: float
    reason: str


def decide(standing: Standing, event: JobEvent, now_s: float) -> Move | None:
    """Return the move that `event` makes at `now_s` (unix time); None if it changes nothing.

    Raises `JobRefused` for a request that is not possible now."""
    match event:
        case TurnCame() if standing.state == "PENDING":
            following = Standing("STARTING", "run", standing.attempt + 1)
            return Move(following, now_s, "its turn came")
        case AllServe() if standing.state == "STARTING":
            return Move(replace(standing, state="RUNNING"), now_s, "all services serve")
        case RunEnded() if standing.state in ACTIVE:
            state, reason = _ending(standing.wish, event)
            return Move(Standing(state, "run", standing.attempt), now_s, reason)
        case Asked("resume"):
            return _resume(standing, event, now_s)
        case Asked():
            return _end(standing, event, now_s)
    return None


def _ending(wish: Wish, event: RunEnded) -> tuple[State, str]:
    words = event.words
    if event.how == "finished":
        return "SUCCEEDED", words or "it is done"
    if (event.how == "failed" and wish != "stop") or (event.how == "lost" and wish == "run"):
        return "FAILED", words or "its run failed"
    # The text of an interruption is omitted, because the user requested it.
    beside = f"; {words}" if words and event.how in ("failed", "lost") else ""
    if wish == "pause":
        return "PAUSED", f"paused on request{beside}"
    if wish == "stop":
        return "STOPPED", f"stopped on request{beside}"
    if event.how == "interrupted":
        return "STOPPED", words or "something outside the controller stopped it"
    return "FAILED", "its process did not come to run anything"


def _resume(standing: Standing, event: Asked, now_s: float) -> Move:
    if standing.state == "SUCCEEDED" and not event.more:
        raise JobRefused("the job is done: there is nothing to resume. trainer.steps=N gives it more steps")
    if standing.state == "PENDING":
        raise JobRefused("the job waits for its turn already")
    if standing.state in ACTIVE:
        if standing.wish == "run":
            raise JobRefused("the job runs already")
        raise JobRefused(f"the job is still ending, to {standing.wish}: ask again once it has")
    return Move(Standing("PENDING", "run", standing.attempt), now_s, event.why or "resumed on request")


def _end(standing: Standing, event: Asked, now_s: float) -> Move | None:
    wish: Wish = "pause" if event.verb == "pause" else "stop"
    if standing.state in ENDED:
        raise JobRefused(f"the job has ended already, as {standing.state}")
    if standing.state in ACTIVE:
        if wish == standing.wish:
            return None
        if standing.wish == "stop":
            raise JobRefused("the job is about to stop: resume it once it has")
        return Move(replace(standing, wish=wish), now_s, event.why or f"asked to {wish}")
    if wish == "stop":
        return Move(replace(standing, state="STOPPED"), now_s, event.why or "stopped on request")
    if standing.state == "PAUSED":
        return None
    return Move(replace(standing, state="PAUSED"), now_s, event.why or "paused before its turn came")
