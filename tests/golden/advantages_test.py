"""Every advantage and all credit against references written plainly over lists, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest
import torch

from areal_async.base.verdicts import Parts
from areal_async.config.objective import KlSection, ObjectiveSection
from tests.golden.tables import Threads, episodes_of, row, shuffled, table_of, units
from trainer_service.algorithms.objective import Objective
from trainer_service.algorithms.table import EpisodeTable, UnitTable
from trainer_service.errors import ObjectiveError

N_CASES = 360
KL = 0.1
AGENTS = ("main", "critic")


@dataclass
class Unit:
    place: int
    """In its episode."""
    own: float = 0.0
    value: float = 0.0
    penalty: float = 0.0
    mask: bool = True


@dataclass
class Seg:
    episode: int
    index: int
    turn: int
    agent: str
    anchor: int
    reward: float | None
    units: list[Unit]
    earned: float = 0.0

    @property
    def penalty(self) -> float:
        return math.fsum(unit.penalty for unit in self.units if unit.mask)


@dataclass
class Case:
    """A step in lists; `rows` and `episodes` are the same for the trainer."""

    rewards: list[float]
    groups: list[int]
    parts: list[Parts | None]
    components: dict[str, list[float]]
    truncated: list[bool]
    segments: list[Seg]
    rows: list
    episodes: EpisodeTable
    columns: dict[str, torch.Tensor] = field(default_factory=dict)

    def table(self, *, masked: bool, penalty: bool) -> UnitTable:
        built = table_of(self.rows, self.episodes)
        columns = {name: column.clone() for name, column in self.columns.items()}
        if not masked:
            columns.pop("mask")
        else:
            for name in ("value", "prox", "ref"):
                columns[name][~columns["mask"]] = math.nan
        return built.with_columns(**columns)


def random_case(seed: int, *, agents=AGENTS, masked=False, greedy=False) -> Case:
    """Groups of one to four episodes of one to three rows of one to three segments, with whatever rewards."""
    rng = np.random.default_rng(seed)
    rewards, groups, parts, truncated, segments, rows = [], [], [], [], [], []
    components = {"format": [], "right": []}
    flat = rng.random() < 0.1
    for group in rng.permutation(int(rng.integers(1, 4))).tolist():
        for _ in range(int(rng.integers(1, 5))):
            episode = len(rewards)
            rewards.append(1.0 if flat else float(rng.integers(0, 3)) / 2)
            groups.append(group)
            truncated.append(bool(rng.random() < 0.3))
            for values in components.values():
                values.append(math.nan if rng.random() < 0.2 else float(rng.integers(0, 2)))
            index = turn = start = 0
            mine: list[Seg] = []
            for _ in range(int(rng.integers(1, 4))):
                described, at = [], start
                for _ in range(int(rng.integers(1, 4))):
                    count = int(rng.choice([1, 2, 5]))
                    reward = None if rng.random() < 0.6 else float(np.float32(rng.normal()))
                    agent, anchor = str(rng.choice(agents)), int(rng.choice([0, 5, -9]))
                    units = [Unit(at + 1 + i) for i in range(count)]
                    at += count + 1
                    mine.append(Seg(episode, index, turn, agent, anchor, reward, units))
                    described.append((index, turn, agent, anchor, reward, count))
                    index += int(rng.integers(1, 3))
                    turn += int(rng.integers(0, 2))
                rows.append(row(episode, described, start=start, truncated=truncated[-1]))
                start = at
            given = Parts(
                segments={s.index: float(rng.normal()) for s in mine[1:]} if rng.random() < 0.3 else {},
                agents={"critic": float(rng.normal())} if rng.random() < 0.3 else {},
                units=rng.normal(size=start).tolist() if rng.random() < 0.3 else [],
            )
            parts.append(given if rng.random() < 0.5 else None)
            segments += mine
    for segment in segments:
        for number, unit in enumerate(segment.units):
            unit.value = float(np.float32(rng.normal()))
            unit.mask = not masked or number == 0 or bool(rng.random() < 0.7)
    every = [unit for segment in segments for unit in segment.units]
    prox, ref = rng.normal(size=(2, len(every))).astype(np.float32)
    for unit, a, b in zip(every, prox.tolist(), ref.tolist(), strict=True):
        unit.penalty = KL * (a - b)
    columns = {
        "value": torch.tensor([unit.value for unit in every]),
        "mask": torch.tensor([unit.mask for unit in every]),
        "prox": torch.from_numpy(prox),
        "ref": torch.from_numpy(ref),
    }
    baseline = [greedy and seed % 3 > 0 and groups.index(group) == i for i, group in enumerate(groups)]
    if greedy:  # nothing of a greedy answer is trained
        keep = [not baseline[segment.episode] for segment in segments for _ in segment.units]
        columns = {name: column[torch.tensor(keep, dtype=torch.bool)] for name, column in columns.items()}
        segments = [segment for segment in segments if not baseline[segment.episode]]
        rows = [each for each in rows if not baseline[each.episode]]
    episodes = episodes_of(rewards, groups, parts=parts, components=components, baseline=baseline)
    return Case(rewards, groups, parts, components, truncated, segments, rows, episodes, columns)


# --- the references ------------------------------------------------------------------------------------


def earn(case: Case, *, penalty: bool) -> None:
    """What each unit and each segment earned: the rule of `credit.py`."""
    for sequence in sequences(case.segments):
        episode, agent = sequence[0].episode, sequence[0].agent
        given = case.parts[episode] or Parts()
        spread = 0.0
        for segment in sequence:
            for unit in segment.units:
                unit.own = given.units[unit.place] if given.units else 0.0
            of_workflow = segment.reward or 0.0
            own = given.segments.get(segment.index, 0.0) if given.segments else of_workflow
            segment.earned = own + math.fsum(unit.own for unit in segment.units)
            spread += segment.earned
        sequence[-1].earned += given.agents.get(agent, case.rewards[episode]) - spread
        for segment in sequence:
            rest = segment.earned - math.fsum(unit.own for unit in segment.units if unit.mask)
            last = [unit for unit in segment.units if unit.mask][-1]
            last.own += rest
            if penalty:
                segment.earned -= segment.penalty
                for unit in segment.units:
                    unit.own -= unit.penalty


def sequences(segments):
    """What one agent did in one episode, in the order of time."""
    found = {}
    for segment in segments:
        found.setdefault((segment.episode, segment.agent), []).append(segment)
    return [sorted(each, key=lambda segment: segment.index) for each in found.values()]


@dataclass
class Sample:
    reward: float
    group: tuple
    length: int
    members: list[Seg]
    baseline: bool = False
    components: dict = field(default_factory=dict)


def samples(case: Case, group_by: str, *, penalty: bool, discount=1.0) -> list[Sample]:
    def of(episode):
        return {name: values[episode] for name, values in case.components.items()}

    def length(members):
        return sum(unit.mask for segment in members for unit in segment.units)

    found = []
    if group_by == "task":
        for episode, (reward, group) in enumerate(zip(case.rewards, case.groups, strict=True)):
            members = [segment for segment in case.segments if segment.episode == episode]
            reward -= math.fsum(segment.penalty for segment in members) if penalty else 0.0
            greedy = bool(case.episodes.baseline[episode])
            found.append(Sample(reward, (group,), length(members), members, greedy, of(episode)))
        return found
    if group_by == "task_turn":
        whole = []
        for episode in range(len(case.rewards)):
            members = sorted(
                (segment for segment in case.segments if segment.episode == episode),
                key=lambda segment: (segment.turn, segment.index),
            )
            given, joint = case.parts[episode] or Parts(), []
            for segment in members:
                own = given.segments.get(segment.index, 0.0) if given.segments else segment.reward or 0.0
                of_units = math.fsum(given.units[u.place] for u in segment.units) if given.units else 0.0
                joint.append(replace(segment, earned=own + of_units))
            if joint:
                joint[-1].earned += case.rewards[episode] - math.fsum(s.earned for s in joint)
                whole.append(joint)
        for joint in whole:
            for segment in joint:
                segment.earned -= segment.penalty if penalty else 0.0
    else:
        whole = sequences(case.segments)
    for sequence in whole:
        episode, agent = sequence[0].episode, sequence[0].agent
        group = (case.groups[episode],) + (() if group_by == "task_turn" else (agent,))
        if group_by == "task_agent":
            earned = math.fsum(segment.earned for segment in sequence)
            found.append(Sample(earned, group, length(sequence), sequence, components=of(episode)))
            continue
        turns = sorted({segment.turn for segment in sequence})
        for at, turn in enumerate(turns):
            earned = math.fsum(
                discount**ahead * segment.earned
                for ahead, later in enumerate(turns[at:])
                for segment in sequence
                if segment.turn == later
            )
            members = [segment for segment in sequence if segment.turn == turn]
            found.append(Sample(earned, (*group, turn), length(members), members, components=of(episode)))
    return found


def mean(values):
    return math.fsum(values) / len(values) if values else 0.0


def std(values):
    middle = mean(values)
    return math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1)) if values[1:] else 0.0


def peers(sample, all_):
    return [other for other in all_ if other.group == sample.group]


def normalised(values, value):
    return 0.0 if len(set(values)) == 1 else (value - mean(values)) / (std(values) + 1e-6)


def whitened(values, weights):
    flat = [value for value, weight in zip(values, weights, strict=True) for _ in range(weight)]
    return [(value - mean(flat)) / (std(flat) + 1e-8) if flat else value for value in values]


def ref_gdpo(found):
    total = []
    for sample in found:
        value = 0.0
        for name, own in sample.components.items():
            have = [v for o in peers(sample, found) if not math.isnan(v := o.components[name])]
            value += 0.0 if math.isnan(own) else normalised(have, own)
        total.append(value)
    return whitened(total, [1] * len(total))


def ref_remax(sample, group):
    greedy = [other.reward for other in group if other.baseline]
    return sample.reward - greedy[0] if greedy and not sample.baseline else 0.0


def ref_opo(sample, group):
    lengths = sum(other.length for other in group)
    total = math.fsum(other.reward * other.length for other in group)
    return sample.reward - total / lengths if lengths else 0.0


def ref_pass_at_k(sample, group):
    others = [other.reward for other in group if other is not sample]
    return max(0.0, sample.reward - max(others)) if others else 0.0


def one_by_one(formula):
    def of_all(found):
        return [formula(sample, peers(sample, found)) for sample in found]

    return of_all


def rewards_of(group):
    return [other.reward for other in group]


OF_SAMPLES = {
    "grpo": one_by_one(lambda s, g: normalised(rewards_of(g), s.reward)),
    "dr_grpo": one_by_one(lambda s, g: s.reward - mean(rewards_of(g))),
    "rloo": one_by_one(lambda s, g: s.reward - mean([o.reward for o in g if o is not s]) if g[1:] else 0.0),
    "reinforce_pp_baseline": lambda found: whitened(
        [s.reward - mean(rewards_of(peers(s, found))) for s in found], [s.length for s in found]
    ),
    "remax": one_by_one(ref_remax),
    "opo": one_by_one(ref_opo),
    "pass_at_k": one_by_one(ref_pass_at_k),
    "gdpo": ref_gdpo,
    "reward": lambda found: rewards_of(found),
}


def spread_out(case, pairs):
    """The list of each unit's number, in the order of the table; 0 where masked."""
    by_segment = {(segment.episode, segment.index): value for segment, value in pairs}
    return [
        by_segment[segment.episode, segment.index] if unit.mask else 0.0
        for segment in case.segments
        for unit in segment.units
    ]


