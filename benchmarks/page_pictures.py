"""The pictures of the page in the docs, of real runs, in headless Chromium.

    python benchmarks/page_pictures.py RUNS RUN [--out docs/images]

`RUNS` is a folder of runs that ended, `RUN` the name of one whose agent called tools
(`recipes/calculator/tiny.yaml`). Views are taken 1280 pixels wide in the light theme and 420 wide in the dark
one: the jobs, the charts, samples by log-prob and by advantage, and a held-out task in two versions.
"""

from __future__ import annotations

import argparse
import base64
from collections.abc import Callable
from pathlib import Path

from page import IN_SIGHT, Server, opened, shown, viewed

from tests.unit.page.browser import Tab, chromium

SIZES = (
    (1280, 900, "light", ("charts", "samples", "advantage", "compare")),
    (420, 860, "dark", ("jobs", "charts", "samples")),
)
LIST = "document.querySelectorAll('#sample-list button').length > 1"
EPISODE = "document.querySelectorAll('#sample-shown [data-unit]').length"
DRAWN = "document.querySelectorAll('#charts figure:not([hidden]) canvas').length > 1"


def chosen(tab: Tab, name: str, option: str) -> None:
    """One of the lists above the samples, as somebody would choose from it."""
    tab.eval(
        f"(e => {{ e.value = [...e.options].find(o => o.textContent === '{option}').value; "
        f"e.dispatchEvent(new Event('change')) }})(document.getElementById('sample-{name}'))"
    )


def settled(tab: Tab) -> None:
    tab.eval("new Promise(tell => setTimeout(tell, 400))")


def charts(tab: Tab) -> None:
    tab.eval("scrollTo({top: 0, behavior: 'instant'})")
    shown(tab, DRAWN)


def samples(tab: Tab, file: str, colour: str) -> None:
    tab.eval(IN_SIGHT)
    chosen(tab, "file", file)
    chosen(tab, "colour", colour)
    settled(tab)
    shown(tab, f"{EPISODE} && [...document.querySelectorAll('.text')].every(e => e.offsetHeight)")


def compared(tab: Tab) -> None:
    """A held-out task before and after the training."""
    names = tab.eval("[...document.getElementById('sample-file').options].map(o => o.textContent)")
    evaluations = [name for name in names if name.startswith("evaluation")]
    samples(tab, evaluations[0], "version")
    tab.eval("document.querySelector('#sample-shown button').click()")  # Keep, to compare
    samples(tab, evaluations[-1], "version")
    shown(tab, "document.querySelectorAll('#sample-shown .episode').length === 2")


def praised(tab: Tab) -> None:
    """The newest episode of a step whose units were not all as good as those of its group."""
    for file in tab.eval("[...document.getElementById('sample-file').options].map(o => o.textContent)"):
        if file.startswith("step"):
            samples(tab, file, "advantage")
            for number in range(tab.eval("document.querySelectorAll('#sample-list button').length")):
                tab.eval(f"document.querySelectorAll('#sample-list button')[{number}].click()")
                settled(tab)
                if tab.eval("document.querySelector('#sample-shown').querySelector('.u0, .u1, .u3, .u4')"):
                    return


def picture(tab: Tab, path: Path, width: int, height: int, part: str) -> None:
    """A part of the page, at most so high."""
    top, bottom = tab.eval(
        f"(r => [r.top + scrollY, r.bottom + scrollY])"
        f"(document.querySelector('{part}').getBoundingClientRect())"
    )
    clip = {
        "x": 0,
        "y": max(0, top - 12),
        "width": width,
        "height": min(height, bottom - top + 24),
        "scale": 1,
    }
    shot = tab.send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
    path.write_bytes(base64.b64decode(shot["data"]))


def take(tab: Tab, server: Server, run: str, out: Path) -> None:
    views: dict[str, tuple[str, Callable[[Tab], None]]] = {
        "charts": ("body", charts),
        "samples": ("#samples", lambda tab: samples(tab, "step 30", "log-prob")),
        "advantage": ("#samples", praised),
        "compare": ("#samples", compared),
    }
    tab.send("Emulation.setScrollbarsHidden", hidden=True)
    for width, height, theme, wanted in SIZES:
        tab.size(width, height, theme)
        opened(tab, server, "document.querySelector('#jobs-list li')")
        if "jobs" in wanted:
            picture(tab, out / f"page-jobs-{width}.png", width, 440, "body")
        tab.eval(f"location.hash = '#/job/{run}'")
        shown(tab, f"{LIST} && {DRAWN}")
        for name, (part, view) in ((name, views[name]) for name in wanted if name in views):
            view(tab)
            settled(tab)
            assert tab.eval("document.documentElement.scrollWidth") <= width, (name, width)
            picture(tab, out / f"page-{name}-{width}.png", width, height, part)
        nameless = [role for role, name in tab.controls() if not name]
        assert nameless == [], nameless


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("run")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    given = parser.parse_args()
    with chromium() as tab, viewed(tab, given.runs) as server:
        take(tab, server, given.run, given.out)
        assert tab.said == [], tab.said


if __name__ == "__main__":
    main()
