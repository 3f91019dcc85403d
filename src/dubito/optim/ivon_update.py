"""The arithmetic of IVON on lists of tensors: the standard deviation of a draw, and one step.

Shen et al. (2024), "Variational Learning is Effective for Large Deep Networks", algorithm 1. With s = h + delta the
posterior is N(m, 1 / (ess s)). Two forms of the same formulas: plain operators, tensor by tensor, and torch._foreach_*
for devices where launching an operator costs more than running it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Settings:
    """The numbers of one group, as a step uses them.

    Attributes:
        rate: the learning rate, already multiplied by `hess_init + weight_decay` where that is wished.
        ess: effective sample size.
        beta1, beta2: decay of the momentum and of the Hessian estimate.
        weight_decay: delta.
        clip_radius: bound of each entry of the preconditioned update before the rate.
    """

    rate: float
    ess: float
    beta1: float
    beta2: float
    weight_decay: float
    clip_radius: float


def sds(hessians: list[Tensor], ess: float, weight_decay: float, foreach: bool) -> list[Tensor]:
    """Posterior standard deviations, `(ess (h + delta)) ** -0.5`."""
    if not foreach:
        return [h.add(weight_decay).mul_(ess).rsqrt_() for h in hessians]
    found = [*torch._foreach_add(hessians, weight_decay)]
    torch._foreach_mul_(found, ess)
    torch._foreach_sqrt_(found)
    torch._foreach_reciprocal_(found)
    return found


def curvatures(
    hessians: list[Tensor], products: list[Tensor], settings: Settings, foreach: bool
) -> list[Tensor]:
    """The next Hessian estimates, `h + r d + (r d)² / 2s` with `d = ĥ - h`, `r = 1 - beta2`.

    `ĥ = E[g eps] / sigma` estimates the Hessian's diagonal without second derivatives (Stein's identity; the noise is
    standardised). The last term keeps `h + delta` positive whatever `ĥ` is: s is never less than halved.

    Args:
        hessians: h.
        products: the mean over draws of gradient times standard noise; overwritten.
        settings: of the group.
        foreach: which form.
    """
    ess, delta, rate = settings.ess, settings.weight_decay, 1 - settings.beta2
    if not foreach:
        found = []
        for h, product in zip(hessians, products, strict=True):
            s = h + delta
            change = product.mul_(s.mul(ess).sqrt_()).sub_(h).mul_(rate)
            found.append(torch.add(h, change).addcdiv_(change.square(), s, value=0.5))
        return found
    shifted = torch._foreach_add(hessians, delta)
    scales = torch._foreach_mul(shifted, ess)
    torch._foreach_sqrt_(scales)
    torch._foreach_mul_(products, scales)
    torch._foreach_sub_(products, hessians)
    torch._foreach_mul_(products, rate)
    new = [*torch._foreach_add(hessians, products)]
    torch._foreach_addcdiv_(new, torch._foreach_mul(products, products), shifted, value=0.5)
    return new


def step_means(
    means: list[Tensor],
    momenta: list[Tensor],
    hessians: list[Tensor],
    steps: list[int],
    settings: Settings,
    foreach: bool,
) -> None:
    """`m ← m - rate (g / (1 - beta1^t) + delta m) / (h + delta)` in place, `hessians` being the new ones.

    Args:
        means: m.
        momenta: the averaged gradients, already with this step's.
        hessians: h.
        steps: t of each parameter, counted from 1.
        settings: of the group.
        foreach: which form.
    """
    delta, bound = settings.weight_decay, settings.clip_radius
    debias = [1 - settings.beta1**t for t in steps]
    if not foreach:
        for m, g, h, by in zip(means, momenta, hessians, debias, strict=True):
            update = torch.add(g, m, alpha=delta * by).div_(h + delta).div_(by)
            if math.isfinite(bound):
                update.clamp_(-bound, bound)
            m.sub_(update, alpha=settings.rate)
        return
    updates = torch._foreach_div(momenta, debias)
    torch._foreach_add_(updates, means, alpha=delta)
    torch._foreach_div_(updates, torch._foreach_add(hessians, delta))
    if math.isfinite(bound):
        torch._foreach_clamp_min_(updates, -bound)
        torch._foreach_clamp_max_(updates, bound)
    torch._foreach_sub_(means, updates, alpha=settings.rate)


def average_gradients_into(
    momenta: list[Tensor], gradients: list[Tensor], beta1: float, foreach: bool
) -> None:
    """`g ← beta1 g + (1 - beta1) ĝ` in place."""
    if not foreach:
        for momentum, gradient in zip(momenta, gradients, strict=True):
            momentum.lerp_(gradient, 1 - beta1)
        return
    torch._foreach_lerp_(momenta, gradients, 1 - beta1)
