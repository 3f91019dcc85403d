"""Rank-one multiplicative weights (Dusenberry et al. 2020, "Efficient and scalable Bayesian neural nets with rank-1
factors").

`W = W0 ⊙ r sᵀ` with `r_i ~ N(mr_i, sr_i²)` for each output and `s_j ~ N(ms_j, ss_j²)` for each input (of a kernel: for
each channel), started at 1. `W0` is the module's own parameter, without a distribution: trained (weight decay is its
prior) or frozen. The KL is that of `r` and `s` alone, 2 (m + n) variational parameters.

Exact moments:
    E W = W0 ⊙ mr msᵀ,    Var W = W0² ⊙ (mr² (ss²)ᵀ + sr² (ms²)ᵀ + sr² (ss²)ᵀ)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dubito.divergences import KLMethod
from dubito.priors import ParameterPrior, PriorSpec, WeightPrior, resolve_prior
from dubito.scalar_checks import count, positive
from dubito.weights.drawn_rank_one import RankOneWeight
from dubito.weights.family import CapabilityError, Components, Family, Group, Noise, WeightPosterior
from dubito.weights.gaussian_entries import entries_kl, sd_of, spread_of_sd
from dubito.weights.point import Point
from dubito.weights.slots import Slot

PRIOR_SCALE = 0.1  # of the default prior N(1, 0.1²) on every multiplier
_SIDES = ("left", "right")


@dataclass(frozen=True)
class RankOne(Family):
    """Gaussian multipliers of the outputs and of the inputs of every weight matrix.

    The baseline "on a frozen pretrained backbone" freezes everything first: `module.requires_grad_(False)`, then
    `bayesianize(module, {"*.weight": RankOne()})`. The multipliers are trained even so.

    Args:
        scale: initial posterior standard deviation of every multiplier (whose mean starts at 1).
        prior: on every multiplier; None takes `bayesianize`'s, else Normal(1, 0.1). A rule such as `"fan_in"` means
            the same, centred on 1.
        train_weight: whether W0 is trained; by default it is frozen as it stands.
        fallback: the family of parameters that are no matrices (biases, normalisation); None leaves them ordinary
            parameters, as in the paper.
        kl_samples: draws of a Monte Carlo KL, where the prior has no closed form or bound.

    Raises:
        ValueError: for a scale that is not positive, or a joint prior.
    """

    scale: float = 0.1
    prior: PriorSpec = None
    train_weight: bool = False
    fallback: Family | None = None
    kl_samples: int = 1

    def __post_init__(self) -> None:
        positive("scale", self.scale)
        count("kl_samples", self.kl_samples, "draws of a Monte Carlo KL")
        if isinstance(self.prior, WeightPrior):
            raise ValueError(
                "prior: RankOne takes a prior on its multipliers, such as Normal(1.0, 0.1), not a WeightPrior over "
                "dense weights, on which it has no density"
            )

    def substitute(self, slot: Slot) -> Family | None:
        """Vectors (and empty parameters) have no rows and columns: they take `fallback`."""
        if len(slot.shape) >= 2 and slot.shape.numel():
            return None
        return self.fallback or Point()

    def attach(self, group: Group) -> RankOnePosterior:
        """The posterior of one weight matrix or kernel."""
        return RankOnePosterior(group, self)


class RankOnePosterior(WeightPosterior):
    """The posterior that `RankOne` makes for one parameter.

    Attributes:
        left_mean, left_spread: mean and log standard deviation of r, over the first axis, (m,).
        right_mean, right_spread: of s, over the second axis, (n,).
    """

    collapses = (
        "has independent multipliers, whose variances the expected loss drives to zero: it ends in a point"
    )

    def __init__(self, group: Group, family: RankOne) -> None:
        super().__init__(group)
        self.family = family
        value, (rows, columns) = self.slot.parameter.detach(), self.slot.shape[:2]
        self.left_mean = nn.Parameter(value.new_ones(rows))
        self.right_mean = nn.Parameter(value.new_ones(columns))
        self.left_spread, self.right_spread = (
            nn.Parameter(spread_of_sd(torch.full_like(mean.detach(), family.scale), "log"))
            for mean in (self.left_mean, self.right_mean)
        )
        for side in _SIDES:
            prior = resolve_prior(group.prior, self.multiplier(side)[0].detach(), PRIOR_SCALE**-2, 1.0)
            if isinstance(prior, WeightPrior):
                raise ValueError(
                    f"prior: {self.slot.name!r} has random multipliers and takes a prior on them, not a WeightPrior "
                    "over dense weights; give RankOne a prior of its own"
                )
            self.priors[side] = prior

    @property
    def slot(self) -> Slot:
        """The one parameter."""
        return self.slots[0]

    def settle(self) -> None:
        """Freeze W0, unless it is to be trained."""
        if not self.family.train_weight:
            self.slot.parameter.requires_grad_(False)

    def multiplier(self, side: str) -> tuple[Tensor, Tensor]:
        """(mean, log standard deviation) of `"left"` (r) or `"right"` (s)."""
        if side == "left":
            return self.left_mean, self.left_spread
        return self.right_mean, self.right_spread

    def multiplier_prior(self, side: str) -> ParameterPrior:
        """The prior of one side's multipliers."""
        prior: Any = self.priors[side]
        return prior  # type: ignore[no-any-return]

    # ---- moments ----------------------------------------------------------------------------------------

    def mean(self) -> dict[str, Tensor]:
        """W0 ⊙ mr msᵀ."""
        return {self.slot.name: self._multiplied(self.slot.parameter, self.left_mean, self.right_mean)}

    def variance(self) -> dict[str, Tensor]:
        """W0² ⊙ (mr² (ss²)ᵀ + sr² (ms²)ᵀ + sr² (ss²)ᵀ)."""
        (r, sr), (s, ss) = (
            (mean.square(), sd_of(spread, "log").square()) for mean, spread in map(self.multiplier, _SIDES)
        )
        factor = (r + sr).unsqueeze(-1) * ss + sr.unsqueeze(-1) * s
        return {self.slot.name: self.slot.parameter.square() * self._as_kernel(factor)}

    def mean_weights(self) -> dict[str, Tensor]:
        """The product at the means."""
        return self.realize({"left": self.left_mean, "right": self.right_mean})

    @torch.no_grad()
    def rescale_spread_(self, factor: float) -> None:
        """sr, ss ← factor·sr, factor·ss."""
        for side in _SIDES:
            spread = self.multiplier(side)[1]
            spread.copy_(spread_of_sd(sd_of(spread, "log") * factor, "log"))

    def spread_parameters(self) -> list[nn.Parameter]:
        """All of the multipliers' parameters: decay would pull their means from 1 to 0."""
        return [p for p in self.parameters() if p.requires_grad]

    # ---- drawing ------------------------------------------------------------------------------------------

    def noise(self, generator: torch.Generator | None = None) -> Noise:
        """Standard normal entries for both sides."""
        return {
            side: torch.randn(m.shape, generator=generator, dtype=m.dtype, device=m.device)
            for side, m in self.noise_like().items()
        }

    def noise_like(self) -> Noise:
        """The multipliers' means."""
        return {side: self.multiplier(side)[0] for side in _SIDES}

    def components(self, noise: Noise) -> Components:
        """r and s."""
        drawn: Components = {}
        for side, eps in noise.items():
            mean, spread = self.multiplier(side)
            drawn[side] = torch.addcmul(mean, sd_of(spread, "log"), eps)
        return drawn

    def realize(self, components: Components) -> dict[str, Tensor]:
        """W0, r and s unmultiplied where an operator can use them so, else the dense draw."""
        matrix, left, right = self.slot.parameter, components["left"], components["right"]
        if len(self.slot.shape) == 2 and not isinstance(self.slot.owner, nn.RNNBase):
            return {self.slot.name: RankOneWeight.of(matrix, left, right)}
        return {self.slot.name: self._multiplied(matrix, left, right)}

    def _multiplied(self, matrix: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return matrix * self._as_kernel(left.unsqueeze(-1) * right)

    def _as_kernel(self, factor: Tensor) -> Tensor:
        """(m, n) → (m, n, 1, …), to multiply a kernel."""
        return factor.reshape(*factor.shape, *[1] * (len(self.slot.shape) - 2))

    # ---- divergences ----------------------------------------------------------------------------------------

    def kl(
        self, method: KLMethod = "auto", samples: int | None = None, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """KL of r and s to their priors, in nats; W0 has none."""
        wanted = samples if samples is not None else self.family.kl_samples
        left, right = (
            entries_kl(
                *self.multiplier(side), "log", self.multiplier_prior(side), method=method, samples=wanted,
                generator=generator,
            )
            for side in _SIDES
        )  # fmt: skip
        return {self.slot.name: left + right}

    def wasserstein(self, other: WeightPosterior) -> Tensor:
        """No closed form for products of Gaussians: raises."""
        raise CapabilityError(
            "a product of Gaussian multipliers has no closed-form 2-Wasserstein distance; use MeanField or "
            "LowRankCovariance where the distance is needed"
        )

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """No density over dense weights: raises."""
        raise CapabilityError(
            "rank-one multiplicative weights have no density over dense weights (their law has m + n dimensions in a "
            "space of m n); the KL lives on the multipliers: bayes.kl()"
        )
