"""Scores of regression: errors, prediction intervals, and the continuous ranked probability score (CRPS).

Predictions and targets must have equal shapes. Sums are taken in float64 (float32 where the device has
none); results are 0-dim tensors, or one value a target with ``reduction="none"``. NaN is refused.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dubito.argument_checks import (
    Reduction,
    check_fraction,
    check_same_shape,
    check_values,
    reduce,
    to_double,
)


def root_mean_squared_error(mean: Tensor, y: Tensor) -> Tensor:
    """Root of the mean squared error; shapes must be equal (no broadcasting)."""
    mean, y = check_values("mean", mean), check_values("y", y)
    check_same_shape(mean=mean, y=y)
    return (mean - y).square().mean().sqrt()


def mean_absolute_error(mean: Tensor, y: Tensor) -> Tensor:
    """Mean absolute error; shapes must be equal (no broadcasting)."""
    mean, y = check_values("mean", mean), check_values("y", y)
    check_same_shape(mean=mean, y=y)
    return (mean - y).abs().mean()


def _checked_interval(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    lower, upper = check_values("lower", lower), check_values("upper", upper)
    check_same_shape(lower=lower, upper=upper)
    crossed = int((lower > upper).sum())
    if crossed:
        raise ValueError(
            f"`lower` exceeds `upper` in {crossed} of {lower.numel()} intervals; are the two swapped?"
        )
    return lower, upper


def prediction_interval_coverage(lower: Tensor, upper: Tensor, y: Tensor) -> Tensor:
    """PICP: fraction of targets in their closed interval [lower, upper]; compare with the nominal level."""
    lower, upper = _checked_interval(lower, upper)
    y = check_values("y", y)
    check_same_shape(lower=lower, y=y)
    return to_double((lower <= y) & (y <= upper)).mean()


def mean_prediction_interval_width(lower: Tensor, upper: Tensor) -> Tensor:
    """MPIW: mean width of the intervals, in the target's unit; of use only beside the coverage."""
    lower, upper = _checked_interval(lower, upper)
    return (upper - lower).mean()


def interval_score(
    lower: Tensor, upper: Tensor, y: Tensor, level: float = 0.95, reduction: Reduction = "mean"
) -> Tensor:
    """Interval (Winkler) score: width + 2/α · distance by which y misses (Gneiting & Raftery, 2007, eq. 43).

    Proper for the central interval of `level` = 1 - α; lower is better; in the target's unit.
    """
    check_fraction("level", level)
    lower, upper = _checked_interval(lower, upper)
    y = check_values("y", y)
    check_same_shape(lower=lower, y=y)
    miss = (lower - y).clamp(min=0) + (y - upper).clamp(min=0)
    return reduce(upper - lower + 2 / (1 - level) * miss, reduction)


def _expected_distance(shift: Tensor, sd: Tensor) -> Tensor:
    """E|X| for X ~ N(shift, sd²); |shift| in the limit sd = 0."""
    sd = sd.clamp(min=torch.finfo(sd.dtype).tiny)
    z = shift / sd
    return shift * torch.erf(z / math.sqrt(2)) + sd * math.sqrt(2 / math.pi) * torch.exp(-z.square() / 2)


def _checked_sd(sd: Tensor | float, like: Tensor) -> Tensor:
    sd = check_values("sd", sd if isinstance(sd, Tensor) else torch.tensor(sd, device=like.device))
    if sd.numel() > 1:
        check_same_shape(mean=like, sd=sd)
    if bool((sd < 0).any()):
        raise ValueError(
            f"`sd` must not be negative, got {float(sd.min()):.4g}; is it a log standard deviation?"
        )
    return sd.expand_as(like) if sd.numel() > 1 else sd.reshape(()).expand_as(like)


def _checked_draws(name: str, draws: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    draws, y = check_values(name, draws), check_values("y", y)
    if draws.shape[1:] != y.shape:
        raise ValueError(
            f"`{name}` must be (S, *y.shape), draws first; got {tuple(draws.shape)} for y {tuple(y.shape)}."
        )
    return draws, y


def crps_gaussian(mean: Tensor, sd: Tensor | float, y: Tensor, reduction: Reduction = "mean") -> Tensor:
    """Continuous ranked probability score of N(mean, sd²), closed form (Gneiting et al., 2005, eq. 5).

    In the target's unit, lower is better; sd = 0 gives the absolute error. Differentiable for sd > 0.

    Args:
        mean: means, the shape of `y`.
        sd: standard deviations, the shape of `y` or one number.
        y: targets.
        reduction: "mean", "sum" or "none".
    """
    mean, y = check_values("mean", mean), check_values("y", y)
    check_same_shape(mean=mean, y=y)
    sd = _checked_sd(sd, mean)
    return reduce(_expected_distance(y - mean, sd) - sd / math.sqrt(math.pi), reduction)


def crps_ensemble(draws: Tensor, y: Tensor, *, fair: bool = False, reduction: Reduction = "mean") -> Tensor:
    """CRPS of draws: E|X - y| - E|X - X'| / 2 (Gneiting & Raftery, 2007, eq. 21), in O(S log S).

    ``fair=False`` scores the empirical distribution of the S draws itself (X and X' over all S² pairs);
    ``fair=True`` estimates without bias the score of what they were drawn from (over S (S - 1); Ferro, 2014).

    Args:
        draws: (S, *y.shape) draws of the target, noise included.
        y: targets.
        fair: which estimator.
        reduction: "mean", "sum" or "none".
    """
    draws, y = _checked_draws("draws", draws, y)
    count = len(draws)
    if fair and count < 2:
        raise ValueError("`fair=True` needs at least two draws, got one.")
    centred = (draws - y).sort(dim=0).values  # about y, where differences keep their digits
    rank = torch.arange(1 - count, count, 2, device=y.device, dtype=y.dtype).reshape(-1, *[1] * y.ndim)
    half_spread = (rank * centred).sum(0) / (count * (count - 1 if fair else count))
    return reduce(centred.abs().mean(0) - half_spread, reduction)


def crps_gaussian_mixture(
    means: Tensor,
    sd: Tensor | float,
    y: Tensor,
    *,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """CRPS of a mixture of Gaussians, closed form (Grimit et al., 2006): S draws of a Gaussian network.

    Σ w_i A(y - μ_i, σ_i) - ½ Σ w_i w_j A(μ_i - μ_j, √(σ_i² + σ_j²)), A(m, s) = E|N(m, s²)|. O(S²) a datum.

    Args:
        means: (S, *y.shape) component means.
        sd: component standard deviations, the shape of `means` or one number.
        y: targets.
        weights: (S,) weights that sum to 1; equal by default.
        reduction: "mean", "sum" or "none".
    """
    means, y = _checked_draws("means", means, y)
    sd = _checked_sd(sd, means)
    w = means.new_full((len(means),), 1 / len(means)) if weights is None else check_values("weights", weights)
    if w.shape != means.shape[:1] or bool((w < 0).any()) or abs(float(w.sum()) - 1) > 1e-3:
        raise ValueError(
            f"`weights` must be ({len(means)},), not negative, and sum to 1; got {tuple(w.shape)}, "
            f"sum {float(w.sum()):.4g}."
        )
    near = torch.einsum("s,s...->...", w, _expected_distance(y - means, sd))
    spread = torch.zeros_like(y)
    for i in range(len(means)):  # one component against all: memory stays O(S), not O(S²)
        pairs = _expected_distance(means - means[i], (sd.square() + sd[i].square()).sqrt())
        spread = spread + w[i] * torch.einsum("s,s...->...", w, pairs)
    return reduce(near - spread / 2, reduction)
