"""Start the weights, and the distributions of weights, at a parametrisation's scales."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import nn

from dubito.bayesian import BayesianModule
from dubito.mup.roles import Role, is_matrix, slots_of
from dubito.mup.scales import Parametrization, Scale, scales
from dubito.scalar_checks import non_negative
from dubito.weights.family import CapabilityError, DubitoWarning
from dubito.weights.initial_scale import fan_in, spread_of
from dubito.weights.slots import Slot


@torch.no_grad()
def initialize_(
    module: nn.Module,
    parametrization: Parametrization = "mup",
    roles: Mapping[str, Role] | None = None,
    bias_scale: float = 1.0,
    means: bool = True,
    generator: torch.Generator | None = None,
) -> None:
    """Draw the trainable weights (the posterior means) anew, in place, and start the spread at the same scales.

    Weights are Gaussian of the standard deviation that `dubito.mup.scales` states, biases of `bias_scale`; gains of
    normalisations are 1 and their shifts 0; parameters outside layers keep their values. A covariance then starts at
    the prior: entries of a factor of rank R have `R ** -0.5` times the mean's standard deviation, so that the marginal
    variance of a weight under q equals the variance with which its mean was drawn, and a draw from q has twice that.

    Args:
        module: the network, plain or Bayesian.
        parametrization: "mup", "standard" or "ntk".
        roles: from `dubito.mup.roles`; None: found by order.
        bias_scale: standard deviation of biases, >= 0 (the references' is 1; torch's own is k^-1/2). At 0 their
            means are 0 and their spread keeps the scale 1.
        means: False leaves the means (of a pretrained network) and only starts the spread.
        generator: source of the draws.

    Raises:
        ValueError: an unknown parametrisation, a negative bias_scale, roles that leave parameters out.
    """
    bias_scale = non_negative("bias_scale", bias_scale)
    slots = slots_of(module)
    found = scales(module, parametrization, roles)
    spreads: dict[str, float] = {}
    for slot in slots:
        sd = _sd(slot, found[slot.name], slots, bias_scale)
        if sd is not None:
            spreads[slot.name] = sd or 1.0
            if means and slot.requires_grad and slot.occupied:
                slot.parameter.normal_(generator=generator).mul_(sd)
        elif slot.occupied:
            if means:
                _reset_vector(slot)
            spreads[slot.name] = spread_of(slot.parameter, fan_in(slot))
    if isinstance(module, BayesianModule):
        _start_spread(module, spreads, generator)


def _sd(slot: Slot, scale: Scale, slots: list[Slot], bias_scale: float) -> float | None:
    """Standard deviation of a weight or bias; None for what is drawn from no Gaussian."""
    if not scale.vector:
        return scale.sd
    beside = any(s.owner is slot.owner and is_matrix(s) for s in slots)
    return bias_scale if len(slot.shape) < 2 and beside else None


def _reset_vector(slot: Slot) -> None:
    """Normalisations start as they always do; anything else (tokens, layer scales, slopes) is left alone."""
    owner = slot.owner
    if "Norm" not in type(owner).__name__ or not slot.requires_grad:
        return
    slot.parameter.fill_(0.0 if "bias" in slot.attribute else 1.0)
    reset = getattr(owner, "reset_running_stats", None)
    if callable(reset):
        reset()


def _start_spread(
    bayes: BayesianModule, spreads: Mapping[str, float], generator: torch.Generator | None
) -> None:
    left: list[str] = []
    for posterior in bayes.posteriors():
        try:
            posterior.reset_spread_(spreads, generator)
        except CapabilityError:
            family = type(posterior).__name__.removesuffix("Posterior")
            left.extend(f"{slot.name} ({family})" for slot in posterior.slots)
    if left:
        warnings.warn(
            f"mup.initialize_ has no rule for {', '.join(left[:5])}{' and more' if len(left) > 5 else ''}: left as "
            "initialised by their own family",
            DubitoWarning,
            stacklevel=4,
        )
