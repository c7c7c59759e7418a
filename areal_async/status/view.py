"""A run on the terminal: one panel that renews itself, or plain lines where there is no terminal.

Drawing only: what is shown comes as a `RunStatus`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_async.status.aggregator import RunStatus, ServiceActivity, no_score_text

PLAIN_EVERY_S = 5.0
STALL_EVERY_S = 30.0
"""How often a stall that lasts is said again on plain lines."""
MIN_WIDTH, MAX_WIDTH = 60, 110
MAX_SERVICES = 10
MAX_NO_SCORES = 3
"""Kinds of verdicts without a score that are shown."""
SPARKS = "▁▂▃▄▅▆▇█"
STATE_ORDER = ("queued", "leased", "generated", "scored", "batched", "trained", "committed", "dropped")
LABEL, DIM, GOOD, WARN = "bold", "bright_black", "green", "yellow"


Show = Callable[[RunStatus], None]
"""Shows a status of the run."""


@contextmanager
def open_view(console: Console, *, plain: bool) -> Iterator[Show]:
    """The live view on a terminal, else plain lines."""
    if plain or not console.is_terminal:
        yield PlainView(console).show
        return
    with Live(console=console, auto_refresh=False) as live:

        def show(status: RunStatus) -> None:
            width = max(MIN_WIDTH, min(MAX_WIDTH, console.width))
            live.update(render(status, width), refresh=True)

        yield show


class PlainView:
    """One line every few seconds, and a new warning as soon as it is there."""

    def __init__(
        self, console: Console, *, every_s: float = PLAIN_EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._every_s = every_s
        self._clock = clock
        self._next_s = 0.0
        self._news = ""
        """What was said last: a message, or the edge of a stall."""
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


def plain_line(status: RunStatus) -> str:
    """The status as one line of text."""
    if not status.trained and (starting := _starting(status.services)):
        return f"{clock_text(status.elapsed_s)} starting: {', '.join(starting)}"
    parts = [clock_text(status.elapsed_s), f"step {status.step}/{status.steps}"]
    if status.kind == "sft" and status.loss is not None:
        parts.append(f"loss {status.loss:.3f}")
    if status.reward is not None:
        parts.append(f"reward {status.reward:.3f}")
    if status.accuracy is not None:
        parts.append(f"held-out {status.accuracy:.3f}")
    if status.staleness_mean is not None:
        parts.append(f"staleness {status.staleness_mean:.2f} max {status.staleness_max}/{status.bound}")
    if status.generated_per_s is not None:
        parts.append(f"{status.generated_per_s:,.0f} tokens/s")
    busy = [
        f"{service.name} {service.busy:.0%}" + (" (draining)" if service.phase == "draining" else "")
        for service in status.services
        if service.busy is not None
    ]
    if busy:
        parts.append(f"busy {' '.join(busy)}")
    if status.dropped.text:
        parts.append(f"dropped {status.dropped.text}")
    if status.eta_s is not None:
        parts.append(f"left {clock_text(status.eta_s)}")
    return " · ".join(parts)


def render(status: RunStatus, width: int) -> RenderableType:
    """The status as a panel of `width` columns."""
    rows = Table.grid(padding=(0, 2), expand=False)
    rows.add_column(style=LABEL, no_wrap=True, min_width=9)
    rows.add_column()
    for label, content in _rows(status, width - 18):
        rows.add_row(label, content)
    parts: list[RenderableType] = [_progress(status, width - 4), Text(), rows]
    if message := _message(status):
        parts += [Text(), Text(_clip(f"! {message}", 2 * (width - 12)), style=WARN)]
    title = Text.assemble(("areal-async", "bold"), f" · {status.job}")
    if status.stopping:
        title.append(" · stopping", style=WARN)
    return Panel(
        Group(*parts), title=title, title_align="left", width=width, border_style="blue", padding=(0, 1)
    )


def clock_text(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as at most `width` blocks, each the mean of its share of them."""
    if len(values) < 2 or width < 2:
        return ""
    count = min(width, len(values))
    cuts = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(SPARKS[min(7, int((mean - low) / span * 8))] for mean in means)


def _progress(status: RunStatus, width: int) -> RenderableType:
    share = status.step / status.steps if status.steps else 0.0
    starting = _starting(status.services)
    left = "" if status.eta_s is None else f"  left {clock_text(status.eta_s)}"
    times = f"{share:>4.0%}  {clock_text(status.elapsed_s)}{left}"
    head = f"step {status.step}/{status.steps}"
    if not status.trained and starting:
        head, times = f"starting {', '.join(starting)}", clock_text(status.elapsed_s)
    bar = Table.grid(padding=(0, 1), expand=False)
    bar.add_row(
        Text(head, style="bold", overflow="ellipsis", no_wrap=True),
        ProgressBar(
            total=max(1, status.steps),
            completed=status.step,
            width=max(10, width - len(head) - len(times) - 3),
            complete_style="blue",
            finished_style="green",
            pulse=False,
        ),
        Text(times, no_wrap=True),
    )
    return bar


