"""The law of a factor's entries: independent Gaussians, or Laplace distributions (location, scale b, variance 2 b²).

A factor is given by its means and by `spread`, the logarithm of the Gaussian's standard deviation or of the Laplace's
b.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.distributions import Distribution, Laplace, Normal

from dubito.divergences import KLMethod, kl_divergence
from dubito.priors import ParameterPrior
from dubito.weights.gaussian_entries import Pending, entries_kl, sd_of, spread_of_sd

FactorLaw = Literal["gaussian", "laplace"]


def spread_of(sd: Tensor, law: FactorLaw) -> Tensor:
    """The spread parameter of entries of standard deviation `sd`."""
    return spread_of_sd(sd if law == "gaussian" else sd / math.sqrt(2.0), "log")


def scale_of(spread: Tensor) -> Tensor:
    """What standard noise is multiplied with: the standard deviation, or b."""
    return sd_of(spread, "log")


def variance_of(spread: Tensor, law: FactorLaw) -> Tensor:
    """Variances of the entries."""
    squares = scale_of(spread).square()
    return squares if law == "gaussian" else 2.0 * squares


def standard_noise(
    shape: Sequence[int], like: Tensor, law: FactorLaw, generator: torch.Generator | None = None
) -> Tensor:
    """Standard normal entries, or Laplace ones of scale 1, in the dtype and on the device of `like`."""
    if law == "gaussian":
        return torch.randn(tuple(shape), generator=generator, dtype=like.dtype, device=like.device)
    uniform = torch.rand((2, *shape), generator=generator, dtype=like.dtype, device=like.device)
    # minus two exponential variables, whose difference is a Laplace one
    exponential: Tensor = torch.log1p(-uniform)
    return exponential[0] - exponential[1]


def law_of(mean: Tensor, spread: Tensor, law: FactorLaw) -> Distribution:
    """The entries as a distribution."""
    if law == "gaussian":
        return Normal(mean, scale_of(spread), validate_args=False)
    return Laplace(mean, scale_of(spread), validate_args=False)


def factor_kl(
    mean: Tensor,
    spread: Tensor,
    law: FactorLaw,
    prior: ParameterPrior,
    *,
    method: KLMethod = "auto",
    samples: int = 1,
    generator: torch.Generator | None = None,
    pending: Pending | None = None,
) -> Tensor:
    """KL(q || prior) of a factor in nats, summed.

    Closed form for Gaussian entries under a Normal, and for Laplace entries under a Normal or a Laplace prior; bounded
    under a scale mixture of either; else by Monte Carlo.
    """
    if law == "gaussian":
        return entries_kl(
            mean, spread, "log", prior, method=method, samples=samples, generator=generator, pending=pending
        )
    if mean.dtype.itemsize < 4:
        mean, spread = mean.float(), spread.float()
    value: Tensor = kl_divergence(
        law_of(mean, spread, law), prior.distribution(mean), method, samples, generator
    )
    return value.sum()
