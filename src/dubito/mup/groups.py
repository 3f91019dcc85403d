"""Optimiser groups with a parametrisation's learning rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from dubito.bayesian import BayesianModule
from dubito.implicit_bias import warn_of_lost_implicit_bias
from dubito.mup.roles import Role, slots_of
from dubito.mup.scales import Parametrization, scales
from dubito.scalar_checks import choice, non_negative, positive

OptimizerKind = Literal["sgd", "adam"]
Objective = Literal["expected_loss", "elbo"]


def parameter_groups(
    module: nn.Module,
    lr: float,
    optimizer: OptimizerKind = "sgd",
    parametrization: Parametrization = "mup",
    roles: Mapping[str, Role] | None = None,
    weight_decay: float = 0.0,
    objective: Objective = "expected_loss",
) -> list[dict[str, Any]]:
    """Groups that hold every trainable parameter exactly once, each at `lr` times its own factor.

    Means and ordinary parameters take the factors of `dubito.mup.scales`. A covariance factor of rank R takes its
    mean's rate, divided by R for SGD and by its root for Adam-like optimisers, whose steps do not grow with the
    gradient. What no rule covers (logarithms of standard deviations, learned noise, factored weights) takes `lr`
    itself. Learning-rate schedules multiply the groups' rates and go on top.

    Where the network is Bayesian, a `DubitoWarning` says once what makes training by the expected loss alone lose its
    implicit bias: a covariance that collapses, an Adam-like optimiser, weight decay on random weights.

    Args:
        module: the network, plain or Bayesian.
        lr: the learning rate that is tuned, and transfers between widths.
        optimizer: "sgd" (with or without momentum) or "adam" (and its kin).
        parametrization: "mup", "standard" or "ntk".
        roles: from `dubito.mup.roles`; None: found by order.
        weight_decay: on means and ordinary parameters; never on spread, noise or priors.
        objective: what will be minimised; under "elbo" nothing is warned of.

    Returns:
        Groups with `params`, `lr`, `weight_decay` and a `name`, of equal rates together.

    Raises:
        ValueError: a rate that is not positive, an unknown option, or a module without trainable parameters.
    """
    lr, weight_decay = positive("lr", lr), non_negative("weight_decay", weight_decay)
    choice("optimizer", optimizer, OptimizerKind)
    choice("objective", objective, Objective)
    found = scales(module, parametrization, roles)
    factors = {name: scale.sgd if optimizer == "sgd" else scale.adam for name, scale in found.items()}
    assigned: dict[int, tuple[str, nn.Parameter, float]] = {}
    slots = [slot for slot in slots_of(module) if slot.occupied]
    for slot in slots:
        assigned[id(slot.parameter)] = ("means", slot.parameter, factors[slot.name])  # type: ignore[assignment]
    if isinstance(module, BayesianModule):
        _assign_spread(module, optimizer, factors, assigned)
        if objective == "expected_loss":
            random = {s.name for p in module.posteriors() for s in p.slots}
            decayed = [s.name for s in slots if s.name in random and s.requires_grad] if weight_decay else []
            warn_of_lost_implicit_bias(
                module, "mup.parameter_groups, for training by the expected loss", optimizer, decayed
            )
    return _collected(module, assigned, lr, weight_decay)


def _assign_spread(
    bayes: BayesianModule,
    optimizer: OptimizerKind,
    factors: Mapping[str, float],
    assigned: dict[int, tuple[str, nn.Parameter, float]],
) -> None:
    for posterior in bayes.posteriors():
        for parameter in posterior.spread_parameters():
            assigned[id(parameter)] = ("spread", parameter, 1.0)
        for rate in posterior.spread_rates():
            own = factors[rate.like] if rate.like is not None else 1.0
            by_rank = 1.0 / rate.rank if optimizer == "sgd" else rate.rank**-0.5
            assigned[id(rate.parameter)] = ("spread", rate.parameter, own * by_rank)
    for part in (bayes.likelihood, bayes.joint_priors):
        for parameter in part.parameters() if part is not None else ():
            assigned[id(parameter)] = ("likelihood and priors", parameter, 1.0)


def _collected(
    module: nn.Module, assigned: Mapping[int, tuple[str, nn.Parameter, float]], lr: float, weight_decay: float
) -> list[dict[str, Any]]:
    trainable = {id(p): p for p in module.parameters() if p.requires_grad}
    if not trainable:
        raise ValueError("the module has no trainable parameter (requires_grad is False everywhere)")
    groups: dict[tuple[str, float], dict[str, Any]] = {}
    for key, parameter in trainable.items():
        kind, _, factor = assigned.get(key, ("other", parameter, 1.0))
        decay = weight_decay if kind in ("means", "other") else 0.0
        name = f"{kind}, lr times {factor:.6g}"
        group = groups.setdefault(
            (kind, factor), {"params": [], "lr": lr * factor, "weight_decay": decay, "name": name}
        )
        group["params"].append(parameter)
    held = [id(p) for group in groups.values() for p in group["params"]]
    assert sorted(held) == sorted(trainable), "every trainable parameter belongs to exactly one group"
    return list(groups.values())
