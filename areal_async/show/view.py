"""A run on the terminal: one panel that updates itself, or plain lines if there is no terminal.

Both show a `RunStatus` with the same content: the panel in rows, the plain line in one line."""

from __future__ import annotations

import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from areal_async.base.log import clock_text
from areal_async.launch.aggregator import RunStatus, no_score_text
from areal_async.show.figures import STEPS, values_of

PLAIN_EVERY_S = 5.0
SELDOM = 6  # Once steps have their own lines, the status line is printed less often by this factor
STALL_EVERY_S = 30.0  # Seconds until a continuing stall is repeated on plain lines
WAITS = " waits for "  # Part of a message about a service that waits
MESSAGE_EVERY_S = 300.0  # Seconds until a repeated message is printed again
MOST_WAITING = 4096  # Maximum of records that wait to be printed; the oldest are dropped
HELD = frozenset({"leased", "generated", "scored"})  # States of groups that a line shows
MAX_WIDTH = 110
MAX_SERVICES = 10
MAX_NO_SCORES = 3  # Shown kinds of verdicts without a score

Show = Callable[[RunStatus], None]  # Shows a status of the run


class RunConsole(Console):
    """A console that becomes silent, without an error, when its reader has exited (`… | head`)."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self.file.fileno())  # Otherwise flushing buffered text fails at exit


class PlainLines:
    """A run as short, searchable lines of `key=value`. Each step, evaluation and warning has a line. From
    time to time a line has the status of the whole run."""

    def __init__(
        self, console: Console, *, policy: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`policy` is the first policy. Lines about the first policy do not name it."""
        self._console = console
        self._policy = policy
        self._records: deque[Mapping[str, Any]] = deque(maxlen=MOST_WAITING)
        self._deaths: deque[str] = deque(maxlen=MOST_WAITING)
        """Texts of the newest process deaths that were shown."""
        self._elapsed_s = 0.0
        self._clock = clock
        self._next_s = 0.0
        self._news = ""  # The last printed news: a message, or the edge of a stall
        self._again_s = 0.0
        self._self_check = ""
        self._no_scores: set[str] = set()  # Kinds that were printed

    def record(self, line: bytes) -> None:
        """Accept a line of metrics.jsonl. `flush` prints it later, because printing may be slow."""
        record = msgspec.json.decode(line)
        if record["kind"] in (*STEPS, "evaluation", *DEATHS):
            self._records.append(record)

    def flush(self) -> None:
        """Print a line for each waiting record."""
        while self._records:
            record = self._records.popleft()
            if record["kind"] in DEATHS:
                died = record.get("text") or f"{record.get('service')} died"
                self._deaths.append(died)
                self._say(f"message={_quoted(died)} time={clock_text(self._elapsed_s)}")
                continue
            self._say(step_line(record, first=self._policy))

    def show(self, status: RunStatus) -> None:
        """Print the status at intervals, and news immediately."""
        self._elapsed_s = status.elapsed_s
        self.flush()
        # A message about a waiting service comes and goes, each time with other numbers. It is not news.
        news = status.stall.edge if status.stall is not None else status.message
        if status.stall is None and news in self._deaths:
            news = ""  # It was printed already
        if WAITS in news:
            news = re.sub(r"\d+", "0", news)
        if news and (news != self._news or self._clock() >= self._again_s):
            kind = "message" if status.stall is None else "stall"
            self._say(f"{kind}={_quoted(_message(status))} time={clock_text(status.elapsed_s)}")
            self._again_s = self._clock() + (STALL_EVERY_S if status.stall is not None else MESSAGE_EVERY_S)
            self._news = news
        elif not news and WAITS not in self._news:
            self._news = ""
        for note in status.dropped.no_scores:
            if note.kind not in self._no_scores:
                self._no_scores.add(note.kind)
                self._say(f"no_score={_quoted(no_score_text(note))}")
        if status.self_check != self._self_check:
            self._self_check = status.self_check
            self._say(f"self_check={_quoted(status.self_check)}")
        if self._clock() >= self._next_s:
            self._next_s = self._clock() + PLAIN_EVERY_S * (SELDOM if status.trained else 1)
            self._say(status_line(status))

    def warning(self, text: str) -> None:
        """Print a warning at once, unless it equals the last one."""
        if text != self._news:
            self._news = text
            self._say(f"warning={_quoted(text)}")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def open_view(console: Console, lines: PlainLines | None) -> Iterator[Show]:
    """Yield a function that shows statuses: as `lines`, or in the live view of a terminal."""
    if lines is not None:
        yield lines.show
        return
    live = Live(console=console, auto_refresh=False)
    drawn = console.size

    def show(status: RunStatus) -> None:
        nonlocal drawn
        if (size := console.size) != drawn:
            console.clear()  # The terminal may have rewrapped the drawn lines, so their start is unknown
            drawn = size
        live.update(fitted(status, min(MAX_WIDTH, size.width), size.height, console), refresh=True)

    live.start()
    try:
        yield show
    finally:
        with suppress(OSError, ValueError):  # The terminal is gone
            live.stop()