def of_samples(case, name, group_by, *, penalty, discount=1.0):
    found = samples(case, group_by, penalty=penalty, discount=discount)
    values = OF_SAMPLES[name](found)
    return spread_out(
        case, [(m, value) for sample, value in zip(found, values, strict=True) for m in sample.members]
    )


def ref_gae(case, *, gamma, lam, whiten, critic=True):
    found, returns = {}, {}
    for sequence in sequences(case.segments):
        trained = [unit for segment in sequence for unit in segment.units if unit.mask]
        value = {id(unit): unit.value if critic else 0.0 for unit in trained}
        after = value[id(trained[-1])] if case.truncated[sequence[0].episode] else 0.0
        advantage = 0.0
        for unit in reversed(trained):
            own = value[id(unit)]
            advantage = unit.own + gamma * after - own + gamma * lam * advantage
            after = own
            found[id(unit)], returns[id(unit)] = advantage, advantage + own
    every = [unit for segment in case.segments for unit in segment.units]
    values = [found.get(id(unit), 0.0) for unit in every]
    if whiten:
        values = whitened(values, [int(unit.mask) for unit in every])
    kept = [value if unit.mask else 0.0 for value, unit in zip(values, every, strict=True)]
    return kept, [returns.get(id(unit), 0.0) for unit in every]


