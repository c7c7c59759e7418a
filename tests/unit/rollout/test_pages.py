"""The page of workflows names every argument that there is."""

from __future__ import annotations

from pathlib import Path

from areal_async.registry import WORKFLOWS

PAGE = Path(__file__).parents[3] / "docs" / "workflows.md"


def test_every_argument_of_a_workflow_is_on_its_page() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = {line.split("`")[1]: line for line in lines if line.startswith("| `")}
    for name in WORKFLOWS.built_in:
        section = getattr(WORKFLOWS.find(name), "Arguments", None)
        for field, info in section.model_fields.items() if section else ():
            assert f"`{field}`" in rows[name]
            assert info.description, f"{name}.{field} says what it means"
