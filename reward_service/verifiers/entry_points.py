"""What the tests of a task take from the program, read from their text.

A name that tests use is theirs if they define or import it, Python's own if it is a builtin, the library's if
it is in `LIBRARY`. Only what is left is taken from the program: the entry points that the task declares, or,
where it declares none, the names that are left. So no program can put its own `set` or `np` under the tests.
"""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from reward_service.sandbox.harness.examiner import IN_PLACE

_MODULES = (
    "bisect cmath collections copy datetime decimal fractions functools heapq itertools json math operator "
    "os random re statistics string sys time typing"
)
_FROM = {
    "collections": "Counter OrderedDict defaultdict deque namedtuple",
    "copy": "deepcopy",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "functools": "reduce",
    "itertools": "chain",
    "math": "isclose",
    "typing": "Any Callable Dict Iterable List Optional Sequence Set Tuple Union",
}
LIBRARY: dict[str, str] = {
    **{name: f"import {name}" for name in _MODULES.split()},
    **{name: f"from {module} import {name}" for module, names in _FROM.items() for name in names.split()},
    "np": "import numpy as np",
    "numpy": "import numpy",
    "pd": "import pandas as pd",
}
"""Names that tests may use without importing them, and the import that supplies them."""
PLAIN_ATTRIBUTES = frozenset(
    name
    for kind in (str, bytes, bytearray, int, float, complex, list, tuple, set, frozenset, dict, range)
    for name in dir(kind)
)
TAKES_PIECES = ("next", "islice")
"""Functions that take an iterator which need not end."""


class Names(NamedTuple):
    """The names in texts that share a namespace."""

    free: list[str]
    """Used, and neither the texts' own nor Python's nor the library's."""
    used: set[str]
    imports: list[str]
    """What supplies the names of the library."""
    star: bool
    """Whether an `import *` may supply any name."""


def names_of(texts: Iterable[str], declared: str = "") -> Names:
    """`declared`: the entry point, which is the program's whatever else has that name. Raises ValueError for
    what is not Python."""
    used: dict[str, None] = {}
    bound: set[str] = set(dir(builtins)) - {declared}
    star = False
    for text in texts:
        tree = ast.walk(ast.parse(text))
        star = star or any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in tree)
        for table in _tables(symtable.symtable(text, "tests", "exec")):
            top = table.get_type() == "module"
            for symbol in table.get_symbols():
                if not top and not symbol.is_global():
                    continue
                if symbol.is_referenced():
                    used[symbol.get_name()] = None
                if symbol.is_assigned() or symbol.is_imported() or (top and symbol.is_namespace()):
                    bound.add(symbol.get_name())
    missing = [name for name in used if name not in bound and not name.startswith("__")]
    supplied = [name for name in missing if name in LIBRARY and name != declared]
    free = [name for name in missing if name not in supplied]
    return Names(free, set(used), [LIBRARY[name] for name in supplied], star)


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def needs_live_objects(texts: Iterable[str], entries: Iterable[str]) -> bool:
    """Whether tests do with a result of the program what no plain data lets them: set an attribute, get one
    that plain data does not have, call it, take its items one by one."""
    uses = _Uses(set(entries) - {"Solution"})
    for text in texts:
        uses.visit(ast.parse(text))
    return uses.live


class _Uses(ast.NodeVisitor):
    def __init__(self, entries: set[str]) -> None:
        self._entries = entries
        self._results: set[str] = set()
        self.live = False

    def _is_result(self, node: ast.AST) -> bool:
        match node:
            case ast.Name(id=name):
                return name in self._results
            case ast.Call(func=ast.Name(id=name)):
                return name in self._entries or name in self._results
            case ast.Attribute(value=value):
                return self._is_result(value)
        return False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name == "check" and node.args.args:
            self._entries = self._entries | {node.args.args[0].arg}
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        if self._is_result(node.value):
            self._results |= {target.id for target in node.targets if isinstance(target, ast.Name)}

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if self._is_result(node.value):
            stored = not isinstance(node.ctx, ast.Load)
            self.live = self.live or stored or node.attr not in PLAIN_ATTRIBUTES
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        named = node.func.id if isinstance(node.func, ast.Name) else ""
        pieces = named in TAKES_PIECES and bool(node.args) and self._is_result(node.args[0])
        called = self._is_result(node.func) and not isinstance(node.func, ast.Attribute)
        self.live = self.live or pieces or called
        self.generic_visit(node)


def marked(text: str) -> str:
    """`text`, with every call that is a statement of its own marked as one (`examiner.in_place`). Raises
    ValueError for what is nested too deeply."""
    try:
        tree = _Statements().visit(ast.parse(text))
        return ast.unparse(ast.fix_missing_locations(tree))
    except (RecursionError, MemoryError) as error:
        raise ValueError("the tests are nested too deeply") from error


class _Statements(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        if isinstance(node.value, ast.Call):
            mark = ast.Name(id=IN_PLACE, ctx=ast.Load())
            node.value.func = ast.Call(func=mark, args=[node.value.func], keywords=[])
        return node