def ref_gigpo(case, *, omega, gamma, norm):
    def compared(values, value):
        if norm == "std":
            return normalised(values, value)
        return value - mean(values)

    episode_of, step_of = {}, {}
    for sequence in sequences(case.segments):
        group = case.groups[sequence[0].episode]
        key = (group, sequence[0].agent)
        for at, segment in enumerate(sequence):
            episode_of[id(segment)] = (key, math.fsum(s.earned for s in sequence), id(sequence[0]))
            to_go = math.fsum(gamma**k * later.earned for k, later in enumerate(sequence[at:]))
            step_of[id(segment)] = ((*key, segment.anchor), to_go)
    pairs = []
    for segment in case.segments:
        key, total, _ = episode_of[id(segment)]
        one_each = {first: value for other, value, first in episode_of.values() if other == key}
        value = compared(list(one_each.values()), total)
        if segment.anchor:
            key, to_go = step_of[id(segment)]
            value += omega * compared([v for other, v in step_of.values() if other == key], to_go)
        pairs.append((segment, value))
    return spread_out(case, pairs)


def ref_marti(case, *, alpha, mode, history):
    found = samples(case, "task_agent_turn", penalty=False, discount=0.0)
    shaped = []
    for sample in found:
        first = sample.members[0]
        earlier = [
            other.reward
            for other in found
            if other.members[0].episode == first.episode
            and other.group[:2] == sample.group[:2]
            and other.group[2] < sample.group[2]
        ]
        r, q = sample.reward, mean(earlier[-1:] if history == "last" else earlier)
        delta = (r - q if mode == "margin" else q * r - (1 - q) * (1 - r)) if earlier else 0.0
        shaped.append(replace(sample, reward=r + alpha * delta))
    values = OF_SAMPLES["grpo"](shaped)
    return spread_out(case, [(m, v) for s, v in zip(shaped, values, strict=True) for m in s.members])


