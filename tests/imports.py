"""The import graph of the product, read from its syntax trees: no module is loaded."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("areal_async", "rollout_service", "replay_buffer", "reward_service", "trainer_service")


class When(IntEnum):
    """The moment at which an import is carried out."""

    LOAD = 0
    """While the module is loaded."""
    RUN = 1
    """While a function of it runs."""
    TYPES = 2
    """Never: a type checker reads it."""


class Import(NamedTuple):
    """One module that another one imports."""

    source: str
    target: str
    """The module, or a name in a package's `__init__.py` as `package.name`."""
    when: When


def product(root: Path = ROOT) -> dict[str, str]:
    """Return the text of each product module by its path below `root`."""
    files = (path for package in PACKAGES for path in sorted((root / package).rglob("*.py")))
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in files}


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def graph(files: Mapping[str, str]) -> list[Import]:
    """Return every import of one of `files` (path → text) by another, of functions and for types too."""
    modules = {module_of(path) for path in files}

    def home(name: str) -> str:
        """The module that holds `name`, or "" for a name of another project."""
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name

    found = []
    for path, text in files.items():
        source = module_of(path)
        for name, when in imports(ast.parse(text)):
            target = home(name)
            if target and target != source:
                found.append(Import(source, name if "." not in target else target, when))
    return found


def imports(tree: ast.AST, when: When = When.LOAD) -> Iterator[tuple[str, When]]:
    """Yield each imported dotted name, with the moment of its import."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, when) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", when) for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from imports(ast.Module(node.body, []), When.TYPES)
            yield from imports(ast.Module(node.orelse, []), when)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imports(node, max(when, When.RUN))
        else:
            yield from imports(node, when)


def circles(edges: list[Import], latest: When) -> list[list[str]]:
    """Return the sets of modules that import each other in a circle, by imports no later than `latest`."""
    onward: dict[str, set[str]] = {}
    for source, target, when in edges:
        if when <= latest:
            onward.setdefault(source, set()).add(target)
    reached = {start: _reached(start, onward) for start in onward}
    left, found = {start for start in onward if start in reached[start]}, []
    while left:
        start = min(left)
        circle = {other for other in reached[start] if start in reached.get(other, ())}
        found.append(sorted(circle))
        left -= circle
    return found


def _reached(start: str, onward: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        new = onward.get(todo.pop(), set()) - seen
        seen |= new
        todo.extend(new)
    return seen
