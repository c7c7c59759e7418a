"""Parts by name, by `path.py:name`, and by the entry point of another installed package."""

from __future__ import annotations

import builtins
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_async.config.registry import PartError, Registry

OWNER = """
from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from areal_async.config.base import Section

Share = Annotated[float, Field(ge=0, le=1)]

class Sized:
    class Arguments(Section):
        size: int
        "How large it is."

def plain(given, weight, *, bias=0.0):
    return weight + bias

def bounded(given: Tensor, *, share: Share = 0.5, mode: Literal["a", "b"] = "a", rest: Tensor = None):
    return share

BUILT_IN = {"sized": "things_owner:Sized", "plain": "things_owner:plain", "bounded": "things_owner:bounded"}
"""
OTHER = "def polite(given, *, tone='warm'): return tone\ndef shadow(given): ...\n"
Mistakes = Callable[..., list[str]]
ENTRY_POINTS = """
[areal_async.things]
polite = things_of_others:polite
plain = things_of_others:shadow
broken = things_of_others:gone
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """The things of an owner's module, and of an installed package that declares three more."""
    site = tmp_path / "site"
    metadata = site / "things_of_others-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "things_owner.py").write_text(OWNER)
    (site / "things_of_others.py").write_text(OTHER)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: things-of-others\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(site))
    return Registry("thing", "things_owner:BUILT_IN", leading=1)


@pytest.fixture
def mistakes(registry: Registry) -> Mistakes:
    def found(name: str, **arguments: Any) -> list[str]:
        listed = registry.mistakes(name, arguments, field="job.thing", args_field="job.thing_args")
        return [str(mistake) for mistake in listed]

    return found


def test_parts_of_packages_are_listed_and_found_after_built_in_ones_which_none_replaces(
    registry: Registry,
) -> None:
    assert registry.names == ("sized", "plain", "bounded", "broken", "polite")
    assert registry.find("polite")(None) == "warm"
    assert registry.find("plain")(None, 2.0, bias=1.0) == 3.0


def test_a_part_in_a_file_is_found_by_its_path(registry: Registry, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def mine(given): return 7\n")
    assert registry.find(f"{file}:mine")(None) == 7
    with pytest.raises(PartError, match=r"defines no 'yours'. It defines mine"):
        registry.find(f"{file}:yours")


def test_a_name_that_nobody_has_is_refused_with_the_choice(registry: Registry, mistakes: Mistakes) -> None:
    said = "there is no thing 'nice', built in or installed. Use sized, plain, bounded, broken, polite, or "
    with pytest.raises(PartError, match=said):
        registry.find("nice")
    assert mistakes("nice") == [f"job.thing: {said}`path.py:name` of one of your own."]


def test_a_package_that_cannot_be_imported_is_named(registry: Registry, mistakes: Mistakes) -> None:
    with pytest.raises(PartError, match="things_of_others:gone of an installed package"):
        registry.find("broken")
    assert "things_of_others:gone" in mistakes("broken")[0]


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("sized", {"size": 3}, []),
        ("sized", {}, ["size: sized needs 'size', and it is missing. Add it. How large it is."]),
        ("sized", {"size": 3, "sise": 3}, ["sise: sized has no argument 'sise'. It takes size."]),
        ("plain", {"weight": 1.0}, []),
        ("polite", {"tone": "cool"}, []),
        (
            *("plain", {"tone": "cool"}),
            [
                "tone: plain has no argument 'tone'. It takes weight, bias.",
                "weight: plain needs 'weight', and it is missing. Add it.",
            ],
        ),
        ("bounded", {"share": 1, "mode": "b", "rest": "anything"}, []),
        ("bounded", {"share": 2}, ["share: 2 is too large. Give at most 1.0."]),
        ("bounded", {"share": "0.5"}, ["share: '0.5' is not a number. Give a number."]),
        ("bounded", {"share": math.nan}, ["share: nan is not a finite number. Give a finite number."]),
        ("bounded", {"mode": "c"}, ["mode: 'c' is not a choice. Use 'a' or 'b'."]),
    ],
)
def test_a_part_declares_its_arguments_itself_or_by_parameters_and_their_annotations(
    mistakes: Mistakes, name: str, arguments: dict[str, Any], said: list[str]
) -> None:
    assert mistakes(name, **arguments) == [f"job.thing_args.{each}" for each in said]


def test_a_file_of_the_users_is_checked_without_being_run(mistakes: Mistakes, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("raise SystemExit('it was run')\ndef mine(given, size, *, colour='red'): ...\n")
    assert mistakes(f"{file}:mine", size=1) == []
    assert mistakes(f"{file}:yours") == [f"job.thing: {file} defines no 'yours'. It defines mine."]
    assert "No such file" in mistakes(f"{tmp_path}/none.py:mine")[0]


def test_a_file_of_the_users_is_a_module_as_an_imported_one(registry: Registry, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "def mine(given): return __spec__.name == __name__ and __file__ == __spec__.origin\n"
        "def loaded(given): return __loader__.get_filename(__name__)\n"
    )
    assert registry.find(f"{file}:mine")(None)
    assert registry.find(f"{file}:loaded")(None) == str(file)


RUN_BY_TWO = """
import builtins

builtins.runs_of_a_part.append(1)
builtins.runs_of_a_part_met.wait(0.5)  # as long as the first takes, a second run would come


def part():
    pass
"""


def test_two_threads_that_want_a_part_at_once_run_its_file_once(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, runs, found = tmp_path / "own.py", list[int](), list[Any]()
    own.write_text(RUN_BY_TWO, encoding="utf-8")
    both = threading.Barrier(2)
    monkeypatch.setattr(builtins, "runs_of_a_part", runs, raising=False)
    monkeypatch.setattr(builtins, "runs_of_a_part_met", threading.Event(), raising=False)

    def find() -> None:
        both.wait()
        found.append(registry.find(f"{own}:part"))

    threads = [threading.Thread(target=find) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert runs == [1]
    assert found[0] is found[1]
