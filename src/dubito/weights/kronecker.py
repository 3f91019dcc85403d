"""Kronecker-factored covariance: `W = M + S_out Z S_inᵀ`, jointly over a weight matrix and its bias.

The bias is an extra input column of the matrix, so `Cov(vec W) = C_in ⊗ C_out` with `C_in = S_in S_inᵀ` and
`C_out = S_out S_outᵀ`. There for comparison: the two factors multiply each other, which the theory of the implicit
bias does not cover: the expected loss alone shrinks also what no data speak of, by an amount that depends on how the
same covariance was split between the factors, and up to the whole spread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from dubito.divergences import KLMethod
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
from dubito.weights.gaussian_weights import KroneckerBias, KroneckerMoments, Moments
from dubito.weights.initial_scale import fan_in, spread_of
from dubito.weights.matrix_layout import bias_name, from_matrix, inputs_first, matrix_size
from dubito.weights.slots import Slot


@dataclass(frozen=True)
class KroneckerCovariance(Family):
    """Gaussian weight matrices with a Kronecker-factored covariance, the bias folded in as an input column.

    A module with several matrices (`nn.LSTM`) has one such Gaussian for each. A vector without a matrix is a
    matrix of one column.

    Args:
        rank_in: columns of S_in, at most the inputs (times kernel area, plus one for the bias).
        rank_out: columns of S_out, at most the outputs. Ranks above are an error for one parameter named alone, else
            clipped, and said.
        scale: multiplies the initial spread. At 1 the marginal variance of a draw's deviation equals the variance
            with which the mean was initialised: entries of S_in have that standard deviation times `rank_in ** -0.5`,
            entries of S_out have `rank_out ** -0.5`.

    Raises:
        ValueError: for a rank below 1, or a scale that is not positive.
    """

    granularity: ClassVar[Granularity] = "module"
    rank_in: int
    rank_out: int
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name, rank in (("rank_in", self.rank_in), ("rank_out", self.rank_out)):
            if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
                raise ValueError(f"{name}={rank!r} must be a whole number of at least 1")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale={self.scale!r} must be positive; 1 starts at the prior")

    def attach(self, group: Group) -> KroneckerCovariancePosterior:
        """The posterior of one module's parameters."""
        return KroneckerCovariancePosterior(group, self)


@dataclass(frozen=True)
class _Unit:
    """A weight matrix and the bias folded into it."""

    weight: Slot
    bias: Slot | None

    @property
    def key(self) -> str:
        return key_of(self.weight.name)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def size(self) -> tuple[int, int]:
        rows, columns = matrix_size(self.weight)
        return rows, columns + (self.bias is not None)


