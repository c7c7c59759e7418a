"""The pages name every argument and option that there is."""

from __future__ import annotations

from pathlib import Path

from areal_async.registry import ENVIRONMENTS, WORKFLOWS

DOCS = Path(__file__).parents[3] / "docs"


def test_every_argument_of_a_workflow_and_option_of_an_environment_is_on_its_page() -> None:
    for page, registry in (("workflows.md", WORKFLOWS), ("environments.md", ENVIRONMENTS)):
        rows = {
            line.split("`")[1]: line
            for line in (DOCS / page).read_text(encoding="utf-8").splitlines()
            if line.startswith("| `")
        }
        for name in registry.built_in:
            section = getattr(registry.find(name), "Arguments", None)
            for field, info in section.model_fields.items() if section else ():
                assert f"`{field}`" in rows[name]
                assert info.description, f"{name}.{field} says what it means"
