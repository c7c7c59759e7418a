"""Whether a command line is one that the program takes, by that program's own parser."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from areal_async.base.gpus import gpu_variables
from areal_async.base.mistakes import ConfigError
from areal_async.cli.main import app
from areal_async.cluster.api import OPERATIONS
from areal_async.config.cluster import ClusterConfig, load_cluster
from areal_async.config.load import load_job

ROOT = Path(__file__).parents[2]
PACKAGES = ("areal_async", "rollout_service", "replay_buffer", "reward_service", "trainer_service")
OURS = typer.main.get_command(app)
NO_RAY = "needs Ray (`pip install 'areal-async[ray]'`)"
OTHERS = ("redis-server", "sh", "wget", "ulimit")


def command_problems(words: Sequence[str]) -> list[str]:
    """What the program says against `words`."""
    return [*_command_problems(tuple(words))]


@cache
def _command_problems(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_asked(words))


def _asked(words: Sequence[str]) -> Iterator[str]:
    if not words:
        yield "there is no command"
        return
    program, *arguments = words
    name = Path(program).name
    if name == "areal-async":
        yield from _parsed(OURS, arguments)
    elif name == "ray":
        yield from _parsed(_ray(), arguments)
    elif name == "python" and arguments[:1] == ["-c"]:
        try:
            ast.parse(arguments[1])
        except SyntaxError as error:
            yield f"{words}: {error}"
    elif name not in OTHERS and not program.startswith("--config.file="):  # the command of Prometheus' image
        yield f"nobody knows the program {program}"


def _parsed(command: Any, arguments: Sequence[str]) -> Iterator[str]:
    """`command` is click's, or of the copy of click in typer: nothing is asked but what both have."""
    words, path = list(arguments), list[str]()
    context = None
    try:
        while hasattr(command, "commands"):
            if not words or words[0].startswith("-"):
                yield f"no command in {' '.join(arguments)!r}"
                return
            path.append(words.pop(0))
            found = command.commands.get(path[-1])
            if found is None:
                yield f"there is no command {' '.join(path)!r}"
                return
            command = found
        context = command.make_context(" ".join(path), words)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        yield f"{' '.join(path)}: {error.format_message()}"
    finally:
        if context is not None:
            context.close()


@cache
def _ray() -> Any:
    return pytest.importorskip("ray.scripts.scripts", reason=NO_RAY).cli


def ray_options(words: Sequence[str]) -> dict[str, Any]:
    """The options of a `ray start`, as Ray reads them."""
    arguments = [*words[words.index("start") + 1 :]]
    with _ray().commands["start"].make_context("start", arguments) as context:
        return dict(context.params)


# --- files -------------------------------------------------------------------------------------------


def cluster_of(text: str, folder: Path) -> ClusterConfig:
    """The cluster that a file holds. Raises `ConfigError`."""
    path = folder / "checked-cluster.yaml"
    path.write_text(text)
    return load_cluster(path)


def cluster_problems(text: str, folder: Path) -> Iterator[str]:
    try:
        cluster_of(text, folder)
    except ConfigError as error:
        yield str(error)


def job_problems(text: str, folder: Path) -> Iterator[str]:
    path = folder / "checked-job.yaml"
    path.write_text(text)
    try:
        load_job(path, files=False)
    except ConfigError as error:
        yield str(error)


# --- routes and names --------------------------------------------------------------------------------


def api_right(path: str) -> str | None:
    """What a token must allow for a GET of `path` of the controller: empty for none needed, None where there
    is no such path."""
    for operation in OPERATIONS:
        if (operation.method, operation.path) == ("GET", path):
            return operation.right or ""
    return None


@cache
def ray_routes() -> frozenset[str]:
    """Paths that Ray's dashboard and agents answer without a token."""
    folder = _ray_folder() / "dashboard"
    routed = set()
    for path in (folder / "modules" / "reporter").glob("*.py"):
        routed |= set(re.findall(r'routes\.get\("([^"]+)"\)', path.read_text()))
    free = {
        route
        for name in ("http_server_agent.py", "http_server_head.py")
        for route in re.findall(r'"(/api/[a-z_/]+)",', (folder / name).read_text())
    }
    return frozenset(routed & free)


@cache
def names_read() -> frozenset[str]:
    """Names in capitals that the packages hold as texts: those of the environment are among them."""
    found: set[str] = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found |= {node.value} if re.fullmatch(r"[A-Z][A-Z0-9_]{2,}", node.value) else set()
    return frozenset(found)


def is_read(name: str) -> bool:
    """Whether somebody who is started here reads the environment variable `name`."""
    if name.startswith("RAY_"):
        return _in_ray(name)
    if gpu_variables({name: ""}):
        return True  # of a library of GPUs, for every process
    return name in names_read() or name in ("HOME", "PATH", "PYTHONUNBUFFERED")


@cache
def _in_ray(name: str) -> bool:
    folder = _ray_folder()
    if name.encode() in (folder / "_raylet.so").read_bytes():
        return True
    texts = (path.read_text(errors="replace") for path in (folder / "_common" / "usage").glob("*.py"))
    return any(name in text for text in texts)


@cache
def _ray_folder() -> Path:
    return Path(pytest.importorskip("ray", reason=NO_RAY).__file__).parent
