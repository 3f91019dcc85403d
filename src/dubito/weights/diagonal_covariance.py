"""Diagonal covariance by signed factors: `w = m + s·eps`, one factor a weight, started at the prior.

The diagonal member of the covariance families of implicit-bias variational inference, there for comparison. Under
the expected loss alone it collapses: for a linear model the loss adds `sum_p s_p² ||X_p||²`, which drives every
factor whose input is not always zero to zero. `MeanField` is the diagonal family to train by an ELBO.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from dubito.divergences import KLMethod, kl_divergence, wasserstein2_gaussian_diagonal
from dubito.priors import PriorSpec
from dubito.weights.family import (
    CapabilityError,
    Components,
    Family,
    Group,
    Noise,
    SpreadRate,
    WeightPosterior,
)
from dubito.weights.initial_scale import fan_in, spread_of
from dubito.weights.slots import Slot


@dataclass(frozen=True)
class DiagonalCovariance(Family):
    """Independent Gaussian weights whose standard deviation is the size of a factor of either sign.

    Args:
        prior: for a KL, where one is wanted; see `MeanField`.
        scale: multiplies the initial factor. At 1 every factor is the standard deviation with which the parameter
            was initialised, so q starts at the prior `N(m0, s0²)`.

    Raises:
        ValueError: for a scale that is not positive.
    """

    prior: PriorSpec = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale={self.scale!r} must be positive; 1 starts at the prior")

    def attach(self, group: Group) -> DiagonalCovariancePosterior:
        """The posterior of one parameter."""
        return DiagonalCovariancePosterior(group, self)


class DiagonalCovariancePosterior(WeightPosterior):
    """The posterior that `DiagonalCovariance` makes for one parameter.

    Attributes:
        factor: s, in the parameter's shape; its sign means nothing.
    """

    diagonal = True

    def __init__(self, group: Group, family: DiagonalCovariance) -> None:
        super().__init__(group)
        self.scale = family.scale
        value = self.slot.parameter.detach()
        self.factor = nn.Parameter(torch.full_like(value, self.scale * spread_of(value, fan_in(self.slot))))
        self.set_prior(self.slot, group.prior)

    @property
    def slot(self) -> Slot:
        """The one parameter."""
        return self.slots[0]

    def mean(self) -> dict[str, Tensor]:
        """The module's own parameter."""
        return {self.slot.name: self.slot.parameter}

    def variance(self) -> dict[str, Tensor]:
        """s²."""
        return {self.slot.name: self.factor.square()}

    @torch.no_grad()
    def rescale_spread_(self, factor: float) -> None:
        """s ← factor·s."""
        self.factor.mul_(factor)

    @torch.no_grad()
    def reset_spread_(self, scales: Mapping[str, float], generator: torch.Generator | None = None) -> None:
        """S ← the initial standard deviation."""
        self.factor.fill_(self.scale * scales[self.slot.name])

    def spread_rates(self) -> list[SpreadRate]:
        """The factor learns at its weight's own rate."""
        return [SpreadRate(self.factor, self.slot.name, 1)]

    def noise(self, generator: torch.Generator | None = None) -> Noise:
        """eps ~ N(0, I)."""
        s = self.factor
        return {"eps": torch.randn(s.shape, generator=generator, dtype=s.dtype, device=s.device)}

    def components(self, noise: Noise) -> Components:
        """w = m + s·eps."""
        return {"weight": torch.addcmul(self.slot.parameter, self.factor, noise["eps"])}

    def realize(self, components: Components) -> dict[str, Tensor]:
        """The dense draw."""
        return {self.slot.name: components["weight"]}

    def kl(
        self, method: KLMethod = "auto", samples: int | None = None, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """KL(q || prior) in nats; infinite once a factor is zero."""
        p = self.prior_of(self.slot).distribution(self.factor)
        value = kl_divergence(self._normal(), p, method, samples or 1, generator)
        return {self.slot.name: value.expand(self.slot.shape).sum()}

    def wasserstein(self, other: WeightPosterior) -> Tensor:
        """Squared 2-Wasserstein distance to another diagonal posterior of the same parameter."""
        if not isinstance(other, DiagonalCovariancePosterior):
            raise CapabilityError(f"no closed form between DiagonalCovariance and {type(other).__name__}")
        return wasserstein2_gaussian_diagonal(
            self.slot.parameter, self.factor.abs(), other.slot.parameter, other.factor.abs()
        )

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """log q(w), summed over the parameter's entries."""
        value: Tensor = self._normal().log_prob(weights[self.slot.name])
        return value.sum(dim=tuple(range(-len(self.slot.shape), 0))) if self.slot.shape else value

    def _normal(self) -> Normal:
        return Normal(self.slot.parameter, self.factor.abs(), validate_args=False)
