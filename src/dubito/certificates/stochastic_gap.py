"""How far the expected losses of two random layers can be apart: from their exact first and second moments.

With `z = W x` and `V = tr Cov z`, for a loss that is L-Lipschitz in z and of curvature at most b,

    |E l(z) - l(E z)| ≤ min(b V / 2, L √V),          0 ≤ E l(z) - l(E z) where l is convex,

so that (singular BNN paper, after theorem 3.7)

    |E l(W x) - E l(W' x)| ≤ L ‖(E W - E W') x‖ + J,

where J is the sum of the two layers' terms, as in the paper, and for a convex loss the larger one of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.argument_checks import to_double
from dubito.certificates.certificate import Certificate
from dubito.certificates.loss_constants import LossConstants, loss_constants
from dubito.weights.family import CapabilityError, WeightPosterior
from dubito.weights.low_rank_factors import LowRankFactorsPosterior

__all__ = ["StochasticGap", "output_moments", "stochastic_gap"]


@dataclass(frozen=True, kw_only=True)
class StochasticGap(Certificate):
    """A bound of the difference between two layers' expected losses, meaned over the given inputs.

    Attributes:
        means_apart: L · mean ‖(E W - E W') x‖.
        sum_form: the bound with the paper's sum of both curvature terms; infinite for a loss with kinks.
    """

    means_apart: float
    sum_form: float


def stochastic_gap(
    one: WeightPosterior | Tensor,
    other: WeightPosterior | Tensor,
    inputs: Tensor,
    *,
    loss: str | LossConstants = "cross_entropy",
    output_bound: float | None = None,
) -> StochasticGap:
    """What exchanging one layer's posterior for another may change the expected loss by.

    Args:
        one, other: posteriors of weight matrices of one size (mean field, or low-rank factors), or plain weights
            (m, n): `list(bayes.posteriors())[0]`.
        inputs: the layer's inputs, (N, n).
        loss: a name or constants, as for `loss_constants`.
        output_bound: B of "half_squared"; the outputs of every draw must stay within it, so clip them.

    Raises:
        CapabilityError: a posterior whose output variance has no closed form.
        ValueError: sizes that do not fit, or NaN.
    """
    constants = loss_constants(loss, output_bound)
    (mean, spread), (other_mean, other_spread) = (output_moments(w, inputs) for w in (one, other))
    if mean.shape != other_mean.shape:
        raise ValueError(f"outputs of {mean.shape[1]} and {other_mean.shape[1]} entries cannot be compared")
    apart = constants.lipschitz * (mean - other_mean).norm(dim=1)
    smooth = math.isfinite(constants.curvature)
    half = 0.5 * constants.curvature if smooth else math.inf
    curved = [torch.where(v > 0, half * v, 0.0) for v in (spread, other_spread)]
    jensen = [
        torch.minimum(c, constants.lipschitz * v.sqrt())
        for c, v in zip(curved, (spread, other_spread), strict=True)
    ]
    both = torch.maximum(*jensen) if constants.convex else jensen[0] + jensen[1]
    kinks = "" if smooth else " (the loss has kinks: L √V in place of b V / 2)"
    return StochasticGap(
        name="stochastic Eckart-Young-Mirsky",
        predictor="Gibbs",
        statement="|E loss(W x) - E loss(W' x)| ≤ L ‖(E W - E W') x‖ + "
        + ("max" if constants.convex else "sum")
        + f" of min(b V / 2, L √V), V = tr Cov(W x), meaned over the inputs{kinks}",
        bound=float((apart + both).mean()),
        trivial=math.inf,
        assumptions=(
            "The loss is L-Lipschitz in the outputs" + (", of curvature at most b." if not kinks else "."),
            *(["The loss is convex in the outputs."] if constants.convex else []),
            "The statement is about one layer's linear map, the same bias on both sides.",
            "The bound is about the mean over the given inputs.",
        ),
        measured={
            "L": constants.lipschitz,
            "b": constants.curvature,
            "mean variance of W x": float(spread.mean()),
            "mean variance of W' x": float(other_spread.mean()),
        },
        means_apart=float(apart.mean()),
        sum_form=float((apart + curved[0] + curved[1]).mean()),
    )


@torch.no_grad()
def output_moments(weight: WeightPosterior | Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """E[W x], (N, m), and the trace of Cov(W x), (N,), exactly.

    Raises:
        CapabilityError: a posterior that is neither diagonal nor one of low-rank factors.
        ValueError: shapes that do not fit, or NaN.
    """
    if isinstance(weight, Tensor):
        matrix = to_double(weight.detach()).flatten(1)
        x = _checked(inputs, matrix.shape[1])
        return x @ matrix.mT, x.new_zeros(len(x))
    if not isinstance(weight, WeightPosterior):
        raise TypeError(
            "each side must be a matrix or the posterior of one, list(bayes.posteriors())[0], not "
            f"{type(weight).__name__}"
        )
    if len(weight.slots) != 1 or len(weight.slots[0].shape) < 2:
        names = ", ".join(slot.name for slot in weight.slots)
        raise ValueError(f"one weight matrix is needed, and this posterior covers {names}")
    name, columns = weight.slots[0].name, weight.slots[0].shape[1:].numel()
    x = _checked(inputs, columns)
    mean = x @ to_double(weight.mean()[name]).flatten(1).mT
    if isinstance(weight, LowRankFactorsPosterior):
        return mean, _factored(weight, x)
    if weight.diagonal:
        return mean, x.square() @ to_double(weight.variance()[name]).flatten(1).sum(0)
    raise CapabilityError(
        f"{type(weight).__name__} gives no closed-form variance of W x here: use MeanField or LowRankFactors"
    )


def _factored(weight: LowRankFactorsPosterior, x: Tensor) -> Tensor:
    """tr Cov(A Bᵀ x) = Σ_k var(h_k) ‖mA_k‖² + Σ_ik vA_ik (E h_k² ), with h = Bᵀ x."""
    left, left_variance = (to_double(t) for t in weight.moments("left"))
    right, right_variance = (to_double(t) for t in weight.moments("right"))
    mean, variance = x @ right, x.square() @ right_variance
    blocks = right.shape[1] // left.shape[1]  # of rows, each with columns of its own in the right factor
    squares, spreads = (
        t.reshape(blocks, -1, left.shape[1]).sum(1).flatten() for t in (left.square(), left_variance)
    )
    return variance @ squares + (mean.square() + variance) @ spreads


def _checked(inputs: Tensor, columns: int) -> Tensor:
    if not isinstance(inputs, Tensor) or inputs.dim() != 2 or inputs.shape[1] != columns or not len(inputs):
        got = tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
        raise ValueError(f"inputs must have shape (N, {columns}) with N ≥ 1, got {got}")
    if not bool(torch.isfinite(inputs).all()):
        raise ValueError("inputs contain NaN or infinity")
    return to_double(inputs.detach())
