"""Mean and variance of activations of a Gaussian: `f(X)` for `X ~ N(mean, variance)`, elementwise.

Every rule takes the mean and the variance (of shapes that broadcast) and returns those of f(X). Variances are written
without differences of nearly equal terms, so that a standard deviation of 1e-3 in float32 is no worse than one of 1.
A variance of 0 gives f(mean) and 0; gradients are finite there.

Errors stated below were measured against quadrature in float64 over means in [-8, 8].
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dubito.moments.elementwise import Moments, elementwise
from dubito.moments.normal_functions import (
    FARTHEST,
    SQRT_HALF,
    chaos_variance,
    density_and_cdf,
    hermite,
    mixture_derivatives,
    normal_cdf,
    safe_sd,
    side_of,
    sigmoid_mixture,
)

GELU_TERMS = 6
MIXTURE_TERMS = 6


def _relu(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of max(X, 0), and P(X > 0).

    With a = |mean| / sd and the unit normal loss l(a) = phi(a) - a (1 - Phi(a)):
    mean = max(mean, 0) + sd l(a), variance = v [P(X > 0) - l (a + l)]. Nothing here cancels for a below 4.
    """
    sd = safe_sd(variance)
    side = side_of(mean / sd)
    above = side.above
    return mean * side.positive + sd * side.loss, variance * (above - side.spread).clamp_min(0.0), above


@elementwise
def relu_moments(mean: Tensor, variance: Tensor) -> Moments:
    """Exact moments of max(X, 0)."""
    out, spread, _ = _relu(mean, variance)
    return out, spread


@elementwise
def leaky_relu_moments(mean: Tensor, variance: Tensor, slope: float | Tensor = 0.01) -> Moments:
    """Exact moments of max(X, 0) + slope · min(X, 0); a tensor of slopes broadcasts (PReLU)."""
    out, spread, above = _relu(mean, variance)
    rest = 1.0 - slope
    return (
        slope * mean + rest * out,
        slope**2 * variance + rest**2 * spread + 2.0 * slope * rest * variance * above,
    )


@elementwise
def _erf_gelu(mean: Tensor, variance: Tensor, terms: int = GELU_TERMS) -> Moments:
    c = torch.reciprocal(1.0 + variance)
    root = c.sqrt()
    h = (mean * root).clamp(-FARTHEST, FARTHEST)
    density, above = density_and_cdf(h)
    tau = variance * c
    # M_k = (-1)^k phi s^(1-k) (He_(k-2) - c He_k) for k ≥ 2, and M_1 = Phi + c h phi; Horner in tau = v / (1 + v).
    polynomials = hermite(h, terms)
    total: Tensor | None = None
    for k in range(terms, 1, -1):
        square = torch.addcmul(polynomials[k - 2], c, polynomials[k], value=-1.0).square()
        total = square if total is None else torch.addcmul(square, tau, total, value=1.0 / (k + 1))
    first = torch.addcmul(above, c * h, density).square()
    spread = first if total is None else torch.addcmul(first, tau * density.square(), total, value=0.5)
    return torch.addcmul(mean * above, variance * root, density), variance * spread


