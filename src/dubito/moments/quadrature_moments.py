"""Moments of any elementwise function of a Gaussian: Gauss–Hermite quadrature, and the first-order rule."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dubito.moments.elementwise import Moments
from dubito.moments.normal_functions import safe_sd

Elementwise = Callable[[Tensor], Tensor]


@functools.cache
def gauss_hermite(nodes: int) -> tuple[tuple[float, float], ...]:
    """Nodes and weights for expectations under the standard normal law, in ascending order.

    Raises:
        ValueError: for fewer than 2 nodes.
    """
    if nodes < 2:
        raise ValueError(f"nodes={nodes!r} must be at least 2: one node finds no variance")
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    weights = weights / weights.sum()
    return tuple((float(p), float(w)) for p, w in zip(points, weights, strict=True))


def quadrature_moments(function: Elementwise, mean: Tensor, variance: Tensor, nodes: int = 5) -> Moments:
    """Moments of an elementwise function by Gauss–Hermite quadrature; exact for polynomials of degree `nodes - 1`.

    Values are taken about `function(mean)` and the variance is `sum w (f_i - m)²`, so that small variances do not
    cancel. Five nodes: the variance of smooth functions (sigmoid, tanh, sine, Mish, GELU) is within 3e-3, relative,
    up to sd 0.3, and within 1e-2 (sigmoid) to 0.3 (GELU's dead tail) at sd 1; nine nodes, 1e-4 to 3e-2 at sd 1. At a
    kink (ReLU, hardswish) it can be wrong altogether: by 6 % of the input's variance, and 0.07 sd in the mean.

    Args:
        function: elementwise, on plain tensors.
        mean: of the input.
        variance: of the input, of a shape that broadcasts.
        nodes: how many evaluations; twice the time each.

    Raises:
        ValueError: for fewer than 2 nodes.
    """
    if mean.shape != variance.shape:
        mean, variance = torch.broadcast_tensors(mean, variance)
    centre = function(mean)
    sd = safe_sd(variance).masked_fill(variance == 0.0, 0.0)
    weighted = [
        (weight, (centre if point == 0.0 else function(torch.add(mean, sd, alpha=point))) - centre)
        for point, weight in gauss_hermite(nodes)
    ]
    shift = functools.reduce(torch.add, (value * weight for weight, value in weighted))
    spread = functools.reduce(torch.add, ((value - shift).square() * weight for weight, value in weighted))
    return centre + shift, spread


def delta_moments(function: Elementwise, mean: Tensor, variance: Tensor) -> Moments:
    """First order, the linearised baseline: `f(mean)` and `f'(mean)² v`, the derivative by forward mode.

    At sd 0.5 the mean is off by up to 0.09 (GELU) or 0.2 (ReLU), the variance by up to 66 % or 100 %.
    """
    if mean.shape != variance.shape:
        mean, variance = torch.broadcast_tensors(mean, variance)
    out, slope = torch.func.jvp(function, (mean,), (torch.ones_like(mean),))[:2]
    return out, slope.square() * variance
