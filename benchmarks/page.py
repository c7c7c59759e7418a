"""The page at sizes that no run of an afternoon has, in a real browser: how long one waits, and for what.

    python benchmarks/page.py [--jobs 1000] [--steps 100000] [--units 32768] [--only PART…] [--out FILE.json]

Three folders written by what writes those of runs: a thousand runs of 300 steps, one run of a hundred
thousand, and one with an episode of 32k units among 200 files of samples. `areal-async view` serves each in a
process of its own to headless Chromium, which is driven over DevTools.

    shown_s       from the navigation, or the click, to the frame in which what was asked for is there
    frame_ms      between two frames while something is scrolled by 400 pixels in each: p95 and longest of 120
    reaction_ms   from an event of keyboard or mouse to the next painted frame (Event Timing, in steps of
                  8 ms; 0 where none took 16): longest of those that were sent
    cpu           in those: milliseconds that the page's main thread computed for each, which other work on
                  the machine does not change
    sent_kb       bytes of all answers that led to it
    cpu_ms        of the server, for one request

Two minutes on two cores. What else runs on the machine (`load_average`) makes all of it longer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from page_runs import run_folder, write_episodes, write_history

from areal_async.service.record import RECORDS, RunLog
from tests.unit.page.browser import Tab, chromium

DIFFERENT = 10  # Runs of the list; the others are copies of them
LISTED = "document.getElementById('jobs-count').textContent === '%d of %d'"
CHARTS = "document.querySelectorAll('#charts figure:not([hidden]) canvas').length > 3"
WHOLE = (
    "/training reward \\S+ at %d;/.test(document.querySelector('#charts .plot')?.getAttribute('aria-label'))"
)
SAMPLES = "document.querySelector('#sample-shown [data-unit]')"
IN_SIGHT = "document.getElementById('samples').scrollIntoView({behavior: 'instant'})"
SHOWN = """(done => new Promise(tell => {
  const over = () => tell(performance.now());
  const look = () => requestAnimationFrame(done() ? over : look);
  look();
}))(() => %s)"""
FRAMES = """new Promise(tell => {
  const moved = %s, took = [];
  let last = performance.now(), down = true;
  const frame = now => {
    took.push(now - last); last = now;
    if (took.length > 120) return tell(took.slice(1));
    const before = moved.scrollTop;
    moved.scrollTop += down ? 400 : -400;
    if (moved.scrollTop === before) down = !down;
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
})"""
BETWEEN_KEYS = "new Promise(tell => setTimeout(tell, 33))"
"""As fast as a keyboard repeats a key that is held."""
EVENTS = """window.slowest = 0; new PerformanceObserver(list => {
  for (const entry of list.getEntries()) window.slowest = Math.max(window.slowest, entry.duration);
}).observe({ type: 'event', durationThreshold: 16 })"""
SENT = "performance.getEntriesByType('resource').reduce((sum, e) => sum + e.transferSize, 0) / 1024"


class Server(NamedTuple):
    url: str
    token: str
    process: psutil.Process

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system

    def cpu_ms(self, path: str, known: bool = False, times: int = 20) -> float:
        """Of one request, by `times` of them after a first."""
        headers = {"authorization": f"Bearer {self.token}"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers)) as answer:
            tag = str(answer.headers["etag"])
        before = self.cpu_s()
        for _ in range(times):
            more = {"if-none-match": tag} if known else {}
            with suppress(urllib.error.HTTPError):  # 304
                urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers | more)).read()
        return round((self.cpu_s() - before) * 1000 / times, 1)


@contextmanager
def viewed(tab: Tab, target: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "areal_async.cli.main", "view", str(target), "--no-open", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        yield Server(told["url"], told["token"], psutil.Process(process.pid))
        tab.open("about:blank")
    finally:
        process.terminate()
        process.wait(20)


def opened(tab: Tab, server: Server, condition: str) -> float:
    """Seconds from a navigation to what is waited for."""
    tab.open("about:blank")
    tab.send("Page.navigate", url=f"{server.url}/#token={server.token}")
    return shown(tab, condition)


def shown(tab: Tab, condition: str, begun_ms: float = 0.0) -> float:
    while True:
        try:
            return round((float(tab.eval(SHOWN % condition)) - begun_ms) / 1000, 3)
        except AssertionError:  # the navigation has just replaced the page that was asked
            time.sleep(0.01)


def task_ms(tab: Tab) -> float:
    """What the main thread of the page has computed so far."""
    metrics = {each["name"]: each["value"] for each in tab.send("Performance.getMetrics")["metrics"]}
    return float(metrics["TaskDuration"]) * 1000


def frames(tab: Tab, what: str) -> dict[str, float]:
    before = task_ms(tab)
    took = sorted(float(each) for each in tab.eval(FRAMES % what))
    cpu = (task_ms(tab) - before) / len(took)
    return {"p95": round(took[int(len(took) * 0.95)], 1), "longest": round(took[-1], 1), "cpu": round(cpu, 1)}


def reaction(tab: Tab, act: Callable[[], None], events: int) -> dict[str, float]:
    tab.eval(EVENTS)
    before = task_ms(tab)
    act()
    tab.eval("new Promise(tell => setTimeout(tell, 300))")
    cpu = (task_ms(tab) - before) / events
    return {"longest": float(tab.eval("window.slowest")), "cpu": round(cpu, 1)}


def mouse(tab: Tab, kind: str, x: float, y: float) -> None:
    more = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
    tab.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)


def middle(tab: Tab, element: str) -> tuple[float, float]:
    x, y = tab.eval(f"(r => [r.x + r.width / 2, r.y + r.height / 2])(({element}).getClientRects()[0])")
    return float(x), float(y)


def click(tab: Tab, element: str) -> float:
    """The time of the page at which it was clicked, in milliseconds."""
    tab.eval(f"({element}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
    x, y = middle(tab, element)
    begun = float(tab.eval("performance.now()"))
    for kind in ("mousePressed", "mouseReleased"):
        mouse(tab, kind, x, y)
    return begun


def hover(tab: Tab, element: str, points: int = 40) -> None:
    left, top, width, height = tab.eval(
        f"(r => [r.x, r.y, r.width, r.height])(({element}).getBoundingClientRect())"
    )
    bottom = min(top + height, float(tab.eval("innerHeight")))
    for i in range(points):
        mouse(
            tab,
            "mouseMoved",
            left + width * (i % 10 + 0.5) / 10,
            max(top, 0) + (bottom - max(top, 0)) * (i + 1) / (points + 2),
        )


def typed(tab: Tab, field: str, text: str) -> None:
    tab.eval(f"document.getElementById('{field}').focus()")
    for letter in text:
        tab.send("Input.dispatchKeyEvent", type="keyDown", text=letter, key=letter)
        tab.send("Input.dispatchKeyEvent", type="keyUp", key=letter)
        tab.eval(BETWEEN_KEYS)


def many_jobs(tab: Tab, folder: Path, jobs: int) -> dict[str, Any]:
    for number in range(jobs):
        if number < DIFFERENT:
            write_history(run_folder(folder, f"sums-{number:04d}", 300), 300, number)
        else:
            shutil.copytree(folder / f"sums-{number % DIFFERENT:04d}", folder / f"sums-{number:04d}")
    told: dict[str, Any] = {"jobs": jobs}
    with viewed(tab, folder) as server:
        before = server.cpu_s()
        told["first_shown_s"] = opened(tab, server, LISTED % (jobs, jobs))
        told["first_cpu_ms"] = round((server.cpu_s() - before) * 1000)
        told["sent_kb"] = round(float(tab.eval(SENT)))
        told["shown_again_s"] = opened(tab, server, LISTED % (jobs, jobs))
        told["cpu_ms"] = server.cpu_ms("/v1/page/jobs")
        told["cpu_ms_nothing_new"] = server.cpu_ms("/v1/page/jobs", known=True)
        told["cpu_ms_of_one_job"] = server.cpu_ms(f"/v1/page/jobs/sums-{jobs // 2:04d}", known=True)
        told["scroll_frame_ms"] = frames(tab, "document.scrollingElement")
        told["find_reaction_ms"] = reaction(tab, lambda: typed(tab, "jobs-find", "sums-00"), 7)
        begun = click(tab, "document.querySelector('#jobs-list li:not([hidden]) a')")
        told["job_shown_s"] = shown(tab, CHARTS, begun)
        begun = float(tab.eval("performance.now()"))
        tab.eval("history.back()")
        told["back_shown_s"] = shown(
            tab, "!document.getElementById('jobs').hidden && document.querySelector('#jobs-list li')", begun
        )
    return told


def long_history(tab: Tab, folder: Path, steps: int) -> dict[str, Any]:
    write_history(folder, steps)
    told: dict[str, Any] = {"steps": steps, "records_mb": round((folder / RECORDS).stat().st_size / 2**20, 1)}
    with viewed(tab, folder) as server:
        before = server.cpu_s()
        told["first_shown_s"] = opened(tab, server, CHARTS)
        told["whole_shown_s"] = shown(tab, WHOLE % (steps - 1))
        told["first_cpu_ms"] = round((server.cpu_s() - before) * 1000)
        told["sent_kb"] = round(float(tab.eval(SENT)))
        told["hover_reaction_ms"] = reaction(
            tab, lambda: hover(tab, "document.querySelector('#charts .u-over')"), 40
        )
        told["scroll_frame_ms"] = frames(tab, "document.scrollingElement")
        told["mean_reaction_ms"] = reaction(
            tab, lambda: void(click(tab, "document.getElementById('smooth')")), 1
        )
        size = (folder / RECORDS).stat().st_size
        told["cpu_ms_nothing_new"] = round(
            server.cpu_ms(f"/v1/page/jobs/{folder.name}", known=True)
            + server.cpu_ms(f"/v1/page/jobs/{folder.name}/records?offset={size}"), 1
        )  # fmt: skip
        log = RunLog(folder / RECORDS)
        begun = float(tab.eval("performance.now()"))
        log.write("step", policy="policy", step=steps, reward_mean=0.5, step_s=1.0)
        log.close()
        told["new_step_shown_s"] = shown(tab, WHOLE % steps, begun)
    return told


def long_episode(tab: Tab, folder: Path, units: int, files: int) -> dict[str, Any]:
    write_history(folder, 300)
    for number in range(files):
        write_episodes(folder, number, [400] * 4)
    write_episodes(folder, files, [400, units, 400, 400])
    told: dict[str, Any] = {"units": units, "files": files + 1}
    second = "document.querySelectorAll('#sample-list button')[1]"
    with viewed(tab, folder) as server:
        opened(tab, server, "document.querySelector('#sample-shown .text')")
        tab.eval(IN_SIGHT)
        shown(tab, SAMPLES)
        begun = click(tab, second)
        has = f"document.querySelector('#sample-shown').textContent.length > {units} && {SAMPLES}"
        told["shown_s"] = shown(tab, has, begun)
        told["episode_kb"] = round(
            float(tab.eval("performance.getEntriesByType('resource').at(-1).transferSize")) / 1024
        )
        text = "document.querySelector('.segment.assistant .text')"
        tab.eval(f"{text}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        told["scroll_frame_ms"] = frames(tab, text)
        told["page_scroll_frame_ms"] = frames(tab, "document.scrollingElement")
        tab.eval(f"{text}.scrollTop = {text}.scrollHeight / 2")
        tab.eval(f"{text}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        told["hover_reaction_ms"] = reaction(tab, lambda: hover(tab, text), 40)
        tab.eval(f"{text}.focus()")
        pressed(tab, ["Home"])
        told["arrow_reaction_ms"] = reaction(tab, lambda: pressed(tab, ["ArrowRight"] * 10), 10)
        told["jump_reaction_ms"] = reaction(tab, lambda: pressed(tab, ["End"]), 1)
        choose = "document.getElementById('sample-colour')"
        begun = float(tab.eval("performance.now()"))
        tab.eval(f"{choose}.value = 'advantage'; {choose}.dispatchEvent(new Event('change'))")
        told["recoloured_s"] = shown(tab, "true", begun)
        told["search_reaction_ms"] = reaction(tab, lambda: typed(tab, "sample-find", "task-2"), 6)
        begun = float(tab.eval("performance.now()"))
        told["found_s"] = shown(
            tab, "document.getElementById('sample-count').textContent.includes('found')", begun
        )
        told["cpu_ms_of_a_search"] = server.cpu_ms(
            f"/v1/page/jobs/{folder.name}/samples?search=nowhere", times=5
        )
        told["cpu_ms_of_the_episode"] = server.cpu_ms(
            f"/v1/page/jobs/{folder.name}/samples?key=/step-{files:08d}.jsonl&episode=1", times=5
        )
    return told


def pressed(tab: Tab, keys: list[str]) -> None:
    for key in keys:
        tab.press(key)
        tab.eval(BETWEEN_KEYS)


def void(_: object) -> None:
    """For what is called for what it does."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--units", type=int, default=32_768)
    parser.add_argument("--only", nargs="*", help="of many_jobs, long_history, long_episode")
    parser.add_argument("--out", type=Path, help="file; what it has of other parts stays")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="areal-page-") as name, chromium() as tab:
        place = Path(name)
        tab.size(1280, 900)
        tab.send("Performance.enable", timeDomain="threadTicks")
        parts = {
            "many_jobs": lambda: many_jobs(tab, place / "runs", given.jobs),
            "long_history": lambda: long_history(tab, run_folder(place, "long", given.steps), given.steps),
            "long_episode": lambda: long_episode(tab, run_folder(place, "samples", 300), given.units, 200),
        }
        told = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}
        told |= {part: parts[part]() for part in given.only or parts}
        told["load_average"] = round(os.getloadavg()[0], 1)
        assert tab.said == [], tab.said
    text = json.dumps(told, indent=2) + "\n"
    print(text)
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
