"""Pruning by signal-to-noise ratio, |mean| / standard deviation (Graves 2011; Blundell et al. 2015, section 5.1).

A weight whose posterior cannot tell its sign is removed at little cost. What remains is a plain network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dubito.bayesian import BayesianModule
from dubito.patterns import Pattern, matching
from dubito.weights.slots import find_slots

__all__ = [
    "PruningPoint",
    "load_sparse_state_dict",
    "prune",
    "pruning_curve",
    "signal_to_noise",
    "sparse_state_dict",
]

Evaluate = Callable[[nn.Module], float]


class PruningPoint(NamedTuple):
    """One point of a pruning curve.

    Attributes:
        keep: fraction of the random weights that stay.
        weights: how many that is.
        threshold: the smallest signal-to-noise ratio among them.
        value: what `evaluate` returned.
    """

    keep: float
    weights: int
    threshold: float
    value: float


@torch.no_grad()
def signal_to_noise(bayes: BayesianModule) -> dict[str, Tensor]:
    """|mean| / standard deviation of every random weight, by parameter name, in the parameters' shapes.

    Infinite where the standard deviation is zero (0 where the mean is zero too).

    Raises:
        CapabilityError: where a family has no closed-form moments.
    """
    result: dict[str, Tensor] = {}
    for posterior in bayes.posteriors():
        variances = posterior.variance()
        for name, mean in posterior.mean().items():
            sizes = mean.abs()
            result[name] = torch.where(sizes > 0, sizes / variances[name].sqrt(), 0.0).to(mean.dtype)
    return result


def prune(bayes: BayesianModule, keep: float, only: Pattern | Sequence[Pattern] | None = None) -> nn.Module:
    """A plain copy of the network at the posterior mean, with the least certain weights set to exactly zero.

    Random weights are ranked together by |mean| / standard deviation over the whole network. Parameters that are not
    random, or that `only` leaves out, stay at their values.

    Args:
        bayes: the Bayesian module; it is not changed.
        keep: fraction of the random weights that stay, in (0, 1]. Of N weights exactly round(keep · N) stay, and at
            least one.
        only: rank and prune these parameters alone: one pattern or several, as for `bayesianize` (a name, a glob
            such as "*.weight", a module name or class).

    Returns:
        A network of the user's own class. `sparse_state_dict` makes it small to store.

    Raises:
        ValueError: keep outside (0, 1], a pattern without a parameter, or no random weight to prune.
        CapabilityError: where a family has no closed-form moments.
    """
    return _pruned(bayes, _ratios(bayes, only), _fraction("keep", keep))[0]


def pruning_curve(
    bayes: BayesianModule,
    evaluate: Evaluate,
    keeps: Sequence[float] = (1.0, 0.5, 0.25, 0.05, 0.02),
    only: Pattern | Sequence[Pattern] | None = None,
) -> list[PruningPoint]:
    """How a measure of the network falls off as weights are removed.

    Args:
        bayes: the Bayesian module; it is not changed.
        evaluate: a number for a plain network in eval mode, such as its accuracy on a test set.
        keeps: the fractions that stay; the defaults are those of Blundell et al. (2015, table 2).
        only: as for `prune`.

    Returns:
        A point for each of `keeps`, in their order.

    Raises:
        TypeError: evaluate is no function.
        ValueError: as for `prune`, or no fraction given.
    """
    if not callable(evaluate):
        raise TypeError(
            f"evaluate must be a function from a plain network to a number, got {type(evaluate).__name__}: write "
            "pruning_curve(bayes, evaluate, keeps)"
        )
    fractions = [_fraction("keeps", keep) for keep in keeps]
    if not fractions:
        raise ValueError("keeps is empty: give the fractions of weights to keep, such as (1.0, 0.25, 0.05)")
    ratios = _ratios(bayes, only)
    points = []
    for keep in fractions:
        plain, weights, threshold = _pruned(bayes, ratios, keep)
        points.append(PruningPoint(keep, weights, threshold, float(evaluate(plain.eval()))))
    return points


def sparse_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """The module's `state_dict`, with every tensor as sparse COO where that takes less room.

    `torch.save` it and read it back by `load_sparse_state_dict`; `tensor.to_dense()` gives any entry back.
    """
    result: dict[str, Tensor] = {}
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            raise TypeError(f"the state of {name!r} is no tensor but {type(value).__name__}")
        entry = value.detach()
        nonzero = int(torch.count_nonzero(entry))
        room = nonzero * (8 * entry.dim() + entry.element_size())  # indices are 64-bit integers
        small = entry.dim() > 0 and room < entry.numel() * entry.element_size()
        result[name] = entry.to_sparse().coalesce() if small else entry.clone()
    return result


def load_sparse_state_dict(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load what `sparse_state_dict` made into a network of the same structure.

    Raises:
        RuntimeError: names or shapes that do not fit (`nn.Module.load_state_dict`'s own message).
    """
    module.load_state_dict({name: value.to_dense() for name, value in state.items()})


def _fraction(name: str, keep: float) -> float:
    number = math.nan if isinstance(keep, bool) else float(keep)
    if not 0 < number <= 1:
        raise ValueError(
            f"{name}={keep!r} must be a fraction in (0, 1], such as 0.05 to remove 95 % of the weights"
        )
    return number


def _ratios(bayes: BayesianModule, only: Pattern | Sequence[Pattern] | None) -> dict[str, Tensor]:
    ratios = signal_to_noise(bayes)
    if only is not None:
        plain = bayes.merge()  # where a factored family has taken parameters out, they are back
        slots = [slot for slot in find_slots(plain) if slot.name in ratios]
        patterns = [only] if isinstance(only, str | type) else list(only)
        chosen = {slot.name for pattern in patterns for slot in matching(plain, slots, pattern)}
        ratios = {name: ratio for name, ratio in ratios.items() if name in chosen}
    if not sum(ratio.numel() for ratio in ratios.values()):
        raise ValueError(
            "there is no random weight to prune: give the parameters a family such as MeanField()"
        )
    for name, ratio in ratios.items():
        if bool(ratio.isnan().any()):
            raise ValueError(f"the posterior of {name!r} contains NaN, so its weights cannot be ranked")
    return ratios


@torch.no_grad()
def _pruned(bayes: BayesianModule, ratios: dict[str, Tensor], keep: float) -> tuple[nn.Module, int, float]:
    """(plain network, number of weights kept, smallest ratio kept)."""
    everything = torch.cat([ratio.reshape(-1).to(torch.float32) for ratio in ratios.values()])
    count = max(1, round(keep * everything.numel()))
    best = everything.topk(count, sorted=False)
    kept = torch.zeros_like(everything, dtype=torch.bool).scatter_(0, best.indices, True)
    plain = bayes.merge()
    masks = kept.split([ratio.numel() for ratio in ratios.values()])
    for (name, ratio), mask in zip(ratios.items(), masks, strict=True):
        plain.get_parameter(name).masked_fill_(~mask.reshape(ratio.shape), 0.0)
    return plain, count, float(best.values.min())
