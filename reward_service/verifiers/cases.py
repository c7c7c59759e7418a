"""Conversion of the ground truths of code tasks, which differ by data set, to one form. docs/sandbox.md lists
the forms.

A ground truth may also be a text that contains any of the forms as JSON. If the tests are code, the ground
truth may also have `entry_point`: the function that the program must define, such as `add` or
`Solution().add`. Any other name in the tests is resolved in this order: a definition or import of the tests,
a builtin of Python, a name in `LIBRARY`. Only the remaining names come from the program. So a program cannot
replace the `set` or `np` of the tests.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import symtable
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from reward_service.sandbox.harness.examiner import IN_PLACE

ENTRY_POINT = re.compile(r"(Solution\(\)\.)?[A-Za-z_]\w*")
CANDIDATE = "__candidate__"  # the entry point, as the argument of a check function
INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")


class StdioCase(msgspec.Struct, frozen=True):
    stdin: str
    stdout: str


class CallCase(msgspec.Struct, frozen=True):
    """A test whether `function(*args)` returns `expected`. Differences that JSON cannot express do not
    count."""

    function: str
    args: list[Any]
    expected: Any
    wrapped: bool = False
    """Whether the task wraps each result in a list with one item."""


class Cases(msgspec.Struct, frozen=True):
    stdio: list[StdioCase] = []
    calls: list[CallCase] = []
    codes: list[str] = []
    """Texts of test code. If the program is right, each of them runs to its end without an exception."""
    setup: list[str] = []
    entries: dict[str, str] = {}
    """Entry points of the program, by the name that `codes` and `setup` use."""

    @property
    def names(self) -> set[str]:
        """Return the functions and classes that the program must define."""
        entries = {*self.entries.values(), *(case.function for case in self.calls)}
        return {entry.removeprefix("Solution().") for entry in entries}

    def first(self, n: int) -> Cases:
        """Return these cases with at most `n` of each form. 0 means all."""
        if not n:
            return self
        return msgspec.structs.replace(self, stdio=self.stdio[:n], calls=self.calls[:n], codes=self.codes[:n])


def read_cases(truth: Any) -> Cases:
    """Return the cases of a ground truth. Raises `ValueError` for an unknown form, because then the task is
    wrong, not the model."""
    truth = _result(truth)
    if isinstance(truth, str):
        return code_cases([truth])
    if isinstance(truth, list):
        return _of_list(truth)
    if not isinstance(truth, dict):
        raise ValueError(f"a ground truth of type {type(truth).__name__} holds no cases (docs/sandbox.md)")
    if "inputs" in truth and "outputs" in truth:
        return _of_columns(truth)
    for key in ("test_list", "test", "tests", "functional"):
        if key in truth:
            return _of_checks(truth, truth[key])
    raise ValueError(f"a ground truth with {sorted(map(str, truth))[:8]} holds no cases (docs/sandbox.md)")


def _of_list(truth: list[Any]) -> Cases:
    if truth and all(isinstance(one, str) for one in truth):
        return code_cases(truth)
    if truth and all(isinstance(one, dict) and "input" in one and "output" in one for one in truth):
        columns = {"inputs": [one["input"] for one in truth], "outputs": [one["output"] for one in truth]}
        names = {one.get("fn_name") for one in truth} - {None, ""}
        return _of_columns({**columns, "fn_name": names.pop() if len(names) == 1 else None})
    forms = "assertions, or objects with `input` and `output` (docs/sandbox.md)"
    raise ValueError(f"a list of cases holds {forms}")


def _of_columns(truth: dict[str, Any]) -> Cases:
    inputs, outputs, name = truth["inputs"], truth["outputs"], truth.get("fn_name")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise ValueError("`inputs` and `outputs` must be lists of the same length")
    if not inputs:
        raise ValueError("`inputs` is empty: there is nothing to test with")
    if not name:
        return Cases(stdio=list(map(StdioCase, map(_text, inputs), map(_text, outputs))))
    expected = [_typed(_result(one)) for one in outputs]
    wrapped = all(isinstance(one, list) and len(one) == 1 for one in expected)
    calls = zip((_typed(_arguments(one)) for one in inputs), expected, strict=True)
    return Cases(calls=[CallCase(_entry_point(name), one, two, wrapped) for one, two in calls])


def _of_checks(truth: dict[str, Any], tests: Any) -> Cases:
    texts = [tests] if isinstance(tests, str) else [str(one) for one in tests]
    imports = truth.get("test_imports") or []
    before = [*([imports] if isinstance(imports, str) else imports), truth.get("test_setup_code") or ""]
    setup = "\n".join(map(str, before))
    entry = truth.get("entry_point")
    return code_cases(texts, setup, _entry_point(entry) if entry else "")


def _entry_point(name: Any) -> str:
    if not isinstance(name, str) or not ENTRY_POINT.fullmatch(name):
        raise ValueError(f"the entry point {name!r:.40} is no name of a function, nor Solution().NAME")
    return name


def code_cases(texts: list[str], setup: str = "", entry_point: str = "") -> Cases:
    """Return the cases in test code.

    Every top-level assertion and every top-level function `test…` is a case, and the other code runs before
    all cases. A text that defines `check` is a single case, and so is a text without such assertions and
    functions. Raises `ValueError` for invalid Python, for tests that use nothing of the program, and for
    undefined names.
    """
    try:
        return _code_cases(texts, setup, entry_point)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"the tests are not Python: {error}") from error


def _code_cases(texts: list[str], setup: str, entry_point: str) -> Cases:
    before = [setup] if setup.strip() else []
    codes: list[str] = []
    for text in texts:
        body = ast.parse(text).body
        if entry_point and any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in body):
            codes.append(f"{text}\ncheck({CANDIDATE})")
            continue
        own: list[str] = []
        for node in body:
            if isinstance(node, ast.Assert):
                own.append(ast.unparse(node))
            elif isinstance(node, ast.FunctionDef) and node.name.startswith("test") and not node.args.args:
                own.append(f"{node.name}()")
        if own or all(isinstance(node, DEFINITIONS) for node in body):
            codes += own
            before += [ast.unparse(node) for node in body if not isinstance(node, ast.Assert)]
        else:
            codes.append(text)
    if not codes:
        raise ValueError("the tests hold nothing to run: no assertion, function test…() or check(candidate)")
    return _with_names(codes, before, entry_point)


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


def _with_names(codes: list[str], setup: list[str], entry_point: str) -> Cases:
    texts = [*setup, *codes]
    declared = entry_point.partition("(")[0]
    checked = any(code.endswith(f"check({CANDIDATE})") for code in codes)
    # `check` gets the entry point as an argument, so a builtin of that name remains Python's.
    names = names_of(texts, "" if checked else declared)
    taken = [declared] if entry_point else names.free
    unknown = [name for name in names.free if name not in taken]
    if unknown and not names.star:
        why = f"which they do not define and which is not the entry point {entry_point!r}"
        raise ValueError(f"the tests use {unknown[0]!r}, {why}: define it there or in `test_setup_code`")
    entries = {name: name for name in taken if name in names.free}
    if checked:
        entries[CANDIDATE] = entry_point
    if not entries:
        why = "every name in them is their own, Python's or a library's"
        raise ValueError(f"the tests use nothing of the program: {why}. Give its function as `entry_point`")
    if needs_live_objects(texts, entries):
        why = "(attributes, calls or items of what it returns), which could answer for themselves"
        raise ValueError(f"the tests use objects of the program {why}: write tests that compare plain data")
    return Cases(codes=codes, setup=[*names.imports, *setup], entries=entries)


def _typed(value: Any) -> Any:
    """Convert the keys of each dictionary, at any depth, to integers if all of them are texts of integers.

    This is necessary because JSON has only texts as keys.
    """
    if isinstance(value, list):
        return [_typed(one) for one in value]
    if isinstance(value, dict):
        integers = all(INTEGER.fullmatch(str(key)) for key in value)
        return {int(key) if integers else key: _typed(one) for key, one in value.items()}
    return value


def _text(value: Any) -> str:
    """Return the input or output of a case as text. If the value is a list, its items are the lines of the
    text."""
    return "\n".join(str(line) for line in value) if isinstance(value, list) else str(value)


def _arguments(value: Any) -> list[Any]:
    """Return the arguments of a case. They are given as a list, or as a text with one argument per line, as
    JSON."""
    if not isinstance(value, str):
        return list(value) if isinstance(value, list) else [value]
    try:
        return [json.loads(line) for line in value.splitlines() if line.strip()]
    except ValueError as error:
        raise ValueError(f"the arguments {value!r:.60} are not JSON, line by line") from error


def _result(value: Any) -> Any:
    """Return the value of a text that is JSON, and any other value unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


