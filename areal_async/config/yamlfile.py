"""Reading YAML strictly: a key given twice is a mistake, and `1e-5` is a number."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from areal_async.config.errors import ConfigError, Mistake


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys and reads exponents without a dot (YAML 1.2) as floats."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} cannot be a key", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what `_StrictLoader` would otherwise read as a number."""


for _kind in (_StrictLoader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )


def parse_yaml(text: str) -> Any:
    """One YAML document as plain values. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_StrictLoader)


def dump_yaml(value: Any) -> str:
    """Plain values as a YAML document that `parse_yaml` reads as the same values."""
    # Not `allow_unicode`: PyYAML would write some line separators in a way that it reads as blanks.
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=110)


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds. Raises `ConfigError`, naming the line of a syntax error."""
    source = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _refused(source, "there is no such file", "Check the path") from None
    except IsADirectoryError:
        raise _refused(source, "this is a directory", "Give the path of the YAML file in it") from None
    except UnicodeDecodeError:
        raise _refused(source, "the file is not UTF-8 text", "Give a YAML job file") from None
    except OSError as error:
        raise _refused(
            source, f"the file cannot be read ({error.strerror})", "Check its permissions"
        ) from None
    try:
        content = parse_yaml(text)
    except yaml.YAMLError as error:
        raise _refused(source, _syntax_problem(error), "Correct the YAML at that line") from None
    if not isinstance(content, dict):
        found = "nothing" if content is None else f"a {type(content).__name__}"
        raise _refused(source, f"the file holds {found}, not `key: value` lines", "Start it with `job: NAME`")
    return content


def _syntax_problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return f"not YAML: {error}".replace("\n", " ")


def _refused(source: str, problem: str, fix: str) -> ConfigError:
    return ConfigError(source, [Mistake("file", problem, fix)])
