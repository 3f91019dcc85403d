"""Generalised variational inference: an expected loss and any divergence from the prior, with any weight."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dubito.scalar_checks import non_negative


class GeneralizedVariational(NamedTuple):
    """A generalised variational objective and its parts; loss = nll + weight · divergence always.

    Attributes:
        loss: what to minimise, per datum, scalar.
        nll: the expected loss of the batch, per datum, scalar.
        divergence: D(q, p), scalar.
        weight: lambda.
    """

    loss: Tensor
    nll: Tensor
    divergence: Tensor
    weight: float


def generalized_variational(
    nll: Tensor, divergence: Tensor, weight: float, check: bool = True
) -> GeneralizedVariational:
    """`nll + weight · divergence` (Knoblauch, Jewson & Damoulas 2022; the view that IBVI starts from).

    The divergence is `bayes.kl()` (with weight 1/N the negative ELBO), or `bayes.wasserstein(prior)`, the squared
    2-Wasserstein distance to `prior = bayes.snapshot()`, which stays finite where variances vanish and covariances are
    singular. As the weight of the latter goes to 0, the optimum goes to the minimiser of the expected loss nearest to
    the prior: where SGD ends from the prior with no divergence at all (implicit-bias variational inference).

    Args:
        nll: mean over the batch (and draws) of the loss, scalar.
        divergence: scalar, >= 0; a KL in nats, or a squared distance in squared weight units.
        weight: lambda >= 0. Nothing is divided by N here.
        check: look for NaN in `nll` and for NaN or infinity in `divergence`, which waits for the device; skipped inside
            `torch.compile`.

    Raises:
        TypeError: something that is no tensor.
        ValueError: no scalars, a negative weight, NaN, or a divergence that is infinite (a KL from a posterior without
            density: use the Wasserstein distance).
    """
    weight = non_negative("weight", weight)
    for name, value in (("nll", nll), ("divergence", divergence)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}.")
        if value.dim():
            raise ValueError(
                f"{name} must be a scalar, got shape {tuple(value.shape)}: take the mean of a loss over the batch, "
                "the sum of a divergence over the weights."
            )
    if check and not torch.compiler.is_compiling():
        if bool(nll.isnan()):
            raise ValueError("nll is NaN: do not take this step; look for a learning rate that is too large.")
        if not bool(divergence.isfinite()):
            raise ValueError(
                f"divergence is {float(divergence)}: a KL is infinite where a variance has vanished or a covariance "
                "is singular; use bayes.wasserstein(prior), or check the weights for NaN."
            )
    return GeneralizedVariational(nll + weight * divergence, nll, divergence, weight)
