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

# sigmoid(x) ≈ sum_i weight_i Phi(x / scale_i), minimax over the line: the error is at most 6.1e-6.
SIGMOID_WEIGHTS = (0.08866016, 0.44576992, 0.3972774, 0.06829252)
SIGMOID_SCALES = (0.95455372, 1.3971368, 2.06412085, 3.07467214)


def safe_sd(variance: Tensor) -> Tensor:
    """Square root whose gradient at zero is zero, not infinite; a variance of 0 gives 2e-13 (float32).

    The floor is so high that dividing by the result twice does not overflow, as gradients do.
    """
    return variance.clamp_min(torch.finfo(variance.dtype).tiny ** (2.0 / 3.0)).sqrt()


def normal_density(x: Tensor) -> Tensor:
    """phi(x), the standard normal density."""
    return torch.exp(-0.5 * x.square()) * INVERSE_SQRT_2PI


def normal_cdf(x: Tensor) -> Tensor:
    """Phi(x), with full relative precision in the lower tail."""
    return 0.5 * torch.erfc(x * -SQRT_HALF)


def upper_tail(x: Tensor) -> Tensor:
    """1 - Phi(x), with full relative precision for large x."""
    return 0.5 * torch.erfc(x * SQRT_HALF)


def mills_ratio(x: Tensor) -> Tensor:
    """(1 - Phi(x)) / phi(x) for x ≥ 0, by the scaled complementary error function: no underflow."""
    return math.sqrt(0.5 * math.pi) * torch.special.erfcx(x * SQRT_HALF)


class Side(NamedTuple):
    """Where a standardised mean lies: what the kinked functions need, precise in both tails.

    Attributes:
        positive: 1.0 where the mean is at least 0, else 0.0 (no gradient).
        distance: |nu|, with derivative 1 at 0 (as `positive` says).
        tail: 1 - Phi(|nu|).
        loss: phi(|nu|) - |nu| (1 - Phi(|nu|)), the unit normal loss: E max(Z - |nu|, 0).
    """

    positive: Tensor
    distance: Tensor
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
    tail = upper_tail(distance)
    return Side(positive, distance, tail, normal_density(distance) - distance * tail)


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


def owens_t(h: Tensor, a: Tensor, nodes: int = 12) -> Tensor:
    """Owen's T(h, a) for 0 ≤ a ≤ 1 by Gauss–Legendre quadrature; the error is below 1e-12 with 12 nodes."""
    total = torch.zeros_like(h * a)
    for point, weight in legendre(nodes):
        one_and_square = 1.0 + (point * a).square()
        total = total + weight * torch.exp(-0.5 * h.square() * one_and_square) / one_and_square
    return total * a / (2.0 * math.pi)


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
    density: Tensor
    side: Side


def sigmoid_mixture(mean: Tensor, variance: Tensor) -> list[Probit]:
    """The sigmoid's terms, smoothed by N(mean, v)."""
    terms = []
    for weight, scale in zip(SIGMOID_WEIGHTS, SIGMOID_SCALES, strict=True):
        inverse = torch.rsqrt(scale**2 + variance)
        h = (mean * inverse).clamp(-FARTHEST, FARTHEST)
        terms.append(Probit(weight, scale, inverse, h, normal_density(h), side_of(h)))
    return terms


def mixture_derivatives(terms: list[Probit], count: int) -> list[Tensor]:
    """D_1 … D_count, derivatives by the mean of `sum w Phi(mean / t)`: (-1)^(k-1) He_(k-1)(h) phi(h) / t^k."""
    totals: list[Tensor] = []
    for term in terms:
        factor = term.weight * term.density
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