class KroneckerCovariancePosterior(WeightPosterior):
    """The posterior that `KroneckerCovariance` makes for one module.

    Attributes:
        inputs: S_in by weight, `(inputs · kernel area [+ 1], rank_in)`; the last row is the bias's.
        outputs: S_out by weight, `(outputs, rank_out)`.
        notes: ranks that were clipped.
    """

    collapses = (
        "is a product of two factors, so the expected loss shrinks what no data speak of with what they do: the "
        "implicit bias is lost, up to a collapse to a point"
    )

    def __init__(self, group: Group, family: KroneckerCovariance) -> None:
        super().__init__(group)
        self.scale = family.scale
        self.units = _units(group.slots)
        self.inputs, self.outputs = nn.ParameterDict(), nn.ParameterDict()
        alone = group.alone and len(group.slots) == 1
        for unit in self.units:
            rows, columns = unit.size
            rank_out = self._fitting("rank_out", family.rank_out, rows, unit, alone)
            rank_in = self._fitting("rank_in", family.rank_in, columns, unit, alone)
            like = unit.weight.parameter.detach()
            self.inputs[unit.key] = nn.Parameter(like.new_empty(columns, rank_in))
            self.outputs[unit.key] = nn.Parameter(like.new_empty(rows, rank_out))
        scales = {s.name: spread_of(s.parameter.detach(), fan_in(s)) for s in self.slots}
        self.reset_spread_(scales)

    def _fitting(self, name: str, rank: int, limit: int, unit: _Unit, alone: bool) -> int:
        if rank <= limit:
            return rank
        if alone:
            raise ValueError(
                f"{name}={rank} is above the {limit} that {unit.weight.name!r} has; use at most {limit}"
            )
        self.notes.append(f"{unit.weight.name}: {name} {rank} clipped to {limit}")
        return limit

    # ---- moments ----------------------------------------------------------------------------------------

    def mean(self) -> dict[str, Tensor]:
        """The module's own parameters."""
        return {slot.name: slot.parameter for slot in self.slots}

    def variance(self) -> dict[str, Tensor]:
        """Products of the row sums of squares of S_out and S_in."""
        result: dict[str, Tensor] = {}
        for unit in self.units:
            rows, columns = (f[unit.key].square().sum(1) for f in (self.outputs, self.inputs))
            result.update(_split(unit, torch.outer(rows, columns)))
        return result

    def gaussian_weights(self) -> dict[str, Moments]:
        """The factors, weight and bias under one Z; of weights stored (inputs, outputs) the marginal variances."""
        result = super().gaussian_weights()
        for unit in self.units:
            slot = unit.weight
            if len(slot.shape) < 2 or inputs_first(slot):
                continue
            left, right = self.outputs[unit.key].square().sum(1), self.inputs[unit.key].mT
            kernels = right[:, : matrix_size(slot)[1]].reshape(-1, *slot.shape[1:])
            last = None if unit.bias is None else right[:, -1]
            source = object()
            result[slot.name] = KroneckerMoments(slot.parameter, left, kernels, source, last)
            if unit.bias is not None:
                bias = result[unit.bias.name]
                result[unit.bias.name] = KroneckerBias(bias.mean, bias.variance, source)
        return result

    @torch.no_grad()
    def rescale_spread_(self, factor: float) -> None:
        """S_in ← factor·S_in."""
        for value in self.inputs.values():
            value.mul_(factor)

    @torch.no_grad()
    def reset_spread_(self, scales: Mapping[str, float], generator: torch.Generator | None = None) -> None:
        """Fresh factors at the prior's scales."""
        for unit in self.units:
            left, right = self.outputs[unit.key], self.inputs[unit.key]
            left.normal_(generator=generator).mul_(left.shape[1] ** -0.5)
            right.normal_(generator=generator).mul_(self.scale * right.shape[1] ** -0.5)
            columns = matrix_size(unit.weight)[1]
            right[:columns].mul_(scales[unit.weight.name])
            if unit.bias is not None:
                right[columns:].mul_(scales[unit.bias.name])

    def spread_rates(self) -> list[SpreadRate]:
        """S_in learns with its weight, S_out at a rate that no layer scales."""
        rates: list[SpreadRate] = []
        for unit in self.units:
            left, right = self.outputs[unit.key], self.inputs[unit.key]
            rates.append(SpreadRate(right, unit.weight.name, right.shape[1]))
            rates.append(SpreadRate(left, None, left.shape[1]))
        return rates

    # ---- drawing ------------------------------------------------------------------------------------------

    def noise(self, generator: torch.Generator | None = None) -> Noise:
        """Z ~ N(0, I), `(rank_out, rank_in)` for each matrix."""
        result: Noise = {}
        for unit in self.units:
            left, right = self.outputs[unit.key], self.inputs[unit.key]
            shape = (left.shape[1], right.shape[1])
            result[unit.key] = torch.randn(shape, generator=generator, dtype=left.dtype, device=left.device)
        return result

    def components(self, noise: Noise) -> Components:
        """W = M + S_out Z S_inᵀ for each matrix."""
        result: Components = {}
        for unit in self.units:
            deviation = self.outputs[unit.key] @ noise[unit.key] @ self.inputs[unit.key].mT
            for name, part in _split(unit, deviation).items():
                result[key_of(name)] = part
        return {key_of(s.name): s.parameter + result[key_of(s.name)] for s in self.slots}

    def realize(self, components: Components) -> dict[str, Tensor]:
        """Dense draws."""
        return {slot.name: components[key_of(slot.name)] for slot in self.slots}

    # ---- divergences ----------------------------------------------------------------------------------------

    def kl(
        self, method: KLMethod = "auto", samples: int | None = None, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Infinite against any prior with a density, but at full ranks: raises.

        Raises:
            CapabilityError: always, naming what to use.
        """
        raise CapabilityError(
            "KroneckerCovariance offers no KL divergence: with ranks below the matrix's size its covariance is "
            "singular, and a prior with a density gives that subspace no mass. Train it by the expected loss alone (in "
            'dubito.fit objective="expected_loss"), measure its distance by wasserstein, or use MeanField for an ELBO'
        )

    def wasserstein(self, other: WeightPosterior) -> Tensor:
        """Squared 2-Wasserstein distance to another Kronecker-factored posterior of the same parameters.

        The nuclear norm of a Kronecker product is the product of the nuclear norms, so the optimal rotation is one for
        each factor: `||A⊗B - A'⊗B'||²` with `A' = A2 Q_A`, `B' = B2 Q_B`, and no product is formed.
        """
        if not isinstance(other, KroneckerCovariancePosterior):
            raise CapabilityError(f"no closed form between KroneckerCovariance and {type(other).__name__}")
        total: Tensor | None = None
        for one, two in zip(self.units, other.units, strict=True):
            value = _distance(
                self.inputs[one.key], self.outputs[one.key], other.inputs[two.key], other.outputs[two.key]
            )
            for mine, theirs in zip(one.slots, two.slots, strict=True):
                value = value + (mine.parameter - theirs.parameter).square().sum()
            total = value if total is None else total + value
        assert total is not None
        return total

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Undefined for a singular covariance: raises."""
        raise CapabilityError(
            "KroneckerCovariance has no density over weights (its covariance is singular); use wasserstein to compare "
            "two posteriors, or MeanField where a density is needed"
        )


def _units(slots: tuple[Slot, ...]) -> tuple[_Unit, ...]:
    """Weight matrices with their biases, and vectors that belong to none, in the slots' order."""
    by_place = {(id(s.owner), s.attribute): s for s in slots}
    folded: dict[int, Slot] = {}
    for slot in slots:
        name = bias_name(slot.attribute) if len(slot.shape) >= 2 else None
        bias = by_place.get((id(slot.owner), name)) if name else None
        if bias is not None and tuple(bias.shape) == (matrix_size(slot)[0],):
            folded[id(slot)] = bias
    taken = {id(bias) for bias in folded.values()}
    return tuple(_Unit(slot, folded.get(id(slot))) for slot in slots if id(slot) not in taken)


def _split(unit: _Unit, matrix: Tensor) -> dict[str, Tensor]:
    """The weight's and the bias's part of a matrix whose last column may be the bias."""
    columns = matrix_size(unit.weight)[1]
    result = {unit.weight.name: from_matrix(unit.weight, matrix[..., :columns])}
    if unit.bias is not None:
        result[unit.bias.name] = matrix[..., columns]
    return result


def _distance(a1: Tensor, b1: Tensor, a2: Tensor, b2: Tensor) -> Tensor:
    """`min ||A1⊗B1 - (A2⊗B2) Q||²` over orthogonal Q, without forming a product."""
    a1, a2 = _aligned(a1, a2)
    b1, b2 = _aligned(b1, b2)
    da, db = a1 - a2, b1 - b2  # A1⊗B1 - A2⊗B2 = da⊗B1 + A2⊗db
    cross = (da * a2).sum() * (b1 * db).sum()
    squares = da.square().sum() * b1.square().sum() + a2.square().sum() * db.square().sum()
    return (squares + 2.0 * cross).clamp_min(0.0)


def _aligned(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The second factor turned onto the first (orthogonal Procrustes), with equal numbers of columns."""
    dtype = torch.promote_types(first.dtype, torch.float32)
    first, second = first.to(dtype), second.to(dtype)
    rank = max(first.shape[1], second.shape[1])
    first, second = (nn.functional.pad(f, (0, rank - f.shape[1])) for f in (first, second))
    with torch.no_grad():
        left, _, right = torch.linalg.svd(second.mT @ first, full_matrices=False)
        rotation = left @ right
    return first, second @ rotation
