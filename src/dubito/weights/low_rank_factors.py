"""Low-rank factors: weight matrices `W = A Bᵀ` with random factors (singular Bayesian neural networks).

`A` (m, r) and `B` (n, r) have independent entries, Gaussian or Laplace; `W` has rank at most r, so q(W) has no density
and all KLs live on the factors. The dense weight is never stored, and never formed where the operator has a rule
(`x Wᵀ = (x B) Aᵀ`): 2 r (m + n) variational parameters in place of 2 m n.

Exact moments (entries that share neither row nor column are uncorrelated):
    E W = mA mBᵀ,    Var W = mA² (sB²)ᵀ + sA² (mB²)ᵀ + sA² (sB²)ᵀ
Covariances and the moments of outputs are in `factor_moments.py`, the scale freedom between the factors in
`factor_balance.py`.
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
from dubito.weights.drawn_block_factors import BlockFactoredWeight, multiply
from dubito.weights.drawn_factors import EmbeddingRows, FactoredWeight
from dubito.weights.drawn_gaussian import FlipoutWeight, LocalWeight
from dubito.weights.factor_entries import (
    FactorLaw,
    factor_kl,
    law_of,
    scale_of,
    spread_of,
    standard_noise,
    variance_of,
)
from dubito.weights.factor_initialization import (
    Blocks,
    Init,
    Rank,
    adapted_rank,
    block_count,
    check_rank,
    heads_of,
    initial_factors,
    matrix_shape,
)
from dubito.weights.family import CapabilityError, Components, Family, Group, Noise, WeightPosterior
from dubito.weights.gaussian_entries import Pending, draw_with_kl, moments_with_kl, spread_of_sd
from dubito.weights.gaussian_weights import FactoredMoments, Moments
from dubito.weights.mean_field import MeanField
from dubito.weights.slots import Slot

Estimator = Literal["weights", "local", "flipout"]


@dataclass(frozen=True)
class LowRankFactors(Family):
    """Random factors of every weight matrix; kernels are taken as (out, in·k) matrices.

    Args:
        rank: r. Above min(m, n) it is an error for a parameter named alone, else it is clipped, and said. At or
            above the break-even rank mn/(m+n) factors save nothing, which is said too. A float in (0, 1) is that
            fraction of each matrix's break-even rank; `"auto"` (with `init="svd"`) the smallest rank that holds
            `energy` of the sum of squared singular values of the given weights.
        init: `"random"` draws new factors whose product has the Glorot variance s_W² = 2/(m+n), `"he"` the He variance
            2/n (the given weights are thrown away), `"svd"` takes the given weights' best rank-r approximation.
            There is no default.
        prior: on every entry of both factors; None takes `bayesianize`'s, else a rank-aware Gaussian of standard
            deviation (s_W² / r)^(1/4), under which a dense entry has the variance s_W² it was initialised for.
        scale: initial posterior standard deviation as a fraction of that scale.
        estimator: `"weights"` (one draw of both factors a call), `"local"` (two-stage local reparametrisation:
            `h ~ N(x mB, x² sB²)`, then `y ~ N(h mAᵀ, h² (sA²)ᵀ)`, exact for each example) or `"flipout"`.
        fallback: the family of parameters that are no matrices (biases, normalisation); None is
            `MeanField` with the same scale and estimator.
        kl_samples: draws of a Monte Carlo KL, where the prior has no closed form or bound.
        distribution: of the factors' entries: `"gaussian"`, or `"laplace"` (same initial standard deviation; no
            `"local"` estimator, whose first stage would not be Gaussian).
        energy: the share that `rank="auto"` keeps.
        damping: multiplies the means of factors that are drawn anew, so that dense entries start at damping⁴ of that
            variance (the paper: 0.32 to 0.85).
        blocks: h > 1 splits the rows (outputs) into h blocks, each with independent factors of rank r, as heads of
            attention have; `"heads"` takes the number from `nn.MultiheadAttention` (3 times its heads for a packed
            `in_proj_weight`), 1 elsewhere.

    Raises:
        ValueError: for a rank below 1, an unknown `init`, `estimator` or `distribution`, a scale that is not positive.
    """

    rank: Rank
    init: Init | None = None
    prior: PriorSpec = None
    scale: float = 0.1
    estimator: Estimator = "weights"
    fallback: Family | None = None
    kl_samples: int = 1
    distribution: FactorLaw = "gaussian"
    energy: float = 0.9
    damping: float = 1.0
    blocks: Blocks = 1

    def __post_init__(self) -> None:
        if self.init not in ("random", "he", "svd"):
            raise ValueError(
                f'init={self.init!r}: it has no default; give init="random" (new factors, the given weights are thrown '
                'away; "he" for the He variance) or init="svd" (the given weights\' best approximation of that rank)'
            )
        check_rank(self.rank, self.init, self.energy)
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(
                f"scale={self.scale!r} must be a positive fraction of the factor scale, such as 0.1"
            )
        if self.estimator not in ("weights", "local", "flipout"):
            raise ValueError(f'estimator={self.estimator!r} must be "weights", "local" or "flipout"')
        self._check_options()
        if isinstance(self.prior, WeightPrior):
            raise ValueError(
                "prior: LowRankFactors takes a prior on the factors' entries (such as Normal(0.0, 1.0)), "
                "not a WeightPrior over dense weights, since a product of factors has no density"
            )

    def _check_options(self) -> None:
        if self.distribution not in ("gaussian", "laplace"):
            raise ValueError(f'distribution={self.distribution!r} must be "gaussian" or "laplace"')
        if self.distribution == "laplace" and self.estimator == "local":
            raise ValueError(
                'estimator="local" draws x B from a Gaussian, which a sum of Laplace variables is not: use '
                'estimator="flipout" or "weights", or distribution="gaussian"'
            )
        if not (math.isfinite(self.damping) and self.damping > 0):
            raise ValueError(f"damping={self.damping!r} must be positive; 1 matches the variance")
        if self.damping != 1.0 and self.init == "svd":
            raise ValueError(
                f'damping={self.damping:g} is for factors drawn anew; init="svd" keeps the given weights'
            )
        whole = isinstance(self.blocks, int) and not isinstance(self.blocks, bool) and self.blocks >= 1
        if self.blocks != "heads" and not whole:
            raise ValueError(f'blocks={self.blocks!r} must be a whole number of at least 1, or "heads"')

    def substitute(self, slot: Slot) -> Family | None:
        """Vectors (and empty parameters) have no rank: they take `fallback`."""
        if len(slot.shape) >= 2 and slot.shape.numel():
            return None
        return self.fallback or MeanField(scale=self.scale, estimator=self.estimator)

    def attach(self, group: Group) -> LowRankFactorsPosterior:
        """The posterior of one weight matrix."""
        (slot,) = group.slots
        blocks = block_count(slot, self.blocks)
        rows, columns = matrix_shape(slot)
        rows //= blocks
        if isinstance(self.rank, int) and self.rank > min(rows, columns) and group.alone:
            raise ValueError(
                f"rank={self.rank} is above min(m, n) = {min(rows, columns)} of {slot.name!r} ({rows} × {columns} as a "
                f"matrix{' of one block' if blocks > 1 else ''}); use a rank of at most {min(rows, columns)}"
            )
        if self.estimator == "local" and slot.tied:
            raise ValueError(
                f'estimator="local" cannot serve {slot.name!r}, which is tied to {", ".join(slot.aliases[1:])}: '
                'each use would draw a different weight. Give it estimator="weights" by a pattern of its own'
            )
        return LowRankFactorsPosterior(group, self, blocks)


class LowRankFactorsPosterior(WeightPosterior):
    """The posterior that `LowRankFactors` makes for one weight matrix.

    Attributes:
        left_mean, left_spread: mean and log standard deviation (Laplace: log b) of A, (m, r).
        right_mean, right_spread: of B, (n, r); with h blocks of rows their factors stand side by side, (n, h·r).
        rank, blocks: r and h.
        fixed_row: the row of A that is not drawn and has no KL (of a padding token), or None.
        law: of the entries, "gaussian" or "laplace".
        notes: what was decided on the user's behalf, in words.
    """

    takes_over = True
    estimators = ("weights", "local", "flipout")
    collapses = (
        "has independent factor entries, whose variances the expected loss drives to zero: it ends in a point"
    )

    def __init__(self, group: Group, family: LowRankFactors, blocks: int) -> None:
        super().__init__(group)
        slot = self.slot
        assert family.init is not None
        self.family, self.blocks = family, blocks
        self.law: FactorLaw = family.distribution
        self.rank, self.notes = adapted_rank(slot, family.rank, blocks, family.energy)
        if group.alone and family.blocks == "heads" and heads_of(slot) is None:
            self.notes.append(
                f'{slot.name}: blocks="heads" knows the heads of nn.MultiheadAttention alone, so this is one block; '
                "give their number, such as blocks=4"
            )
        left, right, entry_variance = initial_factors(slot, self.rank, family.init, blocks, family.damping)
        self.fixed_row = _padding_row(slot)
        if self.fixed_row is not None and family.init != "svd":
            left[self.fixed_row] = 0.0
        factor_scale = (entry_variance / self.rank) ** 0.25
        self.left_mean, self.right_mean = nn.Parameter(left), nn.Parameter(right)
        sd = family.scale * factor_scale
        self.left_spread = nn.Parameter(spread_of(torch.full_like(left, sd), self.law))
        self.right_spread = nn.Parameter(spread_of(torch.full_like(right, sd), self.law))
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
        """(mean, log standard deviation or Laplace's log b) of the factor `"left"` (A) or `"right"` (B)."""
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

    def scale(self, side: str) -> Tensor:
        """What the factor's standard noise is multiplied with; 0 in a padding token's row, which is not drawn."""
        scale = scale_of(self.factor(side)[1])
        return scale if self._fixed(side) is None else _without_row(scale, self.fixed_row)

    def moments(self, side: str) -> tuple[Tensor, Tensor]:
        """Mean and variance of a factor's entries."""
        mean, spread = self.factor(side)
        variance = variance_of(spread, self.law)
        return mean, variance if self._fixed(side) is None else _without_row(variance, self.fixed_row)

    def mean(self) -> dict[str, Tensor]:
        """mA mBᵀ, in the parameter's shape."""
        return {self.slot.name: multiply(self.left_mean, self.right_mean).reshape(self.slot.shape)}

    def variance(self) -> dict[str, Tensor]:
        """mA² (sB²)ᵀ + sA² (mB²)ᵀ + sA² (sB²)ᵀ."""
        (left, left_variance), (right, right_variance) = self.moments("left"), self.moments("right")
        left, right = left.square(), right.square()
        value = multiply(left + left_variance, right_variance) + multiply(left_variance, right)
        return {self.slot.name: value.reshape(self.slot.shape)}

    def gaussian_weights(self) -> dict[str, Moments]:
        """Both factors' moments: two bilinear steps where an operator has a rule for them."""
        if self.blocks > 1:
            return super().gaussian_weights()
        left, right = Moments(*self.moments("left")), Moments(*self.moments("right"))
        return {self.slot.name: FactoredMoments(left, right, self.slot.shape)}

    def mean_weights(self) -> dict[str, Tensor]:
        """The product of the factors' means, kept as factors."""
        return {self.slot.name: self._product(self.left_mean, self.right_mean)}

    @torch.no_grad()
    def rescale_spread_(self, factor: float) -> None:
        """sA, sB ← factor·sA, factor·sB."""
        for spread in (self.left_spread, self.right_spread):
            spread.copy_(spread_of_sd(scale_of(spread) * factor, "log"))

    # ---- drawing ------------------------------------------------------------------------------------------

    def noise(self, generator: torch.Generator | None = None) -> Noise:
        """Standard entries for both factors."""
        means = {"left": self.left_mean, "right": self.right_mean}
        return {side: standard_noise(m.shape, m, self.law, generator) for side, m in means.items()}

    def noise_like(self) -> Noise | None:
        """The factors' means, where they are Gaussian."""
        return {"left": self.left_mean, "right": self.right_mean} if self.law == "gaussian" else None

    def components(self, noise: Noise) -> Components:
        """A and B."""
        return {
            side: torch.addcmul(self.factor(side)[0], self.scale(side), eps) for side, eps in noise.items()
        }

    def realize(self, components: Components) -> dict[str, Tensor]:
        """The drawn factors, as a product."""
        return {self.slot.name: self._product(components["left"], components["right"])}

    def training_weights(self) -> dict[str, Tensor]:
        """One draw by the family's estimator; of an embedding only the rows that are looked up."""
        name = self.slot.name
        if (
            isinstance(self.slot.owner, nn.Embedding)
            and not self.slot.tied
            and _rows_can_be_told(self.left_mean)
        ):
            scale = scale_of(self.left_spread)
            drawn = self._drawn("right")
            return {name: EmbeddingRows.of(self.left_mean, scale, drawn, self.law, self.fixed_row)}
        estimated = self.estimated_weights()
        if estimated is not None:
            return estimated
        return {name: self._product(self._drawn("left"), self._drawn("right"))}

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        """Unmultiplied; a recurrent layer's fused kernel takes the dense weight, so it is made at once."""
        if isinstance(self.slot.owner, nn.RNNBase):
            with without_autocast(left.device.type):
                return multiply(left, right)
        return (FactoredWeight if self.blocks == 1 else BlockFactoredWeight).of(left, right, self.slot.shape)

    def estimated_weights(self, estimator: str | None = None) -> dict[str, Tensor] | None:
        """Factors whose products draw their outputs (two stages), or flip signs."""
        estimator = estimator or self.family.estimator
        if estimator == "weights" or isinstance(self.slot.owner, nn.Embedding):
            return None
        if estimator == "local" and self.law != "gaussian":
            return None  # the first stage would not be Gaussian
        make = self._local if estimator == "local" else self._flipped
        weight = FactoredWeight if self.blocks == 1 else BlockFactoredWeight
        return {self.slot.name: weight.of(make("left"), make("right"), self.slot.shape)}

    def _local(self, side: str) -> LocalWeight:
        mean, variance, pending = moments_with_kl(*self.factor(side), "log", self.factor_prior(side))
        if pending is not None:
            self._pending[side] = pending
        return LocalWeight.of_variance(mean, variance)

    def _drawn(self, side: str) -> Tensor:
        mean, spread = self.factor(side)
        if self.law == "gaussian" and self._fixed(side) is None:
            made = draw_with_kl(mean, spread, self.factor_prior(side))
            if made is not None:
                self._pending[side] = made[1]
                return made[0]
        return torch.addcmul(mean, self.scale(side), standard_noise(mean.shape, mean, self.law))

    def _flipped(self, side: str) -> FlipoutWeight:
        mean = self.factor(side)[0]
        return FlipoutWeight.of(mean, self.scale(side) * standard_noise(mean.shape, mean, self.law))

    def _fixed(self, side: str) -> int | None:
        return self.fixed_row if side == "left" else None

    def _counted(self, side: str) -> tuple[Tensor, Tensor]:
        """Mean and spread of the rows that have a KL: not a padding token's."""
        mean, spread = self.factor(side)
        row = self._fixed(side)
        if row is None:
            return mean, spread
        return torch.cat([mean[:row], mean[row + 1 :]]), torch.cat([spread[:row], spread[row + 1 :]])

    # ---- divergences ----------------------------------------------------------------------------------------

    def balance_(self) -> float:
        """Rescale the factors against each other where the KL is least (`factor_balance.py`): nats saved."""
        from dubito.weights.factor_balance import balance_

        return balance_(self)

    def kl(
        self, method: KLMethod = "auto", samples: int | None = None, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """KL of both factors, in nats: an upper bound of the KL between the laws of W (data processing)."""
        pending, self._pending = self._pending, {}
        count = samples if samples is not None else self.family.kl_samples
        total: Tensor | None = None
        for side in ("left", "right"):
            value = factor_kl(
                *self._counted(side),
                self.law,
                self.factor_prior(side),
                method=method,
                samples=count,
                generator=generator,
                pending=pending.get(side),
            )
            total = value if total is None else total + value
        assert total is not None
        return {self.slot.name: total}

    def factor_log_prob(self, factors: Components) -> Tensor:
        """log q(A) + log q(B) in nats, of drawn factors as `components` gives them; leading dimensions kept."""
        terms = [law_of(*self.factor(s), self.law).log_prob(factors[s]) for s in ("left", "right")]
        if self.fixed_row is not None:
            terms[0] = _without_row(terms[0], self.fixed_row)
        return sum(t.sum((-2, -1)) for t in terms)  # type: ignore[return-value]

    def wasserstein(self, other: WeightPosterior) -> Tensor:
        """No closed form for products of random factors: raises."""
        raise CapabilityError(
            "a product of random factors has no closed-form 2-Wasserstein distance; compare the factors' moments, or "
            "use LowRankCovariance or MeanField where the distance is needed"
        )

    def log_prob(self, weights: Any) -> Tensor:
        """No density over dense weights: raises."""
        raise CapabilityError(
            "a product of factors has no density over dense weights (its law sits on matrices of rank at most "
            f"{self.rank}); the KL lives on the factors: bayes.kl(), and their density is factor_log_prob"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pending": {}}  # part of a graph, and of no copy

    def extra_repr(self) -> str:
        """Parameter, rank and estimator."""
        split = f", blocks={self.blocks}" if self.blocks > 1 else ""
        law = f", {self.law}" if self.law != "gaussian" else ""
        return f'{super().extra_repr()}, rank={self.rank}{split}{law}, estimator="{self.family.estimator}"'


def _padding_row(slot: Slot) -> int | None:
    """The row of an embedding's padding token: it never trains, so it is neither drawn nor counted."""
    if slot.tied or not isinstance(slot.owner, nn.Embedding | nn.EmbeddingBag):
        return None
    return slot.owner.padding_idx


def _rows_can_be_told(table: Tensor) -> bool:
    """Whether rows may be drawn as they are looked up: not where tokens have no values (meta), or are batched."""
    return not (table.is_meta or torch._C._are_functorch_transforms_active())


def _without_row(values: Tensor, row: int | None) -> Tensor:
    """The same with zeros in one row."""
    index = torch.tensor([row], device=values.device)
    return values.index_fill(-2, index, 0.0)
