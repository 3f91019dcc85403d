"""How factors start: their rank, and their means by variance matching or by the singular value decomposition.

A parameter is a matrix of m rows and n columns, in h blocks of rows (h = 1 unless asked), each with factors of its own.
The left factors are stacked, (m, r); the right ones stand side by side, (n, h·r).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from dubito.weights.initial_scale import fan_in
from dubito.weights.matrix_layout import inputs_first
from dubito.weights.rank_choice import break_even_rank, rank_for_energy
from dubito.weights.slots import Slot

Init = Literal["random", "he", "svd"]
Rank = int | float | Literal["auto"]
Blocks = int | Literal["heads"]


def matrix_shape(slot: Slot) -> tuple[int, int]:
    """(m, n): the parameter as a matrix, first dimension by the rest."""
    return slot.shape[0], slot.shape.numel() // slot.shape[0]


def check_rank(rank: Rank, init: Init, energy: float) -> None:
    """Refuse what is no rank.

    Raises:
        ValueError: naming `rank` or `energy`, and what they may be.
    """
    if rank == "auto":
        if init != "svd":
            raise ValueError(
                'rank="auto" reads the rank off the singular values of the given weights, which only init="svd" keeps; '
                "from scratch give a number, or a fraction of the break-even rank such as rank=0.5"
            )
    elif isinstance(rank, float) and not isinstance(rank, bool):
        if not 0 < rank < 1:
            raise ValueError(
                f"rank={rank!r} must be a whole number of at least 1, a fraction of the break-even rank between 0 and "
                '1, or "auto"'
            )
    elif isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(
            f"rank={rank!r} must be a whole number of at least 1, a fraction of the break-even rank between 0 and 1, "
            'or "auto"'
        )
    if not 0 < energy <= 1:
        raise ValueError(f"energy={energy!r} must be a fraction in (0, 1], such as 0.9")


def block_count(slot: Slot, blocks: Blocks) -> int:
    """h for one parameter.

    Raises:
        ValueError: where rows are no outputs or cannot be split so.
    """
    if blocks == "heads":
        return heads_of(slot) or 1
    if blocks == 1:
        return 1
    if inputs_first(slot):
        raise ValueError(
            f"blocks={blocks}: the rows of {slot.name!r} ({type(slot.owner).__name__}) are not outputs; give it "
            "blocks=1 by a pattern of its own"
        )
    if slot.shape[0] % blocks:
        raise ValueError(
            f"blocks={blocks} does not divide the {slot.shape[0]} rows of {slot.name!r}; give it another number, or "
            "blocks=1, by a pattern of its own"
        )
    return blocks


def heads_of(slot: Slot) -> int | None:
    """Into how many heads the rows fall: of query, key and value projections of `nn.MultiheadAttention`, else None."""
    owner = slot.owner
    if not isinstance(owner, nn.MultiheadAttention) or len(slot.shape) != 2:
        return None
    heads = int(owner.num_heads)
    if slot.attribute == "in_proj_weight":
        return 3 * heads
    return heads if slot.attribute in ("q_proj_weight", "k_proj_weight", "v_proj_weight") else None


def adapted_rank(slot: Slot, rank: Rank, blocks: int, energy: float) -> tuple[int, list[str]]:
    """The rank for one parameter, and what is to be said of it."""
    rows, columns = matrix_shape(slot)
    rows //= blocks
    break_even = break_even_rank(rows, columns)
    notes = []
    if isinstance(rank, str):
        values = torch.linalg.svdvals(_blocks_of(slot, blocks))
        found = max(rank_for_energy(v, energy) for v in values)
    else:
        found = rank if isinstance(rank, int) else max(1, math.floor(rank * break_even))
    if found > min(rows, columns):
        notes.append(f"{slot.name}: rank {found} clipped to min(m, n) = {min(rows, columns)}")
        found = min(rows, columns)
    if found >= break_even:
        each = f"{rows} × {columns} " + ("matrix" if blocks == 1 else f"matrix (each of {blocks} blocks)")
        notes.append(
            f"{slot.name}: rank {found} is at or above the break-even rank {break_even:.1f} of a {each}, where factors "
            "hold no fewer parameters than the dense weight"
        )
    return found, notes


def initial_factors(
    slot: Slot, rank: int, init: Init, blocks: int, damping: float
) -> tuple[Tensor, Tensor, float]:
    """(A, B, variance of a dense entry): A (m, r), B (n, h·r)."""
    rows, columns = matrix_shape(slot)
    given = slot.parameter.detach()
    fan = fan_in(slot)
    glorot = 2.0 / (fan + (rows if fan == columns and not isinstance(slot.owner, nn.Embedding) else fan))
    if init == "svd":
        u, s, vh = torch.linalg.svd(_blocks_of(slot, blocks), full_matrices=False)
        root = s[:, :rank].sqrt()
        left = (u[:, :, :rank] * root.unsqueeze(1)).reshape(rows, rank)
        right = (vh[:, :rank] * root.unsqueeze(2)).reshape(blocks * rank, columns).mT
        variance = float(given.double().square().mean()) or glorot
        # in order, so that noise made like a factor or by its shape is the same noise
        return left.to(given.dtype).contiguous(), right.to(given.dtype).contiguous(), variance
    variance = 2.0 / fan if init == "he" else glorot
    scale = (variance / rank) ** 0.25
    left = torch.randn(rows, rank, dtype=given.dtype, device=given.device)
    right = torch.randn(columns, blocks * rank, dtype=given.dtype, device=given.device)
    return left * (scale * damping), right * (scale * damping), variance


def _blocks_of(slot: Slot, blocks: int) -> Tensor:
    """The given weights, (h, m / h, n), in float32 at least."""
    rows, columns = matrix_shape(slot)
    matrix = slot.parameter.detach().reshape(blocks, rows // blocks, columns)
    return matrix.float() if matrix.dtype.itemsize < 4 else matrix
