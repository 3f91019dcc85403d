"""How fast losses change with the outputs: Lipschitz constants, curvatures, and losses bounded by clipping."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from dubito.scalar_checks import positive

BoundedLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LossConstants:
    """Constants of a loss l(z, y) in the outputs z, Euclidean norm.

    Attributes:
        name: of the loss.
        lipschitz: L, with |l(z, y) - l(z', y)| ≤ L ‖z - z'‖.
        curvature: b, the largest eigenvalue of the Hessian in z; infinite where the loss has kinks.
        convex: whether l is convex in z.
    """

    name: str
    lipschitz: float
    curvature: float = math.inf
    convex: bool = False

    def __post_init__(self) -> None:
        positive("lipschitz", self.lipschitz)
        if not self.curvature > 0:
            raise ValueError(f"curvature={self.curvature} must be above 0, or math.inf where there are kinks")


_NAMED = {
    "mae": LossConstants("mae", 1.0, math.inf, True),
    "hinge": LossConstants("hinge", 1.0, math.inf, True),
    "binary_cross_entropy": LossConstants("binary_cross_entropy", 1.0, 0.25, True),
    "cross_entropy": LossConstants("cross_entropy", math.sqrt(2.0), 0.5, True),
}


def loss_constants(loss: str | LossConstants, output_bound: float | None = None) -> LossConstants:
    """The constants of a loss.

    Args:
        loss: one of "mae" (‖z - y‖), "hinge" (of y z, y = ±1), "binary_cross_entropy" (of one logit), "cross_entropy"
            (of the softmax; its Hessian's largest eigenvalue reaches 1/2, not 1/4), "half_squared" (½‖z - y‖², with
            `output_bound`), or constants of your own.
        output_bound: B with ‖z‖, ‖y‖ ≤ B; for "half_squared", whose L is 2 B.

    Raises:
        ValueError: an unknown name, or "half_squared" without `output_bound`.
        TypeError: something else.
    """
    if isinstance(loss, LossConstants):
        return loss
    if not isinstance(loss, str):
        raise TypeError(
            f"loss must be a name or LossConstants(name, lipschitz, curvature), got {type(loss).__name__}"
        )
    if loss == "half_squared":
        if output_bound is None:
            raise ValueError(
                'loss="half_squared" has no Lipschitz constant on all of space: give output_bound=B with ‖z‖, ‖y‖ ≤ B '
                "(its constant is then 2 B), or clip the outputs"
            )
        return LossConstants("half_squared", 2.0 * positive("output_bound", output_bound), 1.0, True)
    if loss not in _NAMED:
        names = ", ".join(map(repr, (*_NAMED, "half_squared")))
        raise ValueError(f"unknown loss {loss!r}: give one of {names}, or LossConstants(name, lipschitz, …)")
    return _NAMED[loss]


@dataclass(frozen=True)
class ClippedLoss:
    """An unbounded loss made one in [0, 1]: min(loss, cap) / cap, never below 0.

    Attributes:
        loss: from outputs (S, batch, …) and targets (batch, …) to losses (S, batch, …), without reduction.
        cap: where it is cut.
    """

    loss: Callable[[Any, Any], Tensor]
    cap: float

    def __post_init__(self) -> None:
        positive("cap", self.cap)

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Losses in [0, 1].

        Raises:
            ValueError: if the loss gave NaN.
        """
        value = self.loss(outputs, y)
        if bool(torch.isnan(value).any()):
            raise ValueError(
                "the clipped loss is NaN for some data: look at the outputs, or at where the loss divides"
            )
        return value.clamp(0.0, self.cap) / self.cap


def clipped_cross_entropy(cap: float = 4.0) -> ClippedLoss:
    """Cross entropy of logits with the classes last, cut at `cap` nats and divided by it."""
    return ClippedLoss(_cross_entropy, cap)


def is_clipped_cross_entropy(loss: object) -> TypeGuard[ClippedLoss]:
    """Whether a loss was made by `clipped_cross_entropy`."""
    return isinstance(loss, ClippedLoss) and loss.loss is _cross_entropy


def _cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    log_probs = outputs.double().log_softmax(-1) if outputs.device.type != "mps" else outputs.log_softmax(-1)
    index = y.long().unsqueeze(-1).expand(*log_probs.shape[:-1], 1)
    return -log_probs.gather(-1, index).squeeze(-1)
