"""`bayesianize`: from a module and patterns to a `BayesianModule`.

Everything is checked and every posterior made before the first parameter is moved, so that bad input leaves the
module as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn

from dubito.bayesian import BayesianModule, Selector
from dubito.likelihoods import Likelihood, likelihood_from_config
from dubito.patterns import Families, assign
from dubito.priors import PriorRule, PriorSpec
from dubito.weights.family import DubitoWarning, Family, Group, WeightPosterior, check_finite, check_real
from dubito.weights.point import Point
from dubito.weights.slots import Slot, emptied, find_slots


def bayesianize(
    module: nn.Module,
    families: Families,
    likelihood: Likelihood | None = None,
    prior: PriorSpec = None,
    output: Selector | None = None,
) -> BayesianModule:
    """Give a network random weights.

    Args:
        module: any `nn.Module`. It stays the same object, with the same code and the same leaf types; its weights
            become the posterior means (a factored family takes the dense weight out, `merge()` gives one back).
        families: one family for all parameters, or a mapping from patterns to families: names, globs over
            `named_parameters()` names, module names, module classes, and `"rest"` for whatever nothing else names.
            Without `"rest"`, parameters that no pattern names stay ordinary parameters.
        likelihood: how outputs become a distribution over targets: `Categorical()`, `Bernoulli()`, `Gaussian()`,
            `HeteroscedasticGaussian()`. There is no silent default; a Hugging Face config that states its
            `problem_type` is used.
        prior: for families that were given none: a `torch.distributions` object, a prior rule, a `WeightPrior`,
            `"fan_in"` (the default, `Normal(0, fan_in ** -0.5)`) or `"pretrained"`.
        output: picks the tensor out of what the network returns, where that is no tensor and has no `.logits`.

    Returns:
        The Bayesian module, in `train()` mode as any new module.

    Raises:
        TypeError, ValueError: for input that does not fit; the module is then unchanged.
    """
    _check_arguments(module, likelihood, output)
    _check_inside(module)
    chosen: dict[str, Family] = {}
    begun: dict[int, PriorSpec] = {}
    posteriors: list[WeightPosterior] = []
    notes: list[str] = []
    for family, matched in assign(module, find_slots(module), families):
        groups = _groups(family, matched)
        alone = sum(used is family for used, _ in groups) == 1
        notes += _replaced(family, groups)
        for used, slots in groups:
            for slot in slots:
                check_finite(slot)
                if not isinstance(used, Point):
                    check_real(slot)
                chosen[slot.name] = used
            in_force = used.own_prior if used.own_prior is not None else prior
            if isinstance(in_force, PriorRule):
                in_force = begun.setdefault(id(in_force), in_force.begin())
            posterior = used.attach(Group(tuple(slots), in_force, alone))
            if posterior is not None:
                posteriors.append(posterior)
    if likelihood is None:
        likelihood = likelihood_from_config(getattr(module, "config", None))
    notes += _out_of_reach(module, [slot for posterior in posteriors for slot in posterior.slots])
    bayes = BayesianModule(module, posteriors, chosen, likelihood, output)
    for posterior in posteriors:
        posterior.settle()
    notes += [note for posterior in posteriors for note in posterior.notes]
    if notes:
        warnings.warn("; ".join(notes), DubitoWarning, stacklevel=2)
    return bayes


def _check_arguments(module: object, likelihood: object, output: object) -> None:
    if isinstance(module, BayesianModule):
        raise TypeError(
            "module is already a BayesianModule; bayesianize bayes.merge(), a plain copy at the posterior mean"
        )
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be an nn.Module, not {type(module).__name__}")
    taken = emptied(module)
    if taken:
        raise ValueError(
            f"module is the inside of a BayesianModule that holds {', '.join(taken)} as factors, so it has no dense "
            "weights of its own; bayesianize bayes.merge(), a plain copy at the posterior mean"
        )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ValueError(
                f"parameter {name!r} of a lazy module has no shape yet: call the module once, then bayesianize it"
            )
    if output is not None and not callable(output):
        raise TypeError(
            "output must be a function from what the network returns to a tensor, such as lambda o: o[0], not "
            f"{output!r}"
        )
    if likelihood is not None and not isinstance(likelihood, Likelihood):
        hint = f"; write {likelihood.__name__}()" if isinstance(likelihood, type) else ""
        raise TypeError(
            f"likelihood must be a Likelihood such as dubito.Categorical(), not {likelihood!r}{hint}"
        )


def _check_inside(module: nn.Module) -> None:
    for name, inner in module.named_modules():
        if isinstance(inner, BayesianModule):
            raise TypeError(
                f"module holds a BayesianModule at {name!r}, whose draws and KL would be lost in the outer one: build "
                "the whole from plain modules and name the random part by a pattern"
            )


def _out_of_reach(module: nn.Module, slots: Sequence[Slot]) -> list[str]:
    """Random weights that are also kept where a draw cannot be put, as in a Python list: a call would use the mean."""
    names = {id(slot.parameter): slot.name for slot in slots if slot.occupied}
    notes = []
    for prefix, owner in module.named_modules():
        kept = (
            {} if isinstance(owner, nn.RNNBase) else vars(owner)
        )  # whose own list is refreshed at every call
        for attribute, value in kept.items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            parts = (
                value.values()
                if isinstance(value, dict)
                else value
                if isinstance(value, list | tuple)
                else [value]
            )
            found = sorted(
                {names[id(part)] for part in parts if isinstance(part, nn.Parameter) and id(part) in names}
            )
            place = f"{prefix}.{attribute}" if prefix else attribute
            notes += [
                f"{name} is also kept in {place!r}, a {type(value).__name__}, where draws do not reach it: a call that "
                "reads it there is not random; use nn.ParameterList or nn.ParameterDict"
                for name in found
            ]
    return notes


def _replaced(family: Family, groups: Sequence[tuple[Family, list[Slot]]]) -> list[str]:
    """What is said where a pattern's family fits none of its parameters, so that another takes all of them."""
    if any(used is family for used, _ in groups):
        return []
    return [
        f"{', '.join(slot.name for slot in slots)}: {type(family).__name__} is for weight matrices, so "
        f"{type(used).__name__} takes {'it' if len(slots) == 1 else 'them'} (fallback= gives another family)"
        for used, slots in groups
    ]


def _groups(family: Family, matched: Sequence[Slot]) -> list[tuple[Family, list[Slot]]]:
    """Split a pattern's parameters by the family that takes them, and by its granularity."""
    by_family: dict[Family, list[Slot]] = {}
    for slot in matched:
        by_family.setdefault(family.substitute(slot) or family, []).append(slot)
    result: list[tuple[Family, list[Slot]]] = []
    for used, slots in by_family.items():
        if used.granularity == "all":
            result.append((used, slots))
        elif used.granularity == "module":
            owners: dict[int, list[Slot]] = {}
            for slot in slots:
                owners.setdefault(id(slot.owner), []).append(slot)
            result.extend((used, members) for members in owners.values())
        else:
            result.extend((used, [slot]) for slot in slots)
    return result
