"""The layers of the product: imports between packages, code lines of each, and the width of functions."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.imports import PACKAGES, Import, When, circles, graph, product

LAYERS = (
    ("base",),
    ("models", "trajectory"),
    ("rpc",),
    ("storage",),
    ("data",),
    ("config",),
    ("service",),
    ("weights",),
    ("launch",),
    ("show",),
    ("runner",),
    ("cluster",),
    ("cli",),
)
"""The packages of `areal_async` from the lowest layer to the highest. Each imports lower layers alone."""
FACE = {"areal_async.__version__": {"cli", "cluster", "show"}}
"""Names of `areal_async/__init__.py` → the packages below it that may read them."""
HIGHEST_FOR_SERVICES = "weights"
FOR_TOOLS = "tools"
"""The folder of a service with its commands, which use the kit of `areal_async.cli`."""
MOST_ARROWS = 60

RANK = {package: rank for rank, layer in enumerate(LAYERS) for package in layer}


def package_of(module: str) -> str:
    """Return the package of a module of `areal_async`, or the service that it belongs to."""
    top, _, rest = module.partition(".")
    return (rest.partition(".")[0] or top) if top == "areal_async" else top


def climbs(edge: Import) -> bool:
    """Tell whether an import leads from a lower layer to a higher one, or sideways."""
    source, target = package_of(edge.source), package_of(edge.target)
    if source == target or edge.source in ("areal_async", "areal_async.__main__"):
        return False
    if edge.target in FACE:
        return source not in FACE[edge.target]
    if source not in RANK:
        tools = FOR_TOOLS in edge.source.split(".")
        return target in RANK and RANK[target] > RANK[HIGHEST_FOR_SERVICES] and not tools
    return target not in RANK or RANK[target] >= RANK[source]


def arrows(edges: list[Import]) -> set[tuple[str, str]]:
    """Return the pairs of packages of `areal_async` of which one imports the other."""
    pairs = {(package_of(edge.source), package_of(edge.target)) for edge in edges}
    return {
        (source, target) for source, target in pairs if source != target and {source, target} <= RANK.keys()
    }


def test_imports_lead_downward_and_in_no_circle() -> None:
    files = product()
    edges = graph(files)
    assert {package_of(module) for module in {edge.source for edge in edges}} - {
        "areal_async",
        "__main__",
    } <= (RANK.keys() | set(PACKAGES))
    assert [edge for edge in edges if climbs(edge)] == []
    assert len(arrows(edges)) <= MOST_ARROWS
    assert circles(edges, When.RUN) == []
    assert len(circles(edges, When.TYPES)) <= 1
    loose = {path for path in files if path.startswith("areal_async/") and path.count("/") == 1}
    assert loose == {"areal_async/__init__.py", "areal_async/__main__.py"}


@pytest.mark.parametrize(
    ("path", "text", "climb"),
    [
        ("areal_async/base/x.py", "from areal_async.rpc import y\n", True),
        ("areal_async/base/x.py", "def f():\n    import areal_async.rpc.y\n", True),
        ("areal_async/base/x.py", "if TYPE_CHECKING:\n    from areal_async.rpc.y import Z\n", True),
        ("areal_async/models/x.py", "from areal_async.trajectory.y import Z\n", True),
        ("areal_async/trajectory/x.py", "from areal_async.base.y import Z\n", False),
        ("areal_async/cli/x.py", "from areal_async import __version__\n", False),
        ("areal_async/config/x.py", "from areal_async import __version__\n", True),
        ("areal_async/cli/x.py", "from areal_async import run\n", True),
        ("areal_async/launch/x.py", "from trainer_service.y import Z\n", True),
        ("trainer_service/x.py", "from areal_async.weights.y import Z\n", False),
        ("trainer_service/x.py", "from areal_async.launch.y import Z\n", True),
        ("trainer_service/x.py", "from areal_async.cli.y import Z\n", True),
        ("trainer_service/tools/x.py", "from areal_async.cli.y import Z\n", False),
    ],
)
def test_an_import_of_a_higher_layer_is_found_wherever_it_stands(path: str, text: str, climb: bool) -> None:
    others = [f"areal_async/{package}/y.py" for package in RANK] + [
        "trainer_service/y.py",
        "areal_async/__init__.py",
    ]
    edges = graph({path: text, **dict.fromkeys(others, "")})
    assert [climbs(edge) for edge in edges] == [climb]


def test_a_circle_is_found_by_the_moment_of_its_imports() -> None:
    files = {
        "areal_async/base/a.py": "import areal_async.base.b",
        "areal_async/base/b.py": "def f():\n    from areal_async.base import c",
        "areal_async/base/c.py": "import areal_async.base.d\n"
        "if TYPE_CHECKING:\n    from areal_async.base.a import A",
        "areal_async/base/d.py": "import areal_async.base.c",
    }
    names = [f"areal_async.base.{name}" for name in "abcd"]
    assert circles(graph(files), When.LOAD) == [names[2:]]
    assert circles(graph(files), When.RUN) == [names[2:]]
    assert circles(graph(files), When.TYPES) == [names]


MOST_CODE_LINES = {
    "areal_async": 22_095,
    "rollout_service": 8_690,
    "replay_buffer": 5_935,
    "reward_service": 7_735,
    "trainer_service": 10_520,
}
"""Package → the code lines it may have. A change that exceeds one removes something. A feature that needs
more raises a budget, with its reason in docs/decisions/foundations.md (Budgets of code lines)."""
WIDE, VERY_WIDE, MOST_WIDE = 8, 10, 15
"""Parameters of a wide function and of one that must not be, and how many wide ones there may be."""
LONG = 60
"""Lines of a function; a longer one says why in a comment that begins with `Long:`."""


def code_lines(text: str) -> int:
    """Count the lines of a module that are neither blank, comment, docstring nor import."""
    lines = text.splitlines()
    gone = {
        number for number, line in enumerate(lines, 1) if not line.strip() or line.lstrip().startswith("#")
    }
    for node in ast.walk(ast.parse(text)):
        prose = (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        if prose or isinstance(node, ast.Import | ast.ImportFrom):
            gone.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines) - len(gone)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    every = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    return sum(each.arg not in ("self", "cls") for each in every)


def test_each_package_keeps_to_its_budget_of_code_lines() -> None:
    lines: Counter[str] = Counter()
    for path, text in product().items():
        lines[path.split("/")[0]] += code_lines(text)
    assert {package: count for package, count in lines.items() if count > MOST_CODE_LINES[package]} == {}
    assert (
        code_lines(
            '"""Prose."""\nimport os\n\n# note\nx = 1\ndef f():\n    """Prose."""\n    return (\n        x)\n'
        )
        == 4
    )


def test_no_function_is_too_wide_or_long() -> None:
    wide, long = {}, []
    for path, text in product().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if parameters(node) >= WIDE:
                    wide[f"{path}:{node.name}"] = parameters(node)
                body = text.splitlines()[node.lineno - 1 : node.end_lineno]
                if len(body) > LONG and not any(line.lstrip().startswith("# Long: ") for line in body):
                    long.append(f"{path}:{node.name}")
    assert {name: count for name, count in wide.items() if count >= VERY_WIDE} == {}
    assert len(wide) <= MOST_WIDE
    assert long == []