def _rows(status: RunStatus, width: int) -> list[tuple[str, RenderableType]]:
    rows: list[tuple[str, RenderableType]] = []
    if status.kind == "sft":
        rows.append(("loss", Text("–" if status.loss is None else f"{status.loss:.4f}")))
    else:
        rows.append(("reward", _reward(status, width)))
    rows.append(("held-out", _accuracy(status)))
    if status.kind == "rl":
        rows.append(("tokens/s", _tokens(status)))
        rows.append(("staleness", _staleness(status)))
        rows.append(("groups", _groups(status.groups)))
        rows += _dropped(status, width)
    rows.append(("busy", _busy(status.services)))
    if status.self_check:
        rows.append(("self-check", Text(status.self_check, overflow="ellipsis", no_wrap=True)))
    return rows


def _reward(status: RunStatus, width: int) -> Text:
    if status.reward is None:
        return Text("–", style=DIM)
    recent = status.rewards[-10:]
    text = Text.assemble((f"{sum(recent) / len(recent):.3f}", GOOD), "  ")
    return text.append(sparkline(status.rewards, min(60, width - 12)), style="blue")


def _accuracy(status: RunStatus) -> Text:
    if status.accuracy is None:
        return Text("–", style=DIM)
    text = Text()
    if status.accuracy_start is not None and status.accuracy_start != status.accuracy:
        text.append(f"{status.accuracy_start:.3f} → ")
    text.append(f"{status.accuracy:.3f}", style=GOOD)
    if status.accuracy_interval is not None:
        low, high = status.accuracy_interval
        text.append(f" [{low:.3f}, {high:.3f}]", style=DIM)
    unit = "step" if status.kind == "sft" else "version"
    return text.append(f"  at {unit} {status.accuracy_version}", style=DIM)


def _tokens(status: RunStatus) -> Text:
    shown = [("generated", status.generated_per_s), ("trained", status.trained_per_s)]
    text = Text(" · ".join(f"{value:,.0f} {what}" for what, value in shown if value is not None) or "–")
    if status.version is not None:
        text.append(f"   version {status.version}", style=DIM)
    return text


def _staleness(status: RunStatus) -> Text:
    if status.staleness_mean is None:
        return Text(f"bound {status.bound}", style=DIM)
    over = status.staleness_seen is not None and status.staleness_seen > status.bound
    text = Text(f"mean {status.staleness_mean:.2f} · max {status.staleness_max} · largest seen ")
    text.append(str(status.staleness_seen), style="bold red" if over else GOOD)
    return text.append(f" of {status.bound} allowed")


def _groups(groups: Mapping[str, int]) -> Text:
    order = {state: index for index, state in enumerate(STATE_ORDER)}
    states = sorted(groups, key=lambda state: order.get(state.lower(), len(order)))
    shown = [f"{groups[state]:,} {state.lower()}" for state in states if groups[state]]
    return Text(" · ".join(shown) or "–")


def _dropped(status: RunStatus, width: int) -> list[tuple[str, RenderableType]]:
    """What was lost and why; no row while nothing was."""
    rows: list[tuple[str, RenderableType]] = []
    if text := status.dropped.text:
        rows.append(("dropped", Text(text)))
    for note in reversed(status.dropped.no_scores[-MAX_NO_SCORES:]):
        rows.append(("no score", Text(_clip(no_score_text(note), width), style=WARN, no_wrap=True)))
    return rows


def _busy(services: Sequence[ServiceActivity]) -> Text:
    shown = [
        f"{service.name} "
        + (service.phase if service.busy is None or service.phase != "serving" else f"{service.busy:.0%}")
        for service in services[:MAX_SERVICES]
    ]
    if hidden := len(services) - len(shown):
        shown.append(f"and {hidden} more")
    return Text(" · ".join(shown))


def _message(status: RunStatus) -> str:
    """The one thing to know now: a stall before all else."""
    if status.stall is None:
        return status.message
    return f"stalled for {clock_text(status.stall_s)}: {status.stall.detail}"


def _clip(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _starting(services: Sequence[ServiceActivity]) -> list[str]:
    return [
        f"{service.name} (waits for {service.waiting_for})" if service.waiting_for else service.name
        for service in services
        if service.phase in ("waiting", "starting")
    ]