# --- against the trainer -------------------------------------------------------------------------------


def objective(name, *, penalty=False, **section):
    kl = KlSection(coefficient=KL, estimator="k1", place="reward") if penalty else KlSection()
    return Objective(ObjectiveSection(advantage=name, kl=kl, correction="none", **section))


def close(actual, expected, scale=1.0):
    want = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.double(), want, atol=2e-6 * scale, rtol=2e-6)


@pytest.fixture(scope="module")
def cases():
    return [random_case(seed) for seed in range(N_CASES)]


@pytest.fixture(scope="module")
def masked_cases():
    """Of some units masked, with NaN in their columns."""
    return [random_case(1000 + seed, masked=True) for seed in range(N_CASES)]


GROUPINGS = ("task", "task_agent", "task_agent_turn", "task_turn")


@pytest.mark.parametrize("name", [name for name in OF_SAMPLES if name != "remax"])
def test_an_advantage_of_samples_is_its_formula(name, cases, masked_cases):
    """Groupings take turns."""
    for seed in range(N_CASES):
        turn, group_by = seed // len(GROUPINGS), GROUPINGS[seed % len(GROUPINGS)]
        several = group_by != "task"
        case = (cases if several else masked_cases)[seed]
        penalty = turn % 2 == 1 and name != "gdpo"
        discount = 0.9 if turn % 3 and several else 1.0
        earn(case, penalty=penalty)
        made = objective(name, penalty=penalty, group_by=group_by, turn_discount=discount)
        table = made.fill(case.table(masked=not several, penalty=penalty), 0)
        want = of_samples(case, name, group_by, penalty=penalty, discount=discount)
        close(table.advantage.masked_fill(~table.mask, 0.0), want)


