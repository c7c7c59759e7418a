"""Seed each bug of `table.yaml` into a copy of the tree and run the tests that must catch it.

    make mutants                              # every row
    make mutants ARGS="--only some-id"        # one row; --part weights for one part of the table
    make mutants ARGS="--json results.json"   # also write what was found
    make mutants ARGS="--jobs 1"              # one at a time; otherwise one per core

A mutant is killed if one of its tests fails, survives if all pass, and is broken if its text is not found
exactly once or its tests cannot run. One that never ends is killed by the time limit, one that takes memory
without end by the memory limit. The test that caught a mutant last time (benchmarks/results/mutants.json)
runs first. Finally the tests that failed run without a change, and must pass. The exit status is 1 unless
every mutant is killed. One process imports torch and transformers once. Each run of tests is a fork of it,
made before the product is imported.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from multiprocessing import get_context
from pathlib import Path

import msgspec
import pytest

from tests.waiting import deadline_s

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("table.yaml")
LAST = ROOT / "benchmarks" / "results" / "mutants.json"
PRELOADED = (
    "hypothesis.extra.numpy",
    "pyarrow.parquet",
    "redis.asyncio",
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "zmq",
)
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "--no-rerun", "--hypothesis-seed=0", "--tb=short")
FIELDS = '["outcome", "CPU seconds", "test that failed"]'
PATIENCE_S = deadline_s(20)
"""A run that takes longer may be one that never ends: the same tests are timed without a change."""
FACTOR = 10
"""The time limit of a mutant is this many times the time of its tests without a change."""
UNCHANGED_S = deadline_s(900)
TOO_LONG = "too long"
MEMORY_BYTES = 4 << 30
"""Memory that a process of a run may take, beyond what the imports took."""
NO_MEMORY = re.compile(r"^E? *MemoryError|(not enough|can't allocate|Cannot allocate) memory", re.MULTILINE)


class Mutant(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A row of the table: `old` becomes `new` in `file`, which breaks a promise that `tests` check."""

    id: str
    file: str
    old: str
    new: str
    breaks: str
    tests: list[str]
    """Test files, or single tests of them (`FILE::NAME`) where the file takes long."""


@dataclass(frozen=True)
class Outcome:
    """The result of one run of tests. `by` names the first failed test, or the limit that ended the run."""

    verdict: str
    cpu_s: float
    by: str = ""
    output: str = ""
    wall_s: float = 0.0


def read_table(path: Path = TABLE) -> dict[str, list[Mutant]]:
    """The rows of the table by part of the product."""
    return msgspec.yaml.decode(path.read_bytes(), type=dict[str, list[Mutant]])


def mutated(text: str, mutant: Mutant) -> str:
    """The changed text of the file. Raises `ValueError` unless `old` occurs exactly once."""
    if (found := text.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.id}: its text occurs {found} times in {mutant.file}")
    return text.replace(mutant.old, mutant.new)


