"""Where parameters live: every place of a module tree that holds one parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

# What `Slot.put` has emptied, for as long as the module lives.
_emptied: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


@dataclass(eq=False)
class Slot:
    """One parameter and every place that holds it.

    A tied parameter has several places (an embedding that is also the output layer); they share one
    slot, so one random weight, one draw and one KL.

    Attributes:
        name: the parameter's first name in `named_parameters()` order.
        aliases: all its names, `name` first.
        places: the `(owner module, attribute)` pairs that hold it.
        shape: the parameter's shape; it stays known when a factored family takes the tensor out.
        requires_grad: whether the parameter was trainable when it was found.
    """

    name: str
    aliases: tuple[str, ...]
    places: list[tuple[nn.Module, str]]
    shape: torch.Size
    requires_grad: bool
    held: Tensor | None = field(default=None, repr=False)

    @property
    def owner(self) -> nn.Module:
        """The module of the first place."""
        return self.places[0][0]

    @property
    def attribute(self) -> str:
        """The name under which `owner` holds the parameter."""
        return self.places[0][1]

    @property
    def tied(self) -> bool:
        """Whether several places share the parameter."""
        return len(self.places) > 1

    @property
    def occupied(self) -> bool:
        """Whether the parameter is in storage (False once a factored family has taken it out)."""
        return self.held is not None or self.owner._parameters[self.attribute] is not None

    @property
    def parameter(self) -> Tensor:
        """The module's own parameter, also while a draw stands in its place.

        Raises:
            RuntimeError: if a factored family has taken it out of storage.
        """
        if self.held is not None:
            return self.held
        value = self.owner._parameters[self.attribute]
        if value is None:
            raise RuntimeError(
                f"parameter {self.name!r} is held as factors and has no dense tensor; "
                "bayes.merge() gives a plain module at the mean, bayes.sample() one at a draw"
            )
        return value

    def put(self, value: nn.Parameter | None) -> None:
        """Place `value` (None empties the slot) in all its places."""
        for owner, attribute in self.places:
            owner._parameters[attribute] = value
            if value is None:
                _emptied.setdefault(owner, set()).add(attribute)
            refresh_recurrent(owner)


def find_slots(module: nn.Module) -> list[Slot]:
    """All parameters of a module, tied ones once, in `named_parameters()` order."""
    slots: dict[int, Slot] = {}
    for prefix, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is None:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            known = slots.get(id(parameter))
            if known is None:
                place = [(owner, attribute)]
                slots[id(parameter)] = Slot(name, (name,), place, parameter.shape, parameter.requires_grad)
            else:
                known.aliases += (name,)
                known.places.append((owner, attribute))
    return list(slots.values())


def emptied(module: nn.Module) -> list[str]:
    """Names of the parameters that a factored family has taken out of a module (not out of its copies)."""
    return [
        f"{prefix}.{attribute}" if prefix else attribute
        for prefix, owner in module.named_modules()
        for attribute in sorted(_emptied.get(owner, ()))
        if owner._parameters.get(attribute) is None
    ]


def refresh_recurrent(owner: nn.Module) -> None:
    """Make an `nn.RNNBase` see what stands in its slots: it reads its weights from a list of its own."""
    if isinstance(owner, nn.RNNBase):
        owner._init_flat_weights()


def recurrent_owners(slots: Iterator[Slot] | list[Slot]) -> list[nn.RNNBase]:
    """The recurrent modules among the owners of `slots`, each once."""
    owners = {id(o): o for slot in slots for o, _ in slot.places if isinstance(o, nn.RNNBase)}
    return list(owners.values())
