"""Draws of Gaussian logits from fixed quasi-normal numbers: no network is run, and the same input has one answer."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from dubito.moments.normal_functions import safe_sd
from dubito.scalar_checks import count

SAMPLES = 256
_SOBOL_DIMENSIONS = torch.quasirandom.SobolEngine.MAXDIM


class LowRankLogits(NamedTuple):
    """A covariance of the logits, `factor factorᵀ + diag(diagonal)`.

    Attributes:
        factor: `(batch, …, C, r)`.
        diagonal: `(batch, …, C)`, at least 0.
    """

    factor: Tensor
    diagonal: Tensor

    def variance(self) -> Tensor:
        """Its diagonal, `(batch, …, C)`."""
        return self.factor.square().sum(-1) + self.diagonal


LogitCovariance = Tensor | LowRankLogits


@functools.lru_cache(maxsize=16)
def _normals(samples: int, dimensions: int) -> Tensor:
    half = samples // 2
    if dimensions <= _SOBOL_DIMENSIONS:
        points = torch.quasirandom.SobolEngine(dimensions, scramble=True, seed=0).draw(
            half, dtype=torch.float64
        )
        z = torch.special.ndtri(points.clamp(1e-12, 1 - 1e-12))
    else:
        z = torch.randn(half, dimensions, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z = torch.cat([z, -z, z.new_zeros(samples % 2, dimensions)])
    return z / z.square().mean(0).sqrt().clamp_min(1e-12)


def fixed_normals(samples: int, dimensions: int, like: Tensor) -> Tensor:
    """`samples` quasi-normal vectors, `(samples, dimensions)`: always the same ones.

    Scrambled Sobol points through the inverse normal distribution function, each with its mirror image (so that all odd
    moments are exact) and with unit second moments. Beyond 21,201 dimensions, pseudo-random ones.

    Args:
        samples: how many, at least 2.
        dimensions: of a vector.
        like: whose dtype and device they get.

    Raises:
        TypeError, ValueError: for a number of samples that is none.
    """
    samples = count("samples", samples, "draws of the logits", minimum=2)
    return _normals(samples, dimensions).to(like)


def sampled_logits(
    mean: Tensor, variance: Tensor, covariance: LogitCovariance | None = None, samples: int = SAMPLES
) -> Tensor:
    """Draws of logits, classes last: `(S, batch, …, C)`, differentiable.

    Args:
        mean: `(batch, …, C)`.
        variance: of the same shape; used where there is no covariance.
        covariance: a full one, `(batch, …, C, C)`, or `LowRankLogits`.
        samples: S.

    Raises:
        ValueError: for moments that do not fit or a covariance that is none.
    """
    check_moments(mean, variance, covariance)
    classes = mean.shape[-1]
    lead = (samples,) + (1,) * (mean.ndim - 1)
    if covariance is None:
        z = fixed_normals(samples, classes, mean).reshape(*lead, classes)
        return mean + safe_sd(variance) * z
    if isinstance(covariance, LowRankLogits):
        factor, diagonal = covariance
        rank = factor.shape[-1]
        z = fixed_normals(samples, rank + classes, mean)
        shared = torch.einsum("...cr,sr->s...c", factor, z[:, :rank])
        return mean + shared + safe_sd(diagonal) * z[:, rank:].reshape(*lead, classes)
    z = fixed_normals(samples, classes, mean)
    return mean + torch.einsum("...cd,sd->s...c", square_root(covariance), z)


def square_root(covariance: Tensor) -> Tensor:
    """A matrix L with `L Lᵀ = covariance`, `(…, C, C)`; singular ones (a rank below C) are allowed.

    Raises:
        ValueError: where it has an eigenvalue below zero by more than rounding.
    """
    symmetric = 0.5 * (covariance + covariance.mT)
    lower: Tensor
    lower, failed = torch.linalg.cholesky_ex(symmetric)
    if not bool(failed.any()):
        return lower
    values, vectors = torch.linalg.eigh(symmetric)
    least, largest = values[..., 0], values[..., -1].clamp_min(0)
    tolerance = 100 * covariance.shape[-1] * torch.finfo(covariance.dtype).eps
    if bool((least < -tolerance * largest - torch.finfo(covariance.dtype).tiny).any()):
        raise ValueError(
            f"covariance is not positive semidefinite: its least eigenvalue is {float(least.min()):.3g}, the largest "
            f"{float(largest.max()):.3g}"
        )
    root: Tensor = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    return root


def check_moments(mean: Tensor, variance: Tensor, covariance: LogitCovariance | None = None) -> None:
    """Refuse moments whose shapes do not fit, or that hold NaN or negative variances.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if not isinstance(mean, Tensor) or not isinstance(variance, Tensor):
        raise TypeError("mean and variance must be tensors: those of the outputs, of one shape")
    if mean.shape != variance.shape:
        raise ValueError(
            f"mean has shape {tuple(mean.shape)}, variance {tuple(variance.shape)}: they must be equal"
        )
    if mean.ndim < 1 or mean.numel() == 0:
        raise ValueError(f"mean has shape {tuple(mean.shape)}: there is nothing to predict")
    bad = int(mean.isnan().sum())
    if bad:
        raise ValueError(f"mean holds {bad} NaN of {mean.numel()} entries")
    _check_variance("variance", variance)
    if isinstance(covariance, LowRankLogits):
        factor, diagonal = covariance
        if factor.shape[:-1] != mean.shape or diagonal.shape != mean.shape:
            raise ValueError(
                f"covariance has factor {tuple(factor.shape)} and diagonal {tuple(diagonal.shape)}, but for logits "
                f"{tuple(mean.shape)} they are {(*mean.shape, 'r')} and {tuple(mean.shape)}"
            )
        _check_variance("covariance.diagonal", diagonal)
        if bool(factor.isnan().any()):
            raise ValueError("covariance.factor holds NaN")
    elif covariance is not None:
        if covariance.shape != (*mean.shape, mean.shape[-1]):
            raise ValueError(
                f"covariance has shape {tuple(covariance.shape)}, but for logits {tuple(mean.shape)} it is "
                f"{(*mean.shape, mean.shape[-1])}, or a LowRankLogits"
            )
        if bool(covariance.isnan().any()):
            raise ValueError("covariance holds NaN")


def _check_variance(name: str, variance: Tensor) -> None:
    bad = int((~(variance >= 0) | variance.isinf()).sum())
    if bad:
        raise ValueError(
            f"{name} holds {bad} negative, NaN or infinite of {variance.numel()} entries, which no variance is"
        )
