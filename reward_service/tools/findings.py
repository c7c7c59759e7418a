"""What a reward did with many answers, summed up: pure functions of the verdicts and their times."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from areal_async.rpc.verdicts import Failure, Score, Timeout, Verdict, kind_of
from reward_service.tools.samples import AnswerSample

MOST_VALUES = 12
"""Scores of at most so many different values get a bar for each value, else `BINS` ranges."""
BINS = 10
"""About so many ranges, with ends that are round numbers."""
MOST_LISTED = 5
"""Examples of a disagreement."""
SAME = 1e-9
"""Relative difference of two scores that counts as none."""
BAD = ("timeout", "error")


class Judged(msgspec.Struct, frozen=True):
    """A verdict, and how long its call took."""

    verdict: Verdict
    elapsed_ms: float


class Source(msgspec.Struct, frozen=True):
    """The answers of one `data_source`, each counted once a repeat."""

    name: str
    answers: int
    kinds: dict[str, int]
    mean: float | None
    """Of the scores; None where there is none."""
    low: float | None
    high: float | None


class Bar(msgspec.Struct, frozen=True):
    """Scores from `low` to before `high`; equal where the bar is of one value. The last range has its end."""

    low: float
    high: float
    count: int


class UnscoredKind(msgspec.Struct, frozen=True):
    """Verdicts of one kind that are no score. `message` and `row` are those of the first."""

    kind: str
    count: int
    message: str
    row: int


class Slow(msgspec.Struct, frozen=True):
    elapsed_ms: float
    row: int
    response: str


class Disagreement(msgspec.Struct, frozen=True):
    """One answer, judged differently when it was judged again."""

    row: int
    response: str
    verdicts: list[str]


class Findings(msgspec.Struct, frozen=True):
    """All that `areal-async reward test` shows."""

    answers: int
    repeats: int
    sources: list[Source]
    histogram: list[Bar]
    components: dict[str, float]
    """Mean of each over the scores that name it."""
    p50_ms: float
    p99_ms: float
    max_ms: float
    slowest: list[Slow]
    problems: list[UnscoredKind]
    disagreeing: int
    disagreements: list[Disagreement]

    @property
    def total(self) -> Source:
        return self.sources[-1]

    @property
    def failed(self) -> bool:
        """Whether a call went wrong, an answer was judged in two ways, or nothing was scored."""
        kinds = self.total.kinds
        return self.disagreeing > 0 or any(kinds.get(kind) for kind in BAD) or not kinds.get("score")

    @property
    def constant(self) -> bool:
        """Whether all scores are the same, from which a policy learns nothing."""
        low, high = self.total.low, self.total.high
        return self.answers > 1 and low is not None and low == high


def summed_up(
    samples: Sequence[AnswerSample], repeats: Sequence[Sequence[Judged]], *, slowest: int
) -> Findings:
    """`repeats[r][i]` is how answer `i` was judged the `r`-th time. The last source is the total."""
    everything = [judged for repeat in repeats for judged in repeat]
    scores = [judged.verdict.value for judged in everything if isinstance(judged.verdict, Score)]
    times = sorted(judged.elapsed_ms for judged in everything)
    differing = [
        Disagreement(sample.row, sample.given.response, in_words(distinct(verdicts)))
        for index, sample in enumerate(samples)
        if len(distinct(verdicts := [repeat[index].verdict for repeat in repeats])) > 1
    ]
    return Findings(
        answers=len(samples),
        repeats=len(repeats),
        sources=_sources(samples, repeats),
        histogram=histogram(scores),
        components=_components(everything),
        p50_ms=_quantile(times, 0.5),
        p99_ms=_quantile(times, 0.99),
        max_ms=_quantile(times, 1.0),
        slowest=_slowest(samples, repeats, slowest),
        problems=_problems(samples, repeats),
        disagreeing=len(differing),
        disagreements=differing[:MOST_LISTED],
    )


def distinct(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Those that differ in kind, in the kind of an error, or in the score; the first of each."""
    found: list[Verdict] = []
    for verdict in verdicts:
        if not any(_same(verdict, other) for other in found):
            found.append(verdict)
    return found


