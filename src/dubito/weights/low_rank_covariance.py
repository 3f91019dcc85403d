"""Low-rank covariance: Gaussian weights with `Cov = S Sᵀ`, joint over a module's parameters.

`w = m + S z` with `z ~ N(0, I_R)`. One z serves all parameters of a module, so its weight and its bias are
correlated; modules are independent. The family of implicit-bias variational inference (IBVI): it starts at the prior
and is trained by the expected loss alone, without a KL, by SGD.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from dubito.divergences import KLMethod, wasserstein2_gaussian_factors
from dubito.weights.family import (
    CapabilityError,
    Components,
    Family,
    Granularity,
    Group,
    Noise,
    SpreadRate,
    WeightPosterior,
    key_of,
)
from dubito.weights.gaussian_weights import CorrelatedMoments, Moments
from dubito.weights.initial_scale import fan_in, spread_of


@dataclass(frozen=True)
class LowRankCovariance(Family):
    """Gaussian weights with a low-rank covariance factor, joint over each module's parameters.

    Args:
        rank: number of columns R of S, at most the module's parameter count (above it: an error for one module named
            alone, else clipped to each one's, and said).
        scale: multiplies the initial factor. At 1 the marginal variance of a draw's deviation equals the variance
            with which the mean was initialised (measured on the parameter's own entries; a parameter whose entries
            do not vary takes its fan-in scale), and the entries of S have standard deviation `scale · R ** -0.5`
            times that, so that the size of a draw does not depend on R.

    Raises:
        ValueError: for a rank below 1 or above the named module's parameter count, or a scale that is not positive.
    """

    granularity: ClassVar[Granularity] = "module"
    rank: int
    scale: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"rank={self.rank!r} must be a whole number of at least 1")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale={self.scale!r} must be positive; 1 starts at the prior")

    def attach(self, group: Group) -> LowRankCovariancePosterior:
        """The posterior of one module's parameters."""
        count = sum(slot.shape.numel() for slot in group.slots)
        if self.rank > count and group.alone:
            names = ", ".join(slot.name for slot in group.slots)
            raise ValueError(
                f"rank={self.rank} is above the number of parameters it covers ({count}: {names}); "
                f"use a rank of at most {count}, or MeanField where no correlation is wanted"
            )
        return LowRankCovariancePosterior(group, self)


class LowRankCovariancePosterior(WeightPosterior):
    """The posterior that `LowRankCovariance` makes for one module.

    Attributes:
        factors: S by parameter, each of shape `(R, *parameter shape)`.
    """

    def __init__(self, group: Group, family: LowRankCovariance) -> None:
        super().__init__(group)
        count = sum(slot.shape.numel() for slot in group.slots)
        self.rank, self.scale = max(min(family.rank, count), 1), family.scale
        if family.rank > count:
            names = ", ".join(slot.name for slot in group.slots)
            self.notes.append(f"{names}: rank {family.rank} clipped to the number of parameters, {self.rank}")
        self.factors = nn.ParameterDict()
        for slot in self.slots:
            value = slot.parameter.detach()
            entry_sd = family.scale * spread_of(value, fan_in(slot)) * self.rank**-0.5
            factor = torch.randn((self.rank, *slot.shape), dtype=value.dtype, device=value.device)
            self.factors[key_of(slot.name)] = nn.Parameter(factor * entry_sd)

    def factor(self, name: str) -> Tensor:
        """S of one parameter, by its slot name: `(R, *shape)`."""
        value: Tensor = self.factors[key_of(name)]
        return value

    def mean(self) -> dict[str, Tensor]:
        """The module's own parameters."""
        return {slot.name: slot.parameter for slot in self.slots}

    def variance(self) -> dict[str, Tensor]:
        """Row sums of squares of S."""
        return {slot.name: self.factor(slot.name).square().sum(0) for slot in self.slots}

    def gaussian_weights(self) -> dict[str, Moments]:
        """m and S, all parameters of the module under one z."""
        source = object()
        return {s.name: CorrelatedMoments(s.parameter, self.factor(s.name), source) for s in self.slots}

    @torch.no_grad()
    def rescale_spread_(self, factor: float) -> None:
        """S ← factor·S."""
        for value in self.factors.values():
            value.mul_(factor)

    @torch.no_grad()
    def reset_spread_(self, scales: Mapping[str, float], generator: torch.Generator | None = None) -> None:
        """Fresh entries of S of standard deviation `scale · scales[name] · R ** -0.5`."""
        for slot in self.slots:
            entry_sd = self.scale * scales[slot.name] * self.rank**-0.5
            self.factor(slot.name).normal_(generator=generator).mul_(entry_sd)

    def spread_rates(self) -> list[SpreadRate]:
        """S learns with its weight, slower by the rank."""
        return [SpreadRate(self.factors[key_of(s.name)], s.name, self.rank) for s in self.slots]

    def noise(self, generator: torch.Generator | None = None) -> Noise:
        """z ~ N(0, I_R), one for all parameters of the module."""
        like = self.factor(self.slots[0].name)
        return {"z": torch.randn(self.rank, generator=generator, dtype=like.dtype, device=like.device)}

    def components(self, noise: Noise) -> Components:
        """w = m + S z for each parameter."""
        z = noise["z"]
        return {
            key_of(slot.name): slot.parameter
            + (z @ self.factor(slot.name).reshape(self.rank, -1)).reshape(*z.shape[:-1], *slot.shape)
            for slot in self.slots
        }

    def realize(self, components: Components) -> dict[str, Tensor]:
        """Dense draws."""
        return {slot.name: components[key_of(slot.name)] for slot in self.slots}

    def kl(
        self, method: KLMethod = "auto", samples: int | None = None, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Infinite against any prior with a density: raises.

        Raises:
            CapabilityError: always, naming the objective to use.
        """
        raise CapabilityError(
            "LowRankCovariance has no finite KL divergence: its covariance S Sᵀ has rank "
            f"{self.rank}, and a prior with a density gives that subspace no mass. Train it by the expected loss "
            "alone (the loss of bayes(x), no KL; SGD from this initialisation regularises it), in dubito.fit by "
            'objective="expected_loss", or measure its distance by wasserstein'
        )

    def wasserstein(self, other: WeightPosterior) -> Tensor:
        """Squared 2-Wasserstein distance to another low-rank-covariance posterior of the same parameters."""
        if not isinstance(other, LowRankCovariancePosterior):
            raise CapabilityError(f"no closed form between LowRankCovariance and {type(other).__name__}")
        return wasserstein2_gaussian_factors(*self._stacked(), *other._stacked())

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Undefined for a singular covariance: raises."""
        raise CapabilityError(
            "LowRankCovariance has no density over weights (its covariance is singular); use wasserstein to compare "
            "two posteriors, or MeanField where a density is needed"
        )

    def _stacked(self) -> tuple[Tensor, Tensor]:
        mean = torch.cat([slot.parameter.reshape(-1) for slot in self.slots])
        factor = torch.cat([self.factor(s.name).reshape(self.rank, -1) for s in self.slots], dim=1)
        return mean, factor.mT
