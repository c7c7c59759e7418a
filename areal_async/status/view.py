"""A run on the terminal: one panel that renews itself, or plain lines where there is no terminal.

What is shown comes as a `RunStatus`; panel and line say the same, in rows and in one line.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import msgspec
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from areal_async.status.aggregator import RunStatus, no_score_text

PLAIN_EVERY_S = 5.0
STALL_EVERY_S = 30.0  # How often a stall that lasts is said again on plain lines
MIN_WIDTH, MAX_WIDTH = 60, 110
MAX_SERVICES = 10
MAX_NO_SCORES = 3  # Kinds of verdicts without a score that are shown

Show = Callable[[RunStatus], None]  # Shows a status of the run


class RunConsole(Console):
    """Once nobody reads it any more (`… | head`) nothing is shown, and nothing fails for it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self.file.fileno())  # or what the file still holds fails at the exit


@contextmanager
def open_view(console: Console, *, plain: bool) -> Iterator[Show]:
    """The live view on a terminal, else plain lines."""
    if plain or not console.is_terminal:
        yield PlainView(console).show
        return
    live = Live(console=console, auto_refresh=False)

    def show(status: RunStatus) -> None:
        width = max(MIN_WIDTH, min(MAX_WIDTH, console.width))
        live.update(render(status, width), refresh=True)

    live.start()
    try:
        yield show
    finally:
        with suppress(OSError, ValueError):  # the terminal has gone
            live.stop()