def gelu_moments(
    mean: Tensor, variance: Tensor, approximate: Literal["none", "tanh"] = "none", terms: int = GELU_TERMS
) -> Moments:
    """Moments of GELU: the mean is exact, the variance is the first `terms` terms of its Hermite series.

    Every left-out term is positive, so the variance is never too large. With six terms its relative error is below
    3e-4 up to sd 0.5, 4.4e-3 at sd 0.7, 2.6e-2 at sd 1 (means in [-4, 4]; the worst lie in the dead tail), and its
    error relative to the input's variance is below 4e-3 at any sd.

    Args:
        mean: of the input.
        variance: of the input.
        approximate: `"tanh"` takes the same moments: the two functions differ by 5e-4 at most, their means by
            1.5e-4 at sd 0.05 to 1.
        terms: of the series, at least 1.

    Raises:
        ValueError: for another `approximate`, or no terms.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate={approximate!r} must be 'none' or 'tanh'")
    if terms < 1:
        raise ValueError(f"terms={terms!r} must be at least 1")
    return _erf_gelu(mean, variance, terms=terms)


@elementwise
def sigmoid_moments(mean: Tensor, variance: Tensor) -> Moments:
    """Moments of the sigmoid, as a mixture of four normal distribution functions (`sigmoid_mixture`).

    The mean is within 7e-6. The variance's error is below 8e-6 of the input's at any sd, and below 1.2e-3 relative for
    means in [-4, 4]; it grows to 4e-2 at ±8 with small sd, and to 1 at ±8 with sd 1, where the variance is negligible.
    """
    terms = sigmoid_mixture(mean, variance)
    smaller = sum(t.weight * t.side.tail for t in terms)
    assert isinstance(smaller, Tensor)
    derivatives = mixture_derivatives(terms, MIXTURE_TERMS)
    return smaller + terms[0].side.positive * (1.0 - 2.0 * smaller), _sigmoid_variance(
        smaller, derivatives, variance
    )


def _sigmoid_variance(smaller: Tensor, derivatives: list[Tensor], variance: Tensor) -> Tensor:
    # s^2 = s - s' closes the second moment; below v = 1 that cancels, and the series has converged.
    closed = smaller * (1.0 - smaller) - derivatives[0]
    series = chaos_variance(derivatives, variance.clamp_max(1.0))
    return torch.where(variance < 1.0, series, closed.clamp_min(0.0))


@elementwise
def tanh_moments(mean: Tensor, variance: Tensor) -> Moments:
    """Moments of tanh(X) = 2 sigmoid(2 X) - 1, as `sigmoid_moments`.

    The mean is within 1.3e-5, the variance's error below 1.3e-4 of the input's at any sd; relative errors are large
    only in saturation (|mean| above 3), where the variance itself is below 1e-4 of the input's.
    """
    wide = 4.0 * variance
    terms = sigmoid_mixture(2.0 * mean, wide)
    smaller = sum(t.weight * t.side.tail for t in terms)
    out = sum(t.weight * torch.erf(t.h * SQRT_HALF) for t in terms)
    assert isinstance(smaller, Tensor)
    assert isinstance(out, Tensor)
    spread = _sigmoid_variance(smaller, mixture_derivatives(terms, MIXTURE_TERMS), wide)
    return out, 4.0 * spread


@elementwise
def silu_moments(mean: Tensor, variance: Tensor) -> Moments:
    """Moments of X · sigmoid(X), the sigmoid as a mixture of four normal distribution functions.

    The mean is within 5e-5. The variance's error is below 2e-4 of the input's at any sd, and below 2e-3 relative for
    means in [-4, 4] (7e-3 at sd 1); in the dead tail at -8 it can be as large as the variance.
    """
    terms = sigmoid_mixture(mean, variance)
    above = sum(t.weight * t.side.above for t in terms)
    assert isinstance(above, Tensor)
    d = mixture_derivatives(terms, MIXTURE_TERMS + 1)
    out = mean * above + variance * d[0]
    # M_k = k D_(k-1) + mean D_k + v D_(k+1); from v = 1 on, s^2 = s - s' closes E[X^2 s^2].
    known = [above, *d]
    capped = variance.clamp_max(1.0)
    slopes = [
        k * known[k - 1] + mean * known[k] + variance * known[k + 1] for k in range(1, MIXTURE_TERMS + 1)
    ]
    square = (mean.square() + variance) * (above - d[0]) + 2.0 * mean * variance * (d[0] - d[1])
    closed = square + variance.square() * (d[1] - d[2]) - out.square()
    return out, torch.where(variance < 1.0, chaos_variance(slopes, capped), closed.clamp_min(0.0))


@elementwise
def _softplus(mean: Tensor, variance: Tensor) -> Moments:
    terms = sigmoid_mixture(mean, variance)
    positive = terms[0].side.positive
    above = sum(t.weight * t.side.above for t in terms)
    beyond = sum(t.weight / t.inverse * t.side.loss for t in terms)
    assert isinstance(above, Tensor)
    slopes = [above, *mixture_derivatives(terms, MIXTURE_TERMS - 1)]
    return mean * positive + beyond, chaos_variance(slopes, variance)


def softplus_moments(mean: Tensor, variance: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Moments:
    """Moments of log(1 + exp(beta X)) / beta, from the mixture for its derivative.

    The mean is within 3e-5. The variance's relative error for means in [-4, 4] is below 7e-4 up to sd 1, 1.2e-3 at
    sd 2, 4e-3 at sd 3 and 1e-2 at sd 6 (beta = 1; else at sd / beta).

    The function's own change to a straight line above `threshold` is left out: it moves values by
    log(1 + exp(-threshold)) / beta at most, 2e-9 by default.

    Raises:
        ValueError: for a beta that is not positive.
    """
    if not beta > 0.0:
        raise ValueError(f"beta={beta!r} must be positive")
    del threshold
    out, spread = _softplus(mean * beta, variance * beta**2)
    return out / beta, spread / beta**2


@elementwise
def hardtanh_moments(mean: Tensor, variance: Tensor, lo: float = -1.0, hi: float = 1.0) -> Moments:
    """Exact moments of X clamped to [lo, hi].

    The lower half is computed, the upper one is its reflection, so neither end cancels.
    """
    middle, width = 0.5 * (lo + hi), hi - lo
    sign = 2.0 * (mean >= middle).to(mean.dtype) - 1.0
    lower = middle - (mean - middle) * sign
    at_lo, spread_lo, _ = _relu(lower - lo, variance)
    at_hi, spread_hi, _ = _relu(lower - hi, variance)
    out = lo + (at_lo - at_hi)
    spread = spread_lo - spread_hi - 2.0 * at_hi * (width - (at_lo - at_hi))
    return middle + (middle - out) * sign, spread.clamp_min(0.0)


def relu6_moments(mean: Tensor, variance: Tensor) -> Moments:
    """Exact moments of X clamped to [0, 6]."""
    return hardtanh_moments(mean, variance, lo=0.0, hi=6.0)


def hardsigmoid_moments(mean: Tensor, variance: Tensor) -> Moments:
    """Exact moments of (X + 3) / 6 clamped to [0, 1]."""
    return hardtanh_moments(mean / 6.0 + 0.5, variance / 36.0, lo=0.0, hi=1.0)


@elementwise
def softshrink_moments(mean: Tensor, variance: Tensor, lambd: float = 0.5) -> Moments:
    """Exact moments of max(X - lambd, 0) - max(-X - lambd, 0)."""
    up, spread_up, _ = _relu(mean - lambd, variance)
    down, spread_down, _ = _relu(-mean - lambd, variance)
    return up - down, spread_up + spread_down + 2.0 * up * down


@elementwise
def abs_moments(mean: Tensor, variance: Tensor) -> Moments:
    """Exact moments of |X|: mean |mean| + 2 sd l(a), variance v - 4 sd l (|mean| + sd l)."""
    sd = safe_sd(variance)
    side = side_of(mean / sd)
    excess = 2.0 * sd * side.loss
    size = mean * (2.0 * side.positive - 1.0)
    return size + excess, (variance - excess * (2.0 * size + excess)).clamp_min(0.0)


@elementwise
def elu_moments(mean: Tensor, variance: Tensor, alpha: float = 1.0, scale: float = 1.0) -> Moments:
    """Exact moments of scale · (max(X, 0) + alpha · min(exp(X) - 1, 0)); computed in double where the device has it.

    With A_k = E[exp(k X); X < 0]: mean = E max(X, 0) + alpha (A_1 - P(X < 0)), and the variance adds that of
    max(X, 0), that of min(exp X, 1) and their covariance, each without large common terms.
    """
    dtype = mean.dtype
    if mean.device.type != "mps":
        mean, variance = mean.double(), variance.double()
    relu, spread, above = _relu(mean, variance)
    # Terms of size 1 / sd cancel in the gradient: a floor on sd keeps what rounding leaves of them small.
    sd = variance.clamp_min(1e-24).sqrt()
    nu = (mean / sd).clamp(-1e4, 1e4)
    first = torch.exp(mean + 0.5 * variance + torch.special.log_ndtr(-(nu + sd)))
    second = torch.exp(2.0 * mean + 2.0 * variance + torch.special.log_ndtr(-(nu + 2.0 * sd)))
    below = normal_cdf(-nu)
    # The rounding of a difference never makes it larger than v: min(exp X, 1) moves no faster than X.
    bounded = torch.minimum((second + above - (first + above).square()).clamp_min(0.0), variance)
    out = relu + alpha * (first - below)
    total = spread + alpha**2 * bounded + 2.0 * alpha * relu * (below - first)
    return (scale * out).to(dtype), (scale**2 * total).to(dtype)


def selu_moments(mean: Tensor, variance: Tensor) -> Moments:
    """Exact moments of the self-normalising ELU."""
    return elu_moments(mean, variance, alpha=1.6732632423543772, scale=1.0507009873554805)


def celu_moments(mean: Tensor, variance: Tensor, alpha: float = 1.0) -> Moments:
    """Exact moments of max(X, 0) + min(0, alpha (exp(X / alpha) - 1)), alpha > 0."""
    return elu_moments(mean / alpha, variance / alpha**2, alpha=1.0, scale=alpha)
