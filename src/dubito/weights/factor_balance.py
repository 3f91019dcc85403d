"""The scale freedom of a product of factors, removed where the KL is least.

`A_k → c_k A_k, B_k → B_k / c_k` (means and scales of the k-th columns) changes no draw of `W = A Bᵀ` and no output, but
does change the KL, which lives on the factors. Every bound that the KL enters is tightened for free.

With zero-mean Gaussian priors the KL of component k is, in u = c_k²,

    ½ (E_A u + E_B / u - (m - n) log u) + const,    E_A = sum_i E[A_ik²] / τ_ik²,  E_B alike,

whose only minimum is `u = (m - n + sqrt((m - n)² + 4 E_A E_B)) / (2 E_A)`. Under other priors log c_k is searched.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dubito.divergences import kl_divergence
from dubito.scalar_checks import computing_dtype
from dubito.weights.factor_entries import law_of
from dubito.weights.low_rank_factors import LowRankFactorsPosterior

if TYPE_CHECKING:
    from dubito.bayesian import BayesianModule

WIDEST = math.log(1e4)  # how far log c is searched to either side
GRID, REFINEMENTS = 65, 30


@torch.no_grad()
def balance_(target: BayesianModule | LowRankFactorsPosterior) -> float:
    """Rescale factors against each other so that the KL is least; the distribution of every weight stays the same.

    The optimiser's running averages belong to the old scales: call it before training or after it, or make a new
    optimiser. Frozen factors are rescaled too.

    Args:
        target: a Bayesian module (all its weights of `LowRankFactors`), or one such posterior.

    Returns:
        By how many nats the KL fell (of a Monte Carlo KL, an estimate).

    Raises:
        TypeError: for anything else.
        ValueError: for a module without low-rank factors.
    """
    if isinstance(target, LowRankFactorsPosterior):
        found = [target]
    elif hasattr(target, "posteriors"):
        found = [p for p in target.posteriors() if isinstance(p, LowRankFactorsPosterior)]
        if not found:
            raise ValueError("the module has no weights of LowRankFactors, so there is nothing to balance")
    else:
        raise TypeError(
            f"balance_ wants a BayesianModule or a posterior of LowRankFactors, got {type(target).__name__}"
        )
    return sum(_balance_one(posterior) for posterior in found)


def _balance_one(posterior: LowRankFactorsPosterior) -> float:
    """The fall of one weight's KL."""
    even = torch.zeros(posterior.blocks, posterior.rank, dtype=_wide(posterior), device=_device(posterior))
    shift = _closed_form(posterior)
    if shift is None:
        shift = _searched(posterior, even)
    before, after = _component_kl(posterior, even), _component_kl(posterior, shift)
    better = (
        after < before
    )  # rounding, or noise of Monte Carlo, may say otherwise where nothing is to be gained
    shift = torch.where(better, shift, even)
    for side in ("left", "right"):
        mean, spread = posterior.factor(side)
        moved = _spread_over(posterior, side, shift).to(mean.dtype)
        mean.mul_(moved.exp())
        spread.add_(moved)
    return float((before - after).clamp_min(0.0).sum())


def _closed_form(posterior: LowRankFactorsPosterior) -> Tensor | None:
    """log c, (h, r), where both priors are Gaussian of mean zero; else None."""
    sums, counts = [], []
    for side in ("left", "right"):
        prior = posterior.factor_prior(side).gaussian()
        if prior is None or isinstance(prior[0], Tensor) or prior[0] != 0:
            return None
        tau = prior[1]
        if isinstance(tau, Tensor) and tau.numel() > 1:
            return None  # entries of their own, which the search takes as they are
        mean, variance = (t.to(_wide(posterior)) for t in posterior.moments(side))
        energy = (mean.square() + variance) / (tau**2)
        rows = len(mean) // (posterior.blocks if side == "left" else 1)
        keep = _kept(posterior, side)
        sums.append(_per_component(posterior, side, energy * keep))
        counts.append(rows - int((keep == 0).sum()))
    (energy_a, energy_b), difference = sums, counts[0] - counts[1]
    root = (difference**2 + 4.0 * energy_a * energy_b).sqrt()
    # of the two forms of the root the one without cancellation
    u = (difference + root) / (2.0 * energy_a) if difference >= 0 else 2.0 * energy_b / (root - difference)
    return 0.5 * u.log()


def _searched(posterior: LowRankFactorsPosterior, even: Tensor) -> Tensor:
    """log c by a grid and golden sections around its best point, all components at once."""
    grid = torch.linspace(-WIDEST, WIDEST, GRID, dtype=even.dtype, device=even.device)
    values = torch.stack([_component_kl(posterior, even + point) for point in grid])
    best = grid[values.argmin(0)]
    step = 2 * WIDEST / (GRID - 1)
    low, high = best - step, best + step
    ratio = (math.sqrt(5.0) - 1.0) / 2.0
    inner, outer = high - ratio * (high - low), low + ratio * (high - low)
    at_inner, at_outer = _component_kl(posterior, inner), _component_kl(posterior, outer)
    for _ in range(REFINEMENTS):
        left = at_inner < at_outer
        low, high = torch.where(left, low, inner), torch.where(left, outer, high)
        inner, outer = high - ratio * (high - low), low + ratio * (high - low)
        at_inner, at_outer = _component_kl(posterior, inner), _component_kl(posterior, outer)
    return 0.5 * (low + high)


def _component_kl(posterior: LowRankFactorsPosterior, shift: Tensor) -> Tensor:
    """KL in nats of each component, (h, r), with its columns scaled by exp(±shift); Monte Carlo by common numbers."""
    total = torch.zeros_like(shift)
    for side in ("left", "right"):
        mean, spread = (t.to(shift.dtype) for t in posterior.factor(side))
        moved = _spread_over(posterior, side, shift)
        q = law_of(mean * moved.exp(), spread + moved, posterior.law)
        prior = posterior.factor_prior(side).distribution(mean)
        generator = torch.Generator(mean.device).manual_seed(0)
        value = kl_divergence(q, prior, "auto", posterior.family.kl_samples, generator)
        total = total + _per_component(posterior, side, value * _kept(posterior, side))
    return total


def _per_component(posterior: LowRankFactorsPosterior, side: str, values: Tensor) -> Tensor:
    """Sums over a factor's rows: (h, r)."""
    if side == "left":
        return values.reshape(posterior.blocks, -1, posterior.rank).sum(1)
    return values.sum(0).reshape(posterior.blocks, posterior.rank)


def _spread_over(posterior: LowRankFactorsPosterior, side: str, shift: Tensor) -> Tensor:
    """log c for every entry of A, -log c of B."""
    if side == "left":
        return shift.repeat_interleave(len(posterior.left_mean) // posterior.blocks, 0)
    return -shift.reshape(1, -1)


def _kept(posterior: LowRankFactorsPosterior, side: str) -> Tensor:
    """(rows, 1): 0 for a padding token's row, which has no KL."""
    mean = posterior.factor(side)[0]
    keep = torch.ones(len(mean), 1, dtype=_wide(posterior), device=mean.device)
    row = posterior.fixed_row if side == "left" else None
    if row is not None:
        keep[row] = 0.0
    return keep


def _wide(posterior: LowRankFactorsPosterior) -> torch.dtype:
    return computing_dtype(posterior.left_mean.dtype)


def _device(posterior: LowRankFactorsPosterior) -> torch.device:
    return posterior.left_mean.device
