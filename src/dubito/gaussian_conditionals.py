"""Gaussians over the weights of one layer, by natural parameters.

A layer's weights come in K independent blocks of M entries: one block an output unit, or one for the whole layer. With
precision P and shift h = P·mean, conditioning on data adds to both; the posterior is inverted once, by the Cholesky
factor P = L Lᵀ: mean = P⁻¹h, a draw is mean + L⁻ᵀ eps. No covariance is ever formed. All in float64, whatever the
dtype of the model: posterior precisions of 1e4 beside priors of 1 leave float32 nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

_LOG_TWO_PI = math.log(2 * math.pi)


class PrecisionError(RuntimeError):
    """A posterior precision is not positive definite or not finite; the message names the layer and the remedy."""


class LayerGaussian(NamedTuple):
    """A Gaussian with what conditioning on data and a KL to it need.

    Attributes:
        mean: (…, K, M).
        factor: F with precision F Fᵀ, (…, K, M, M), triangular or diagonal.
        precision: (…, K, M, M).
        half_log_det: ½ log det of the precision, (…, K).
    """

    mean: Tensor
    factor: Tensor
    precision: Tensor
    half_log_det: Tensor

    @property
    def shift(self) -> Tensor:
        """P·mean, (…, K, M)."""
        return (self.precision @ self.mean.unsqueeze(-1)).squeeze(-1)

    def log_prob(self, weights: Tensor) -> Tensor:
        """log density of weights (…, K, M), summed over blocks, in nats: shape (…)."""
        whitened = (self.factor.mT @ (weights - self.mean).unsqueeze(-1)).squeeze(-1)
        per_block = self.half_log_det - 0.5 * (whitened.square().sum(-1) + weights.shape[-1] * _LOG_TWO_PI)
        return per_block.sum(-1)

    def draw(self, noise: Tensor) -> Tensor:
        """mean + F⁻ᵀ noise, for a lower triangular F; noise (…, K, M)."""
        deviation: Tensor = torch.linalg.solve_triangular(self.factor.mT, noise.unsqueeze(-1), upper=True)
        return self.mean + deviation.squeeze(-1)

    def kl(self, other: LayerGaussian) -> Tensor:
        """KL(self || other) in nats, summed over blocks: shape (…).

        ½ [‖L⁻¹F‖² + (m - μ)ᵀ P₀ (m - μ) - M] + ½ log det P - ½ log det P₀, with P = L Lᵀ and P₀ = F Fᵀ.
        """
        ratio: Tensor = torch.linalg.solve_triangular(self.factor, other.factor, upper=False)
        trace = ratio.square().sum((-2, -1))
        moved = (other.factor.mT @ (self.mean - other.mean).unsqueeze(-1)).squeeze(-1).square().sum(-1)
        per_block = 0.5 * (trace + moved - self.mean.shape[-1]) + self.half_log_det - other.half_log_det
        return per_block.sum(-1)


@runtime_checkable
class LayeredGaussian(Protocol):
    """A prior that is an independent Gaussian over each layer's weights, biases last in each unit's."""

    def layer_gaussians(self) -> list[LayerGaussian]:
        """The layers' Gaussians, in order."""


def from_natural(precision: Tensor, shift: Tensor, name: str) -> LayerGaussian:
    """The Gaussian of these natural parameters.

    Args:
        precision: (…, K, M, M).
        shift: (…, K, M).
        name: of the layer, for errors.

    Raises:
        PrecisionError: not positive definite, or not finite. Nothing is added to make it so.
    """
    factor, info = torch.linalg.cholesky_ex(precision)
    if bool((info != 0).any()):
        where = (
            "holds NaN or infinity" if not bool(precision.isfinite().all()) else "is not positive definite"
        )
        raise PrecisionError(
            f"the posterior precision of {name} {where}: lower the learning rate, clip the gradient, lower "
            "`max_precision` of the inference network, or standardise the tasks' inputs and outcomes"
        )
    mean = torch.cholesky_solve(shift.unsqueeze(-1), factor).squeeze(-1)
    return LayerGaussian(mean, factor, precision, factor.diagonal(dim1=-2, dim2=-1).log().sum(-1))


def data_term(features: Tensor, targets: Tensor, precisions: Tensor) -> tuple[Tensor, Tensor]:
    """What pseudo-observations add to the natural parameters of every unit.

    P_u = Σ_n λ_nu φ_n φ_nᵀ and h_u = Σ_n λ_nu v_nu φ_n, without an N × N matrix.

    Args:
        features: φ, (S, B, N, D).
        targets: v, (B, N, U).
        precisions: λ, (B, N, U); 0 where there is no observation.

    Returns:
        (S, B, U, D, D) and (S, B, U, D).
    """
    width, units = features.shape[-1], targets.shape[-1]
    weighted = precisions * targets
    shift = weighted.mT @ features
    if width <= units:
        outer = (features.unsqueeze(-1) * features.unsqueeze(-2)).flatten(-2)
        precision = (precisions.mT @ outer).unflatten(-1, (width, width))
    else:
        scaled = precisions.mT.unsqueeze(-1) * features.unsqueeze(-3)
        precision = scaled.mT @ features.unsqueeze(-3)
    return precision, shift


def as_one_block(precision: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Unit-wise terms, (…, U, D, D) and (…, U, D), as one block over the whole layer: (…, 1, UD, UD) and (…, 1, UD)."""
    units, width = shift.shape[-2:]
    spread = torch.diag_embed(precision.movedim(-3, -1))  # (…, D, D, U, U)
    dense = spread.movedim((-2, -1), (-4, -2)).reshape(*shift.shape[:-2], 1, units * width, units * width)
    return dense, shift.flatten(-2).unsqueeze(-2)
