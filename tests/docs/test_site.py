"""The site of the docs: it is built strictly, whole, and a browser reads it without asking any other host."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import areal_async
from tests.unit.page.browser import chromium
from tests.waiting import LIMIT_S

pytest.importorskip("mkdocs")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it. A broken link or anchor, and a page that is not in the navigation of
    `mkdocs.yml`, end the strict build."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert built.returncode == 0, built.stderr[-4000:]
    return folder


class Asked(HTMLParser):
    """The addresses that a browser asks for by itself when it opens a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and given.get("rel") in ("canonical", "next", "prev"):
            return
        names = ["src", "srcset", "data", "poster", *(["href"] if tag in ("link", "image", "use") else [])]
        self.found.update(given.get(name) or "" for name in names)


def pages(site: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(site.rglob("*.html")):
        yield path.relative_to(site).as_posix(), path.read_text(encoding="utf-8")


def test_the_site_asks_no_other_host_for_anything(site: Path) -> None:
    elsewhere = re.compile(r"(https?:)?//")
    asked = [
        (name, each) for name, text in pages(site) for each in Asked(text).found if elsewhere.match(each)
    ]
    assert asked == []
    styles = {path.name: path.read_text(encoding="utf-8") for path in site.rglob("*.css")}
    fetched = re.compile(r"(url\(|@import)\s*[\"']?(https?:)?//")
    assert [name for name, text in styles.items() if fetched.search(text)] == []
    # The theme would fetch the program for such diagrams.
    assert len([*pages(site)]) > 50
    assert [name for name, text in pages(site) if 'class="mermaid"' in text] == []


def test_every_page_and_file_that_the_docs_link_to_is_in_the_site(site: Path) -> None:
    assert (site / "repository" / "recipes" / "gsm8k-grpo" / "index.html").exists()
    assert (site / "repository" / "examples" / "reward_servers" / "server.js.html").exists()
    decisions = (site / "decisions" / "index.html").read_text(encoding="utf-8")
    for page in (ROOT / "docs" / "decisions").glob("[a-z]*.md"):
        assert f'href="{page.stem}.html"' in decisions, f"docs/decisions/README.md has no row for {page.name}"


def test_every_public_name_is_described_from_the_code(site: Path) -> None:
    text = (site / "api.html").read_text(encoding="utf-8")
    described = set(re.findall(r'<h\d id="areal_async\.(\w+)"', text))
    assert described == set(areal_async.__all__)


def test_no_markdown_is_left_in_the_text(site: Path) -> None:
    """Code hosts read some things as lists, tables and code that the site's Markdown does not, such as a list
    after a line of text and code in a list that is indented by less than four spaces."""
    left: dict[str, list[str]] = {}
    for name, text in pages(site):
        article = re.sub(
            r"<pre.*?</pre>", "", "".join(re.findall(r"<article.*?</article>", text, re.S)), flags=re.S
        )
        found = re.findall(r"<(?:p|li)>(?:(?!</p>|</li>).)*?\n\s*(?:[-*+] |\d+[.)] |\|)[^\n]*", article, re.S)
        found += re.findall(r"[^\n]*(?:```|~~~|\]\()[^\n]*", article)
        if found:
            left[name] = [each[-200:] for each in found]
    assert left == {}


def test_the_search_works_from_the_disk(site: Path) -> None:
    pytest.importorskip("websockets")
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {each["location"] for each in index["docs"]}
    assert {"index.html", "api.html#areal_async.reward"} <= found
    with chromium() as tab:
        tab.open((site / "index.html").as_uri())
        tab.eval("document.querySelector('label[for=__search]').click()")
        tab.wait("document.querySelector('.md-search-result__meta').textContent.includes('Type to start')")
        tab.send("Input.insertText", text="overtaken")
        tab.wait("document.querySelector('.md-search-result__link[href*=\"buffer.html\"]')", "a result")
        assert tab.said == []
        asked = tab.eval("performance.getEntriesByType('resource').map(each => each.name)")
        assert [each for each in asked if not each.startswith("file:")] == []
