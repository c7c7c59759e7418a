"""`data prepare`: convert sources to the files of a job, mix them, drop duplicates and long prompts, split.

The result depends only on sources, options and seed. No prompt is in both files. A mixture has its shares to
within one row and repeats no row. If anything is wrong, nothing is written."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec

from areal_async.data.convert import BadRow, Style, convert
from areal_async.data.examples import split_prompt, tools_of
from areal_async.data.sources import DataError, Source, source_rows
from areal_async.data.tasks import TaskFileError
from areal_async.models.prompts import prompt_ids

Row = dict[str, Any]
Track = Callable[[Iterable[Any], str], Iterable[Any]]
SKIPS = "(--skip-bad leaves such rows out.)"


@dataclass(frozen=True)
class Recipe:
    """Steps after the conversion of the rows."""

    seed: int = 0
    weights: tuple[float, ...] = ()
    """Share of each source in the mixture. Empty means all rows."""
    held_out: float = 0
    """Number of held-out rows, or their share if it is below 1."""
    skip_bad: bool = False
    max_prompt_tokens: int | None = None
    where: Mapping[str, str] = field(default_factory=dict)
    """Values, as texts, that a row must have in these columns. Other rows are omitted."""


@dataclass
class SourceCounts:
    """Numbers of the rows of a source, by result."""

    rows: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    """Description of the first row with each result."""

    def add(self, what: str, told: object = "") -> None:
        self.rows[what] += 1
        if told:
            self.first.setdefault(what, str(told))


@dataclass
class Prepared:
    """The rows of both files, and the counts of each source."""

    train: list[Row]
    held_out: list[Row]
    counts: dict[str, SourceCounts]
    tokens: list[int] = field(default_factory=list)
    """Length of each prompt in tokens, if a tokenizer was given."""


def prepare(
    sources: Sequence[Source],
    style: Style,
    recipe: Recipe,
    tokenizer: Any = None,
    track: Track = lambda rows, what: rows,
) -> Prepared:
    """Return the rows of the files of a job. Raises `DataError`."""
    if recipe.weights and (len(recipe.weights) != len(sources) or min(recipe.weights) <= 0):
        raise DataError(
            f"--weights has {len(recipe.weights)} numbers for {len(sources)} sources. Give each one, above 0."
        )
    counts: dict[str, SourceCounts] = {}
    seen: dict[str, Row] = {}
    pools = []
    for number, source in enumerate(sources):
        label = source.name if source.name not in counts else f"{source.name} ({number + 1})"
        made = counts[label] = SourceCounts()
        broken: list[TaskFileError] = []
        rows = track(source_rows(source, broken if recipe.skip_bad else None), label)
        pools.append([*_converted(rows, source.name, style, recipe, made, seen)])
        for problem in broken:
            made.add("read")
            made.add("bad", problem)
        if recipe.max_prompt_tokens is not None and tokenizer is not None:
            kept = [row for row in pools[-1] if _length(tokenizer, row) <= recipe.max_prompt_tokens]
            made.rows["too long"] = len(pools[-1]) - len(kept)
            pools[-1] = kept
        if not pools[-1]:
            why = f" The first: {made.first['bad']}" if "bad" in made.first else ""
            why += f" --where takes none of {made.rows['other']}." if made.rows["other"] else ""
            raise DataError(f"none of the {made.rows['read']} rows of {label} can be used.{why}")
    taken = _mixed(pools, recipe) if recipe.weights else pools
    for made, pool in zip(counts.values(), taken, strict=True):
        made.rows["taken"] = len(pool)
    held_out, train = _split([row for pool in taken for row in pool], recipe)
    done = Prepared(train, held_out, counts)
    if style.kind == "rl":
        for split, side in (("train", train), ("held_out", held_out)):
            for index, row in enumerate(side):
                row["extra_info"] = {**row["extra_info"], "split": split, "index": index}
        if tokenizer is not None:
            done.tokens = [_length(tokenizer, row) for row in track((*train, *held_out), "lengths")]
    return done


def _converted(
    rows: Iterable[tuple[str, Row]],
    source: str,
    style: Style,
    recipe: Recipe,
    counts: SourceCounts,
    seen: dict[str, Row],
) -> Iterator[Row]:
    """Yield the rows of a job. `seen` maps `prompt_key` to the earlier rows."""
    for where, row in rows:
        counts.add("read")
        if any(str(row.get(column)) != value for column, value in recipe.where.items()):
            counts.add("other")
            continue
        try:
            made = convert(where, row, style, source)
        except BadRow as error:
            if not recipe.skip_bad:
                raise BadRow(f"{error} {SKIPS}") from None
            counts.add("bad", error)
            continue
        kept = seen.setdefault(prompt_key(made), made)
        if kept is made:
            yield made
            continue
        counts.add("duplicates")
        if (before := _answer(kept)) != (other := _answer(made)):
            told = f"{where} has the answer {other:.60}, and the row that was kept {before:.60}"
            counts.add("other answers", told)


def _answer(row: Row) -> str:
    """Return the answer of a task, or "" for other rows. Other rows are duplicates only if they are equal as
    a whole."""
    return repr(row["reward_model"]["ground_truth"]) if "reward_model" in row else ""


def prompt_key(row: Mapping[str, Any]) -> str:
    """Return a key that is equal for rows with the same content: the same prompt, or the same whole chat or
    pair."""
    asked = row.get("prompt")
    if asked is None or "completion" in row:
        asked = {name: row[name] for name in row if name not in ("tools", "extra_info")}
    text = asked.strip() if isinstance(asked, str) else json.dumps(asked, sort_keys=True, ensure_ascii=False)
    if tools := (row.get("extra_info") or {}).get("tools"):  # With other tools it is another question
        text += json.dumps(tools, sort_keys=True)
    if "chosen" in row:  # A prompt may have several pairs
        text += json.dumps([row["chosen"], row["rejected"]], sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def split_key(row: Mapping[str, Any]) -> str:
    """Return a key that is equal for rows with one prompt. Such rows belong to the same side of a split."""
    if isinstance(chat := row.get("messages"), list):
        row = {"prompt": [each for each in chat if each["role"] != "assistant"] or chat}
    elif row.get("prompt") is None and "chosen" in row:
        row = {"prompt": split_prompt(row["chosen"], row["rejected"])[0] or row["chosen"]}
    return prompt_key({"prompt": row["prompt"]})


def _length(tokenizer: Any, row: Row) -> int:
    prompt = row.get("prompt")
    if prompt is None:
        chat = row.get("messages") or row["chosen"]
        prompt = chat[:-1] if isinstance(chat, list) and len(chat) > 1 else chat
    try:
        return len(prompt_ids(tokenizer, prompt, tools_of(row, "a row")))
    except Exception as error:  # A template may raise anything
        raise DataError(
            f"the chat template fails on the prompt {prompt!r:.80} ({type(error).__name__}: {error!s:.200})."
        ) from error


def _mixed(pools: list[list[Row]], recipe: Recipe) -> list[list[Row]]:
    """Draw rows from each pool in proportion to its weight, without repeats."""
    whole = sum(recipe.weights)
    shares = [weight / whole for weight in recipe.weights]
    total = int(min(len(pool) / share for pool, share in zip(pools, shares, strict=True)) + 1e-9)
    counts = [min(int(total * share), len(pool)) for pool, share in zip(pools, shares, strict=True)]
    by_rest = sorted(range(len(pools)), key=lambda i: counts[i] - total * shares[i])
    for index in by_rest[: total - sum(counts)]:
        counts[index] += counts[index] < len(pools[index])
    drawn = [
        random.Random(f"{recipe.seed}:{number}").sample(range(len(pool)), count)
        for number, (pool, count) in enumerate(zip(pools, counts, strict=True))
    ]
    return [[pool[i] for i in sorted(chosen)] for pool, chosen in zip(pools, drawn, strict=True)]


def _split(rows: list[Row], recipe: Recipe) -> tuple[list[Row], list[Row]]:
    """Return (held out, train), shuffled with the seed. All rows with one prompt are on the same side."""
    random.Random(f"{recipe.seed}:order").shuffle(rows)
    wanted = round(recipe.held_out * len(rows)) if recipe.held_out < 1 else int(recipe.held_out)
    if wanted >= len(rows):
        raise DataError(f"--held-out {recipe.held_out:g} leaves none of the {len(rows)} rows. Give less.")
    held = set[str]()
    for key, size in Counter(map(split_key, rows)).items():
        if wanted > 0:
            held.add(key)
            wanted -= size
    train = [row for row in rows if split_key(row) not in held]
    if not train:
        raise DataError("all rows have one prompt, so none can be held out. Leave out --held-out.")
    return [row for row in rows if split_key(row) in held], train


def length_figures(lengths: Sequence[int]) -> dict[str, int]:
    """Return p50, p95 and max, computed by nearest rank."""
    ordered = sorted(lengths)
    at = {"p50": (len(ordered) - 1) // 2, "p95": -(-95 * len(ordered) // 100) - 1, "max": len(ordered) - 1}
    return dict(zip(at, itemgetter(*at.values())(ordered), strict=True))


def write_rows(files: Mapping[Path, Sequence[Row]], *, overwrite: bool) -> None:
    """Write all .jsonl files completely, or none. Raises `DataError`."""
    for path in files:
        if path.suffix != ".jsonl":
            raise DataError(f"{path} is to be written, and does not end in .jsonl. Name it so.")
        if path.exists() and not overwrite:
            raise DataError(f"{path} exists. Give another --out, or --overwrite to replace it.")
    fresh = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in files}
    try:
        for path, rows in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with fresh[path].open("wb") as file:
                file.writelines(msgspec.json.encode(row) + b"\n" for row in rows)
        for path, made in fresh.items():
            made.replace(path)
    except OSError as error:
        raise DataError(
            f"{error.filename} cannot be written: {error.strerror}. Give another --out."
        ) from error
    finally:
        for made in fresh.values():
            made.unlink(missing_ok=True)