class Tree:
    """A copy of the working tree, in which one file at a time is changed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # Compiled files are told apart by time and size: each text that is written gets a second of its own.
        self._times = count(1_000_000_000)
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)

    @contextmanager
    def change(self, mutant: Mutant) -> Iterator[None]:
        """Write the mutant, and the original again at the end."""
        path = self.root / mutant.file
        original = path.read_text()
        self._write(path, mutated(original, mutant))
        try:
            yield
        finally:
            self._write(path, original)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        at_s = next(self._times)
        os.utime(path, (at_s, at_s))


def run_tests(tree: Path, tests: Sequence[str], limit_s: float) -> Outcome:
    """Run tests in a fork of this process. What it has started ends with it."""
    begun_s, over = time.monotonic(), False
    with tempfile.TemporaryFile("w+") as said:
        if not (child := os.fork()):
            _be_pytest(tree, tests, said.fileno())
        try:
            while not (ended := os.wait4(child, os.WNOHANG))[0]:
                if over := time.monotonic() - begun_s > limit_s:
                    _kill(child)
                time.sleep(0.02)
        finally:
            _kill(child)
        _, status, used = ended
        said.seek(0)
        output = said.read()
    verdict = {0: "survived", 1: "killed"}.get(os.waitstatus_to_exitcode(status), "broken")
    by = ""
    if over:
        verdict = TOO_LONG
    elif NO_MEMORY.search(output) and verdict != "survived":
        verdict, by = "killed", "the memory limit"
    elif verdict == "killed":
        failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", output, re.MULTILINE)
        by = failed[1] if failed else ""
    return Outcome(verdict, used.ru_utime + used.ru_stime, by, output, time.monotonic() - begun_s)


def _kill(child: int) -> None:
    """Kill a fork, which may not have its process group yet, and what is left of that group."""
    for end in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            end(child, signal.SIGKILL)


def _be_pytest(tree: Path, tests: Sequence[str], output: int) -> None:
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    code = 3
    limit = MEMORY_BYTES + _data_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    try:
        code = pytest.main([*OPTIONS, *tests])
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _data_bytes() -> int:
    """Memory of this process that counts against `RLIMIT_DATA`."""
    found = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


class Job:
    """One of the processes that try mutants, each in a tree of its own."""

    tree: Tree

    @classmethod
    def begin(cls, folder: str) -> None:
        cls.tree = Tree(Path(tempfile.mkdtemp(dir=folder)))

    @classmethod
    def attempt(cls, mutant: Mutant, first: str) -> Outcome:
        """Try a mutant: with the test `first` if there is one, then with all tests of the row."""
        if first and (found := cls._tried(mutant, (first,))).verdict == "killed":
            return found
        return cls._tried(mutant, tuple(mutant.tests))

    @classmethod
    def _tried(cls, mutant: Mutant, tests: tuple[str, ...]) -> Outcome:
        limit_s = PATIENCE_S
        while True:
            try:
                with cls.tree.change(mutant):
                    found = run_tests(cls.tree.root, tests, limit_s)
            except ValueError as error:
                return Outcome("broken", 0.0, output=str(error))
            if found.verdict != TOO_LONG:
                return found
            if limit_s >= (allowed_s := FACTOR * cls.unchanged_s(tests)):
                return replace(found, verdict="killed", by="the time limit")
            limit_s = allowed_s

    @classmethod
    @cache
    def unchanged_s(cls, tests: tuple[str, ...]) -> float:
        return cls.unchanged(tests).wall_s

    @classmethod
    def unchanged(cls, tests: Sequence[str]) -> Outcome:
        """Run tests without a change."""
        return run_tests(cls.tree.root, tests, UNCHANGED_S)


def _caught_last() -> dict[str, str]:
    """The test that caught each mutant when the results were filed."""
    rows = json.loads(LAST.read_text())["mutants"] if LAST.exists() else {}
    return {id_: by for id_, (_, _, by) in rows.items() if by.startswith("tests/")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="a row; may be repeated")
    parser.add_argument("--part", action="append", default=[], help="a part; may be repeated")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes that try mutants"
    )
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    given = parser.parse_args()
    chosen = [
        mutant
        for part, rows in read_table().items()
        for mutant in rows
        if (not given.part or part in given.part) and (not given.only or mutant.id in given.only)
    ]
    sys.path[:] = [place for place in sys.path if Path(place).resolve() not in (ROOT, Path(__file__).parent)]
    for name in PRELOADED:
        importlib.import_module(name)
    last = _caught_last()
    firsts = [last.get(mutant.id, "") for mutant in chosen]
    outcomes: dict[str, Outcome] = {}
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        ProcessPoolExecutor(given.jobs, get_context("fork"), Job.begin, (folder,)) as pool,
    ):
        for mutant, found in zip(chosen, pool.map(Job.attempt, chosen, firsts), strict=True):
            outcomes[mutant.id] = found
            print(f"{found.verdict:8} {found.cpu_s:6.1f} s  {mutant.id}  {found.by}", flush=True)
            if found.verdict != "killed":
                print(_advice(mutant, found), flush=True)
        caught = sorted(
            {by.partition("[")[0] for o in outcomes.values() if (by := o.by).startswith("tests/")}
        )
        shares = [
            caught[len(caught) * i // given.jobs : len(caught) * (i + 1) // given.jobs]
            for i in range(given.jobs)
        ]
        plain = list(pool.map(Job.unchanged, filter(None, shares)))
    if given.json:
        given.json.write_text(_as_json(outcomes))
    alive = [id_ for id_, found in outcomes.items() if found.verdict != "killed"]
    print(f"{len(outcomes) - len(alive)} of {len(outcomes)} mutants are killed", *alive, sep="\n  ")
    if failed := [found.output for found in plain if found.verdict != "survived"]:
        print(*failed, "Tests that failed with a mutant fail without it too.", sep="\n")
        return 1
    return 1 if alive or not outcomes else 0


def _advice(mutant: Mutant, found: Outcome) -> str:
    lines = [f"  {mutant.breaks}"]
    if found.verdict == "broken":
        lines += [f"  {line}" for line in found.output.splitlines()[-15:]]
    lines += [f'  again: make mutants ARGS="--only {mutant.id}"']
    lines += [f"  or by hand: in {mutant.file} replace", mutant.old, "  by", mutant.new]
    lines += [f"  and run pytest {' '.join(mutant.tests)}"]
    return "\n".join(lines)


def _as_json(outcomes: dict[str, Outcome]) -> str:
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
    revision = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    rows = {id_: [found.verdict, round(found.cpu_s, 1), found.by] for id_, found in outcomes.items()}
    lines = ",\n".join(f"  {json.dumps(id_)}: {json.dumps(row)}" for id_, row in rows.items())
    return f'{{\n "revision": "{revision}",\n "fields": {FIELDS},\n "mutants": {{\n{lines}\n }}\n}}\n'


if __name__ == "__main__":
    raise SystemExit(main())
