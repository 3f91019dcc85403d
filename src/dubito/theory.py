"""Where training by the expected loss ends, in closed form, for linear models.

Gradient descent on the expected loss of `f_w(x) = xᵀw` under `q = N(m, S Sᵀ)` moves m and S within the row space of
the data only. From the prior it therefore ends at the minimiser of the expected loss that is nearest to the prior in
2-Wasserstein distance: certain where there are data, as uncertain as the prior where there are none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dubito.bayesian import BayesianModule
from dubito.divergences import wasserstein2_gaussian_factors
from dubito.snapshot import Snapshot
from dubito.weights.low_rank_covariance import LowRankCovariancePosterior

Prior = tuple[Tensor, Tensor] | BayesianModule | Snapshot


@dataclass(frozen=True)
class LinearGaussian:
    """A Gaussian over the weights of a linear model, `w ~ N(mean, factor factorᵀ)`.

    Attributes:
        mean: (P,).
        factor: (P, R).
        bias: whether the last weight is that of a constant input.
    """

    mean: Tensor
    factor: Tensor
    bias: bool = False

    @property
    def covariance(self) -> Tensor:
        """(P, P)."""
        return self.factor @ self.factor.mT

    def predictive(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of `xᵀw`, each (N,), at inputs (N, P) (without the constant one)."""
        X = design(X, self.mean.numel(), self.bias)
        return X @ self.mean, (X @ self.factor).square().sum(1)

    def wasserstein(self, other: LinearGaussian) -> Tensor:
        """Squared 2-Wasserstein distance, scalar."""
        return wasserstein2_gaussian_factors(self.mean, self.factor, other.mean, other.factor)


def linear_gaussian(prior: Prior) -> LinearGaussian:
    """The distribution over a linear model's weights.

    Args:
        prior: (mean (P,), factor (P, R)); or a network that is one `nn.Linear(P, 1)` with one `LowRankCovariance`
            over its weight and, if it has one, its bias; or a snapshot of it.

    Raises:
        ValueError, TypeError: something else.
    """
    if isinstance(prior, tuple):
        mean, factor = prior
        if mean.dim() != 1 or factor.dim() != 2 or len(mean) != len(factor):
            raise ValueError(
                f"prior must be a mean (P,) and a factor (P, R), got {tuple(mean.shape)} and {tuple(factor.shape)}"
            )
        return LinearGaussian(mean.detach(), factor.detach())
    if not isinstance(prior, BayesianModule | Snapshot):
        raise TypeError(
            f"prior must be (mean, factor), a BayesianModule or a snapshot, not {type(prior).__name__}"
        )
    posteriors: list[Any] = list(prior.posteriors())
    names = {slot.name.rpartition(".")[2]: slot for p in posteriors for slot in p.slots}
    fits = len(posteriors) == 1 and isinstance(posteriors[0], LowRankCovariancePosterior)
    if not fits or not {"weight"} <= set(names) <= {"weight", "bias"} or names["weight"].shape[0] != 1:
        raise ValueError(
            "prior must be a linear model of one output, nn.Linear(P, 1), whose weight and bias share one "
            "LowRankCovariance"
        )
    (posterior,) = posteriors
    slots = [names["weight"], *([names["bias"]] if "bias" in names else [])]
    means = torch.cat([slot.parameter.detach().reshape(-1) for slot in slots])
    factors = [posterior.factor(slot.name).detach().reshape(posterior.rank, -1) for slot in slots]
    return LinearGaussian(means.clone(), torch.cat(factors, 1).mT.clone(), "bias" in names)


def implicit_bias_limit(
    X: Tensor, y: Tensor, prior: Prior, learning_rates: Tensor | None = None
) -> LinearGaussian:
    """Where (stochastic) gradient descent on the expected squared error ends, from `prior` (IBVI, theorem 1).

    With `A = D Xᵀ (X D Xᵀ)⁺`, `D = diag(learning_rates)` and `A = X⁺` for equal rates:
    `m* = m0 + A (y - X m0)` and `S* = (I - A X) S0`. Momentum, batches and draws change nothing, nor does a rate of S
    that is a multiple of its mean's; Adam and weight decay do. Where y is not in the range of X (more data than
    weights), the mean is the least-squares one.

    Args:
        X: inputs (N, P), without the constant one of a bias.
        y: targets (N,) or (N, 1).
        prior: see `linear_gaussian`.
        learning_rates: relative rate of each of the P weights (the bias last), > 0; None: all equal.

    Returns:
        The limit; its variance is 0 at the training inputs.

    Raises:
        ValueError: shapes that do not fit, or rates that are not positive.
    """
    start, X, y = _problem(X, y, prior)
    d = torch.ones_like(start.mean)
    if learning_rates is not None:
        if learning_rates.shape != start.mean.shape or not bool((learning_rates > 0).all()):
            raise ValueError(
                f"learning_rates must be {len(start.mean)} positive numbers, one a weight (the bias last), got "
                f"{learning_rates}"
            )
        d = learning_rates.to(start.mean)
    root = d.sqrt()
    A = root[:, None] * torch.linalg.pinv(X * root)
    mean = start.mean + A @ (y - X @ start.mean)
    return LinearGaussian(mean, start.factor - A @ (X @ start.factor), start.bias)


