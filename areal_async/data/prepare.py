"""From sources to the files of a job: converted, mixed, without duplicates, filtered by length and split.

Promises: the result is a function of sources, options and seed alone; no prompt is in both files; a mixture
has its shares to within one row and repeats none; nothing is written unless all of it is right.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from areal_async.data.examples import split_prompt, tools_of
from areal_async.data.questions import BadRow, SourceRow
from areal_async.data.sources import DataError, Source, source_rows
from areal_async.data.styles import NO_MARK, TAKE_WHOLE, Style
from areal_async.data.tasks import TaskFileError, without_fillers
from areal_async.models.prompts import prompt_ids

Row = dict[str, Any]
Track = Callable[[Iterable[Any], str], Iterable[Any]]
SKIPS = "(--skip-bad leaves such rows out.)"


@dataclass
class SourceCounts:
    """What became of the rows of a source."""

    read: int = 0
    others: int = 0
    """Those that `--where` does not ask for."""
    bad: int = 0
    duplicates: int = 0
    too_long: int = 0
    taken: int = 0
    first_bad: str = ""
    other_answers: int = 0
    """Duplicates whose answer is not that of the row that was kept."""
    first_other: str = ""
    whole: int = 0
    """Rows whose answer is a whole text without a mark."""
    first_whole: str = ""
    unused: list[str] = field(default_factory=list)
    """Columns of rows that were taken, of which nothing is in the files."""

    def leave_out(self, error: Exception) -> None:
        self.bad += 1
        self.first_bad = self.first_bad or str(error)


@dataclass
class Prepared:
    """The rows of both files, and what became of those that were read."""

    train: list[Row]
    held_out: list[Row]
    counts: dict[str, SourceCounts] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    """Length of each prompt that was kept, where a tokenizer counted them."""


@dataclass(frozen=True)
class Recipe:
    """What is to be done, beside the style of the rows."""

    seed: int = 0
    weights: tuple[float, ...] = ()
    rows: int | None = None
    held_out: float = 0
    """Below 1 a share of the rows, else their number."""
    skip_bad: bool = False
    keep_duplicates: bool = False
    max_prompt_tokens: int | None = None
    where: Mapping[str, str] = field(default_factory=dict)
    """What a column of the source must be, as text, for its row to be taken."""


def prepare(
    sources: Sequence[Source],
    style: Style,
    recipe: Recipe,
    tokenizer: Any = None,
    track: Track = lambda rows, what: rows,
) -> Prepared:
    """The files of a job from these sources. Raises `DataError`."""
    if recipe.weights and len(recipe.weights) != len(sources):
        raise DataError(
            f"--weights has {len(recipe.weights)} numbers for {len(sources)} sources. Give each one."
        )
    if any(weight <= 0 for weight in recipe.weights):
        raise DataError("--weights has a number that is not above 0. Leave out that source.")
    done = Prepared([], [])
    pools: list[list[Row]] = []
    seen: dict[str, Row] = {}
    for number, source in enumerate(sources):
        label = source.name if source.name not in done.counts else f"{source.name} ({number + 1})"
        counts = done.counts[label] = SourceCounts()
        pool: list[Row] = []
        broken: list[TaskFileError] = []
        answers, unused = _AnswerForms(counts), dict[str, None]()
        for where, row in track(source_rows(source, broken if recipe.skip_bad else None), label):
            counts.read += 1
            if any(str(row.get(column)) != value for column, value in recipe.where.items()):
                counts.others += 1
                continue
            try:
                made, given = style.convert(where, row, source.name)
            except BadRow as error:
                if not recipe.skip_bad:
                    raise BadRow(f"{error} {SKIPS}") from None
                counts.leave_out(error)
                continue
            key = prompt_key(made)
            if key in seen and not recipe.keep_duplicates:
                counts.duplicates += 1
                if (kept := _answer(seen[key])) != (other := _answer(made)):
                    counts.other_answers += 1
                    told = f"{where} has the answer {other:.60}, and the row that was kept {kept:.60}"
                    counts.first_other = counts.first_other or told
                continue
            seen[key] = made
            limit = recipe.max_prompt_tokens
            if limit is not None and tokenizer is not None and _length(tokenizer, where, made) > limit:
                counts.too_long += 1
                continue
            pool.append(made)
            answers.note(where, made, given)
            looked_at = given.used | recipe.where.keys()
            unused |= dict.fromkeys(name for name in row if name not in looked_at and given.holds(name))
        for problem in broken:
            counts.read += 1
            counts.leave_out(problem)
        pool = answers.checked(pool, recipe.skip_bad)
        counts.unused = [*unused]
        if not pool:
            why = f" The first: {counts.first_bad}" if counts.first_bad else ""
            why += f" --where takes none of {counts.others}." if counts.others else ""
            raise DataError(f"none of the {counts.read} rows of {label} can be used.{why}")
        pools.append(pool)
    taken = _mixed(pools, sources, recipe)
    for counts, rows in zip(done.counts.values(), taken, strict=True):
        counts.taken = len(rows)
    done.held_out, done.train = _split([row for rows in taken for row in rows], recipe)
    if style.kind == "rl":
        _number(done)
    if tokenizer is not None and style.kind == "rl":
        every = (*done.train, *done.held_out)
        done.tokens = [_length(tokenizer, "a row", row) for row in track(every, "lengths")]
    return done


class _AnswerForms:
    """Answers of one source that are whole texts, found out only when others of the source are marked."""

    def __init__(self, counts: SourceCounts) -> None:
        self._counts, self._marked, self._whole = counts, False, dict[int, str]()

    def note(self, where: str, made: Row, given: SourceRow) -> None:
        self._marked |= given.marked
        if given.whole:
            self._whole[id(made)] = f"{where} {NO_MARK} in {given.whole!r:.60}"

    def checked(self, pool: list[Row], skip_bad: bool) -> list[Row]:
        """Return the rows whose answers count. Raises `BadRow` for a whole text among marked answers."""
        first = next(iter(self._whole.values()), "")
        if not (self._marked and first):
            self._counts.whole, self._counts.first_whole = len(self._whole), first
            return pool
        error = BadRow(f"{first}, which the answers of other rows have. {TAKE_WHOLE}")
        if not skip_bad:
            raise BadRow(f"{error} {SKIPS}")
        for _ in self._whole:
            self._counts.leave_out(error)
        return [row for row in pool if id(row) not in self._whole]


def _answer(row: Row) -> str:
    """The answer of a task, as it is told; empty for other rows, which are duplicates only as a whole."""
    return repr(row["reward_model"]["ground_truth"]) if "reward_model" in row else ""


def prompt_key(row: Mapping[str, Any]) -> str:
    """Equal for rows that ask the same: the prompt, stripped of white space, or a whole chat or pair."""
    asked = row.get("prompt")
    if asked is None or "completion" in row:
        asked = {name: row[name] for name in row if name not in ("tools", "extra_info")}
    text = asked.strip() if isinstance(asked, str) else json.dumps(asked, sort_keys=True, ensure_ascii=False)
    if tools := (row.get("extra_info") or {}).get("tools"):  # with other tools it is another question
        text += json.dumps(tools, sort_keys=True)
    if "chosen" in row:  # one prompt may have several pairs
        text += json.dumps([row["chosen"], row["rejected"]], sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def split_key(row: Mapping[str, Any]) -> str:
    """Equal for rows that must not be on both sides of a split: those of one prompt."""
    if isinstance(chat := row.get("messages"), list):
        row = {"prompt": [each for each in chat if each["role"] != "assistant"] or chat}
    elif row.get("prompt") is None and "chosen" in row:
        row = {"prompt": split_prompt(row["chosen"], row["rejected"])[0] or row["chosen"]}
    return prompt_key({"prompt": row["prompt"]})


def _length(tokenizer: Any, where: str, row: Row) -> int:
    prompt = row.get("prompt")
    if prompt is None:
        chat = row.get("messages") or row["chosen"]
        prompt = chat[:-1] if isinstance(chat, list) and len(chat) > 1 else chat
    try:
        return len(prompt_ids(tokenizer, prompt, tools_of(row, where)))
    except Exception as error:  # whatever a template raises
        raise DataError(
            f"{where}: the chat template fails on its prompt ({type(error).__name__}: {error!s:.200})."
        ) from error


def _mixed(pools: list[list[Row]], sources: Sequence[Source], recipe: Recipe) -> list[list[Row]]:
    """Of each source so many rows as its weight says, drawn by the seed."""
    if not recipe.weights and recipe.rows is None:
        return pools
    weights = recipe.weights or tuple(float(len(pool)) for pool in pools)
    whole = sum(weights)
    most = int(min(len(pool) * whole / weight for pool, weight in zip(pools, weights, strict=True)) + 1e-9)
    total = min(recipe.rows or most, sum(map(len, pools)))
    if total > most:
        scarce = min(range(len(pools)), key=lambda i: len(pools[i]) / weights[i])
        raise DataError(
            f"--rows {recipe.rows} needs more of {sources[scarce].name} than its {len(pools[scarce])} rows: "
            f"at these weights there are {most}. Ask for fewer, or change --weights."
        )
    exact = [total * weight / whole for weight in weights]
    counts = [min(int(each), len(pool)) for each, pool in zip(exact, pools, strict=True)]
    by_rest = sorted(range(len(pools)), key=lambda i: counts[i] - exact[i])
    for index in by_rest[: total - sum(counts)]:
        counts[index] += counts[index] < len(pools[index])
    taken = []
    for number, (pool, count) in enumerate(zip(pools, counts, strict=True)):
        chosen = random.Random(f"{recipe.seed}:{number}").sample(range(len(pool)), count)
        taken.append([pool[index] for index in sorted(chosen)])
    return taken


def _split(rows: list[Row], recipe: Recipe) -> tuple[list[Row], list[Row]]:
    """(held out, train), both in an order of the seed. Rows of one prompt go the same way."""
    order = list(range(len(rows)))
    random.Random(f"{recipe.seed}:order").shuffle(order)
    wanted = round(recipe.held_out * len(rows)) if recipe.held_out < 1 else int(recipe.held_out)
    if wanted >= len(rows):
        raise DataError(f"--held-out {recipe.held_out:g} leaves none of the {len(rows)} rows. Give less.")
    prompts: dict[str, list[int]] = {}
    for index in order:
        prompts.setdefault(split_key(rows[index]), []).append(index)
    held: set[int] = set()
    for members in prompts.values():
        if len(held) >= wanted:
            break
        held.update(members)
    if len(held) == len(rows):
        raise DataError("all rows have one prompt, so none can be held out. Leave out --held-out.")
    return [rows[i] for i in order if i in held], [rows[i] for i in order if i not in held]


def _number(done: Prepared) -> None:
    for split, rows in (("train", done.train), ("held_out", done.held_out)):
        for index, row in enumerate(rows):
            row["extra_info"] = {**row["extra_info"], "split": split, "index": index}


def write_rows(files: Mapping[Path, Sequence[Row]], *, overwrite: bool) -> None:
    """Write each file, .jsonl or .parquet, whole or none of them. Raises `DataError`."""
    for path in files:
        if path.suffix not in (".jsonl", ".parquet"):
            raise DataError(f"{path} is to be written, and ends in neither .jsonl nor .parquet. Name it so.")
        if path.exists() and not overwrite:
            raise DataError(f"{path} exists. Give another --out, or --overwrite to replace it.")
    fresh = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in files}
    try:
        for path, rows in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            (_write_parquet if path.suffix == ".parquet" else _write_jsonl)(fresh[path], path, rows)
        for path, made in fresh.items():
            made.replace(path)
    except OSError as error:
        raise DataError(
            f"{error.filename} cannot be written: {error.strerror}. Give another --out."
        ) from error
    finally:
        for made in fresh.values():
            made.unlink(missing_ok=True)


def _write_jsonl(fresh: Path, path: Path, rows: Sequence[Row]) -> None:
    with fresh.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _write_parquet(fresh: Path, path: Path, rows: Sequence[Row]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    given = [row | {"tools": json.dumps(row["tools"])} if "tools" in row else row for row in rows]
    names = list(dict.fromkeys(name for row in given for name in row))
    try:
        table = pa.table({name: [row.get(name) for row in given] for name in names})
        kept = all(
            one == _as_given(row) == without_fillers(one)
            for one, row in zip(given, table.to_pylist(), strict=True)
        )
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: the rows differ in the types of their values, and a column of parquet has one "
            f"({error}). Write .jsonl instead."
        ) from error
    if not kept:
        raise DataError(
            f"{path}: some rows have inner fields that others lack (tool calls, schemas), and in parquet "
            "each would get those of all, as null. Write .jsonl instead."
        )
    pq.write_table(table, fresh)


def _as_given(row: Row) -> Row:
    """A row of a table without the nulls for what others have, in itself and in its extra_info."""
    row = {name: value for name, value in row.items() if value is not None}
    if isinstance(extra := row.get("extra_info"), dict):
        row["extra_info"] = {name: value for name, value in extra.items() if value is not None}
    return row


def load_tokenizer(model: Path, template_args: Mapping[str, Any]) -> Any:
    """The tokenizer of a model directory, its chat template given `template_args`. Raises `DataError`."""
    from transformers import AutoTokenizer  # seconds, which no other step pays

    from areal_async.models.prompts import with_template_args

    try:
        load = partial(AutoTokenizer.from_pretrained, local_files_only=True, trust_remote_code=False)
        return with_template_args(load(model), template_args)
    except Exception as error:  # whatever a broken file makes the library raise
        text = " ".join(str(error).split())
        raise DataError(
            f"transformers cannot read the tokenizer of {model} ({type(error).__name__}: {text:.200}). Give "
            "a complete Hugging Face model directory."
        ) from error
