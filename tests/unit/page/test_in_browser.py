"""The page in a real browser: followed, used by keyboard, and fed with what a hostile model might write."""

from __future__ import annotations

import asyncio
import io
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image

from areal_async.base.http_server import HttpLimits, HttpServer, listen
from areal_async.data.images import preview_of
from areal_async.show.page.app import view_app
from areal_async.show.page.report import write_report
from tests.unit.page.browser import Tab, chromium
from tests.unit.page.runs import HOSTILE, append, episode, load, run_folder, step, write_samples
from tests.waiting import LIMIT_S

pytest.importorskip("websockets")
TOKEN = "a-token-of-this-test"
CHART = (
    "[...document.querySelectorAll('figure')].find(f => f.innerText.includes('%s'))?.querySelector('.plot')"
)
POINTS = "document.querySelectorAll('#charts figure:not([hidden])').length"


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with chromium() as tab:
        yield tab


@contextmanager
def served(folder: Path) -> Iterator[str]:
    listening = listen("127.0.0.1", 0)
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        server = HttpServer(view_app(folder, TOKEN), listening, HttpLimits(), name="page")
        server.start()
        await over.wait()
        await server.close()

    over = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(LIMIT_S)


def fresh(tab: Tab, url: str) -> None:
    """Another page in the same tab, with nothing said yet."""
    tab.open("about:blank")
    tab.said.clear()
    tab.open(url)


def points_of(tab: Tab, title: str) -> str:
    """What the chart of this title says to somebody who does not see it."""
    return str(tab.eval(f"{CHART % title}?.getAttribute('aria-label') || ''"))


