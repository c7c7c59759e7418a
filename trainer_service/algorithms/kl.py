"""Estimates of the distance from the reference policy, from the sampled units.

With d = logp - ref of a sampled unit, the estimators are k1 = d, k2 = d²/2 and k3 = e^-d - 1 + d. The
expectation of k1 and of k3 is KL(policy ‖ ref). The expectation of k2 is another number, but the mean
gradient of k2 is the gradient of the KL. Source: Schulman 2020, "Approximating KL divergence"; on gradients
Tang and Munos 2025, "On a few pitfalls in KL divergence gradient estimation for RL".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from areal_async.config.objective import KlSection

EXPONENT_LIMIT = 20.0
"""Log-ratios are clamped to ± this limit before exp. e^20 is far outside any clip range and still finite."""
MOST_CHANGE = 0.2


def estimate(estimator: str, logp: Tensor, ref: Tensor) -> Tensor:
    """Return the estimate of each unit, with the gradient that follows from the estimator's formula: f32
    [S]."""
    d = logp - ref
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    return (-d).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp() - 1 + d


class KlPenalty:
    """KL penalty of a job section. An adaptive `coefficient` changes from step to step."""

    def __init__(self, section: KlSection) -> None:
        self._section = section
        self.coefficient = section.coefficient
        self.place = section.place

    @property
    def adapts(self) -> bool:
        """Whether the coefficient is adaptive."""
        return self.coefficient > 0 and self._section.target is not None

    def values(self, logp: Tensor, ref: Tensor) -> Tensor:
        """Return the estimates without gradient: f32 [S]."""
        return estimate(self._section.estimator, logp.detach(), ref)

    def in_loss(self, logp: Tensor, ref: Tensor) -> Tensor:
        """Return the estimates with gradient: f32 [S]. See `KlSection.straight_through`."""
        if not self._section.straight_through:
            return estimate(self._section.estimator, logp, ref)
        slope = estimate("k2", logp, ref)
        return self.values(logp, ref) + slope - slope.detach()

    def after_step(self, measured: float) -> None:
        """Adapt the coefficient to the mean divergence of a step: β ← β · (1 + e / horizon).

        e is measured / target - 1, clamped to ±0.2. Source: Ziegler et al. 2019, "Fine-tuning language models
        from human preferences", sec. 2.2."""
        if self._section.target is not None:
            error = max(-MOST_CHANGE, min(MOST_CHANGE, measured / self._section.target - 1))
            self.coefficient *= 1 + error / self._section.horizon_steps