def _same(one: Verdict, other: Verdict) -> bool:
    if isinstance(one, Score) and isinstance(other, Score):
        return math.isclose(one.value, other.value, rel_tol=SAME, abs_tol=SAME)
    if isinstance(one, Failure) and isinstance(other, Failure):
        return one.kind == other.kind
    return type(one) is type(other)


def in_words(verdicts: Sequence[Verdict]) -> list[str]:
    """`1`, `timeout`, `abstain`, `error (exception)`; with as many digits as tell different scores apart."""
    brief = [_in_words(verdict, 4) for verdict in verdicts]
    return brief if len(set(brief)) == len(brief) else [_in_words(verdict, 15) for verdict in verdicts]


def _in_words(verdict: Verdict, digits: int) -> str:
    if isinstance(verdict, Score):
        return f"{verdict.value:.{digits}g}"
    return f"error ({verdict.kind})" if isinstance(verdict, Failure) else kind_of(verdict)


def histogram(scores: Sequence[float]) -> list[Bar]:
    """Bars from the lowest score to the highest."""
    values = Counter(scores)
    if len(values) <= MOST_VALUES:
        return [Bar(value, value, values[value]) for value in sorted(values)]
    low, high = min(scores), max(scores)
    step = round_step((high - low) / BINS)
    first = math.floor(low / step)
    bins = max(1, math.ceil(high / step) - first)
    counts = Counter(min(bins - 1, math.floor(score / step) - first) for score in scores)
    return [Bar((first + index) * step, (first + index + 1) * step, counts[index]) for index in range(bins)]


def round_step(least: float) -> float:
    """The smallest of 1, 2 or 5 times a power of ten that is not below `least`, which is above 0."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - SAME))


def _sources(samples: Sequence[AnswerSample], repeats: Sequence[Sequence[Judged]]) -> list[Source]:
    by_name: dict[str, list[Verdict]] = defaultdict(list)
    for index, sample in enumerate(samples):
        by_name[sample.task.data_source] += [repeat[index].verdict for repeat in repeats]
    sources = [_source(name, by_name[name]) for name in sorted(by_name)]
    return [*sources, _source("", [verdict for name in by_name for verdict in by_name[name]])]


def _source(name: str, verdicts: Sequence[Verdict]) -> Source:
    scores = [verdict.value for verdict in verdicts if isinstance(verdict, Score)]
    return Source(
        name,
        len(verdicts),
        dict(Counter(kind_of(verdict) for verdict in verdicts)),
        math.fsum(scores) / len(scores) if scores else None,
        min(scores, default=None),
        max(scores, default=None),
    )


def _components(everything: Sequence[Judged]) -> dict[str, float]:
    by_name: dict[str, list[float]] = defaultdict(list)
    for judged in everything:
        if isinstance(judged.verdict, Score):
            for name, value in judged.verdict.components.items():
                by_name[name].append(value)
    return {name: math.fsum(values) / len(values) for name, values in sorted(by_name.items())}


def _slowest(samples: Sequence[AnswerSample], repeats: Sequence[Sequence[Judged]], most: int) -> list[Slow]:
    """The answers whose slowest call was slowest."""
    longest = [max(repeat[index].elapsed_ms for repeat in repeats) for index in range(len(samples))]
    order = sorted(range(len(samples)), key=lambda index: -longest[index])[:most]
    return [Slow(longest[index], samples[index].row, samples[index].given.response) for index in order]


def _problems(samples: Sequence[AnswerSample], repeats: Sequence[Sequence[Judged]]) -> list[UnscoredKind]:
    found: dict[str, UnscoredKind] = {}
    for repeat in repeats:
        for sample, judged in zip(samples, repeat, strict=True):
            if isinstance(judged.verdict, Score):
                continue
            kind, message = _why(judged.verdict)
            first = found.get(kind, UnscoredKind(kind, 0, message, sample.row))
            found[kind] = msgspec.structs.replace(first, count=first.count + 1)
    return sorted(found.values(), key=lambda problem: (problem.kind.startswith("abstain"), -problem.count))


def _why(verdict: Verdict) -> tuple[str, str]:
    match verdict:
        case Failure(kind, message):
            return f"error: {kind}", message
        case Timeout(limit_ms):
            return "timeout", f"not back within {limit_ms / 1000:g} s"
        case _:
            return "abstain", getattr(verdict, "reason", "") or "no reason given"


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
