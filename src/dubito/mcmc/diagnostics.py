"""Have the chains mixed, and how many independent draws are theirs worth: split R-hat and effective sample size.

Vehtari, Gelman, Simpson, Carpenter & Bürkner 2021, "Rank-normalization, folding, and localization: an improved R-hat
for assessing convergence of MCMC". Every function takes `(chains, draws, …)` and gives one number for each of the
quantities in the trailing dimensions.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dubito.scalar_checks import choice

EssKind = Literal["bulk", "tail", "mean"]


def r_hat(values: Tensor) -> Tensor:
    """Rank-normalised split R-hat: the larger of that of the values and of their distance from the median.

    1 where chains agree; their section 4 asks for at most 1.01. Infinite where chains stand still at different values,
    NaN where nothing varies at all.

    Args:
        values: `(chains, draws, …)`, at least four draws of each chain.

    Raises:
        ValueError: fewer dimensions or draws, or values that are not finite.
    """
    halves = _split(_checked(values))
    folded = (halves - halves.flatten(0, 1).quantile(0.5, dim=0)).abs()
    # fmax: what is symmetric about its median may not vary when folded
    return torch.fmax(_plain_r_hat(_normal_scores(halves)), _plain_r_hat(_normal_scores(folded)))


def effective_sample_size(values: Tensor, kind: EssKind = "bulk") -> Tensor:
    """How many independent draws would estimate as well as these correlated ones.

    "bulk" is that of the rank-normalised values (for centres), "tail" the smaller one of the indicators of the 5 % and
    95 % quantiles (for intervals), "mean" that of the values themselves (for their mean's Monte Carlo error). By the
    initial monotone sequence of the split chains' autocorrelations (Geyer 1992). NaN where nothing varies.

    Args:
        values: `(chains, draws, …)`, at least four draws of each chain.

    Raises:
        ValueError: fewer dimensions or draws, values that are not finite, or another kind.
    """
    choice("kind", kind, EssKind)
    halves = _split(_checked(values))
    if kind == "mean":
        return _plain_ess(halves)
    if kind == "bulk":
        return _plain_ess(_normal_scores(halves))
    low, high = (halves.flatten(0, 1).quantile(q, dim=0) for q in (0.05, 0.95))
    return torch.minimum(_plain_ess((halves <= low).to(halves)), _plain_ess((halves <= high).to(halves)))


def _checked(values: Tensor) -> Tensor:
    if values.ndim < 2 or values.shape[1] < 4 or values.shape[0] < 1:
        raise ValueError(
            f"values have shape {tuple(values.shape)}; (chains, draws, …) with at least 4 draws each are needed"
        )
    wide = values.detach().to(torch.float32 if values.device.type == "mps" else torch.float64)
    if not bool(wide.isfinite().all()):
        raise ValueError(f"values hold {int((~wide.isfinite()).sum())} NaN or infinite entries")
    return wide


def _split(values: Tensor) -> Tensor:
    """Each chain as two, so that a drift within it counts; of an odd number of draws the middle one is left out."""
    half = values.shape[1] // 2
    return torch.cat((values[:, :half], values[:, -half:]))


def _normal_scores(values: Tensor) -> Tensor:
    """Φ⁻¹ of the ranks over all chains, (rank - 3/8) / (n + 1/4), ties sharing their mean rank (their equation 14)."""
    count = values.shape[0] * values.shape[1]
    flat = values.reshape(count, -1).mT.contiguous()
    ordered = flat.sort(dim=-1).values
    below = torch.searchsorted(ordered, flat, side="left")
    up_to = torch.searchsorted(ordered, flat, side="right")
    rank = 0.5 * (below + up_to + 1).to(values)
    scores: Tensor = torch.special.ndtri((rank - 0.375) / (count + 0.25))
    return scores.mT.reshape(values.shape)


def _plain_r_hat(values: Tensor) -> Tensor:
    """√(var⁺ / W) with W the mean variance within and var⁺ = (n-1)/n W + variance of the chains' means."""
    draws = values.shape[1]
    within = values.var(dim=1).mean(0)
    between = values.mean(1).var(dim=0)
    return (((draws - 1) / draws * within + between) / within).sqrt()


def _autocovariance(values: Tensor) -> Tensor:
    """Of each chain at every lag, along dimension 1, divided by the number of draws."""
    draws = values.shape[1]
    centred = values - values.mean(1, keepdim=True)
    size = 2 ** (2 * draws - 1).bit_length()
    spectrum = torch.fft.rfft(centred, n=size, dim=1)
    sums: Tensor = torch.fft.irfft(spectrum.abs().square(), n=size, dim=1)
    return sums[:, :draws] / draws


def _plain_ess(values: Tensor) -> Tensor:
    chains, draws = values.shape[:2]
    covariance = _autocovariance(values).mean(0)
    within = covariance[0] * draws / (draws - 1)
    spread = covariance[0] + values.mean(1).var(dim=0)  # var⁺ of R-hat
    rho = 1 - (within - covariance) / spread
    rho[0] = 1.0
    pairs = rho[: draws - draws % 2].reshape(draws // 2, 2, *rho.shape[1:]).sum(1)
    kept = (pairs > 0).to(pairs).cumprod(0)  # up to the first pair that is not positive
    monotone = pairs.cummin(0).values * kept
    # the even lag after the last pair kept: an odd number of terms does better for antithetic chains
    position = kept.sum(0, keepdim=True).long().clamp(max=draws // 2 - 1)
    tail = rho[0::2].gather(0, position).squeeze(0).clamp(min=0)
    tail = torch.where(kept[-1] > 0, torch.zeros_like(tail), tail)
    total = chains * draws
    tau = -1 + 2 * monotone.sum(0) + tail
    floor = 1 / torch.log10(torch.tensor(float(total), dtype=tau.dtype))
    # a chain of no variance has no autocorrelation: 0 / 0 stays NaN
    return torch.where(spread > 0, total / torch.maximum(tau, floor.to(tau)), torch.full_like(tau, torch.nan))
