"""Outcomes of a task under the library's likelihoods: encoded for the inference network, and scored one by one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dubito.amortised.tasks import TaskBatch
from dubito.gaussian_mixtures import gaussian_log_prob
from dubito.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood


def output_width(likelihood: Likelihood, dim_y: int) -> int:
    """Outputs that the network needs for `dim_y` outcomes.

    Raises:
        TypeError: for a likelihood that a process cannot take.
    """
    if isinstance(likelihood, HeteroscedasticGaussian):
        return 2 * dim_y
    if isinstance(likelihood, Categorical) and likelihood.dim == -1:
        return dim_y
    if isinstance(likelihood, Gaussian | Bernoulli):
        return dim_y
    raise TypeError(
        f"likelihood is {type(likelihood).__name__}, but a process takes dubito.Gaussian, HeteroscedasticGaussian, "
        "Bernoulli or Categorical(dim=-1)"
    )


def takes_labels(likelihood: Likelihood) -> bool:
    """Whether outcomes are integer labels."""
    return isinstance(likelihood, Categorical)


def encoded(likelihood: Likelihood, batch: TaskBatch, dim_y: int, missing: bool) -> Tensor:
    """x beside the outcomes, (tasks, points, features): labels one-hot, and with `missing` flags of what was seen."""
    y = F.one_hot(batch.y, dim_y) if takes_labels(likelihood) else batch.y
    y = y.to(batch.x.dtype)
    if takes_labels(likelihood):
        y = y * batch.observed
    parts = (batch.x, y, batch.observed.to(y.dtype)) if missing else (batch.x, y)
    return torch.cat(parts, dim=-1)


def log_likelihood(likelihood: Likelihood, outputs: Tensor, batch: TaskBatch) -> Tensor:
    """log p(y | outputs) of every point, outcomes that were not seen left out, in nats.

    Args:
        likelihood: of `output_width`.
        outputs: (S, tasks, points, outputs), float64.
        batch: the points.

    Returns:
        (S, tasks, points); 0 at padded points.
    """
    if isinstance(likelihood, Categorical):
        scores = outputs.log_softmax(-1).gather(-1, batch.y.expand(outputs.shape[:-1]).unsqueeze(-1))
    elif isinstance(likelihood, Bernoulli):
        scores = -F.binary_cross_entropy_with_logits(outputs, batch.y.expand_as(outputs), reduction="none")
    elif isinstance(likelihood, HeteroscedasticGaussian):
        means, sds = likelihood.split(outputs)
        scores = gaussian_log_prob(batch.y, means, sds.square())
    else:
        assert isinstance(likelihood, Gaussian)
        scores = gaussian_log_prob(batch.y, outputs, noise_variance(likelihood))
    return (scores * batch.observed).sum(-1)


def noise_variance(likelihood: Gaussian) -> Tensor:
    """Variance of the noise in float64: a number, or one an outcome."""
    return (2 * likelihood.log_noise.to(torch.float64)).exp()