def test_a_run_is_followed_as_it_goes_on(tab: Tab, tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    append(folder, [load(0.0, 0, worker={"busy_s": {"x": 0.0}, "tokens": 0}), step(0), step(1)])
    with served(folder) as url:
        fresh(tab, f"{url}/#token={TOKEN}")
        tab.wait(f"{POINTS} > 3")
        assert "token" not in tab.eval("location.href")
        assert "training reward 0.1 at 1" in points_of(tab, "Learning")
        assert "Entropy" not in tab.eval("document.getElementById('charts').innerText")
        append(folder, [step(2, entropy=0.25), load(9.0, 3, worker={"busy_s": {"x": 3.0}, "tokens": 90})])
        tab.wait("document.getElementById('charts').innerText.includes('Entropy')")
        assert "training reward 0.2 at 2" in points_of(tab, "Learning")
        assert "worker 0.3333 at 3" in points_of(tab, "Busy share")
        asked = "performance.getEntriesByType('resource').filter(e => e.name.includes('/records'))"
        sizes = tab.eval(f"{asked}.map(e => [new URL(e.name).searchParams.get('offset'), e.decodedBodySize])")
        assert sizes[0][0] == "0"
        assert int(sizes[-1][0]) > 0  # it went on, and did not begin again
        write_samples(folder, "step-00000002.jsonl", [episode()])
        tab.wait("document.querySelector('#sample-list button')")
        # What came after is no more.
        append(folder, [{"kind": "resume", "time_s": 9.5}, step(1, reward_mean=0.75)])
        tab.wait(f"{CHART % 'Learning'}.getAttribute('aria-label').includes('training reward 0.75 at 1')")
        again = "const s = new Charts.Store(); s.add([0, 1, 2, 1].map(x => ['p', x, 0, { a: 1 }]))"
        assert tab.eval(f"(() => {{ {again}; return [...s.series.values()][0].x }})()") == [0, 1]
        shutil.rmtree(folder)
        tab.wait("document.getElementById('trouble').textContent.includes('there is no run')")
    assert [said for said in tab.said if "404" not in said] == []


def test_of_a_long_answer_what_is_looked_at_has_units(tab: Tab, tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    append(folder, [step(0)])
    tokens = ["\n" if i % 40 == 39 else f" w{i}" for i in range(6000)]
    write_samples(folder, "step-00000000.jsonl", [episode(tokens)])
    units = "[...document.querySelectorAll('[data-unit]')].map(e => Number(e.dataset.unit))"
    with served(folder) as url:
        fresh(tab, f"{url}/#token={TOKEN}")
        tab.wait("document.querySelector('#sample-shown .segment.assistant .text')")
        text = "document.querySelector('.segment.assistant .text')"
        assert tab.eval(f"{text}.textContent") == "".join(tokens)
        tab.eval(f"{text}.scrollIntoView()")
        tab.wait(f"{units}.includes(0) && {text}.querySelector('.u0')")
        assert tab.eval(f"{units}.length") < 3000
        tab.eval(f"{text}.focus()")
        tab.press("End")
        assert "unit 6000 of 6000" in tab.eval("document.getElementById('sample-unit').textContent")
        tab.wait(f"{units}.includes(5999) && {units}.length < 5000")
        assert tab.eval(f"{text}.querySelector('.here').textContent") == tokens[-1]
        assert tab.eval(f"{text}.textContent") == "".join(tokens)
    assert tab.said == []


def test_what_a_model_wrote_is_text_and_nothing_else(tab: Tab, tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    append(folder, [step(0, rewards={HOSTILE: 1.0})])
    bad = episode([HOSTILE, "javascript:hurt()"], task=HOSTILE, ground_truth=HOSTILE, rewards={HOSTILE: 1})
    bad["segments"].append({"author": f'x" onload="{HOSTILE}', "agent": HOSTILE, "text": HOSTILE})
    write_samples(folder, "step-00000000.jsonl", [bad])
    report = tmp_path / "report.html"
    write_report([folder], report)
    with served(folder) as url:
        for address in (f"{url}/#token={TOKEN}", report.as_uri()):
            fresh(tab, address)
            tab.wait("document.querySelector('#sample-shown .text')", address)
            tab.eval("document.querySelector('.segment.assistant .text').scrollIntoView()")
            tab.wait("document.querySelector('[data-unit]')", address)
            assert HOSTILE in tab.eval("document.getElementById('sample-shown').textContent")
            assert HOSTILE in points_of(tab, "Components")
            tab.eval("document.querySelectorAll('#sample-shown button')[1].click()")
            tab.wait("document.getElementById('sample-count').textContent === '1 episode found'")
            assert tab.eval("window.hurt") is None
            assert tab.eval("document.querySelectorAll('main img, main script').length") == 0
            assert tab.said == []
            # and were one to get in, the policy of the page would not run it
            let_in = (
                "const s = document.createElement('script'); s.text = 'hurt = 1'; document.body.append(s)"
            )
            tab.eval(f"{{{let_in}}}")
            assert tab.eval("window.hurt") is None


def test_images_are_small_pictures_and_no_other_address_is_loaded(tab: Tab, tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    append(folder, [step(0)])
    preview = preview_of(png_of(200, 100))
    bad = {
        f'{HOSTILE}"': preview,
        "other": f'{preview}" onerror="window.hurt=1',
        "page": "data:text/html,<script>window.hurt=1</script>",
        "drawn": "data:image/svg+xml;base64,PHN2Zy8+",
        "script": "javascript:window.hurt=1",
        "far": "http://127.0.0.1:9/pixel.png",
        HOSTILE: HOSTILE,
    }
    shown = episode(images=bad)
    shown["segments"][0]["images"] = [*bad, "lost", "__proto__"]
    write_samples(folder, "step-00000000.jsonl", [shown])
    report = tmp_path / "report.html"
    write_report([folder], report)
    pictures = "[...document.querySelectorAll('main img')]"
    with served(folder) as url:
        for address in (f"{url}/#token={TOKEN}", report.as_uri()):
            fresh(tab, address)
            tab.wait(f"{pictures}.length && {pictures}.every(each => each.complete)", address)
            found = tab.eval(f"{pictures}.map(each => [each.naturalWidth, each.naturalHeight, each.alt])")
            assert found == [[128, 64, "image 1 of 9"]]
            assert tab.eval("document.querySelector('.pictures').textContent") == "8 images without a preview"
            assert tab.eval("window.hurt") is None
            assert tab.said == []
            # The policy of the page would not load a picture from elsewhere either.
            told = "document.addEventListener('securitypolicyviolation', e => { kept = e.effectiveDirective })"
            tab.eval(f"{{ {told}; new Image().src = '/x.png' }}")
            tab.wait("window.kept === 'img-src'")


def png_of(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "PNG")
    return file.getvalue()


def test_the_samples_are_reached_and_read_by_keyboard(tab: Tab, tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    append(folder, [step(0), step(1)])
    write_samples(folder, "step-00000000.jsonl", [episode(), episode(["a", "b", "c"])])

    def reach(place: str) -> None:
        for _ in range(60):
            if tab.eval(place):
                return
            tab.press("Tab")
        raise AssertionError(f"no key leads to {place}")

    with served(folder) as url:
        fresh(tab, f"{url}/#token={TOKEN}")
        tab.wait("document.querySelectorAll('#sample-list button').length === 2")
        names = tab.controls()
        assert [role for role, name in names if not name] == [], names
        assert {"Step", "Search", "Colour units by", "Theme", "Rolling mean"} <= {name for _, name in names}
        reach("document.activeElement === document.querySelectorAll('#sample-list button')[1]")
        tab.press("Enter")
        tab.wait("document.querySelector('#sample-shown').textContent.includes('abc')")
        reach("document.activeElement.getAttribute('aria-label') === 'turn 1: assistant · 3 units'")
        tab.press("ArrowRight")
        tab.press("ArrowRight")
        said = tab.eval("document.getElementById('sample-unit').textContent")
        assert said.startswith('unit 2 of 3   "b"   version 8   log-prob −'.replace("−", "-"))
        for colour, name in (("mask", "in the gradient"), ("advantage", "below 0"), ("logp", "unlikely")):
            tab.eval(
                f"document.getElementById('sample-colour').value = '{colour}';"
                "document.getElementById('sample-colour').dispatchEvent(new Event('change'))"
            )
            assert name in tab.eval("document.getElementById('sample-legend').textContent")
        for width in (390, 1280):
            tab.size(width, 900)
            assert tab.eval("document.documentElement.scrollWidth") <= width
    assert tab.said == []


def test_of_many_jobs_more_are_listed_as_one_scrolls(tab: Tab, tmp_path: Path) -> None:
    for number in range(230):
        run_folder(tmp_path, f"sums-{number:03d}")
    listed = "document.querySelectorAll('#jobs-list li').length"
    with served(tmp_path) as url:
        fresh(tab, f"{url}/#token={TOKEN}")
        tab.wait("document.getElementById('jobs-count').textContent === '230 of 230'")
        assert tab.eval(listed) == 100
        assert TOKEN not in tab.eval("location.href")
        # Somebody who scrolls faster than frames are drawn is always at the end of the list.
        tab.eval(
            "globalThis.follow = () => scrollTo({top: document.body.scrollHeight, behavior: 'instant'});"
            "new MutationObserver(follow).observe(document.getElementById('jobs-list'), {childList: true});"
            "follow()"
        )
        tab.wait(f"{listed} === 230")
        find = "(e => { e.value = 'sums-22'; e.dispatchEvent(new Event('input')) })"
        tab.eval(f"{find}(document.getElementById('jobs-find'))")
        assert tab.eval("document.getElementById('jobs-count').textContent") == "10 of 230"
        assert tab.eval(listed) == 10
        tab.eval("document.querySelectorAll('#jobs-list a')[3].focus()")
        run_folder(tmp_path, "sums-229-b")
        tab.wait(f"{listed} === 11")
        chosen = tab.eval("document.activeElement.textContent")
        assert chosen.startswith("sums-22")
        tab.press("Enter")
        tab.wait("!document.getElementById('job').hidden")
        assert chosen.startswith(tab.eval("document.getElementById('job-title').textContent"))
    assert tab.said == []


def test_strangers_are_refused_and_asked_for_a_token(tab: Tab, tmp_path: Path) -> None:
    run_folder(tmp_path, "one")
    run_folder(tmp_path, "two")
    with served(tmp_path) as url:

        def status(path: str, **headers: str) -> int:
            try:
                with urllib.request.urlopen(urllib.request.Request(url + path, headers=headers)) as answer:
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                return error.code

        good, bad = {"authorization": f"Bearer {TOKEN}"}, {"authorization": "Bearer other"}
        evil = {"Host": "evil.example"}
        asked = [status("/v1/page/jobs", **headers) for headers in (good, {}, bad, good | evil)]
        assert [*asked, status("/", **evil)] == [200, 401, 401, 400, 400]
        outside = "/v1/page/jobs/.. /v1/page/jobs/%2e%2e%2fetc /page/../app.py /page/%2e%2e/app.py"
        assert {path: status(path, **good) for path in outside.split()} == dict.fromkeys(outside.split(), 404)
        fresh(tab, "about:blank")
        tab.open(url)
        tab.wait("!document.getElementById('login').hidden")
        give = "document.getElementById('token').value = '%s'; document.forms[0].requestSubmit()"
        tab.eval(give % "wrong")
        tab.wait("document.getElementById('trouble').textContent === 'This token is not let in.'")
        tab.eval(give % TOKEN)
        tab.wait("document.querySelectorAll('#jobs-list li').length === 2")
        assert TOKEN not in tab.eval("location.href")
