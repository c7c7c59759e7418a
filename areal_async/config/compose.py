"""Job files that consist of several files. `include` names files with initial fields; `${NAME}` and
`${NAME:-default}` stand for environment variables.

Both are resolved when the file is read, so records, submissions and prints contain only values."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

from areal_async.base.mistakes import ConfigError, Mistake
from areal_async.base.secrecy import is_secret
from areal_async.base.yaml_file import parse_yaml, read_mapping
from areal_async.config.job import merged
from areal_async.config.paths import resolve_paths

VARIABLE = re.compile(r"\$\{([A-Z_][A-Z0-9_]*)(?::-([^}]*))?\}")


def read_composed(path: Path) -> dict[str, Any]:
    """Return the mapping of a job file, with its includes and variables resolved.

    Later includes override earlier includes, and the file itself overrides all, section by section. Paths are
    relative to the file that contains them. They stay relative, because `submit` sends files below a job file
    along with it. Raises `ConfigError`, which names the wrong file."""
    return _read(path, ())


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    here = path.resolve()
    if here in above:
        chain = " includes ".join(str(each) for each in (*above, here))
        mistake = Mistake("include", f"it includes itself: {chain}", "Remove one of them")
        raise ConfigError(str(path), [mistake])
    mistakes: list[Mistake] = []
    content = _filled(read_mapping(path), "", mistakes)
    names = content.pop("include", [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        fix = "Write `include: base.yaml`, or a list of files"
        mistakes.append(Mistake("include", "it does not name files", fix))
    if mistakes:
        raise ConfigError(str(path), mistakes)
    base: dict[str, Any] = {}
    for name in names:
        included = here.parent / os.path.expanduser(name)
        if not included.is_file():
            fix = "Correct the path, which is relative to the file that includes it"
            raise ConfigError(str(path), [Mistake("include", f"{included} is no file", fix)])
        inner = _read(included, (*above, here))
        if (folder := included.resolve().parent) != here.parent:
            resolve_paths(inner, folder, seen_from=here.parent)
        base = merged(base, inner)
    return merged(base, content) if base else content


def _filled(value: Any, field: str, mistakes: list[Mistake]) -> Any:
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        inner = {key: _filled(each, f"{field}.{key}".strip("."), mistakes) for key, each in pairs}
        return inner if isinstance(value, dict) else list(inner.values())
    if not isinstance(value, str) or VARIABLE.search(value) is None:
        return value
    defaults = {found[1]: found[2] for found in VARIABLE.finditer(value)}
    for name, default in defaults.items():
        if is_secret(name, os.environ.get(name, "")):
            problem = f"${{{name}}} looks like a secret, and job files are recorded and shown"
            fix = "Have what needs it read it itself, as buffer.redis_login.password_env does"
            mistakes.append(Mistake(field, problem, fix))
        if default is None and name not in os.environ:
            problem, fix = (
                f"the environment variable {name} is not set",
                f"Set it, or write ${{{name}:-default}}",
            )
            mistakes.append(Mistake(field, problem, fix))
    text = VARIABLE.sub(lambda found: os.environ.get(found[1]) or found[2] or "", value)
    try:
        alone = parse_yaml(text) if VARIABLE.fullmatch(value) else text  # a number becomes a number
    except yaml.YAMLError:
        return text
    return text if isinstance(alone, dict | list) else alone