def max_margin_limit(X: Tensor, y: Tensor, prior: Prior) -> LinearGaussian:
    """The limit of gradient descent on the expected exponential loss of separable data (IBVI, theorem 2).

    `m* = w + (I - X⁺X) m0` with the max-margin vector w, `S* = (I - X⁺X) S0`. The iterate's mean grows without bound:
    only its direction within the row space tends to w (`m_t / log t` does, and slowly), and S to S*.

    Args:
        X: inputs (N, P), without the constant one of a bias.
        y: labels -1 and 1, or 0 and 1, (N,) or (N, 1).
        prior: see `linear_gaussian`.

    Raises:
        ValueError: shapes that do not fit, or labels that no hyperplane through the origin separates.
    """
    start, X, labels = _problem(X, y, prior)
    margin = max_margin_direction(X, labels)
    outside = torch.eye(len(start.mean)).to(X) - torch.linalg.pinv(X) @ X
    return LinearGaussian(margin + outside @ start.mean, outside @ start.factor, start.bias)


def max_margin_direction(X: Tensor, y: Tensor) -> Tensor:
    """The hard-margin support-vector solution without a bias: min ||w||² such that `y_n x_nᵀw >= 1`, (P,).

    Solved exactly, as a problem of non-negative least squares (least-distance programming, Lawson & Hanson 1974).

    Args:
        X: inputs (N, P).
        y: labels -1 and 1, or 0 and 1, (N,).

    Raises:
        ValueError: other labels, or data that are not separable.
    """
    signs = torch.where(y > 0, 1.0, -1.0).to(X)
    if not bool(((y == 1) | (y == -1)).all() | ((y == 1) | (y == 0)).all()):
        raise ValueError(f"y must hold labels -1 and 1, or 0 and 1, got {y.unique().tolist()[:5]}")
    Z = signs[:, None] * X
    E = torch.cat([Z, Z.new_ones(len(Z), 1)], 1).mT  # the least-distance problem as one of least squares
    goal = E.new_zeros(len(E))
    goal[-1] = 1.0
    residual = E @ _nonnegative_least_squares(E, goal) - goal
    w = residual[:-1] / -residual[-1].clamp_max(-torch.finfo(E.dtype).tiny)
    if not bool((Z @ w >= 1.0 - 1e-4).all()):
        raise ValueError(
            "the data are not linearly separable by a hyperplane through the origin, so there is no maximum margin"
        )
    return w


def design(X: Tensor, size: int, bias: bool) -> Tensor:
    """Inputs with a column of ones where the last of `size` weights is a bias.

    Raises:
        ValueError: if the numbers of columns do not fit.
    """
    if X.dim() != 2 or X.shape[1] != size - bias:
        raise ValueError(
            f"X must have {size - bias} columns, one an input of the linear model, got {tuple(X.shape)}"
        )
    return torch.cat([X, X.new_ones(len(X), 1)], 1) if bias else X


def _problem(X: Tensor, y: Tensor, prior: Prior) -> tuple[LinearGaussian, Tensor, Tensor]:
    start = linear_gaussian(prior)
    if y.numel() != len(X) or y.shape[0] != len(X):
        raise ValueError(
            f"y must hold one number for each of the {len(X)} inputs, got shape {tuple(y.shape)}"
        )
    return start, design(X, start.mean.numel(), start.bias).to(start.mean), y.reshape(-1).to(start.mean)


def _nonnegative_least_squares(E: Tensor, goal: Tensor) -> Tensor:
    """argmin ||E u - goal|| over u >= 0, by the active-set method of Lawson & Hanson (1974, chapter 23)."""
    u = E.new_zeros(E.shape[1])
    active = torch.zeros(len(u), dtype=torch.bool, device=E.device)
    tolerance = 100.0 * torch.finfo(E.dtype).eps * float(E.abs().max())
    for _ in range(10 * len(u)):
        slope = E.mT @ (goal - E @ u)
        slope[active] = -torch.inf
        if not bool(slope.max() > tolerance):
            break
        active[slope.argmax()] = True
        while bool(active.any()):
            target = torch.zeros_like(u)
            target[active] = torch.linalg.pinv(E[:, active]) @ goal
            below = active & (target <= 0.0)
            if not bool(below.any()):
                u = target
                break
            step = (u[below] / (u[below] - target[below])).min()
            u = u + step * (target - u)
            active = active & (u > tolerance)
            u = torch.where(active, u, 0.0)
    return u
