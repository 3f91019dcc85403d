"""Equally weighted mixtures of one-dimensional Gaussians: what a regression predictive of S draws is.

Components lead: means and standard deviations have shape `(S, …)`, results `(…)`.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor

_BLOCK = 2**21  # numbers held at once by the quadrature
_REACH = 8.5  # standard deviations beyond which a component is taken as zero (density below 1e-16)
_EDGES = (-_REACH, -5.0, -3.0, -1.5, 0.0, 1.5, 3.0, 5.0, _REACH)  # intervals a component wants for itself
_ORDER = 8  # nodes of Gauss and Legendre in each of them


def log_mean_exp(values: Tensor, dim: int = 0) -> Tensor:
    """Logarithm of the mean of `exp(values)` over a dimension; exact for a dimension of size one."""
    return torch.logsumexp(values, dim) - math.log(values.shape[dim])


def mixture_quantile(means: Tensor, sds: Tensor, q: float) -> Tensor:
    """Quantile of each mixture, by bisection on its distribution function.

    A mixture's quantile lies between the least and the greatest of its components' quantiles, which is where
    the search starts (so one component is answered exactly). The upper half works on the survival function,
    so that both tails are equally sharp. A component of zero standard deviation is a point mass. No gradient
    passes.

    Args:
        means: shape (S, …).
        sds: standard deviations, broadcastable to `means`.
        q: probability, strictly between 0 and 1.
    """
    if not 0.0 < q < 1.0:
        raise ValueError(f"q is {q}, but a quantile is asked for at a probability strictly between 0 and 1.")
    means, sds = means.detach(), sds.detach()
    candidates = means + sds * NormalDist().inv_cdf(q)
    low, high = candidates.amin(0), candidates.amax(0)
    inverse = math.sqrt(0.5) / sds.clamp_min(torch.finfo(sds.dtype).tiny)
    sign, tail = (1.0, q) if q <= 0.5 else (-1.0, 1.0 - q)
    for _ in range(64 if means.dtype == torch.float64 else 36):
        middle = 0.5 * (low + high)
        mass = 0.5 * torch.erfc(sign * (means - middle) * inverse).mean(0)  # ndtr is coarse in the tails
        above = mass < tail if sign > 0 else mass > tail
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return 0.5 * (low + high)


def mixture_entropy(means: Tensor, sds: Tensor) -> Tensor:
    """Differential entropy (nats) of each mixture, by quadrature.

    Where the components are of like width, by the trapezium rule with a step of half the smallest standard
    deviation, which is exact to rounding for Gaussians and to about 1e-8 here. Where that would take too many
    steps (a narrow component within, or far from, wide ones), by Gauss-Legendre quadrature on intervals marked
    off by every component. At most 72 S nodes, so the cost is at most of order S² for an element; elements
    are worked on in blocks of bounded memory.

    Args:
        means: shape (S, …).
        sds: standard deviations, broadcastable to `means`, above zero.
    """
    count, shape = means.shape[0], means.shape[1:]
    means, sds = means.reshape(count, -1), sds.expand_as(means).reshape(count, -1)
    if count == 1:
        return gaussian_entropy(sds[0].square()).reshape(shape)
    low, high = (means - _REACH * sds).amin(0).detach(), (means + _REACH * sds).amax(0).detach()
    most = _ORDER * (count * len(_EDGES) - 1)
    steps = ((high - low) / (0.5 * sds.detach().amin(0))).ceil().clamp(max=most)
    order = steps.argsort(descending=True)
    parts, start, sizes = [], 0, [int(n) for n in steps[order].tolist()]
    while start < len(sizes):
        width = max(1, _BLOCK // (count * (sizes[start] + 1)))
        chosen = order[start : start + width]
        if sizes[start] < most:
            x, weight = _even_nodes(low[chosen], high[chosen], sizes[start])
        else:
            x, weight = _marked_nodes(means[:, chosen].detach(), sds[:, chosen].detach())
        parts.append(_expected_surprise(means[:, chosen], sds[:, chosen], x, weight))
        start += width
    return torch.cat(parts)[order.argsort()].reshape(shape) if parts else means.new_zeros(shape)


def _even_nodes(low: Tensor, high: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    grid = torch.linspace(0.0, 1.0, steps + 1, dtype=low.dtype, device=low.device)
    length = (high - low).unsqueeze(-1)
    return low.unsqueeze(-1) + length * grid, length / steps  # both ends vanish: the plain sum is the rule


def _marked_nodes(means: Tensor, sds: Tensor) -> tuple[Tensor, Tensor]:
    edges = torch.tensor(_EDGES, dtype=means.dtype, device=means.device)
    marks = (means.unsqueeze(-1) + sds.unsqueeze(-1) * edges).transpose(0, 1).flatten(1).sort(-1).values
    nodes, weights = (
        torch.as_tensor(part, dtype=means.dtype, device=means.device) for part in leggauss(_ORDER)
    )
    half = 0.5 * marks.diff(dim=-1).unsqueeze(-1)
    middle = 0.5 * (marks[:, 1:] + marks[:, :-1]).unsqueeze(-1)
    return (middle + half * nodes).flatten(1), (half * weights).flatten(1)


def _expected_surprise(means: Tensor, sds: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Integral of `-f log f`, f the mixtures of components (S, elements), on nodes (elements, nodes)."""
    z = (x - means.unsqueeze(-1)) / sds.unsqueeze(-1)
    log_density = log_mean_exp(-0.5 * (z.square() + math.log(2 * math.pi)) - sds.log().unsqueeze(-1))
    return -(weight * log_density.exp() * log_density).sum(-1)


def gaussian_entropy(variance: Tensor) -> Tensor:
    """Differential entropy (nats) of a Gaussian, `½ log(2πe σ²)`."""
    return 0.5 * (variance.log() + math.log(2 * math.pi * math.e))


def gaussian_log_prob(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Log density (nats) of a Gaussian, element by element."""
    return -0.5 * ((y - mean).square() / variance + variance.log() + math.log(2 * math.pi))
