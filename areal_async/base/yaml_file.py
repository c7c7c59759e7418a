"""Strict reading of YAML. A duplicate key is a mistake, and `1e-5` is a number.

The depth and size of the data, with aliases expanded, are checked before any object is built, because later
code recurses once for each level.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from areal_async.base.mistakes import ConfigError, Mistake

MOST_BYTES = 4 << 20  # largest YAML file that is read
MOST_LEVELS = 32  # nested levels of lists and mappings
MOST_NODES = 200_000  # values in one structure, each counted once per reference


class _StrictLoader(yaml.SafeLoader):
    """A SafeLoader that refuses duplicate keys and structures above the limits, and reads `1e-5` as a float.

    The limits are `MOST_LEVELS` levels and `MOST_NODES` values. Exponents without a dot follow YAML 1.2.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._path: list[str] = []

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node. A node that is nested too deeply is refused here, because composing recurses once
        for each level."""
        self._path.append(index.value[:40] if isinstance(index, yaml.ScalarNode) else "")
        if len(self._path) - 1 > MOST_LEVELS:
            raise _too_large(".".join(filter(None, self._path[1:5])), self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self._path.pop()
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable) or key in seen:
                again = isinstance(key, Hashable)
                problem = f"the key {key!r} is given twice" if again else f"{key!r} cannot be a key"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _as_int(loader: _StrictLoader, node: yaml.ScalarNode) -> int:
    """Return a decimal integer. Refuses 010 and 1:30, which YAML 1.1 reads as 8 and 90."""
    value: int = loader.construct_yaml_int(node)
    text = node.value.replace("_", "").lstrip("+-")
    if ":" in text or (text[0] == "0" and text[1:].isdigit()):
        problem = (
            f"{node.value} would be read as {value}; write it without 0 before it or colons, or in quotes"
        )
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    return value


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _as_int)


def _too_large(where: str, mark: yaml.Mark) -> yaml.YAMLError:
    limits = f"nested more than {MOST_LEVELS} levels deep, or has over {MOST_NODES} values"
    problem = f"{where or 'the document'} is {limits}"
    return yaml.constructor.ConstructorError(None, None, problem, mark)


class _Dumper(yaml.SafeDumper):
    """A SafeDumper that quotes texts that `_StrictLoader` would read as numbers."""


for _kind in (_StrictLoader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )


def parse_yaml(text: str) -> Any:
    """Return one YAML document as plain values. Raises `yaml.YAMLError` with the field that is nested too
    deeply."""
    loader = _StrictLoader(text)
    node = loader.get_single_node()
    if node is None:
        return None
    if (where := too_nested(node)) is not None:  # an alias counts like its target
        raise _too_large(where, node.start_mark)
    return loader.construct_document(node)


def dump_yaml(value: Any) -> str:
    """Return plain values as a YAML document that `parse_yaml` reads as the same values."""
    # `allow_unicode` is not set, because PyYAML would write some line separators so that it reads them as
    # blanks.
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=110)


_UNREADABLE: Mapping[type[OSError], tuple[str, str]] = {
    FileNotFoundError: ("there is no such file", "Check the path"),
    IsADirectoryError: ("this is a directory", "Give the path of the YAML file in it"),
}


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises `ConfigError` with the line of a syntax error."""
    source = str(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise _refused(source, f"the file has more than {MOST_BYTES} bytes", "Give a YAML job file")
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise _refused(source, "the file is not UTF-8 text", "Give a YAML job file") from None
    except OSError as error:
        unknown = f"the file cannot be read ({error.strerror})", "Check its permissions"
        raise _refused(source, *_UNREADABLE.get(type(error), unknown)) from None
    try:
        content = parse_yaml(text)
    except yaml.YAMLError as error:
        raise _refused(source, syntax_problem(error), "Correct the YAML at that line") from None
    if not isinstance(content, dict):
        found = "nothing" if content is None else f"a {type(content).__name__}"
        raise _refused(source, f"the file holds {found}, not `key: value` lines", "Start it with `job: NAME`")
    return content


def syntax_problem(error: yaml.YAMLError) -> str:
    """Return the text of a YAML error on one line, with its position."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return f"not YAML: {error}".replace("\n", " ")


def _refused(source: str, problem: str, fix: str) -> ConfigError:
    return ConfigError(source, [Mistake("file", problem, fix)])


def half_character(value: Any) -> str | None:
    """Return the dotted path of the first text or key that UTF-8 cannot encode, or None.

    Such a text has half of a surrogate pair, for example if it was cut within an escape such as
    `\\ud83d\\ude00`.
    """
    inner: Iterable[tuple[str, Any]] = ()
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return ""
    elif isinstance(value, Mapping):
        inner = ((str(key), part) for key, both in value.items() for part in (key, both))
    elif isinstance(value, list | tuple):
        inner = ((str(index), each) for index, each in enumerate(value))
    for name, part in inner:
        if (found := half_character(part)) is not None:
            return f"{ascii(name)[1:-1]}.{found}".rstrip(".")
    return None


def _is_small(value: Any) -> bool:
    """Return whether plain values keep to both limits. False means that a closer look is needed."""
    level, nodes = [value], 0
    for _ in range(MOST_LEVELS):
        nodes += len(level)
        if nodes > MOST_NODES:
            return False
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.values()
            elif isinstance(each, list):
                inner += each
            elif not isinstance(each, (str, int, float, type(None))):
                return False
        if not inner:
            return True
        level = inner
    return False


def too_nested(value: Any) -> str | None:
    """Return the dotted path of the first place that breaks `MOST_LEVELS` or `MOST_NODES`, or None.

    `value` consists of plain values or of YAML nodes. A structure that contains itself is too deep.
    """
    if _is_small(value):
        return None
    nodes = 0

    def look(value: Any, path: tuple[str, ...]) -> str | None:
        nonlocal nodes
        nodes += 1
        inner: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, Mapping):
            inner = value.items()
        elif isinstance(value, list | tuple):
            inner = enumerate(value)
        elif isinstance(value, yaml.MappingNode):
            inner = (
                (key.value if isinstance(key, yaml.ScalarNode) else "", each) for key, each in value.value
            )
        elif isinstance(value, yaml.SequenceNode):
            inner = enumerate(value.value)
        if nodes > MOST_NODES or (inner != () and len(path) >= MOST_LEVELS):
            return ".".join(path[:4])
        found = (look(each, (*path, str(key))) for key, each in inner)
        return next((place for place in found if place is not None), None)

    return look(value, ())
