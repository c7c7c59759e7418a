"""Every part of the objective against values computed by hand, and the parts against each other."""

from dataclasses import replace
from itertools import product
from math import log

import pytest
import torch
from torch import tensor

from areal_async.config.objective import ObjectiveSection
from tests.golden.tables import episodes_of, row, table_of, totals_of, units
from trainer_service.algorithms import (
    ADVANTAGES,
    CORRECTIONS,
    LOSSES,
)
from trainer_service.algorithms.objective import Objective, UnitTerms
from trainer_service.algorithms.off_policy import StepStatistics
from trainer_service.algorithms.table import masked

NAN = float("nan")


def close(actual, expected, atol=1e-6):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), atol=atol, rtol=0)


MASKS = (
    [1] * 12,
    [1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0],
    [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1],
)


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_a_masked_unit_counts_nowhere_whatever_the_parts(advantage):
    """Mask × normaliser × correction × advantage × loss: masked units full of NaN give the advantages, the
    loss, the gradient and the figures of a step that never had them."""
    rows = [
        row(0, [(1, 0, "main", 7, None, 2), (3, 1, "main", 9, None, 1)]),
        row(1, [(1, 0, "main", 7, 0.5, 1), (3, 1, "main", 9, None, 2)]),
        row(2, [(1, 0, "main", 3, None, 2)]),
        row(2, [(4, 1, "main", 4, None, 1)], start=9),
        row(3, [(1, 0, "main", 3, None, 3)]),
    ]
    greedy = [True, False] * 2 if advantage == "remax" else None
    components = {"format": [1.0, 0.0, NAN, 1.0], "right": [0.0, 1.0, 1.0, 0.0]}
    episodes = episodes_of([1.0, 0.25, 0.0, 2.0], [0, 0, 1, 1], baseline=greedy, components=components)
    generator = torch.Generator().manual_seed(1)
    found = {name: -2 * torch.rand(12, generator=generator) for name in NUMBERS}
    value = torch.rand(12, generator=generator)
    kinds = product(LOSSES, CORRECTIONS)
    for number, (loss, correction) in enumerate(kinds):
        mask = torch.tensor(MASKS[number % 3], dtype=torch.bool)
        normaliser = ("token", "sequence", "rollout", "constant")[number % 4]
        section = ObjectiveSection(
            advantage=advantage,
            loss=loss,
            correction=correction,
            correction_args={"level": "sequence"} if correction == "tis" else {},
            normaliser=normaliser,
            normaliser_args={"length": 8} if normaliser == "constant" else {},
            kl={"coefficient": 0.1, "place": ("loss", "reward")[number % 2]},
            entropy=0.01,
        )
        objective = Objective(section, minibatches=2)

        def run(keep, mask, objective=objective):
            columns = {n: torch.where(mask, v, NAN)[keep] for n, v in (found | {"value": value}).items()}
            logp = columns.pop("logp").requires_grad_()
            table = table_of(rows, episodes)
            table = replace(table, columns={n: c[keep] for n, c in table.columns.items()})
            in_row = torch.zeros(5).long().index_add(0, ROWS[keep], mask[keep].long())
            table = table.with_columns(
                behaviour=columns.pop("beh"),
                mask=mask[keep],
                row_units=in_row[ROWS[keep]].clamp(min=1),
                **columns,
            )
            table = objective.fill(table, 0)
            statistic = objective.statistic(logp, table)
            if statistic is not None:
                mean = table.mean_of_episode(statistic.detach()).float()
                size = table.by_episode(torch.ones_like(statistic))[table.episode].float()
                table = table.with_columns(
                    episode_mean=mean + statistic - statistic.detach(), episode_units=size
                )
            terms = objective.terms({"logp": logp, "entropy": logp * 2}, table)
            total = (terms.loss * objective.coefficients(table, totals_of(table))).sum()
            total.backward()
            statistics = StepStatistics(0, 0, objective.figures)
            statistics.add(terms, table)
            return total.detach(), logp.grad, masked(table.advantage, table.mask), statistics.report()

        total, gradient, advantages_, report = run(slice(None), mask)
        want, want_gradient, want_advantages, want_report = run(mask, mask)
        close(total, want, atol=1e-6)
        close(gradient[mask], want_gradient, atol=1e-6)
        close(advantages_[mask], want_advantages, atol=1e-6)
        assert torch.equal(gradient[~mask], torch.zeros(int((~mask).sum())))
        for name in ("by_staleness", *objective.figures):
            assert (name in report) == (name in want_report)
        report, want_report = (each.pop("by_staleness")["0"] for each in (report, want_report))
        assert report == pytest.approx(want_report, rel=1e-6, abs=1e-6), (loss, correction)


NUMBERS = ("logp", "prox", "beh", "ref", "teacher", "process")
ROWS = tensor([0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 4, 4])


def test_statistics_by_hand_split_by_staleness():
    objective = Objective(ObjectiveSection(correction_args={"cap": 1.5}), minibatches=2)
    # step 5: staleness 0, 0, 2; w = 1, 2, 1/2
    u = units([0.0, -log(2.0), log(2.0)], episode=[0, 0, 1], advantage=[1.0, 1.0, -1.0], version=[5, 5, 3])
    u = u.with_columns(prox=torch.zeros(3))
    terms = objective.terms({"logp": tensor([log(1.5), 0.0, log(0.5)])}, u)
    statistics = StepStatistics(5, 4, objective.figures)
    for part in (slice(0, 1), slice(1, 3)):
        figures = {name: values[part] for name, values in terms.figures.items()}
        cut = u.part(part.start, part.stop)
        statistics.add(UnitTerms(terms.loss[part], terms.weight[part], figures), cut)
    report = statistics.report()
    assert report["units"] == 3
    assert report["w_mean"] == pytest.approx(3.5 / 3)
    assert (report["w_max"], report["w_min"]) == (pytest.approx(2.0), pytest.approx(0.5))
    assert report["ess"] == pytest.approx(3.5**2 / (3 * 5.25))
    assert report["chi2"] == pytest.approx((0 + 1 + 0.25) / 3)
    assert report["kl_prox_beh"] == pytest.approx((0 + 2 * log(2) - 1 + 0.5 * log(0.5) + 0.5) / 3)
    assert report["truncated_share"] == pytest.approx(1 / 3)
    assert report["clip_high_share"] == pytest.approx(1 / 3)
    assert report["clip_low_share"] == pytest.approx(1 / 3)
    by = report["by_staleness"]
    assert set(by) == {"0", "2"}
    assert by["0"]["units"] == 2
    assert by["0"]["clip_high_share"] == 0.5
    assert by["2"]["clip_low_share"] == 1.0
    assert by["2"]["w_max"] == pytest.approx(0.5)
