"""The standard normal law and what moments of smooth functions are made of.

Densities, tails, Owen's T, the sigmoid as a mixture of normal distribution functions, and Hermite (chaos) sums: for
`X ~ N(mu, v)` and `M(mu) = E f(X)`, the variance of f(X) is `sum_k v^k / k! (d^k M / d mu^k)^2`, whose terms are all
positive, so that nothing cancels at small variances. Pure functions on plain tensors, differentiable everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SQRT_HALF = math.sqrt(0.5)
INVERSE_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
# Beyond 40 standard deviations the density is zero in double precision too; squares stay finite.
FARTHEST = 40.0

# (1 - Phi(a)) / phi(a) = t P(t) with t = 1 / (1 + MILLS_POLE a), for a ≥ 0: relative error 2.3e-7, minimax.
MILLS_POLE = 0.375
MILLS = (
    0.37500007518021516,
    0.37500308486627043,
    0.32196563389999844,
    0.22218280366036847,
    0.03917469845568977,
    0.12691353179679687,
    -0.46753540858712483,
    0.34310451650162577,
    -0.08249507722945282,
)

# sigmoid(x) ≈ sum_i weight_i Phi(x / scale_i), minimax over the line: the error is at most 6.1e-6.
SIGMOID_WEIGHTS = (0.08866016, 0.44576992, 0.3972774, 0.06829252)
SIGMOID_SCALES = (0.95455372, 1.3971368, 2.06412085, 3.07467214)


def safe_sd(variance: Tensor) -> Tensor:
    """Square root whose gradient at zero is zero, not infinite; a variance of 0 gives 2e-13 (float32).

    The floor is so high that dividing by the result twice does not overflow, as gradients do.
    """
    floor: float = torch.finfo(variance.dtype).tiny ** (2.0 / 3.0)
    return variance.clamp_min(floor).sqrt()


def normal_density(x: Tensor) -> Tensor:
    """phi(x), the standard normal density."""
    return torch.exp(-0.5 * x.square()) * INVERSE_SQRT_2PI


def normal_cdf(x: Tensor) -> Tensor:
    """Phi(x), with full relative precision in the lower tail."""
    return 0.5 * torch.erfc(x * -SQRT_HALF)


def upper_tail(x: Tensor) -> Tensor:
    """1 - Phi(x), with full relative precision for large x."""
    return 0.5 * torch.erfc(x * SQRT_HALF)


def recorded(*tensors: Tensor) -> bool:
    """Whether something records these operators (compile, export, vmap, a dispatch mode)."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors)


def _tail(distance: Tensor, density: Tensor) -> Tensor:
    """1 - Phi(distance) for distances ≥ 0, whose density is known.

    In compiled kernels, where erfc costs six times exp, a rational form for single precision; eager the function.
    """
    if distance.dtype != torch.float32 or not recorded(distance):
        return upper_tail(distance)
    t = torch.reciprocal(1.0 + MILLS_POLE * distance)
    total = t * MILLS[-1]
    for coefficient in MILLS[-2::-1]:
        total = (total + coefficient) * t
    return density * total


def density_and_cdf(x: Tensor) -> tuple[Tensor, Tensor]:
    """phi(x) and Phi(x)."""
    density = normal_density(x)
    if x.dtype != torch.float32 or not recorded(x):
        return density, normal_cdf(x)
    tail = _tail(x.abs(), density)
    return density, torch.where(x >= 0.0, 1.0 - tail, tail)


class Side(NamedTuple):
    """Where a standardised mean lies: what the kinked functions need, precise in both tails.

    Attributes:
        positive: 1.0 where the mean is at least 0, else 0.0 (no gradient).
        distance: |nu|, with derivative 1 at 0 (as `positive` says).
        density: phi(nu).
        tail: 1 - Phi(|nu|).
        loss: phi(nu) - |nu| (1 - Phi(|nu|)), the unit normal loss: E max(Z - |nu|, 0).
    """

    positive: Tensor
    distance: Tensor
    density: Tensor
    tail: Tensor
    loss: Tensor

    @property
    def above(self) -> Tensor:
        """Phi(nu)."""
        return self.tail + self.positive * (1.0 - 2.0 * self.tail)

    @property
    def spread(self) -> Tensor:
        """loss · (|nu| + loss): what knowing the larger of two takes from its variance."""
        return self.loss * (self.distance + self.loss)


