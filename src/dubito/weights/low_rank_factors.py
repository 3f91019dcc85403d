"""Low-rank factors: weight matrices `W = A Bᵀ` with Gaussian factors (singular Bayesian neural networks).

`A` (m, r) and `B` (n, r) have independent Gaussian entries; `W` has rank at most r, so q(W) has no density and
all KLs live on the factors. The dense weight is never stored, and never formed where the operator has a rule
(`x W ᵀ = (x B) Aᵀ`): 2 r (m + n) variational parameters in place of 2 m n.

Exact moments (entries that share neither row nor column are uncorrelated):
    E W = mA mBᵀ,    Var W = mA² (sB²)ᵀ + sA² (mB²)ᵀ + sA² (sB²)ᵀ
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dubito.divergences import KLMethod
from dubito.priors import ParameterPrior, PriorSpec, WeightPrior, resolve_prior
from dubito.weights.drawn import without_autocast
from dubito.weights.drawn_factors import EmbeddingRows, FactoredWeight
from dubito.weights.drawn_gaussian import FlipoutWeight, LocalWeight
from dubito.weights.family import CapabilityError, Components, Family, Group, Noise, WeightPosterior
from dubito.weights.gaussian_entries import (
    Pending,
    draw_with_kl,
    entries_kl,
    moments_with_kl,
    sd_of,
    spread_of_sd,
)
from dubito.weights.initial_scale import fan_in
from dubito.weights.mean_field import MeanField
from dubito.weights.slots import Slot

Estimator = Literal["weights", "local", "flipout"]


@dataclass(frozen=True)
class LowRankFactors(Family):
    """Gaussian factors of every weight matrix; kernels are taken as (out, in·k) matrices.

    Args:
        rank: r. Above min(m, n) it is an error for a parameter named alone, else it is clipped, and said. At or
            above the break-even rank mn/(m+n) factors save nothing, which is said too.
        init: `"random"` draws new factors whose product has the Glorot variance (the given weights are thrown
            away), `"svd"` takes the given weights' best rank-r approximation. There is no default.
        prior: on every entry of both factors; None takes `bayesianize`'s, else a rank-aware Gaussian of standard
            deviation (s_W² / r)^(1/4), under which a dense entry has the variance s_W² it was initialised for.
        scale: initial posterior standard deviation as a fraction of that scale.
        estimator: `"weights"` (one draw of both factors a call), `"local"` (two-stage local reparametrisation:
            `h ~ N(x mB, x² sB²)`, then `y ~ N(h mAᵀ, h² (sA²)ᵀ)`, exact for each example) or `"flipout"`.
        fallback: the family of parameters that are no matrices (biases, normalisation); None is
            `MeanField` with the same scale and estimator.
        kl_samples: draws of a Monte Carlo KL, where the prior has no closed form or bound.

    Raises:
        ValueError: for a rank below 1, an unknown `init` or `estimator`, a scale that is not positive.
    """

    rank: int
    init: Literal["random", "svd"] | None = None
    prior: PriorSpec = None
    scale: float = 0.1
    estimator: Estimator = "weights"
    fallback: Family | None = None
    kl_samples: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"rank={self.rank!r} must be a whole number of at least 1")
        if self.init not in ("random", "svd"):
            raise ValueError(
                f'init={self.init!r}: it has no default; give init="random" (new factors, the given weights are thrown '
                'away) or init="svd" (the given weights\' best approximation of that rank)'
            )
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(
                f"scale={self.scale!r} must be a positive fraction of the factor scale, such as 0.1"
            )
        if self.estimator not in ("weights", "local", "flipout"):
            raise ValueError(f'estimator={self.estimator!r} must be "weights", "local" or "flipout"')
        if isinstance(self.prior, WeightPrior):
            raise ValueError(
                "prior: LowRankFactors takes a prior on the factors' entries (such as Normal(0.0, 1.0)), "
                "not a WeightPrior over dense weights, since a product of factors has no density"
            )

    def substitute(self, slot: Slot) -> Family | None:
        """Vectors (and empty parameters) have no rank: they take `fallback`."""
        if len(slot.shape) >= 2 and slot.shape.numel():
            return None
        return self.fallback or MeanField(scale=self.scale, estimator=self.estimator)

    def attach(self, group: Group) -> LowRankFactorsPosterior:
        """The posterior of one weight matrix."""
        (slot,) = group.slots
        rows, columns = matrix_shape(slot)
        if self.rank > min(rows, columns) and group.alone:
            raise ValueError(
                f"rank={self.rank} is above min(m, n) = {min(rows, columns)} of {slot.name!r} ({rows} × {columns} as a "
                f"matrix); use a rank of at most {min(rows, columns)}"
            )
        if self.estimator == "local" and slot.tied:
            raise ValueError(
                f'estimator="local" cannot serve {slot.name!r}, which is tied to {", ".join(slot.aliases[1:])}: '
                'each use would draw a different weight. Give it estimator="weights" by a pattern of its own'
            )
        return LowRankFactorsPosterior(group, self)


class LowRankFactorsPosterior(WeightPosterior):
    """The posterior that `LowRankFactors` makes for one weight matrix.

    Attributes:
        left_mean, left_spread: mean and log standard deviation of A, (m, r).
        right_mean, right_spread: of B, (n, r).
        notes: what was decided on the user's behalf, in words.
    """

    takes_over = True
    estimators = ("weights", "local", "flipout")
    collapses = (
        "has independent factor entries, whose variances the expected loss drives to zero: it ends in a point"
    )

    def __init__(self, group: Group, family: LowRankFactors) -> None:
        super().__init__(group)
        slot = self.slot
        self.family = family
        self.rank, self.notes = _adapted_rank(slot, family.rank)
        left, right, entry_variance = _initial_factors(slot, self.rank, family.init)
        factor_scale = (entry_variance / self.rank) ** 0.25
        self.left_mean, self.right_mean = nn.Parameter(left), nn.Parameter(right)
        self.left_spread = nn.Parameter(
            spread_of_sd(torch.full_like(left, family.scale * factor_scale), "log")
        )
        self.right_spread = nn.Parameter(
            spread_of_sd(torch.full_like(right, family.scale * factor_scale), "log")
        )
        for side, value in (("left", left), ("right", right)):
            prior = resolve_prior(group.prior, value, factor_scale**-2, 0.0)
            if isinstance(prior, WeightPrior):
                raise ValueError(
                    f"prior: {slot.name!r} is factored and takes a prior on its factors' entries, not a "
                    "WeightPrior over dense weights; give LowRankFactors a prior of its own"
                )
            self.priors[side] = prior
        for parameter in self.parameters():
            parameter.requires_grad_(
                slot.requires_grad or parameter is self.left_spread or parameter is self.right_spread
            )
        self._pending: dict[str, Pending] = {}

    @property
    def slot(self) -> Slot:
        """The one parameter."""
        return self.slots[0]

    def factor(self, side: str) -> tuple[nn.Parameter, nn.Parameter]:
        """(mean, log standard deviation) of the factor `"left"` (A) or `"right"` (B)."""
        if side == "left":
            return self.left_mean, self.left_spread
        return self.right_mean, self.right_spread

    def factor_prior(self, side: str) -> ParameterPrior:
        """The prior of a factor's entries."""
        prior: Any = self.priors[side]
        return prior  # type: ignore[no-any-return]

    def spread_parameters(self) -> list[nn.Parameter]:
        """The log standard deviations; the factors' means are ordinary weights."""
        return [p for p in (self.left_spread, self.right_spread) if p.requires_grad]

    # ---- moments ----------------------------------------------------------------------------------------

    def mean(self) -> dict[str, Tensor]:
        """mA mBᵀ, in the parameter's shape."""
        return {self.slot.name: (self.left_mean @ self.right_mean.mT).reshape(self.slot.shape)}

    def variance(self) -> dict[str, Tensor]:
        """mA² (sB²)ᵀ + sA² (mB²)ᵀ + sA² (sB²)ᵀ."""
        left, right = self.left_mean.square(), self.right_mean.square()
        left_variance = sd_of(self.left_spread, "log").square()
        right_variance = sd_of(self.right_spread, "log").square()
        value = (left + left_variance) @ right_variance.mT + left_variance @ right.mT
        return {self.slot.name: value.reshape(self.slot.shape)}

    def mean_weights(self) -> dict[str, Tensor]:
        """The product of the factors' means, kept as factors."""
        return {self.slot.name: self._product(self.left_mean, self.right_mean)}

    @torch.no_grad()
    def rescale_spread_(self, factor: float) -> None:
        """sA, sB ← factor·sA, factor·sB."""
        for spread in (self.left_spread, self.right_spread):
            spread.copy_(spread_of_sd(sd_of(spread, "log") * factor, "log"))

    # ---- drawing ------------------------------------------------------------------------------------------

    def noise(self, generator: torch.Generator | None = None) -> Noise:
        """Standard normal entries for both factors."""
        return {
            side: torch.randn(m.shape, generator=generator, dtype=m.dtype, device=m.device)
            for side, m in self.noise_like().items()
        }

    def noise_like(self) -> Noise:
        """The factors' means."""
        return {"left": self.left_mean, "right": self.right_mean}

    def components(self, noise: Noise) -> Components:
        """A and B."""
        return {
            side: torch.addcmul(self.factor(side)[0], sd_of(self.factor(side)[1], "log"), eps)
            for side, eps in noise.items()
        }

    def realize(self, components: Components) -> dict[str, Tensor]:
        """The drawn factors, as a product."""
        return {self.slot.name: self._product(components["left"], components["right"])}

    def training_weights(self) -> dict[str, Tensor]:
        """One draw by the family's estimator; of an embedding only the rows that are looked up."""
        name = self.slot.name
        if isinstance(self.slot.owner, nn.Embedding) and not self.slot.tied:
            sd = sd_of(self.left_spread, "log")
            return {name: EmbeddingRows.of(self.left_mean, sd, self._drawn("right"))}
        estimated = self.estimated_weights()
        if estimated is not None:
            return estimated
        return {name: self._product(self._drawn("left"), self._drawn("right"))}

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        """Unmultiplied; a recurrent layer's fused kernel takes the dense weight, so it is made at once."""
        if isinstance(self.slot.owner, nn.RNNBase):
            with without_autocast(left.device.type):
                return left @ right.mT
        return FactoredWeight.of(left, right, self.slot.shape)

    def estimated_weights(self, estimator: str | None = None) -> dict[str, Tensor] | None:
        """Factors whose products draw their outputs (two stages), or flip signs."""
        estimator = estimator or self.family.estimator
        if estimator == "weights" or isinstance(self.slot.owner, nn.Embedding):
            return None
        make = self._local if estimator == "local" else self._flipped
        return {self.slot.name: FactoredWeight.of(make("left"), make("right"), self.slot.shape)}

    def _local(self, side: str) -> LocalWeight:
        mean, variance, pending = moments_with_kl(*self.factor(side), "log", self.factor_prior(side))
        if pending is not None:
            self._pending[side] = pending
        return LocalWeight.of_variance(mean, variance)

    def _drawn(self, side: str) -> Tensor:
        mean, spread = self.factor(side)
        made = draw_with_kl(mean, spread, self.factor_prior(side))
        if made is None:
            sd = sd_of(spread, "log")
            return torch.addcmul(mean, sd, torch.randn_like(sd))
        self._pending[side] = made[1]
        return made[0]

    def _flipped(self, side: str) -> FlipoutWeight:
        mean, spread = self.factor(side)
        sd = sd_of(spread, "log")
        return FlipoutWeight.of(mean, sd * torch.randn_like(sd))

    # ---- divergences ----------------------------------------------------------------------------------------

    def kl(
        self, method: KLMethod = "auto", samples: int | None = None, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """KL of both factors, in nats: an upper bound of the KL between the laws of W (data processing)."""
        pending, self._pending = self._pending, {}
        count = samples if samples is not None else self.family.kl_samples
        total: Tensor | None = None
        for side in ("left", "right"):
            value = entries_kl(
                *self.factor(side),
                "log",
                self.factor_prior(side),
                method=method,
                samples=count,
                generator=generator,
                pending=pending.get(side),
            )
            total = value if total is None else total + value
        assert total is not None
        return {self.slot.name: total}

    def wasserstein(self, other: WeightPosterior) -> Tensor:
        """No closed form for products of Gaussian factors: raises."""
        raise CapabilityError(
            "a product of Gaussian factors has no closed-form 2-Wasserstein distance; compare the factors' moments, or "
            "use LowRankCovariance or MeanField where the distance is needed"
        )

    def log_prob(self, weights: Any) -> Tensor:
        """No density over dense weights: raises."""
        raise CapabilityError(
            "a product of factors has no density over dense weights (its law sits on matrices of rank at most "
            f"{self.rank}); the KL lives on the factors: bayes.kl()"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pending": {}}  # part of a graph, and of no copy

    def extra_repr(self) -> str:
        """Parameter, rank and estimator."""
        return f'{super().extra_repr()}, rank={self.rank}, estimator="{self.family.estimator}"'


def matrix_shape(slot: Slot) -> tuple[int, int]:
    """(m, n): the parameter as a matrix, first dimension by the rest."""
    return slot.shape[0], slot.shape.numel() // slot.shape[0]


def _adapted_rank(slot: Slot, rank: int) -> tuple[int, list[str]]:
    rows, columns = matrix_shape(slot)
    notes = []
    if rank > min(rows, columns):
        notes.append(f"{slot.name}: rank {rank} clipped to min(m, n) = {min(rows, columns)}")
        rank = min(rows, columns)
    break_even = rows * columns / (rows + columns)
    if rank >= break_even:
        notes.append(
            f"{slot.name}: rank {rank} is at or above the break-even rank {break_even:.1f} of a {rows} × {columns} "
            "matrix, where factors hold no fewer parameters than the dense weight"
        )
    return rank, notes


def _initial_factors(slot: Slot, rank: int, init: str | None) -> tuple[Tensor, Tensor, float]:
    """(A, B, variance of a dense entry): by variance matching, or by the singular value decomposition."""
    rows, columns = matrix_shape(slot)
    given = slot.parameter.detach()
    fan = fan_in(slot)
    glorot = 2.0 / (fan + (rows if fan == columns and not isinstance(slot.owner, nn.Embedding) else fan))
    if init == "svd":
        matrix = given.reshape(rows, columns)
        u, s, vh = torch.linalg.svd(
            matrix.float() if matrix.dtype.itemsize < 4 else matrix, full_matrices=False
        )
        root = s[:rank].sqrt()
        variance = float(given.double().square().mean()) or glorot
        return (
            (u[:, :rank] * root).to(given.dtype),
            (vh[:rank].mT * root).to(given.dtype).contiguous(),
            variance,
        )
    scale = (glorot / rank) ** 0.25
    left = torch.randn(rows, rank, dtype=given.dtype, device=given.device) * scale
    right = torch.randn(columns, rank, dtype=given.dtype, device=given.device) * scale
    return left, right, glorot
