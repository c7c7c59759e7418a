"""What the preparation of recipes and examples has in common: task files, job files, the command line."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any


def task_row(
    source: str,
    prompt: str,
    answer: str,
    *,
    ability: str,
    style: str = "rule",
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One task in the schema that public RL data sets use."""
    row: dict[str, Any] = {
        "data_source": source,
        "prompt": prompt,
        "ability": ability,
        "reward_model": {"style": style, "ground_truth": answer},
    }
    return row if extra is None else row | {"extra_info": dict(extra)}


def write_tasks(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One row a line, as JSON."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def copy_files(folder: Path, out: Path, *names: str) -> None:
    """The files in `folder` that a job needs, as they are."""
    for name in names:
        shutil.copyfile(folder / name, out / name)


def prepare_command(description: str | None, prepare: Callable[[Path, int], None]) -> None:
    """The command line `--out FOLDER [--seed N]`: calls `prepare(out, seed)` on a folder that is there."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    prepare(options.out, options.seed)
