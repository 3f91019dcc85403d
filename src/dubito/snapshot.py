"""A distribution over weights kept as it was: the initial one, to measure how far training has moved from it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from dubito.weights.family import WeightPosterior, key_of
from dubito.weights.slots import Slot


class Snapshot(nn.Module):
    """A frozen copy of a posterior; made by `BayesianModule.snapshot`.

    It holds the means and the spread of the random weights (nothing of the rest of the network), moves with `.to`, and
    has a `state_dict`.

    Attributes:
        posterior: the `WeightPosterior`s, under the keys of the network's.
        means: the dense means that were the network's own parameters.
    """

    def __init__(self, posterior: Mapping[str, WeightPosterior]) -> None:
        super().__init__()
        self.posterior = nn.ModuleDict()
        self.means = nn.ModuleDict()
        memo: dict[int, Any] = {}
        for key, original in posterior.items():
            for slot in original.slots:
                memo[id(slot)] = self._keep(slot)
            memo.update((id(prior), prior) for prior in original.joint_prior)
            self.posterior[key] = copy.deepcopy(original, memo)
        self.requires_grad_(False)

    def _keep(self, slot: Slot) -> Slot:
        """A slot of the same name whose parameter is a copy held here."""
        holder = nn.Module()
        if slot.occupied:
            value = slot.parameter.detach().clone()
            holder.register_parameter("mean", nn.Parameter(value, requires_grad=False))
            self.means[key_of(slot.name)] = holder
        else:
            holder.register_parameter("mean", None)
        return Slot(slot.name, slot.aliases, [(holder, "mean")], slot.shape, slot.requires_grad)

    def posteriors(self) -> Iterable[WeightPosterior]:
        """The posteriors of all groups of parameters."""
        values: Any = self.posterior.values()
        return values  # type: ignore[no-any-return]


def squared_wasserstein(one: Mapping[str, Any], two: Mapping[str, Any]) -> Tensor:
    """Squared 2-Wasserstein distance between two sets of posteriors, summed over the (independent) groups.

    Raises:
        ValueError: if they are not of the same random weights.
    """
    if list(one) != list(two):
        missing = sorted(set(one) ^ set(two)) or list(two)
        raise ValueError(
            "the snapshot was made of another network, or of other families: they differ in "
            f"{', '.join(name.replace('/', '.') for name in missing[:5])}; make it with this one's snapshot()"
        )
    if not one:
        raise ValueError("there is no random weight, so there is no distance between distributions of them")
    values = [one[key].wasserstein(two[key]) for key in one]
    total: Tensor = values[0]
    for value in values[1:]:
        total = total + value
    return total