class PlainView:
    """One line every few seconds, and a new warning as soon as it is there."""

    def __init__(
        self, console: Console, *, every_s: float = PLAIN_EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._every_s = every_s
        self._clock = clock
        self._next_s = 0.0
        self._news = ""  # What was said last: a message, or the edge of a stall
        self._again_s = 0.0
        self._self_check = ""

    def show(self, status: RunStatus) -> None:
        news = status.stall.edge if status.stall is not None else status.message
        again = status.stall is not None and self._clock() >= self._again_s
        if news and (news != self._news or again):
            self._say(f"{clock_text(status.elapsed_s)} {_message(status)}")
            self._again_s = self._clock() + STALL_EVERY_S
        self._news = news
        if status.self_check != self._self_check:
            self._self_check = status.self_check
            self._say(f"{clock_text(status.elapsed_s)} self-check {status.self_check}")
        if self._clock() >= self._next_s:
            self._next_s = self._clock() + self._every_s
            self._say(plain_line(status))

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class PlainLines:
    """One line for each step and each evaluation, from their records, and one for each warning."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._warned = ""

    def record(self, line: bytes) -> None:
        """Show the record of a line of metrics.jsonl, if it is of a kind that is shown."""
        record = msgspec.json.decode(line)
        names, begin = FIGURES.get(record["kind"], ({}, ""))
        known = [(label, record[name]) for name, label in names.items() if record.get(name) is not None]
        said = [f"{label} {value:.4g}" for label, value in known]
        if said:
            count = record.get("version", record.get("step"))
            self._say(" · ".join([f"{begin} {count}", *said]))

    def warning(self, text: str) -> None:
        """Show a warning, unless it was the last one too."""
        if text != self._warned:
            self._warned = text
            self._say(f"warning: {text}")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


FIGURES: Mapping[str, tuple[Mapping[str, str], str]] = {
    "step": (
        {"loss": "loss", "reward_mean": "reward", "staleness_max": "staleness", "step_s": "seconds"},
        "step",
    ),
    "sft": ({"loss": "loss", "accuracy": "held-out"}, "step"),
    "evaluation": ({"accuracy": "held-out", "n": "tasks"}, "evaluation of version"),
}
"""Kind of a record → its fields that are shown, by their labels, and how its line begins."""


def plain_line(status: RunStatus) -> str:
    """The status as one line of text."""
    shown = [f"{label} {text}" for label, text in _figures(status).items()]
    return " · ".join([clock_text(status.elapsed_s), _progress(status), *shown])


def render(status: RunStatus, width: int) -> Panel:
    """The status as a panel of `width` columns."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True, min_width=9)
    rows.add_column()
    rows.add_row(clock_text(status.elapsed_s), _progress(status))
    figures = _figures(status)
    if status.kind == "rl":
        held = [f"{count:,} {state}" for state, count in status.groups.items() if count]
        figures["groups"] = ", ".join(held) or "none"
        if status.pacing:
            figures["pacing"] = status.pacing
    if status.self_check:
        figures["self-check"] = status.self_check
    for label, text in figures.items():
        rows.add_row(label, Text(text))
    for note in reversed(status.dropped.no_scores[-MAX_NO_SCORES:]):
        rows.add_row("no score", _clipped(no_score_text(note), width - 18))
    if message := _message(status):
        rows.add_row("!", _clipped(message, 2 * (width - 18)))
    title = f"[bold]areal-async[/] · {status.job}{' · stopping' if status.stopping else ''}"
    return Panel(rows, title=title, title_align="left", width=width, border_style="blue", padding=(0, 1))


def clock_text(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _progress(status: RunStatus) -> str:
    starting = [
        f"{service.name} (waits for {service.waiting_for})" if service.waiting_for else service.name
        for service in status.services
        if service.phase in ("waiting", "starting")
    ]
    if not status.trained and starting:
        return f"starting {', '.join(starting)}"
    left = "" if status.eta_s is None else f", left {clock_text(status.eta_s)}"
    return f"step {status.step}/{status.steps}{left}"


def _figures(status: RunStatus) -> dict[str, str]:
    """What is known of the run, by its label."""
    figures = {}
    if status.kind != "rl" and status.loss is not None:
        figures["loss"] = f"{status.loss:.4f}"
    if status.reward is not None:
        figures["reward"] = f"{status.reward:.3f}"
    if status.accuracy is not None:
        figures["held-out"] = _accuracy(status)
    if status.staleness_mean is not None:
        seen = f"seen {status.staleness_seen} of {status.bound} allowed"
        figures["staleness"] = f"{status.staleness_mean:.2f}, max {status.staleness_max}, {seen}"
    speeds = [("generated", status.generated_per_s), ("trained", status.trained_per_s)]
    if said := [f"{value:,.0f} {what}" for what, value in speeds if value is not None]:
        figures["tokens/s"] = ", ".join(said)
    figures["busy"] = _busy(status)
    if status.dropped.text:
        figures["dropped"] = status.dropped.text
    return figures


def _accuracy(status: RunStatus) -> str:
    text = f"{status.accuracy:.3f}"
    if status.accuracy_start is not None and status.accuracy_start != status.accuracy:
        text = f"{status.accuracy_start:.3f} → {text}"
    if status.accuracy_interval is not None:
        low, high = status.accuracy_interval
        text += f" [{low:.3f}, {high:.3f}]"
    return f"{text} at {'version' if status.kind == 'rl' else 'step'} {status.accuracy_version}"


def _busy(status: RunStatus) -> str:
    """Services with their shares; of several alike that serve, such as ranks, one entry with the range."""
    alike: dict[str, list[float]] = {}
    shown = {}
    for service in status.services:
        if service.phase != "serving" or service.busy is None:
            shown[service.name] = f"{service.name} {service.phase}"
            continue
        kind = service.name.rstrip("0123456789").rstrip("-")
        shares = alike.setdefault(kind, [])
        shares.append(service.busy)
        low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
        name = service.name if len(shares) == 1 else f"{len(shares)} × {kind}"
        shown[f"{kind} that serve"] = f"{name} {low}" + (f" to {high}" if high != low else "")
    said = list(shown.values())
    hidden = [f"and {len(said) - MAX_SERVICES} more"] if len(said) > MAX_SERVICES else []
    return ", ".join(said[:MAX_SERVICES] + hidden)


def _message(status: RunStatus) -> str:
    """The one thing to know now: a stall before all else."""
    if status.stall is None:
        return status.message
    return f"stalled for {clock_text(status.stall_s)}: {status.stall.detail}"


def _clipped(text: str, length: int) -> Text:
    return Text(text if len(text) <= length else f"{text[: length - 1]}…", style="yellow")
