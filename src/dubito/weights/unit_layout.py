"""Groups of parameters as rows: which entries of a module's parameters vary together.

A *block* holds parameters with the same number of units, side by side: `(units, entries a unit)`. Of a linear layer
with "unit" grouping a row is one output's incoming weights and its bias; grouped whole, there is one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dubito.weights.slots import Slot

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Block:
    """Parameters whose entries vary together, unit by unit.

    Attributes:
        slots: the parameters.
        units: number of rows; rows are independent of each other.
        sizes: how many entries of a row each parameter has.
        whole: whether the one row holds the parameters in their own order.
    """

    slots: tuple[Slot, ...]
    units: int
    sizes: tuple[int, ...]
    whole: bool

    @property
    def width(self) -> int:
        """Entries a row."""
        return sum(self.sizes)

    def rows(self, values: dict[str, Tensor]) -> Tensor:
        """`(…, *shape)` by slot name → `(…, units, width)`."""
        parts = []
        for slot, size in zip(self.slots, self.sizes, strict=True):
            value = values[slot.name]
            lead = value.shape[: value.dim() - len(slot.shape)]
            value = value if self.whole else _units_first(slot, value, len(lead))
            parts.append(value.reshape(*lead, self.units, size))
        return torch.cat(parts, dim=-1)

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """`(…, units, width)` → `(…, *shape)` by slot name."""
        result = {}
        for slot, part in zip(self.slots, rows.split(self.sizes, dim=-1), strict=True):
            result[slot.name] = (
                part.reshape(*rows.shape[:-2], *slot.shape) if self.whole else _units_back(slot, part)
            )
        return result


def unit_blocks(slots: Sequence[Slot]) -> list[Block]:
    """One row an output unit; parameters of a module with the same number of units stand side by side."""
    by_units: dict[int, list[Slot]] = {}
    for slot in slots:
        by_units.setdefault(_units(slot), []).append(slot)
    return [
        Block(tuple(members), units, tuple(s.shape.numel() // max(1, units) for s in members), whole=False)
        for units, members in by_units.items()
    ]


def whole_block(slots: Sequence[Slot]) -> list[Block]:
    """All parameters in one row."""
    return [Block(tuple(slots), 1, tuple(s.shape.numel() for s in slots), whole=True)]


def _units(slot: Slot) -> int:
    if not slot.shape:
        return 1
    axis = _axis(slot)
    return slot.shape[axis] * (_groups(slot) if axis else 1)


def _axis(slot: Slot) -> int:
    """The axis of output units: the first, but for layers stored (in, out); a row of an embedding is a unit."""
    stored_in_out = isinstance(slot.owner, _TRANSPOSED) or type(slot.owner).__name__ == "Conv1D"
    return 1 if stored_in_out and len(slot.shape) > 1 else 0


def _groups(slot: Slot) -> int:
    return int(slot.owner.groups) if isinstance(slot.owner, _TRANSPOSED) else 1


def _units_first(slot: Slot, value: Tensor, lead: int) -> Tensor:
    """`(…, groups · in, out, k…)` → `(…, groups, out, in, k…)`; anything else has its units first already."""
    if _axis(slot) == 0:
        return value
    groups, shape = _groups(slot), slot.shape
    value = value.reshape(*value.shape[:lead], groups, shape[0] // groups, *shape[1:])
    return value.transpose(lead + 1, lead + 2)


def _units_back(slot: Slot, rows: Tensor) -> Tensor:
    lead, shape = rows.shape[:-2], slot.shape
    if _axis(slot) == 0:
        return rows.reshape(*lead, *shape)
    groups = _groups(slot)
    value = rows.reshape(*lead, groups, shape[1], shape[0] // groups, *shape[2:])
    return value.transpose(len(lead) + 1, len(lead) + 2).reshape(*lead, *shape)
