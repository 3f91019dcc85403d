"""The one policy for initial scales: everything is measured against the fan-in of a parameter.

A weight that is summed over `fan_in` inputs has the natural scale `fan_in ** -0.5`. The default prior has that
standard deviation, and a posterior starts at a stated fraction of it, so every layer begins with the same
relative perturbation whatever its width. Parameters that are not summed over anything (normalisation gains
and shifts) have fan-in 1; a bias takes the fan-in of the weight beside it.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from dubito.weights.slots import Slot

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_ONE_ROW_AN_OUTPUT = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.Bilinear)


def fan_in(slot: Slot) -> float:
    """Over how many inputs the parameter is summed.

    Linear, convolution, attention and recurrent weights: inputs times kernel area. Transposed convolutions:
    input channels a group times kernel area. Embeddings: the embedding dimension (a looked-up row then has
    unit length). Biases: that of the weight beside them. Normalisation parameters and lone vectors: 1.
    """
    owner, name, shape = slot.owner, slot.attribute, slot.shape
    if len(shape) < 2:
        return max(_fan_in_of_vector(owner, name), 1.0)
    return max(_fan_in_of_matrix(owner, tuple(shape)), 1.0)  # of an empty layer it would be 0


def centre(slot: Slot) -> float:
    """What the default prior is centred on: 1 for normalisation gains, 0 for everything else."""
    lone = len(slot.shape) < 2 and _fan_in_of_vector(slot.owner, slot.attribute) == 1.0
    return 1.0 if lone and slot.attribute == "weight" and bool((slot.parameter == 1).all()) else 0.0


def spread_of(value: Tensor, fan: float) -> float:
    """Root mean squared deviation of a parameter's entries, or `fan ** -0.5` where they do not vary."""
    if value.numel() > 1:
        deviation = float(value.detach().double().std(unbiased=False))
        if deviation > 0:
            return deviation
    return float(fan**-0.5)


def _fan_in_of_matrix(owner: nn.Module, shape: tuple[int, ...]) -> float:
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        return float(shape[-1])
    if isinstance(owner, _TRANSPOSED):
        return float(shape[0] * math.prod(shape[2:])) / int(owner.groups)
    if type(owner).__name__ == "Conv1D" and len(shape) == 2:  # transformers' linear layer, stored (in, out)
        return float(shape[0])
    if shape[0] == 1 and not isinstance(
        owner, _ONE_ROW_AN_OUTPUT
    ):  # a token, or positions: (1, …, dimension)
        return float(shape[-1])
    return float(math.prod(shape[1:]))


def _fan_in_of_vector(owner: nn.Module, name: str) -> float:
    sibling = name.replace("bias", "weight", 1) if "bias" in name else None
    for candidate in (sibling, "weight", "in_proj_weight", "q_proj_weight") if sibling else ():
        shape = _shape_of(owner, candidate)
        if shape is not None and len(shape) >= 2:
            return _fan_in_of_matrix(owner, shape)
    return 1.0


def _shape_of(owner: nn.Module, name: str | None) -> tuple[int, ...] | None:
    value = owner._parameters.get(name) if name else None
    return None if value is None else tuple(value.shape)
