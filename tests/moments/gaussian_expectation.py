"""Reference moments for the tests of moment rules: dense quadrature and Monte Carlo, in float64."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def reference_moments(
    function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor, kinks: tuple[float, ...] = ()
) -> tuple[Tensor, Tensor]:
    """Mean and variance of `function(X)` by Gauss–Legendre panels over 10 sd, split at the kinks."""
    mean, variance = mean.double(), variance.double()
    points, weights = (torch.from_numpy(a) for a in __import__("numpy").polynomial.legendre.leggauss(20))
    edges = torch.linspace(-10, 10, 41, dtype=torch.float64).expand(*mean.shape, 41)
    for kink in kinks:
        z = ((kink - mean) / variance.sqrt()).clamp(-10, 10)
        edges = torch.cat([edges, z[..., None]], -1)
    edges = edges.sort(-1).values
    low, width = edges[..., :-1, None], edges.diff(dim=-1)[..., None]
    z = (low + width * 0.5 * (points + 1.0)).flatten(-2)
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2.0 * math.pi)
    probability = (0.5 * width * weights).flatten(-2) * density
    probability = probability / probability.sum(-1, keepdim=True)
    centre = function(mean)[..., None]
    values = function(mean[..., None] + variance.sqrt()[..., None] * z) - centre
    shift = (probability * values).sum(-1, keepdim=True)
    return (centre + shift)[..., 0], (probability * (values - shift).square()).sum(-1)


def monte_carlo(
    function: Callable[..., Tensor], *pairs: tuple[Tensor, Tensor], draws: int = 4000, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Mean and variance of `function` of independent Gaussians, draws leading."""
    generator = torch.Generator().manual_seed(seed)
    samples = [
        mean + variance.sqrt() * torch.randn((draws, *mean.shape), generator=generator, dtype=mean.dtype)
        for mean, variance in pairs
    ]
    out = torch.func.vmap(function)(*samples)
    return out.mean(0), out.var(0)
