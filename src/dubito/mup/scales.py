"""Initial standard deviation and learning-rate factors of every parameter, by its fans and its role.

With k inputs and m outputs (kernel area included, as torch counts fans):

                      standard deviation   SGD rate        Adam rate
    mup   input W     k^-1/2               m               1
          hidden W    k^-1/2               1               1/k
          output W    1/k                  1/k             1/k
          vectors     1                    m               1
    standard W        k^-1/2               1               1
    ntk W             k^-1/2               1/k             k^-1/2        vectors 1, 1, 1 under both

Vectors are biases, gains, shifts, tokens and positions. The neural-tangent rows are those of standard normal weights
under a forward multiplier k^-1/2, moved into the weights (no multiplier is left in the network). An embedding reads
one-hot inputs: its k is 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from torch import nn

from dubito.mup.roles import Role, is_matrix, roles, slots_of
from dubito.scalar_checks import choice
from dubito.weights.initial_scale import fan_in
from dubito.weights.matrix_layout import bias_name, inputs_first
from dubito.weights.slots import Slot

Parametrization = Literal["mup", "standard", "ntk"]
_GATES = {"LSTM": 4, "LSTMCell": 4, "GRU": 3, "GRUCell": 3}


class Scale(NamedTuple):
    """What a parametrisation says of one parameter.

    Attributes:
        role: "input", "hidden" or "output".
        vector: whether it is a bias, gain, shift, token or position rather than a weight between layers.
        sd: initial standard deviation.
        sgd: factor of the learning rate of SGD, with or without momentum.
        adam: factor of that of Adam and its kin.
    """

    role: Role
    vector: bool
    sd: float
    sgd: float
    adam: float


def scales(
    module: nn.Module, parametrization: Parametrization = "mup", roles: Mapping[str, Role] | None = None
) -> dict[str, Scale]:
    """The scales of every parameter, by its name.

    Args:
        module: the network, plain or Bayesian.
        parametrization: "mup", "standard" or "ntk".
        roles: from `dubito.mup.roles`; None: found by order.

    Raises:
        ValueError: an unknown parametrisation, or roles that leave parameters out.
    """
    choice("parametrization", parametrization, Parametrization)
    slots = slots_of(module)
    given = _checked(module, slots, roles)
    return {slot.name: _scale(parametrization, slot, given[slot.name], slots) for slot in slots}


def fans(slot: Slot, slots: list[Slot]) -> tuple[float, float]:
    """(k, m) of a weight, or of the weight beside a bias; (1, size) of parameters outside layers.

    The gates of a recurrent layer and the three projections of attention count once: each is a layer of its own.
    """
    weight = slot if is_matrix(slot) else _beside(slot, slots)
    if weight is None:
        return 1.0, float(slot.shape[-1]) if slot.shape else 1.0
    owner, shape = weight.owner, tuple(weight.shape)
    outputs = float(shape[1] if inputs_first(weight) else shape[0])
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        return 1.0, outputs
    area = 1.0
    if isinstance(owner, nn.modules.conv._ConvNd):
        area = float(math.prod(shape[2:]))
        outputs *= owner.groups if inputs_first(weight) else 1
    elif isinstance(owner, nn.RNNBase | nn.RNNCellBase) and weight.attribute.startswith(
        ("weight_ih", "weight_hh")
    ):
        outputs /= _GATES.get(getattr(owner, "mode", type(owner).__name__), 1)
    elif isinstance(owner, nn.MultiheadAttention) and weight.attribute == "in_proj_weight":
        outputs /= 3.0
    inputs = float(math.prod(shape[1:])) if shape[0] == 1 else fan_in(weight)
    return inputs, outputs * area


def _scale(parametrization: Parametrization, slot: Slot, role: Role, slots: list[Slot]) -> Scale:
    k, m = fans(slot, slots)
    vector = not is_matrix(slot)
    if parametrization == "mup":
        if vector:
            return Scale(role, vector, 1.0, m, 1.0)
        if role == "input":
            return Scale(role, vector, k**-0.5, m, 1.0)
        if role == "hidden":
            return Scale(role, vector, k**-0.5, 1.0, 1.0 / k)
        return Scale(role, vector, 1.0 / k, 1.0 / k, 1.0 / k)
    if vector:
        return Scale(role, vector, 1.0, 1.0, 1.0)
    if parametrization == "standard":
        return Scale(role, vector, k**-0.5, 1.0, 1.0)
    return Scale(role, vector, k**-0.5, 1.0 / k, k**-0.5)


def _beside(slot: Slot, slots: list[Slot]) -> Slot | None:
    """The weight that a bias is added beside."""
    if len(slot.shape) > 1:
        return None
    others = [s for s in slots if s.owner is slot.owner and is_matrix(s)]
    named = [s for s in others if bias_name(s.attribute) == slot.attribute]
    return (named or others or [None])[0]  # type: ignore[list-item]


def _checked(module: nn.Module, slots: list[Slot], given: Mapping[str, Role] | None) -> Mapping[str, Role]:
    if given is None:
        return roles(module)
    missing = [s.name for s in slots if s.name not in given]
    if missing:
        raise ValueError(
            f"roles leaves out {', '.join(missing[:5])}: make it by dubito.mup.roles(module, patterns={{…}}), which "
            "names every parameter"
        )
    for slot in slots:
        choice(f"role of {slot.name!r},", given[slot.name], Role)
    return given
