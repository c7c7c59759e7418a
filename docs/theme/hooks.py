"""What mkdocs does for this site beside what `mkdocs.yml` says.

Pages of `docs/` link to files beside it (`../recipes/…/README.md`, `../examples/…/server.js`), as a code
host wants them. Each such file becomes part of the site: it lies at `repository/` and its path, pages as
pages, text as a page with the text in it, anything else as a copy. What they link to comes along, and every
link is turned to where its file lies now. A link to a file that does not exist stays as it is, so that the
strict build refuses it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
HOME = "repository"
INSTEAD = {"README.md": "docs/index.md"}
"""The first page of the repository → the first page of the site."""
LANGUAGES = {".py": "python", ".js": "javascript", ".yaml": "yaml", ".json": "json", ".sh": "bash"}
MOST_TEXT = 200_000
CODE_PAGE = """\
---
search: {{exclude: true}}
---

# {name}

`{path}`

~~~~~~{language}
{text}
~~~~~~
"""
LINK = re.compile(r"(?<=\]\()([^()\s#:]+)(#[^()\s]*)?(?=\))")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds what is linked to, and what that links to."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    waiting += sorted(_wanted(config.nav))
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in seen or not (ROOT / path).is_file():
            continue
        seen.add(path)
        if not path.startswith("docs/"):
            files.append(_file_of(path, config))
        if path.endswith(".md"):
            text = (ROOT / path).read_text(encoding="utf-8")
            waiting += [_target(path, link) for link, _ in LINK.findall(text)]
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns the links of a page to where their files lie in the site."""
    here = _path_of(page.file.src_uri)
    if not here.endswith(".md"):
        return markdown

    def turned(found: re.Match[str]) -> str:
        target = _target(here, found[1])
        among_docs = here.startswith("docs/") and target.startswith("docs/")
        if among_docs or not (ROOT / target).is_file():
            return found[0]
        return posixpath.relpath(_uri_of(target), posixpath.dirname(page.file.src_uri)) + (found[2] or "")

    return LINK.sub(turned, markdown)


def _target(page: str, link: str) -> str:
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return INSTEAD.get(target, target)


def _uri_of(path: str) -> str:
    """Where a file of the repository lies in the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{HOME}/{path}" + (".md" if Path(path).suffix in LANGUAGES else "")


def _path_of(uri: str) -> str:
    """The file of the repository that a page of the site shows."""
    if not uri.startswith(f"{HOME}/"):
        return f"docs/{uri}"
    path = uri.removeprefix(f"{HOME}/")
    return path if (ROOT / path).is_file() else path.removesuffix(".md")


def _file_of(path: str, config: MkDocsConfig) -> File:
    source = ROOT / path
    if language := LANGUAGES.get(source.suffix):
        text = source.read_text(encoding="utf-8")
        shown = text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}\n… {len(text)} characters in all"
        return File.generated(
            config,
            _uri_of(path),
            content=CODE_PAGE.format(name=source.name, path=path, language=language, text=shown),
        )
    return File.generated(config, _uri_of(path), abs_src_path=str(source))


def _wanted(nav: Any) -> set[str]:
    """The files beside `docs/` that the navigation names."""
    if isinstance(nav, dict):
        nav = list(nav.values())
    if isinstance(nav, list):
        return {path for each in nav for path in _wanted(each)}
    return {_path_of(nav)} if nav.startswith(f"{HOME}/") else set()
