"""The table of seeded bugs fits the tree: each text is there once, and the tests that it names exist."""

from __future__ import annotations

import ast
from collections import Counter

from tests.mutants.run import ROOT, Mutant, mutated, read_table

ROWS = [mutant for rows in read_table().values() for mutant in rows]


def problems_of(mutant: Mutant) -> list[str]:
    """Descriptions of what does not fit; empty for a good row."""
    found = []
    text = (ROOT / mutant.file).read_text()
    if (times := text.count(mutant.old)) != 1:
        found.append(f"its text occurs {times} times in {mutant.file}")
    elif mutant.file.endswith(".py"):
        ast.parse(mutated(text, mutant))
    if mutant.old == mutant.new:
        found.append("it changes nothing")
    for test in mutant.tests:
        file, _, name = test.partition("::")
        if not (ROOT / file).is_file():
            found.append(f"there is no file {file}")
        elif name and f"def {name}(" not in (ROOT / file).read_text():
            found.append(f"there is no test {name} in {file}")
    return found


def test_every_seeded_bug_applies_and_names_tests_that_exist() -> None:
    assert {mutant.id: found for mutant in ROWS if (found := problems_of(mutant))} == {}


def test_a_seeded_bug_has_a_name_of_its_own() -> None:
    assert [id_ for id_, times in Counter(mutant.id for mutant in ROWS).items() if times > 1] == []


def test_a_row_that_does_not_fit_is_reported() -> None:
    row = Mutant(
        "x", "Makefile", "no such text", "", "", ["tests/none.py", "tests/unit/test_house.py::test_none"]
    )
    assert problems_of(row) == [
        "its text occurs 0 times in Makefile",
        "there is no file tests/none.py",
        "there is no test test_none in tests/unit/test_house.py",
    ]
