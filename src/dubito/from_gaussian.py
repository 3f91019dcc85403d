"""Gaussian weights that something else has found, as a `BayesianModule`: IVON's, or any variances by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from dubito.bayesian import BayesianModule, Selector
from dubito.conversion import bayesianize
from dubito.likelihoods import Likelihood
from dubito.optim.ivon import IVON
from dubito.patterns import Pattern, matching, show
from dubito.priors import PriorSpec
from dubito.weights.family import Family
from dubito.weights.gaussian_entries import spread_of_sd
from dubito.weights.mean_field import MeanField, MeanFieldPosterior
from dubito.weights.point import Point
from dubito.weights.slots import Slot, find_slots

Priors = dict[str, PriorSpec]


def from_ivon(
    module: nn.Module,
    optimizer: IVON,
    likelihood: Likelihood | None = None,
    prior: PriorSpec = None,
    output: Selector | None = None,
) -> BayesianModule:
    """The posterior that IVON has found, as a mean-field `BayesianModule`.

    Means are the module's own parameters; standard deviations `(ess (h + delta)) ** -0.5`, and the prior of each
    parameter N(0, 1 / (ess · delta)), with the settings of its group. Parameters that are frozen, or not the
    optimizer's, stay ordinary ones.

    Args:
        module: the network that was trained.
        optimizer: its IVON.
        likelihood: how outputs become a distribution over targets.
        prior: for all parameters, in place of the optimizer's.
        output: picks the tensor out of what the network returns, see `bayesianize`.

    Raises:
        TypeError: for another optimizer.
        RuntimeError: inside `optimizer.sampled_params()`, or before the first step.
        ValueError: where module and optimizer share no parameter, where the optimizer holds parameters that are
            neither the module's nor the likelihood's, or where `weight_decay` is 0, whose prior is improper, and no
            `prior` is given.
    """
    if not isinstance(optimizer, IVON):
        raise TypeError(
            f"optimizer must be a dubito.IVON, got {type(optimizer).__name__}; "
            "dubito.from_variances takes variances from anywhere else"
        )
    if optimizer.inside_sampled_params:
        raise RuntimeError(
            "from_ivon inside `with optimizer.sampled_params():`, where the parameters are a draw and not the means; "
            "leave the block first"
        )
    slots = _slots_of(module, optimizer, likelihood)
    if all(optimizer.state.get(slot.parameter, {}).get("step", 0) == 0 for slot in slots):
        raise RuntimeError(
            "the optimizer has taken no step, so its variances are only those of hess_init: train first"
        )
    variances: dict[Pattern, Tensor | float] = {}
    priors: Priors = {}
    for slot in slots:
        if not torch.equal(optimizer.posterior_mean(slot.parameter).to(slot.parameter.dtype), slot.parameter):
            raise RuntimeError(f"parameter {slot.name!r} is not the optimizer's mean")
        variances[slot.name] = optimizer.posterior_sd(slot.parameter).square()
        priors[slot.name] = prior if prior is not None else _prior_of(optimizer, slot)
    return _with_variances(module, variances, likelihood, priors, output)


def from_variances(
    module: nn.Module,
    variances: Mapping[Pattern, Tensor | float] | Tensor,
    likelihood: Likelihood | None = None,
    prior: PriorSpec = None,
    output: Selector | None = None,
) -> BayesianModule:
    """A mean-field `BayesianModule` from variances found elsewhere: diagonal Laplace, diagonal SWAG, or anything.

    Means are the module's own parameters as they stand. Parameters that no name covers stay ordinary ones, as do those
    whose variances are all zero (they become a `Point`; a zero among other variances is kept as the smallest standard
    deviation that can be stored, 1e-30).

        laplace = Laplace(model, "classification", subset_of_weights="all", hessian_structure="diag")
        laplace.fit(loader)
        bayes = dubito.from_variances(model, laplace.posterior_variance, dubito.Categorical())

    Args:
        module: the network, at the means.
        variances: by parameter name, glob over names, module name or class, as for `bayesianize`: a tensor of the
            parameter's shape, or a number for all entries of every parameter that the pattern names. Or one flat
            tensor of all trainable parameters in `parameters()` order.
        likelihood: how outputs become a distribution over targets.
        prior: of all parameters, for `kl`; see `bayesianize`.
        output: picks the tensor out of what the network returns, see `bayesianize`.

    Raises:
        TypeError: for what is neither a mapping nor a tensor.
        ValueError: a pattern that matches nothing (the message lists the nearest names), two that match one parameter,
            a wrong shape, or variances that are negative, NaN or infinite.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be an nn.Module, not {type(module).__name__}")
    if isinstance(variances, Tensor):
        variances = _unflattened(module, variances)
    if not isinstance(variances, Mapping):
        raise TypeError(
            f"variances must be a mapping from parameter names to tensors, or one flat tensor, got "
            f"{type(variances).__name__}"
        )
    return _with_variances(module, variances, likelihood, prior, output)


