"""The head: from the moments of the outputs to the predictive.

Logits are taken as Gaussian. Their softmax has no closed-form mean; there are four ways (`HEADS`):

- `"sampled"`, the default: the mean over 256 fixed quasi-normal draws of the logits, exact in the limit, for any number
  of classes and for full or low-rank covariances, with entropy and mutual information.
- `"probit"`: `softmax(m / sqrt(1 + pi v / 8))` (MacKay 1992), a temperature a class; cheap, but with a hundred classes
  worse than no correction.
- `"pairwise"`: `p_k ∝ 1 / sum_i exp(-(m_k - m_i) / sqrt(1 + pi w / 8))`, each pair of classes as a binary problem.
- `"second_order"`: Taylor's expansion in the logits' deviation; the sharpest of the closed forms up to a standard
  deviation of 1, and not to be used from 2 on.

For Bernoulli, Gaussian and heteroscedastic Gaussian likelihoods the default is a closed form or a quadrature.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito import targets
from dubito.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from dubito.moments.activation_moments import sigmoid_moments
from dubito.moments.normal_functions import safe_sd
from dubito.moments.quadrature_moments import gauss_hermite
from dubito.moments.sampled_logits import (
    SAMPLES,
    LogitCovariance,
    LowRankLogits,
    check_moments,
    sampled_logits,
)
from dubito.predictive import Predictive
from dubito.scalar_checks import choice

Head = Literal["sampled", "probit", "pairwise", "second_order"]
HEADS: tuple[str, ...] = get_args(Head)
_BLOCK = 2**22  # numbers drawn at once
_NODES = 32  # of the quadratures in one dimension

__all__ = [
    "HEADS",
    "LogitCovariance",
    "LowRankLogits",
    "pairwise_probabilities",
    "predictive_from_moments",
    "probit_probabilities",
    "sampled_probabilities",
    "second_order_probabilities",
]


# ------------------------------------------------------------------------------ logits' moments → probabilities


def sampled_probabilities(
    mean: Tensor, variance: Tensor, covariance: LogitCovariance | None = None, samples: int = SAMPLES
) -> Tensor:
    """E[softmax] over fixed quasi-normal draws of the logits; classes last, `(batch, …, C)`.

    Args:
        mean: of the logits.
        variance: theirs, used where there is no covariance.
        covariance: full `(batch, …, C, C)`, or `LowRankLogits`.
        samples: draws.
    """
    return sampled_logits(mean, variance, covariance, samples).softmax(-1).mean(0)


def probit_probabilities(mean: Tensor, variance: Tensor, covariance: LogitCovariance | None = None) -> Tensor:
    """`softmax(m / sqrt(1 + pi v / 8))`; a covariance counts by its diagonal."""
    check_moments(mean, variance, covariance)
    return _damped(mean, _diagonal(variance, covariance)).softmax(-1)


def pairwise_probabilities(
    mean: Tensor, variance: Tensor, covariance: LogitCovariance | None = None
) -> Tensor:
    """`p_k ∝ 1 / sum_i exp(-(m_k - m_i) / sqrt(1 + pi w_ki / 8))`.

    With two classes w is the variance of the difference, and this is the probit form of a binary problem. With more,
    all pairs together would count each logit's variance twice: w is v_k alone, with a covariance half the variance of
    the difference.
    """
    check_moments(mean, variance, covariance)
    if covariance is None:
        ours, theirs = variance.unsqueeze(-1), variance.unsqueeze(-2)
        spread = ours + theirs if mean.shape[-1] == 2 else ours.expand(*mean.shape, mean.shape[-1])
    else:
        full = _full(covariance)
        diagonal = full.diagonal(dim1=-2, dim2=-1)
        spread = (diagonal.unsqueeze(-1) + diagonal.unsqueeze(-2) - 2 * full).clamp_min(0)
        spread = spread if mean.shape[-1] == 2 else 0.5 * spread
    difference = _damped(mean.unsqueeze(-1) - mean.unsqueeze(-2), spread)
    return (-torch.logsumexp(-difference, -1)).softmax(-1)


def second_order_probabilities(
    mean: Tensor, variance: Tensor, covariance: LogitCovariance | None = None
) -> Tensor:
    """Taylor's expansion of the softmax to second order: `p_k (1 + x_k)`, `x_k = (q_k - sum_i p_i q_i) / 2`.

    `q_k = (e_k - p)ᵀ S (e_k - p)` is the variance of `log p_k` to first order. Where x is negative, `1 / (1 - x)`
    stands for `1 + x`, the same to this order and never below zero; then they are scaled to sum to one. Good up to
    standard deviations of 1 (mean KL to the truth 1.5e-3 with ten classes, against 2e-2 without a correction); at 3 it
    removes little more than half of the error.
    """
    check_moments(mean, variance, covariance)
    probs = mean.softmax(-1)
    spread = _log_variance(probs, variance, covariance)
    x = 0.5 * (spread - (probs * spread).sum(-1, keepdim=True))
    raised = probs * torch.where(x < 0, 1 / (1 - x.clamp_max(0)), 1 + x)
    return raised / raised.sum(-1, keepdim=True)


# ------------------------------------------------------------------------------ outputs' moments → predictive


def predictive_from_moments(
    likelihood: Likelihood,
    mean: Tensor,
    variance: Tensor,
    covariance: LogitCovariance | None = None,
    head: str = "sampled",
    samples: int = SAMPLES,
) -> Predictive:
    """The predictive of Gaussian outputs.

    In classification it carries `logits_mean` and `logits_variance`, in regression `mean` and its two parts of the
    variance. Under `"sampled"` it has every uncertainty; under `"second_order"` those of the same order; under
    `"probit"` and `"pairwise"` no more than the probabilities (mutual information is not available). Gradient passes.

    Bernoulli: E[sigmoid] and its variance by a mixture of normal distribution functions (within 5e-5), the expected
    entropy by quadrature; `"probit"`, which for two classes is also `"pairwise"`, and `"second_order"` as for two
    classes. Gaussian: exact. Heteroscedastic Gaussian: the noise's variance and entropy averaged over the raw scale by
    quadrature; its density is the Gaussian of the same variance. Of any other likelihood, the outputs are sampled.

    Args:
        likelihood: how outputs become a distribution over targets.
        mean: of the outputs, `(batch, …)`.
        variance: of the outputs, of the same shape.
        covariance: of the logits of a datum, classes last: full `(batch, …, C, C)` or `LowRankLogits`. Regression and
            Bernoulli need no more than the variances.
        head: one of `HEADS`.
        samples: draws of the logits under `"sampled"`.

    Raises:
        TypeError, ValueError: an unknown head, moments that do not fit, NaN or negative variances.
    """
    choice("head", head, Head)
    if not isinstance(likelihood, Likelihood):
        raise TypeError(f"likelihood must be a Likelihood such as dubito.Categorical(), got {likelihood!r}")
    check_moments(mean, variance)
    mean, variance = targets.compute_dtype(mean), targets.compute_dtype(variance)
    if isinstance(likelihood, Categorical):
        return _categorical(mean, variance, covariance, likelihood.dim, head, samples)
    if isinstance(likelihood, Bernoulli):
        return _bernoulli(mean, variance, head)
    if isinstance(likelihood, Gaussian):
        noise = likelihood.noise.square()
        return Predictive.from_moments("regression", mean, epistemic=variance, aleatoric=noise)
    if isinstance(likelihood, HeteroscedasticGaussian):
        return _heteroscedastic(likelihood, mean, variance)
    if head != "sampled":
        raise ValueError(f"head={head!r} is for classes; for {type(likelihood).__name__} use 'sampled'")
    draws = sampled_logits(mean, variance, covariance, samples)
    return _carrying(likelihood.predictive(draws, keep_draws=False), mean, variance)


def _categorical(
    mean: Tensor,
    variance: Tensor,
    covariance: LogitCovariance | None,
    dim: int,
    head: str,
    samples: int,
) -> Predictive:
    logits, spread = mean.movedim(dim, -1), variance.movedim(dim, -1)
    check_moments(logits, spread, covariance)
    if head == "sampled":
        size = max(1, _BLOCK // max(1, samples * logits[0].numel()))
        parts = []
        for start in range(0, len(logits), size):
            at = slice(start, start + size)
            draws = sampled_logits(logits[at], spread[at], _part(covariance, at), samples)
            parts.append(
                Predictive.from_draws(
                    "categorical", draws.movedim(-1, dim), logits=True, keep_draws=False, dim=dim
                )
            )
        whole = parts[0] if len(parts) == 1 else Predictive.concatenate(parts)
        return _carrying(whole, mean, variance)
    if head == "second_order":
        probs = second_order_probabilities(logits, spread, covariance)
        at_mean = logits.softmax(-1)
        log_variance = _log_variance(at_mean, spread, covariance)
        epistemic = torch.minimum(at_mean.square() * log_variance, probs * (1 - probs))
        known = 0.5 * (at_mean * log_variance).sum(-1)  # the mutual information to this order
        entropy = torch.special.entr(probs).sum(-1)
        return Predictive.from_moments(
            "categorical", probs.movedim(-1, dim), epistemic=epistemic.movedim(-1, dim),
            expected_entropy=(entropy - known).clamp_min(0), logits_mean=mean, logits_variance=variance, dim=dim,
        )  # fmt: skip
    form = probit_probabilities if head == "probit" else pairwise_probabilities
    probs = form(logits, spread, covariance).movedim(-1, dim)
    return Predictive.from_moments("categorical", probs, logits_mean=mean, logits_variance=variance, dim=dim)


def _bernoulli(mean: Tensor, variance: Tensor, head: str) -> Predictive:
    carried: dict[str, Any] = {"logits_mean": mean, "logits_variance": variance}
    if head in ("probit", "pairwise"):
        return Predictive.from_moments("bernoulli", _damped(mean, variance).sigmoid(), **carried)
    if head == "second_order":
        p = mean.sigmoid()
        slope = p * (1 - p)
        probs = (p + 0.5 * variance * slope * (1 - 2 * p)).clamp(0, 1)
        spread = torch.minimum(slope.square() * variance, probs * (1 - probs))
        expected = (_binary_entropy(probs) - 0.5 * slope * variance).clamp_min(0)
        return Predictive.from_moments(
            "bernoulli", probs, epistemic=spread, expected_entropy=expected, **carried
        )
    probs, spread = sigmoid_moments(mean, variance)
    probs = probs.clamp(0, 1)
    spread = torch.minimum(spread.clamp_min(0), probs * (1 - probs))
    expected = _expectation(lambda x: F.softplus(x) - x * x.sigmoid(), mean, variance)
    expected = torch.minimum(expected, _binary_entropy(probs))
    return Predictive.from_moments("bernoulli", probs, epistemic=spread, expected_entropy=expected, **carried)


def _heteroscedastic(likelihood: HeteroscedasticGaussian, mean: Tensor, variance: Tensor) -> Predictive:
    likelihood.split(mean)  # refuses an odd number of outputs
    (centre, raw), (spread, wide) = mean.chunk(2, -1), variance.chunk(2, -1)
    floor = likelihood.floor
    noise = _expectation(lambda x: (F.softplus(x) + floor).square(), raw, wide)
    logarithm = _expectation(lambda x: (F.softplus(x) + floor).log(), raw, wide)
    return Predictive.from_moments(
        "regression", centre, epistemic=spread, aleatoric=noise,
        expected_entropy=logarithm + 0.5 * math.log(2 * math.pi * math.e),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ parts


def _damped(mean: Tensor, variance: Tensor) -> Tensor:
    return mean / torch.sqrt(1 + (math.pi / 8) * variance)


def _full(covariance: LogitCovariance) -> Tensor:
    if isinstance(covariance, LowRankLogits):
        return covariance.factor @ covariance.factor.mT + torch.diag_embed(covariance.diagonal)
    return covariance


def _diagonal(variance: Tensor, covariance: LogitCovariance | None) -> Tensor:
    if covariance is None:
        return variance
    if isinstance(covariance, LowRankLogits):
        return covariance.variance()
    return covariance.diagonal(dim1=-2, dim2=-1)


def _log_variance(probs: Tensor, variance: Tensor, covariance: LogitCovariance | None) -> Tensor:
    """`(e_k - p)ᵀ S (e_k - p)`, the variance of the k-th log probability to first order."""
    own = _diagonal(variance, covariance)
    if covariance is None:
        cross = variance * probs
    elif isinstance(covariance, LowRankLogits):
        factor, diagonal = covariance
        cross = (factor @ (factor.mT @ probs.unsqueeze(-1))).squeeze(-1) + diagonal * probs
    else:
        cross = (covariance @ probs.unsqueeze(-1)).squeeze(-1)
    return (own - 2 * cross + (probs * cross).sum(-1, keepdim=True)).clamp_min(0)


def _expectation(function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor) -> Tensor:
    sd = safe_sd(variance)
    total = torch.zeros_like(mean)
    for point, weight in gauss_hermite(_NODES):
        total = total + weight * function(mean + point * sd)
    return total


def _binary_entropy(probs: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(probs) + torch.special.entr(1 - probs)
    return entropy


def _part(covariance: LogitCovariance | None, at: slice) -> LogitCovariance | None:
    if isinstance(covariance, LowRankLogits):
        return LowRankLogits(covariance.factor[at], covariance.diagonal[at])
    return None if covariance is None else covariance[at]


def _carrying(predictive: Predictive, mean: Tensor, variance: Tensor) -> Predictive:
    """With the logits' moments, and no draws of weights to its name."""
    return dataclasses.replace(predictive, samples=None, logits_mean=mean, logits_variance=variance)
