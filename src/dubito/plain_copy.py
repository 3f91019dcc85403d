"""An ordinary copy of a network with given weights in the places of its random ones."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dubito.weights.slots import Slot, refresh_recurrent


def plain_copy(module: nn.Module, slots: Mapping[str, Slot], values: Mapping[str, Tensor]) -> nn.Module:
    """A deep copy of `module` whose parameters at `slots` hold `values`; ties stay tied.

    Args:
        module: the network; it is not changed.
        slots: its random parameters, by name.
        values: dense weights, by the same names.
    """
    memo: dict[int, Any] = {}
    fresh: dict[str, nn.Parameter] = {}
    for name, slot in slots.items():
        fresh[name] = nn.Parameter(values[name].detach().clone(), requires_grad=slot.requires_grad)
        if slot.occupied:
            memo[id(slot.parameter)] = fresh[name]
    plain: nn.Module = copy.deepcopy(module, memo)
    for name, slot in slots.items():
        for owner, attribute in slot.places:
            copied: nn.Module = memo[id(owner)] if owner is not module else plain
            copied._parameters[attribute] = fresh[name]
    for part in plain.modules():
        refresh_recurrent(part)
    return plain
