"""A job file made of others: `include` names files whose fields it starts from, `${NAME}` and
`${NAME:-default}` stand for environment variables.

Both are resolved when the file is read: what is recorded, sent to a controller or printed holds values alone.
"""

from __future__ import annotations

import copy
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
"""In the name of a variable whose value must not be written into job files, which are copied and shown."""


def read_composed(path: Path) -> dict[str, Any]:
    """The mapping of a job file with what it includes and with its variables filled in. Included files come
    in order, later ones over earlier ones and the file itself over all, section by section; paths in each are
    relative to it. Raises `ConfigError`, which names the file that is wrong."""
    return _read(path, ())


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    here = path.resolve()
    if here in above:
        chain = " includes ".join(str(each) for each in (*above, here))
        raise ConfigError(
            str(path), [Mistake("include", f"it includes itself: {chain}", "Remove one of them")]
        )
    content = read_mapping(path)
    mistakes: list[Mistake] = []
    content = _filled(content, "", mistakes)
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
        if included.resolve().parent != here.parent:
            given, has_run_dir = copy.deepcopy(inner), "run_dir" in inner
            resolve_paths(inner, included.resolve().parent)
            if not has_run_dir:
                del inner["run_dir"]
            inner = _seen_from(here.parent, given, inner)
        base = merged(base, inner)
    return merged(base, content) if base else content


def _seen_from(base: Path, given: Any, resolved: Any) -> Any:
    """`resolved` with what was `given` as a relative path relative again, to `base`: below it files travel
    with `submit`."""
    if isinstance(resolved, dict):
        before = given if isinstance(given, dict) else {}
        return {key: _seen_from(base, before.get(key), value) for key, value in resolved.items()}
    if isinstance(resolved, list) and isinstance(given, list) and len(given) == len(resolved):
        return [_seen_from(base, *pair) for pair in zip(given, resolved, strict=True)]
    if not isinstance(resolved, str) or not isinstance(given, str) or given == resolved:
        return resolved
    if not os.path.isabs(resolved) or os.path.isabs(given) or given.startswith("~"):
        return resolved
    short = os.path.relpath(resolved, base)
    return short if short.startswith(".") else f"./{short}"


def _filled(value: Any, field: str, mistakes: list[Mistake]) -> Any:
    if isinstance(value, dict):
        return {
            key: _filled(inner, f"{field}.{key}" if field else str(key), mistakes)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_filled(inner, f"{field}.{n}", mistakes) for n, inner in enumerate(value)]
    if not isinstance(value, str) or VARIABLE.search(value) is None:
        return value
    for name in dict.fromkeys(found[1] for found in VARIABLE.finditer(value)):
        if is_secret(name, os.environ.get(name, "")):
            problem = f"${{{name}}} looks like a secret, and job files are recorded and shown"
            fix = "Have what needs it read it itself, as buffer.redis_login.password_env does"
            mistakes.append(Mistake(field, problem, fix))
    missing = [
        found[1] for found in VARIABLE.finditer(value) if found[2] is None and found[1] not in os.environ
    ]
    for name in dict.fromkeys(missing):
        fix = f"Set it, or write ${{{name}:-default}}"
        mistakes.append(Mistake(field, f"the environment variable {name} is not set", fix))
    text = VARIABLE.sub(lambda found: os.environ.get(found[1]) or found[2] or "", value)
    if VARIABLE.fullmatch(value) is None:
        return text
    try:
        alone = parse_yaml(text)  # so that a number is one
    except yaml.YAMLError:
        return text
    return text if isinstance(alone, dict | list) else alone