# --- what the tests take from the program ------------------------------------------------------------


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
"""Name → import statement, for names that tests may use without importing them."""
PLAIN_ATTRIBUTES = frozenset(
    name
    for kind in (str, bytes, bytearray, int, float, complex, list, tuple, set, frozenset, dict, range)
    for name in dir(kind)
)
TAKES_PIECES = ("next", "islice")  # functions that accept an endless iterator


class Names(NamedTuple):
    """The names in several texts of code that share a namespace."""

    free: list[str]
    """Names that the texts use, but that neither the texts nor Python nor `LIBRARY` define."""
    imports: list[str]
    """Import statements for the used names of `LIBRARY`."""
    star: bool


def names_of(texts: Iterable[str], declared: str = "") -> Names:
    """Return the names in the texts. Raises `ValueError` for invalid Python.

    `declared` is the name of the entry point, which always belongs to the program.
    """
    used: dict[str, None] = {}
    bound: set[str] = set(dir(builtins)) - {declared}
    star = False
    for text in texts:
        tree = ast.walk(ast.parse(text))
        star |= any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in tree)
        for table in _tables(symtable.symtable(text, "tests", "exec")):
            top = table.get_type() == "module"
            for symbol in (one for one in table.get_symbols() if top or one.is_global()):
                if symbol.is_referenced():
                    used[symbol.get_name()] = None
                if symbol.is_assigned() or symbol.is_imported() or (top and symbol.is_namespace()):
                    bound.add(symbol.get_name())
    missing = [name for name in used if name not in bound and not name.startswith("__")]
    supplied = [name for name in missing if name in LIBRARY and name != declared]
    free = [name for name in missing if name not in supplied]
    return Names(free, [LIBRARY[name] for name in supplied], star)


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def needs_live_objects(texts: Iterable[str], entries: Iterable[str]) -> bool:
    """Return whether plain data is not enough for the tests, so that they need a live object of the program.

    Examples are setting an attribute, reading an unusual attribute, calling a result, or iterating step by
    step.
    """
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
        plain = isinstance(node.ctx, ast.Load) and node.attr in PLAIN_ATTRIBUTES
        self.live = self.live or (self._is_result(node.value) and not plain)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        named = node.func.id if isinstance(node.func, ast.Name) else ""
        pieces = named in TAKES_PIECES and bool(node.args) and self._is_result(node.args[0])
        called = self._is_result(node.func) and not isinstance(node.func, ast.Attribute)
        self.live = self.live or pieces or called
        self.generic_visit(node)


def marked(text: str) -> str:
    """Return `text` with every call that is a statement of its own marked (`examiner.in_place`).

    Raises `ValueError` for too deep nesting.
    """
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