def test_remax_is_its_formula_and_a_group_without_its_greedy_answer_gives_nothing():
    seen = set()
    for seed in range(N_CASES):
        case = random_case(2000 + seed, greedy=True)
        table = objective("remax").fill(case.table(masked=False, penalty=False), 0)
        close(table.advantage, of_samples(case, "remax", "task", penalty=False))
        seen.add(bool(case.episodes.baseline.any()))
        if not case.episodes.baseline.any():
            assert not table.advantage.any()
    assert seen == {True, False}


def test_gdpo_of_rewards_without_its_components_is_an_error():
    made = objective("gdpo", advantage_args={"weights": {"style": 1.0}})
    with pytest.raises(ObjectiveError, match=r"\(style\).*\(format, right\)"):
        made.fill(random_case(0).table(masked=False, penalty=False), 0)


OF_UNITS = {
    "gae": ({"gamma": (1.0, 0.9), "lam": (0.95, 1.0, 0.0), "whiten": (True, True, False, False)}, ref_gae),
    "reinforce_pp": ({"gamma": (1.0, 0.9)}, partial(ref_gae, lam=1.0, whiten=True, critic=False)),
    "gigpo": ({"omega": (1.0, 0.3), "gamma": (0.95, 1.0), "norm": ("none", "std")}, ref_gigpo),
    "marti": (
        {"alpha": (0.5,), "mode": ("margin", "quality"), "history": ("all", "all", "last", "last")},
        ref_marti,
    ),
}
"""By name the arguments, whose values take turns, and the reference."""


@pytest.mark.parametrize("name", OF_UNITS)
def test_an_advantage_of_units_or_segments_is_its_formula(name, cases, masked_cases):
    arguments, formula = OF_UNITS[name]
    of_units = name in ("gae", "reinforce_pp")
    for seed, case in enumerate(masked_cases if of_units else cases):
        how = {key: values[seed % len(values)] for key, values in arguments.items()}
        penalty = of_units and seed // 4 % 2 == 1
        earn(case, penalty=penalty)
        made = objective(name, penalty=penalty, advantage_args=how)
        table = made.fill(case.table(masked=of_units, penalty=penalty), 0)
        want = formula(case, **how)
        close(table.advantage, want[0] if of_units else want)
        if name == "gae":
            close(table["return"], want[1])


@pytest.mark.parametrize("name", [*OF_SAMPLES, *OF_UNITS])
def test_an_advantage_depends_neither_on_order_nor_on_ranks(name):
    """Rows of an episode are on one rank where the advantage is of units."""
    for seed in range(12):
        case = random_case(3000 + seed, greedy=name == "remax")
        section = (
            {"group_by": "task_agent_turn"} if seed % 2 and name in OF_SAMPLES and name != "remax" else {}
        )
        made = objective(name, **section)
        alone = made.fill(case.table(masked=False, penalty=False), 0)
        order = torch.randperm(len(alone), generator=torch.Generator().manual_seed(seed))
        again = made.fill(shuffled(case.table(masked=False, penalty=False), order), 0)
        close(again.advantage, alone.advantage[order].tolist())
        ranks = Threads(2)
        values = alone["value"]

        def on(rank, case=case, made=made, ranks=ranks, values=values, seed=seed):
            spread = np.random.default_rng(seed).integers(0, 2, len(case.rows))
            whole = made.whole_episodes
            mine = [
                number
                for number, each in enumerate(case.rows)
                if (each.episode % 2 if whole else spread[number]) == rank
            ]
            starts = np.cumsum([0, *(len(each.position) for each in case.rows)])
            at = [place for number in mine for place in range(starts[number], starts[number + 1])]
            part = table_of([case.rows[n] for n in mine], case.episodes, ranks=ranks, value=values[at])
            return at, made.fill(part, 0).advantage

        for at, found in ranks.on_ranks(on):
            close(found, alone.advantage[at].tolist())


def test_a_whitened_batch_in_which_all_is_equal_is_exactly_zero():
    """The mean of so many equal numbers is off by rounding, which whitening would make large."""
    n = 100_003
    table = units(np.zeros(n), episode=np.zeros(n, np.int64), advantage=np.zeros(n))
    assert not table.whiten(torch.full((n,), 0.1, dtype=torch.float64)).any()