DEATHS = frozenset({"restart", "death"})
"""Kinds of records about the death of a service."""
STEP_KEYS = {
    "reward": "reward_mean",
    "accuracy": "accuracy",
    "staleness": "staleness_max",
    "tok/s": "tokens_per_s",
    "loss": "loss",
    "grad_norm": "grad_norm",
}
EVALUATION_KEYS = {"accuracy": "accuracy", "low": "low", "high": "high", "tasks": "n", "wall_s": "wall_s"}
"""Keys of the line that a record prints, each with the figure or field of its value."""


def step_line(record: Mapping[str, Any], *, first: str = "") -> str:
    """Return the line of a step or an evaluation. Policy `first` is not named."""
    figures = {**record, **values_of(record)}
    if record["kind"] == "evaluation":
        said, keys = {"evaluation": record.get("version")}, EVALUATION_KEYS
        if isinstance(interval := record.get("mean"), list) and len(interval) == 3:
            figures |= {"low": interval[1], "high": interval[2]}
    else:
        said, keys = {"step": record.get("step")}, STEP_KEYS
    if (policy := record.get("policy") or first) != first:
        said["policy"] = policy
    said |= {key: figures.get(name) for key, name in keys.items()}
    return " ".join(f"{key}={_figure(value)}" for key, value in said.items() if value is not None)


def status_line(status: RunStatus) -> str:
    figures: dict[str, Any] = {"time": clock_text(status.elapsed_s)}
    if not status.trained and (starting := _starting(status)):
        return pairs_of(figures | {"starting": ", ".join(starting)})
    figures |= {"done": f"{status.step}/{status.steps}"}
    if status.eta_s is not None:
        figures["left"] = clock_text(status.eta_s)
    if status.generated_per_s is not None:
        figures["generated/s"] = f"{status.generated_per_s:.0f}"
    if busy := {one.name: one.busy for one in status.services if one.busy and one.phase == "serving"}:
        busiest = max(busy, key=lambda name: busy[name])
        figures["busiest"] = f"{busiest}:{busy[busiest]:.0%}"
    if doing := _doing(status):
        figures["doing"] = doing
    if away := [f"{one.name} {one.phase}" for one in status.services if one.phase != "serving"]:
        figures["not_serving"] = ", ".join(away)
    if status.kind == "rl":
        figures |= {state: count for state, count in status.groups.items() if count and state in HELD}
    lost = {"dropped": status.dropped.groups, "masked": status.dropped.masked}
    figures |= {name: sum(counts.values()) for name, counts in lost.items() if counts}
    return pairs_of(figures)


def pairs_of(figures: Mapping[str, Any]) -> str:
    """Return `key=value` for each figure. Values are quoted if needed."""
    return " ".join(f"{key}={_quoted(str(value))}" for key, value in figures.items())


def _quoted(text: str) -> str:
    """Quote a text that could not be read as one value."""
    text = " ".join(text.split())
    return text if text and not set(text) & set(" \"'=") else json.dumps(text, ensure_ascii=False)


