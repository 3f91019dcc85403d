"""Objectives of a Bayesian neural network process, each from one set of S weight draws a task.

With D_c a context, D_t targets apart from it, W_s ~ q(W | D_c):

    ELBO(D)   = mean_s Σ_n log p(y_n | x_n, W_s) - mean_s Σ_l KL(q(W^l | W_s^<l, D) ‖ p(W^l))
    PP-AVI    = log mean_s Π_(n ∈ t) p(y_n | x_n, W_s) + ELBO(D_c)          the paper's: predictions and inference
    AVI       = ELBO(D_c ∪ D_t)                                            inference alone
    NPML      = log mean_s Π_(n ∈ t) p(y_n | x_n, W_s)                     predictions alone
    NPVI      = E_q(W | D_c ∪ D_t) [log p(Y_t | W)] - KL(q(W | D_c ∪ D_t) ‖ q(W | D_c))

The logarithm of the mean in PP-AVI and NPML is of the joint probability of a task's targets. In NPVI both posteriors
are conditioned along the same draws. All are sums over a task's points, in nats, so a task with many points weighs
more; `per_point` divides each task's objective by the number of its points that the objective speaks of (context and
targets; for NPVI targets alone), which leaves the two terms in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dubito.amortised.tasks import TaskBatch, check_disjoint
from dubito.amortised.weight_samples import WeightSamples

if TYPE_CHECKING:
    from dubito.amortised.process import BNNProcess

ObjectiveName = Literal["pp-avi", "avi", "npml", "npvi"]


class ProcessObjective(NamedTuple):
    """What an objective is worth.

    Attributes:
        loss: its negative, averaged over tasks: to be minimised.
        value: each task's, (tasks,), in nats (or nats a point).
        predictive: the part that speaks of targets, (tasks,); zero for AVI.
        elbo: the part that is an ELBO, (tasks,); zero for NPML.
        kl: KL of the weights, averaged over draws, (tasks,), never divided.
    """

    loss: Tensor
    value: Tensor
    predictive: Tensor
    elbo: Tensor
    kl: Tensor


class Objective(Protocol):
    """Any of the objectives of this module."""

    def __call__(
        self,
        process: BNNProcess,
        context: TaskBatch,
        target: TaskBatch,
        samples: int = 8,
        *,
        batch_size: int | None = None,
        per_point: bool = False,
        disjoint: bool = True,
        generator: torch.Generator | None = None,
    ) -> ProcessObjective:
        """The objective of some tasks; see the module for arguments."""


def pp_avi(
    process: BNNProcess,
    context: TaskBatch,
    target: TaskBatch,
    samples: int = 8,
    *,
    batch_size: int | None = None,
    per_point: bool = False,
    disjoint: bool = True,
    generator: torch.Generator | None = None,
) -> ProcessObjective:
    """Posterior-predictive amortised variational inference; the draws serve both terms.

    Args:
        process: the process.
        context: D_c of each task.
        target: D_t of each task, in the same order.
        samples: S.
        batch_size: points worked through at once; the value and its gradient do not depend on it.
        per_point: see the module.
        disjoint: refuse targets that stand in the context.
        generator: source of noise.

    Raises:
        ValueError: targets inside the context where `disjoint`; else as `BNNProcess.infer`.
    """
    _check(process, context, target, disjoint)
    drawn = process.infer(context, samples, batch_size=batch_size, generator=generator)
    predictive = _joint_predictive(process, drawn, target, batch_size)
    fit = _summed(process, drawn, context, batch_size).mean(0)
    kl = drawn.kl.mean(0)
    return _objective(predictive, fit - kl, kl, target.counts + context.counts, per_point)


def avi(
    process: BNNProcess,
    context: TaskBatch,
    target: TaskBatch,
    samples: int = 8,
    *,
    batch_size: int | None = None,
    per_point: bool = False,
    disjoint: bool = True,
    generator: torch.Generator | None = None,
) -> ProcessObjective:
    """The ELBO of context and target together. Arguments as `pp_avi`."""
    _check(process, context, target, disjoint)
    return elbo(
        process,
        context.joined(target),
        samples,
        batch_size=batch_size,
        per_point=per_point,
        generator=generator,
    )


def npml(
    process: BNNProcess,
    context: TaskBatch,
    target: TaskBatch,
    samples: int = 8,
    *,
    batch_size: int | None = None,
    per_point: bool = False,
    disjoint: bool = True,
    generator: torch.Generator | None = None,
) -> ProcessObjective:
    """Predictive maximum likelihood, as neural processes train. Arguments as `pp_avi`."""
    _check(process, context, target, disjoint)
    drawn = process.infer(context, samples, batch_size=batch_size, generator=generator)
    predictive = _joint_predictive(process, drawn, target, batch_size)
    nothing = torch.zeros_like(predictive)
    return _objective(predictive, nothing, drawn.kl.mean(0), target.counts, per_point)


def npvi(
    process: BNNProcess,
    context: TaskBatch,
    target: TaskBatch,
    samples: int = 8,
    *,
    batch_size: int | None = None,
    per_point: bool = False,
    disjoint: bool = True,
    generator: torch.Generator | None = None,
) -> ProcessObjective:
    """Neural process variational inference. Arguments as `pp_avi`."""
    _check(process, context, target, disjoint)
    whole = context.joined(target)
    drawn = process.infer(whole, samples, batch_size=batch_size, reference=context, generator=generator)
    kl = drawn.kl.mean(0)
    value = _summed(process, drawn, target, batch_size).mean(0) - kl
    return _objective(torch.zeros_like(value), value, kl, target.counts, per_point)


def elbo(
    process: BNNProcess,
    data: TaskBatch,
    samples: int = 8,
    *,
    batch_size: int | None = None,
    per_point: bool = False,
    generator: torch.Generator | None = None,
) -> ProcessObjective:
    """The evidence lower bound of whole data sets. Arguments as `pp_avi`."""
    drawn = process.infer(data, samples, batch_size=batch_size, generator=generator)
    kl = drawn.kl.mean(0)
    value = _summed(process, drawn, data, batch_size).mean(0) - kl
    return _objective(torch.zeros_like(value), value, kl, data.counts, per_point)


OBJECTIVES: Mapping[str, Objective] = MappingProxyType(
    {"pp-avi": pp_avi, "avi": avi, "npml": npml, "npvi": npvi}
)


def _check(process: BNNProcess, context: TaskBatch, target: TaskBatch, disjoint: bool) -> None:
    if len(context) != len(target):
        raise ValueError(
            f"context has {len(context)} tasks and target {len(target)}; they go together one by one"
        )
    process.check(target)
    if disjoint:
        check_disjoint(context, target)


def _objective(
    predictive: Tensor, bound: Tensor, kl: Tensor, points: Tensor, per_point: bool
) -> ProcessObjective:
    if per_point:
        predictive, bound = (part / points.clamp(min=1) for part in (predictive, bound))
    value = predictive + bound
    return ProcessObjective(-value.mean(), value, predictive, bound, kl)


def _joint_predictive(
    process: BNNProcess, drawn: WeightSamples, target: TaskBatch, batch_size: int | None
) -> Tensor:
    """log of the mean over draws of the targets' joint probability, (tasks,)."""
    return _summed(process, drawn, target, batch_size).logsumexp(0) - math.log(drawn.samples)


def _summed(process: BNNProcess, drawn: WeightSamples, batch: TaskBatch, batch_size: int | None) -> Tensor:
    """Σ_n log p(y_n | x_n, W_s), (S, tasks)."""
    chunks = batch.chunks(batch_size)
    total = drawn.kl.new_zeros(drawn.kl.shape)

    def summed(chunk: TaskBatch, *weights: Tensor) -> Tensor:
        return process.log_likelihood(weights, chunk).sum(-1)

    for chunk in chunks:
        if len(chunks) > 1 and torch.is_grad_enabled():
            total = total + checkpoint(summed, chunk, *drawn.weights, use_reentrant=False)
        elif chunk.points:
            total = total + summed(chunk, *drawn.weights)
    return total
