"""The tables of `docs/job-file.md`, made from the models so that page and code cannot part.

`python tests/unit/config/job_file_tables.py docs/job-file.md` renews the tables between their markers.
"""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import yaml

from areal_async.config.base import Section
from areal_async.config.fields import Field, section_of
from areal_async.config.job import JobConfig, job_fields

_TABLE = re.compile(r"(<!-- fields: ?([\w.]*) -->\n).*?(<!-- end -->)", re.DOTALL)
_TYPES = {int: "integer", float: "number", str: "text", bool: "boolean", Path: "path"}
_BOUNDS = (
    (annotated_types.Ge, "≥", "ge"),
    (annotated_types.Gt, ">", "gt"),
    (annotated_types.Le, "≤", "le"),
    (annotated_types.Lt, "<", "lt"),
)


def renew(page: str) -> str:
    """The page with each table between `<!-- fields: SECTION -->` and `<!-- end -->` made anew.

    Raises ValueError when the page leaves a field out or has one twice."""
    shown: list[str] = []
    places: dict[type[Section], str] = {}

    def table(match: re.Match[str]) -> str:
        fields = _fields_of(match[2])
        shown.extend(field.path for field in fields)
        return f"{match[1]}{_table(fields, places)}{match[3]}"

    renewed = _TABLE.sub(table, page)
    if sorted(shown) != sorted(job_fields()):
        different = set(job_fields()).symmetric_difference(shown) or {"a section"}
        raise ValueError(f"fields that are missing or there twice: {', '.join(sorted(different))}")
    return renewed


def _fields_of(section: str) -> list[Field]:
    """The leaves of a section and its subsections; "" is the top level of the file alone."""
    if not section:
        return [field for field in job_fields().values() if "." not in field.path]
    return [field for field in job_fields().values() if field.path.startswith(f"{section}.")]


def _table(fields: list[Field], places: dict[type[Section], str]) -> str:
    """A row for each field; one for all of a section that has the fields of one before it, in `places`."""
    lines = ["field | type | default | meaning", "---|---|---|---"]
    for field in fields:
        above = field.path.rpartition(".")[0]
        kind = section_of(JobConfig, above)
        if kind is not None and (place := places.setdefault(kind, above)) != above:
            if (row := f"`{above}.*` | | | As `{place}.*`.") not in lines:
                lines.append(row)
            continue
        default = "required" if field.required else f"`{_yaml(field.default)}`"
        meaning = " ".join(field.description.split())
        row = (f"`{field.path}`", f"{_type(field)}", default, meaning)
        lines.append(" | ".join(cell.replace("|", "\\|") for cell in row))
    return "\n".join(lines) + "\n"


def _type(field: Field) -> str:
    return _name(field.annotation) + _range(field.info.metadata)


def _name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _name(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, types.UnionType):
        return ", ".join("none" if part is type(None) else _name(part) for part in arguments)
    if origin is tuple:
        many = arguments[-1] is Ellipsis
        return (
            f"list of {_name(arguments[0])}s" if many else f"list of {len(arguments)} {_name(arguments[0])}s"
        )
    if origin is dict:
        keys, values = arguments
        return "mapping" if values is Any else f"{_name(keys)} to {_name(values)}"
    return _TYPES[annotation]


def _range(metadata: list[Any]) -> str:
    """` ≥1 ≤64` for a number between bounds."""
    return "".join(
        f" {sign}{getattr(item, name)}"
        for kind, sign, name in _BOUNDS
        for item in metadata
        if isinstance(item, kind)
    )


def _yaml(value: Any) -> str:
    plain = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True).removesuffix("...\n").strip()


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(renew(file.read_text(encoding="utf-8")), encoding="utf-8")
