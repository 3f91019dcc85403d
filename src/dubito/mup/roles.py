"""Which part each parameter plays when the network is widened: input, hidden or output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import nn

from dubito.bayesian import BayesianModule
from dubito.monte_carlo import as_arguments, evaluating
from dubito.patterns import Pattern, matching, show
from dubito.weights.matrix_layout import inputs_first
from dubito.weights.slots import Slot, find_slots

Role = Literal["input", "hidden", "output"]

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


def roles(
    module: nn.Module,
    base: nn.Module | None = None,
    example: Any = None,
    patterns: Mapping[Pattern, Role] | None = None,
) -> dict[str, Role]:
    """The role of every parameter, by its name.

    With `base`, the same network at another width, roles follow from the shapes that differ: a weight is "input" if
    only its outputs grow, "output" if only its inputs do, else "hidden" (also if neither does: then every scale is a
    constant). Without it the order of execution decides: the first layer is "input" (embeddings always are), the last
    one "output", all between are "hidden", and so is a layer that is alone. Biases go with their weights; a
    normalisation's parameters are "hidden", parameters outside layers (tokens, positions) "input".

    Attention is scaled by `1 / sqrt(head size)` inside the modules, which is muP's `1 / head size` up to a constant as
    long as a wider network has more heads, not larger ones: widen it so.

    Args:
        module: the network, plain or Bayesian.
        base: the same network, narrower (only its shapes are read).
        example: an input (as for `BayesianModule.outputs`) to find the order of execution with; None: the order in
            which the layers were registered, which is that of their definition.
        patterns: roles that win over what was found, by the patterns that `bayesianize` takes.

    Returns:
        Role by parameter name; tied parameters once, under their first name.

    Raises:
        ValueError: a base that is another network or no narrower, an unknown role, a pattern that matches nothing.
    """
    slots = slots_of(module)
    found = _by_growth(slots, base) if base is not None else _by_order(module, slots, example)
    for pattern, role in (patterns or {}).items():
        if role not in get_args(Role):
            raise ValueError(
                f"patterns[{show(pattern)}]={role!r} is no role: give one of {', '.join(map(repr, get_args(Role)))}"
            )
        for slot in matching(network_of(module), slots, pattern):
            found[slot.name] = role
    return found


def network_of(module: nn.Module) -> nn.Module:
    """The plain network of a Bayesian module, or the module itself."""
    return module.module if isinstance(module, BayesianModule) else module


def slots_of(module: nn.Module) -> list[Slot]:
    """All parameters of the network, those that a factored family has taken out included."""
    slots = find_slots(network_of(module))
    if isinstance(module, BayesianModule):
        slots += [s for p in module.posteriors() if p.takes_over for s in p.slots]
    return slots


def is_matrix(slot: Slot) -> bool:
    """Whether the parameter maps inputs to outputs: a weight of a layer, not a bias, gain, token or position."""
    if len(slot.shape) < 2:
        return False
    if isinstance(slot.owner, _LAYERS):
        return True
    return "weight" in slot.attribute and slot.shape[0] > 1 and "Norm" not in type(slot.owner).__name__


_LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Bilinear,
    nn.modules.conv._ConvNd,
    nn.MultiheadAttention,
    *_EMBEDDINGS,
    *_RECURRENT,
)


# ---- by the shapes that grow -----------------------------------------------------------------------------------


def _by_growth(slots: list[Slot], base: nn.Module) -> dict[str, Role]:
    shapes = {s.name: tuple(s.shape) for s in slots_of(base)}
    names = [s.name for s in slots]
    if set(names) != set(shapes):
        odd = sorted(set(names) ^ set(shapes))
        raise ValueError(
            f"base must be the same network at another width, but they differ in {', '.join(odd[:5])}"
        )
    if all(shapes[s.name] == tuple(s.shape) for s in slots):
        raise ValueError(
            "base has the same shapes as the module: make it narrower, so that one sees what grows"
        )
    found: dict[str, Role] = {}
    for slot in slots:
        narrow = shapes[slot.name]
        if len(narrow) != len(slot.shape):
            raise ValueError(
                f"base: {slot.name!r} has {len(narrow)} dimensions there and {len(slot.shape)} here"
            )
        found[slot.name] = _role_of_growth(slot, narrow)
    return _biases_follow(slots, found)


def _role_of_growth(slot: Slot, narrow: tuple[int, ...]) -> Role:
    grows = [wide > small for wide, small in zip(slot.shape, narrow, strict=True)]
    if not is_matrix(slot):
        return "input" if any(grows) and len(grows) > 1 else "hidden"
    outputs, inputs = (grows[1], grows[0]) if inputs_first(slot) else (grows[0], any(grows[1:]))
    if outputs == inputs:
        return "hidden"
    return "input" if outputs else "output"


# ---- by the order of execution ---------------------------------------------------------------------------------


def _by_order(module: nn.Module, slots: list[Slot], example: Any) -> dict[str, Role]:
    owners: dict[int, nn.Module] = {}
    for slot in slots:
        if is_matrix(slot) and not isinstance(slot.owner, _EMBEDDINGS):
            owners[id(slot.owner)] = slot.owner
    layers = list(owners.values()) if example is None else _executed(module, owners, example)
    embedded = any(isinstance(s.owner, _EMBEDDINGS) for s in slots)
    first = layers[0] if layers and not embedded else None
    last = layers[-1] if layers and not isinstance(layers[-1], (*_RECURRENT, nn.MultiheadAttention)) else None
    if first is last:  # one layer: its sizes are the data's, and every scale is a constant
        first = None
        last = last if embedded else None
    found: dict[str, Role] = {}
    for slot in slots:
        found[slot.name] = "hidden"
        if isinstance(slot.owner, _EMBEDDINGS) or (len(slot.shape) > 1 and not is_matrix(slot)):
            found[slot.name] = "input"
        elif is_matrix(slot) and slot.owner is last:
            found[slot.name] = "output"
        elif is_matrix(slot) and slot.owner is first and _reads_data(slot):
            found[slot.name] = "input"
    return _biases_follow(slots, found)


def _reads_data(slot: Slot) -> bool:
    """Of a recurrent layer only the first level's input weights see the data."""
    if isinstance(slot.owner, nn.RNNBase):
        return slot.attribute.startswith("weight_ih_l0")
    return not isinstance(slot.owner, nn.RNNCellBase) or slot.attribute == "weight_ih"


def _executed(module: nn.Module, owners: Mapping[int, nn.Module], example: Any) -> list[nn.Module]:
    """The layers in the order of their first call."""
    order: dict[int, nn.Module] = {}

    def note(owner: nn.Module, _: Any) -> None:
        order.setdefault(id(owner), owner)

    handles = [owner.register_forward_pre_hook(note) for owner in owners.values()]
    args, kwargs = as_arguments(example)
    try:
        with torch.no_grad(), evaluating(module):
            module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return list(order.values())


def _biases_follow(slots: list[Slot], found: dict[str, Role]) -> dict[str, Role]:
    """A vector beside a weight takes the weight's role."""
    by_owner: dict[int, Role] = {}
    for slot in slots:
        if is_matrix(slot):
            by_owner.setdefault(id(slot.owner), found[slot.name])
    for slot in slots:
        if len(slot.shape) < 2 and id(slot.owner) in by_owner:
            found[slot.name] = by_owner[id(slot.owner)]
    return found
