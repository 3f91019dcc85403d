"""Exact first and second moments of `W = A Bᵀ`, and of what it makes of an input.

With independent entries of means mA, mB and variances VA, VB (Gaussian or Laplace; only two moments matter):

    Cov(W_ij, W_pq) = sum_k  1[i=p] VA_ik mB_jk mB_qk + 1[j=q] VB_jk mA_ik mA_pk + 1[i=p, j=q] VA_ik VB_jk

so entries that share neither row nor column are uncorrelated. For `h = Bᵀ x` with mean hm and variance hv,

    E y = mA hm,    Cov y = mA diag(hv) mAᵀ + diag(VA (hm² + hv)).

The laws are not Gaussian: the kurtosis of an entry is 3 + 6/r for Gaussian factors of zero mean and equal scale. The
covariance is Lemma 3.5 of "Singular Bayesian neural networks".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dubito.scalar_checks import computing_dtype
from dubito.weights.family import WeightPosterior
from dubito.weights.low_rank_factors import LowRankFactorsPosterior

LARGEST_COVARIANCE = 2**13  # entries of W: a matrix of 2^26 numbers


class _Block(NamedTuple):
    """One block of rows, from `start`: means and variances of its factors, (m/h, r) and (n, r)."""

    start: int
    left: Tensor
    left_variance: Tensor
    right: Tensor
    right_variance: Tensor


@torch.no_grad()
def weight_covariance(posterior: WeightPosterior) -> Tensor:
    """Covariance of all entries of W, exact.

    Args:
        posterior: one that `LowRankFactors` made, as in `bayes.posterior`.

    Returns:
        (m n, m n), entries of W in row-major order; a kernel is its (out, in·k) matrix.

    Raises:
        TypeError: for another family.
        ValueError: for a weight of more than 8,192 entries; `entry_covariance` gives single ones.
    """
    factors = _checked(posterior)
    rows, columns = factors.left_mean.shape[0], factors.right_mean.shape[0]
    if rows * columns > LARGEST_COVARIANCE:
        raise ValueError(
            f"the covariance of {rows} × {columns} entries would hold {(rows * columns) ** 2:,} numbers (the limit is "
            f"{LARGEST_COVARIANCE:,} entries); ask for single ones by entry_covariance(posterior, (i, j), (p, q))"
        )
    value = factors.left_mean.new_zeros(
        rows, columns, rows, columns, dtype=computing_dtype(factors.left_mean.dtype)
    )
    every_column = torch.arange(columns, device=value.device)
    for block in _blocks(factors):
        span = slice(block.start, block.start + len(block.left))
        own = value[span, :, span, :]
        every_row = torch.arange(len(block.left), device=value.device)
        own[every_row, :, every_row, :] += torch.einsum(
            "ik,jk,qk->ijq", block.left_variance, block.right, block.right
        )
        own[:, every_column, :, every_column] += torch.einsum(
            "jk,ik,pk->jip", block.right_variance, block.left, block.left
        )
        both = block.left_variance @ block.right_variance.mT
        own.diagonal(dim1=0, dim2=2).diagonal(dim1=0, dim2=1).add_(both)
    return value.reshape(rows * columns, rows * columns)


@torch.no_grad()
def entry_covariance(posterior: WeightPosterior, first: tuple[int, int], second: tuple[int, int]) -> float:
    """Cov(W_ij, W_pq) of two entries (of the matrix, for a kernel), exact; negative indices count from the end.

    Raises:
        TypeError: for another family.
        IndexError: for an entry that W does not have.
    """
    factors = _checked(posterior)
    shape = (factors.left_mean.shape[0], factors.right_mean.shape[0])
    for name, entry in (("first", first), ("second", second)):
        if any(not -size <= index < size for index, size in zip(entry, shape, strict=True)):
            raise IndexError(f"{name}={entry} is no entry of a {shape[0]} × {shape[1]} matrix")
    (i, j), (p, q) = ((a % shape[0], b % shape[1]) for a, b in (first, second))
    height = shape[0] // factors.blocks
    if i // height != p // height:
        return 0.0
    block = list(_blocks(factors))[i // height]
    i, p = i - block.start, p - block.start
    value = torch.zeros((), dtype=block.left.dtype, device=block.left.device)
    if i == p:
        value = value + (block.left_variance[i] * block.right[j] * block.right[q]).sum()
    if j == q:
        value = value + (block.right_variance[j] * block.left[i] * block.left[p]).sum()
    if i == p and j == q:
        value = value + (block.left_variance[i] * block.right_variance[j]).sum()
    return float(value)


def output_moments(posterior: WeightPosterior, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of `W x` for given inputs, exact and differentiable.

    Both under one draw of the weights an example and under two-stage local reparametrisation. For a kernel an input is
    an unfolded patch of in·k numbers.

    Args:
        posterior: one that `LowRankFactors` made.
        x: inputs, (B, n).

    Returns:
        The mean (B, m) and the covariance (B, m, m): a diagonal plus rank r.

    Raises:
        TypeError: for another family.
        ValueError: for inputs that are not (B, n).
    """
    factors = _checked(posterior)
    columns = factors.right_mean.shape[0]
    if x.dim() != 2 or x.shape[1] != columns:
        raise ValueError(
            f"x must be of shape (batch, {columns}) for this {factors.left_mean.shape[0]} × {columns} matrix, got "
            f"{tuple(x.shape)}"
        )
    x = x.to(computing_dtype(factors.left_mean.dtype))
    means, covariances = [], []
    for block in _blocks(factors):
        hidden, spread = x @ block.right, x.square() @ block.right_variance
        means.append(hidden @ block.left.mT)
        own = (hidden.square() + spread) @ block.left_variance.mT
        covariances.append((block.left * spread.unsqueeze(1)) @ block.left.mT + torch.diag_embed(own))
    mean = torch.cat(means, 1)
    if len(covariances) == 1:
        return mean, covariances[0]
    covariance = mean.new_zeros(*mean.shape, mean.shape[1])
    start = 0
    for part in covariances:
        stop = start + part.shape[1]
        covariance[:, start:stop, start:stop] = part
        start = stop
    return mean, covariance


def _checked(posterior: WeightPosterior) -> LowRankFactorsPosterior:
    if not isinstance(posterior, LowRankFactorsPosterior):
        raise TypeError(
            f"posterior must be one that LowRankFactors made, got {type(posterior).__name__}; of any family "
            "posterior.mean() and posterior.variance() give the moments of single entries"
        )
    return posterior


def _blocks(factors: LowRankFactorsPosterior) -> Iterator[_Block]:
    wide = computing_dtype(factors.left_mean.dtype)
    (left, left_variance), (right, right_variance) = factors.moments("left"), factors.moments("right")
    parts = [t.to(wide).chunk(factors.blocks, 0) for t in (left, left_variance)]
    parts += [t.to(wide).chunk(factors.blocks, 1) for t in (right, right_variance)]
    start = 0
    for a, va, b, vb in zip(*parts, strict=True):
        yield _Block(start, a, va, b, vb)
        start += len(a)