def _with_variances(
    module: nn.Module,
    variances: Mapping[Pattern, Tensor | float],
    likelihood: Likelihood | None,
    prior: PriorSpec | Priors,
    output: Selector | None,
) -> BayesianModule:
    found = _by_parameter(module, variances)
    families: dict[Pattern, Family] = {}
    shared = prior if not isinstance(prior, dict) else None
    for name, variance in found.items():
        own = prior[name] if isinstance(prior, dict) else None
        families[name] = MeanField(prior=own) if bool((variance > 0).any()) else Point()
    bayes = bayesianize(module, families, likelihood=likelihood, prior=shared, output=output)
    with torch.no_grad():
        for posterior in bayes.posteriors():
            assert isinstance(posterior, MeanFieldPosterior)
            # the root before the cast: half precision has no numbers for small squares
            sd = found[posterior.slot.name].to(posterior.spread.device).sqrt()
            posterior.spread.copy_(spread_of_sd(sd, posterior.parametrization))
    return bayes


def _by_parameter(module: nn.Module, variances: Mapping[Pattern, Tensor | float]) -> dict[str, Tensor]:
    if not variances:
        raise ValueError("variances is empty: name at least one parameter")
    slots, taken = find_slots(module), dict[str, Pattern]()
    found: dict[str, Tensor] = {}
    for pattern, variance in variances.items():
        for slot in matching(module, slots, pattern):
            if slot.name in taken:
                raise ValueError(
                    f"parameter {slot.name!r} is matched by two patterns, {show(taken[slot.name])} and {show(pattern)}"
                )
            taken[slot.name] = pattern
            found[slot.name] = _checked(slot, pattern, variance)
    return found


def _checked(slot: Slot, pattern: Pattern, variance: Tensor | float) -> Tensor:
    value = torch.as_tensor(variance).detach()
    if not value.is_floating_point():
        value = value.to(torch.get_default_dtype())
    if value.shape != slot.shape and value.numel() != 1:
        raise ValueError(
            f"variances[{show(pattern)}] has shape {tuple(value.shape)}, but parameter {slot.name!r} is "
            f"{tuple(slot.shape)}: give a tensor of that shape, or one number"
        )
    bad = int((~value.isfinite() | (value < 0)).sum())
    if bad:
        raise ValueError(
            f"variances[{show(pattern)}] holds {bad} negative, NaN or infinite of {value.numel()} entries; a variance "
            "is a finite number of at least 0"
        )
    return value if value.shape == slot.shape else value.reshape(()).expand(slot.shape)


def _unflattened(module: nn.Module, flat: Tensor) -> dict[Pattern, Tensor | float]:
    trainable = [slot for slot in find_slots(module) if slot.requires_grad]
    sizes = [math.prod(slot.shape) for slot in trainable]
    if flat.ndim != 1 or flat.numel() != sum(sizes):
        raise ValueError(
            f"variances is a tensor of shape {tuple(flat.shape)}, but the module has {sum(sizes)} trainable weights: "
            "give a flat tensor of that length, or a mapping from parameter names"
        )
    pieces = flat.split(sizes)
    return {slot.name: v.reshape(slot.shape) for slot, v in zip(trainable, pieces, strict=True)}


def _slots_of(module: Any, optimizer: IVON, likelihood: Likelihood | None) -> list[Slot]:
    """The module's trainable parameters that are the optimizer's."""
    if isinstance(module, BayesianModule):
        raise TypeError(
            "module is a BayesianModule already: give the network that IVON trained, bayes.module"
        )
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be an nn.Module, not {type(module).__name__}")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    slots = find_slots(module)
    shared = [slot for slot in slots if id(slot.parameter) in held]
    if not shared:
        raise ValueError(
            "module and optimizer share no parameter: give the very module whose parameters the optimizer was made "
            "of, not a copy of it"
        )
    known = {id(slot.parameter) for slot in slots}
    known |= {id(p) for p in likelihood.parameters()} if isinstance(likelihood, nn.Module) else set()
    outside = held - known
    if outside:
        raise ValueError(
            f"the optimizer holds {len(outside)} parameters that are neither the module's nor the likelihood's: give "
            "the whole module that it trained"
        )
    return [slot for slot in shared if slot.requires_grad]


def _prior_of(optimizer: IVON, slot: Slot) -> Normal:
    group = optimizer.group_of(slot.parameter)
    precision = float(group["ess"]) * float(group["weight_decay"])
    if precision == 0:
        raise ValueError(
            f"weight_decay is 0 for {slot.name!r}, which is no proper prior: pass prior=Normal(0.0, 1.0) or another"
        )
    place: dict[str, Any] = {"dtype": torch.float64, "device": slot.parameter.device}
    if slot.parameter.device.type == "mps":
        place["dtype"] = torch.float32
    return Normal(torch.zeros((), **place), torch.full((), precision**-0.5, **place))
