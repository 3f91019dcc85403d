"""Parameters as matrices with one row an output: which axis is which, and back again."""

from __future__ import annotations

from torch import Tensor, nn

from dubito.weights.slots import Slot

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def inputs_first(slot: Slot) -> bool:
    """Whether the first axis counts inputs: transposed convolutions, embeddings, and transformers' `Conv1D`."""
    owner = slot.owner
    if len(slot.shape) < 2:
        return False
    return (
        isinstance(owner, (*_TRANSPOSED, nn.Embedding, nn.EmbeddingBag)) or type(owner).__name__ == "Conv1D"
    )


def matrix_size(slot: Slot) -> tuple[int, int]:
    """(outputs, inputs times kernel area); a vector is one column."""
    shape = tuple(slot.shape)
    if len(shape) < 2:
        return slot.shape.numel(), 1
    rows = shape[1] if inputs_first(slot) else shape[0]
    return rows, slot.shape.numel() // rows if rows else 0


def from_matrix(slot: Slot, matrix: Tensor) -> Tensor:
    """`(…, outputs, inputs · kernel area)` → `(…, *slot.shape)`."""
    lead = matrix.shape[:-2]
    if not inputs_first(slot):
        return matrix.reshape(*lead, *slot.shape)
    shape = tuple(slot.shape)
    swapped = matrix.reshape(*lead, shape[1], shape[0], *shape[2:])
    return swapped.transpose(len(lead), len(lead) + 1)


def bias_name(attribute: str) -> str | None:
    """Under which name the module of a weight holds the bias beside it."""
    return attribute.replace("weight", "bias", 1) if "weight" in attribute else None
