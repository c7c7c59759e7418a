"""Records a program in a terminal, and draws the recording as an animated SVG.

    python docs/theme/recording.py record run.cast -- areal-async quickstart
    python docs/theme/recording.py draw run.cast docs/images/terminal.svg --seconds 30

A recording is an asciicast (version 2): a header, then lines of time and output. The picture shows some
screens a second of those that stood for a while; its time is the recording's, only faster, and it names the
factor. A line that did not change from one screen to the next is drawn once.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import struct
import subprocess
import termios
import time
from html import escape
from pathlib import Path

import pyte

COLUMNS, ROWS = 100, 26
SCREENS_A_SECOND = 3
CELL_WIDTH, LINE_HEIGHT, MARGIN = 8.4, 18, 16
COLOURS = {
    "default": "#d4d7dd", "black": "#6b7280", "red": "#f28b82", "green": "#81c995", "brown": "#fdd663",
    "blue": "#8ab4f8", "magenta": "#d7aefb", "cyan": "#78d9ec", "white": "#f1f3f4",
}  # fmt: skip
Run = tuple[int, str, str]
"""The column where a run of cells begins, its text and its style."""


def record(cast: Path, command: list[str]) -> int:
    """Runs a command in a terminal of its own until it ends, and writes what it drew and when."""
    main, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    began = time.monotonic()
    process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment, close_fds=True)
    os.close(end)
    with cast.open("w", encoding="utf-8") as file:
        header = {"version": 2, "width": COLUMNS, "height": ROWS, "command": " ".join(command)}
        file.write(json.dumps(header) + "\n")
        while chunk := _read(main):
            text = chunk.decode("utf-8", errors="replace")
            file.write(json.dumps([round(time.monotonic() - began, 3), "o", text]) + "\n")
            file.flush()
    return process.wait()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux says that the program has closed its end
        return b""


def screens(cast: Path, stands_s: float) -> tuple[list[tuple[float, list[tuple[Run, ...]]]], float]:
    """The screens that stood for at least `stands_s`, each with when it appeared, and the whole time."""
    header, *events = (json.loads(line) for line in cast.read_text(encoding="utf-8").splitlines())
    screen = pyte.Screen(header["width"], header["height"])
    stream = pyte.Stream(screen)
    stream.feed(f"$ {header['command']}\r\n")
    found: list[tuple[float, list[tuple[Run, ...]]]] = []
    for (at_s, _, text), following in zip(events, [*events[1:], [float("inf")]], strict=True):
        stream.feed(text)
        shown = [_runs(screen, row) for row in range(screen.lines)]
        if following[0] - at_s >= stands_s and (not found or shown != found[-1][1]):
            found.append((at_s, shown))
    return found, events[-1][0]


def _runs(screen: pyte.Screen, row: int) -> tuple[Run, ...]:
    runs: list[Run] = []
    for column in range(screen.columns):
        cell = screen.buffer[row][column]
        colour = COLOURS.get(cell.fg.removeprefix("bright"), f"#{cell.fg}")
        style = f"fill:{COLOURS['default'] if cell.fg == 'default' else colour}"
        style += ";font-weight:bold" if cell.bold else ""
        if runs and runs[-1][2] == style:
            runs[-1] = (runs[-1][0], runs[-1][1] + cell.data, style)
        else:
            runs.append((column, cell.data, style))
    return tuple((column, text.rstrip(), style) for column, text, style in runs if text.strip())


def draw(cast: Path, picture: Path, seconds: float, stands_s: float, rests_s: float = 4.0) -> None:
    """Writes the picture, which shows the recording in `seconds`, rests on its end and begins anew."""
    every, length_s = screens(cast, stands_s)
    # Of the screens of one slot of time the last one.
    slots = {int(at_s / length_s * seconds * SCREENS_A_SECOND): (at_s, shown) for at_s, shown in every}
    found = list(slots.values())
    header = json.loads(cast.open(encoding="utf-8").readline())
    width = header["width"] * CELL_WIDTH + 2 * MARGIN
    used = 1 + max(row for _, rows in found for row, runs in enumerate(rows) if runs)
    height = (used + 1) * LINE_HEIGHT + 2 * MARGIN
    total_s, faster = seconds + rests_s, length_s / seconds
    begins = [at_s / length_s * seconds / total_s * 100 for at_s, _ in found]
    styles: dict[str, str] = {}
    # Each line is drawn once for as long as it stands: (row, runs, first screen, the screen that ends it).
    lines: list[tuple[int, tuple[Run, ...], int, int]] = []
    for row in range(used):
        first = 0
        for number in range(1, len(found) + 1):
            if number == len(found) or found[number][1][row] != found[first][1][row]:
                if found[first][1][row]:
                    lines.append((row, found[first][1][row], first, number))
                first = number
    drawn, rules = [], {}
    for row, runs, first, last in lines:
        texts = []
        for column, text, style in runs:
            name = styles.setdefault(style, f"s{len(styles)}")
            x, wide = column * CELL_WIDTH, len(text) * CELL_WIDTH
            texts.append(f'<tspan class="{name}" x="{x:.1f}" textLength="{wide:.1f}">{escape(text)}</tspan>')
        whole = first == 0 and last == len(found)
        stands = "" if whole else f' class="a{first}-{last}"'
        y = MARGIN + LINE_HEIGHT * (row + 1)
        drawn.append(f'<text transform="translate({MARGIN},{y})"{stands}>{"".join(texts)}</text>')
        if not whole:
            start, end = begins[first], begins[last] if last < len(found) else 100.0
            rules[f"a{first}-{last}"] = (
                f".a{first}-{last}{{opacity:0;animation:k{first}-{last} {total_s:g}s step-end infinite}}"
                f"@keyframes k{first}-{last}{{0%{{opacity:{int(first == 0)}}}{start:.3f}%{{opacity:1}}"
                + (f"{end:.3f}%{{opacity:0}}" if last < len(found) else "")
                + "}"
            )
    colours = "".join(f".{name}{{{style}}}" for style, name in styles.items())
    # Who wants no moving pictures sees the last screen.
    final = ",".join(f".{name}" for name in rules if name.endswith(f"-{len(found)}"))
    still = f"@media (prefers-reduced-motion:reduce){{text[class^=a]{{animation:none}}{final}{{opacity:1}}}}"
    picture.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" '
        f'aria-label="A terminal: {escape(header["command"])}, {faster:.0f} times faster">\n'
        "<style>text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
        f"white-space:pre}}{colours}{''.join(rules.values())}{still}</style>\n"
        f'<rect width="{width:.0f}" height="{height}" rx="10" fill="#1b1e26" stroke="#4b5160"/>\n'
        + "\n".join(drawn)
        + f'\n<text x="{width - MARGIN:.0f}" y="{height - MARGIN / 2:.0f}" text-anchor="end" '
        f'style="fill:{COLOURS["black"]}">{faster:.0f}× faster than it was</text>\n</svg>\n',
        encoding="utf-8",
    )
    print(
        f"{picture}: {len(found)} screens, {picture.stat().st_size / 1000:.0f} kB, {faster:.1f} times faster"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    does = parser.add_subparsers(dest="does", required=True)
    records = does.add_parser("record")
    records.add_argument("cast", type=Path)
    records.add_argument("command", nargs="+")
    draws = does.add_parser("draw")
    draws.add_argument("cast", type=Path)
    draws.add_argument("picture", type=Path)
    draws.add_argument("--seconds", type=float, default=30.0)
    draws.add_argument("--stands-s", type=float, default=0.2)
    given = parser.parse_args()
    if given.does == "record":
        raise SystemExit(record(given.cast, given.command))
    draw(given.cast, given.picture, given.seconds, given.stands_s)


if __name__ == "__main__":
    main()