def side_of(nu: Tensor) -> Side:
    """`Side` of a standardised mean."""
    # Products with 0 and 1 in place of torch.where, which is slow on CPUs; the derivative at 0 is the right one.
    positive = (nu >= 0).to(nu.dtype)
    distance = (nu * (2.0 * positive - 1.0)).clamp_max(FARTHEST)
    density = normal_density(distance)
    tail = _tail(distance, density)
    return Side(positive, distance, density, tail, density - distance * tail)


def hermite(x: Tensor, terms: int) -> list[Tensor]:
    """He_0(x) … He_terms(x), the probabilists' Hermite polynomials."""
    values = [torch.ones_like(x), x]
    for k in range(2, terms + 1):
        values.append(torch.sub(x * values[-1], values[-2], alpha=k - 1))
    return values[: terms + 1]


def legendre(nodes: int) -> Iterator[tuple[float, float]]:
    """Gauss–Legendre nodes and weights on (0, 1)."""
    points, weights = np.polynomial.legendre.leggauss(nodes)
    yield from ((float(0.5 * (p + 1.0)), float(0.5 * w)) for p, w in zip(points, weights, strict=True))


def cdf_variance(mean: Tensor, variance: Tensor, nodes: int = 8) -> Tensor:
    """Var Phi(X): 2 T(h, 1) - 2 T(h, a) with h = mean / sqrt(1 + v), a = 1 / sqrt(1 + 2 v).

    The difference is one integral from a to 1, whose length is computed without cancellation.
    """
    h_square = mean.square() / (1.0 + variance)
    a = torch.rsqrt(1.0 + 2.0 * variance)
    length = 2.0 * variance / (1.0 + 2.0 * variance) / (1.0 + a)
    total = torch.zeros_like(h_square)
    for point, weight in legendre(nodes):
        one_and_square = 1.0 + (1.0 - point * length).square()
        total = total + weight * torch.exp(-0.5 * h_square * one_and_square) / one_and_square
    return total * length / math.pi


class Probit(NamedTuple):
    """One term w Phi(x / l) of a mixture, smoothed by N(mean, v): h = mean / t with t² = l² + v."""

    weight: float
    scale: float
    inverse: Tensor
    h: Tensor
    side: Side


def sigmoid_mixture(mean: Tensor, variance: Tensor) -> list[Probit]:
    """The sigmoid's terms, smoothed by N(mean, v)."""
    terms = []
    for weight, scale in zip(SIGMOID_WEIGHTS, SIGMOID_SCALES, strict=True):
        inverse = torch.rsqrt(scale**2 + variance)
        h = (mean * inverse).clamp(-FARTHEST, FARTHEST)
        terms.append(Probit(weight, scale, inverse, h, side_of(h)))
    return terms


def mixture_derivatives(terms: list[Probit], count: int) -> list[Tensor]:
    """D_1 … D_count, derivatives by the mean of `sum w Phi(mean / t)`: (-1)^(k-1) He_(k-1)(h) phi(h) / t^k."""
    totals: list[Tensor] = []
    for term in terms:
        factor = term.weight * term.side.density
        for k, polynomial in enumerate(hermite(term.h, count - 1), start=1):
            factor = factor * term.inverse
            value = polynomial * factor
            if k > len(totals):
                totals.append(value)
            else:
                totals[k - 1] = totals[k - 1] + value
    return [-total if k % 2 else total for k, total in enumerate(totals)]


def chaos_variance(derivatives: list[Tensor], variance: Tensor) -> Tensor:
    """`sum_k v^k / k! M_k^2` over the derivatives M_1 … M_K of the mean function, by Horner from the last."""
    total = derivatives[-1].square()
    for k in range(len(derivatives) - 1, 0, -1):
        total = torch.addcmul(derivatives[k - 1].square(), variance, total, value=1.0 / (k + 1))
    return variance * total