def _figure(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def fitted(status: RunStatus, width: int, height: int, console: Console) -> Panel:
    """Return the panel with `width` columns. Its last rows are cut off if it has more than `height` lines."""
    panel = render(status, width)
    panel.height = min(height, len(console.render_lines(panel, console.options.update(width=width))))
    return panel


def render(status: RunStatus, width: int) -> Panel:
    """Return the status as a panel with `width` columns."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True, min_width=9)
    rows.add_column(overflow="fold")
    rows.add_row(clock_text(status.elapsed_s), _clipped(_progress(status), 3 * (width - 18)))
    if message := _message(status):
        rows.add_row("!", _clipped(message, 2 * (width - 18), "yellow"))
    for label, text in _figures(status).items():
        rows.add_row(label, _clipped(text, 3 * (width - 18)))
    for note in reversed(status.dropped.no_scores[-MAX_NO_SCORES:]):
        rows.add_row("no score", _clipped(no_score_text(note), width - 18, "yellow"))
    title = f"[bold]areal-async[/] · {status.job}{' · stopping' if status.stopping else ''}"
    return Panel(rows, title=title, title_align="left", width=width, border_style="blue", padding=(0, 1))


def _starting(status: RunStatus) -> list[str]:
    return [
        f"{service.name} (waits for {service.waiting_for})" if service.waiting_for else service.name
        for service in status.services
        if service.phase in ("waiting", "starting")
    ]


def _progress(status: RunStatus) -> str:
    if not status.trained and (starting := _starting(status)):
        return f"starting {', '.join(starting)}"
    left = "" if status.eta_s is None else f", left {clock_text(status.eta_s)}"
    return f"step {status.step}/{status.steps}{left}"


def _figures(status: RunStatus) -> dict[str, str]:
    """Return the known figures of the run by their labels."""
    is_rl = status.kind == "rl"
    loss = None if is_rl else status.loss
    speeds = [("generated", status.generated_per_s), ("trained", status.trained_per_s)]
    held = [f"{count:,} {state}" for state, count in status.groups.items() if count]
    seen = f"max {status.staleness_max}, seen {status.staleness_seen} of {status.bound} allowed"
    figures = {
        "loss": f"{loss:.4f}" if loss is not None else "",
        "reward": f"{status.reward:.3f}" if status.reward is not None else "",
        "held-out": _accuracy(status) if status.accuracy is not None else "",
        "staleness": f"{status.staleness_mean:.2f}, {seen}" if status.staleness_mean is not None else "",
        "tokens/s": ", ".join(f"{value:,.0f} {what}" for what, value in speeds if value is not None),
        "doing": _doing(status),
        "busy": _busy(status),
        "dropped": status.dropped.text,
        "groups": (", ".join(held) or "none") if is_rl else "",
        "pacing": status.pacing if is_rl else "",
        "self-check": status.self_check,
    }
    return {label: text for label, text in figures.items() if text}


def _doing(status: RunStatus) -> str:
    return ", ".join(f"{one.name} {one.doing}" for one in status.services if one.doing)


def _accuracy(status: RunStatus) -> str:
    text = f"{status.accuracy:.3f}"
    if status.accuracy_start is not None and status.accuracy_start != status.accuracy:
        text = f"{status.accuracy_start:.3f} → {text}"
    if status.accuracy_interval is not None:
        low, high = status.accuracy_interval
        text += f" [{low:.3f}, {high:.3f}]"
    return f"{text} at {'version' if status.kind == 'rl' else 'step'} {status.accuracy_version}"


def _busy(status: RunStatus) -> str:
    """Return services with their busy shares. Serving services of one kind, such as ranks, have one entry
    with a range."""
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
    """Return the most important message. A stall comes first."""
    if status.stall is None:
        return status.message
    return f"stalled for {clock_text(status.stall_s)}: {status.stall.detail}"


def _clipped(text: str, length: int, style: str = "") -> Text:
    """Cut the text to `length` characters, but to 20 at least. On a narrower terminal, the panel cuts the
    text further."""
    return Text(text if len(text) <= max(length, 20) else f"{text[: max(length, 20) - 1]}…", style=style)
