"""Which rank a matrix needs: from the energy of its singular values, and from what factors cost."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rank_for_energy(singular_values: Tensor, energy: float) -> int:
    """The smallest r whose r largest singular values hold the fraction `energy` of the sum of squares.

    Args:
        singular_values: (k,), in any order.
        energy: fraction in (0, 1].

    Returns:
        A rank from 1 to k (1 for a matrix of zeros).

    Raises:
        ValueError: no or non-finite singular values, or an energy outside (0, 1].
    """
    if not 0 < energy <= 1:
        raise ValueError(f"energy={energy!r} must be a fraction in (0, 1], such as 0.95")
    if singular_values.dim() != 1 or not singular_values.numel():
        raise ValueError(
            f"singular_values must be a vector (k,) with k ≥ 1, got shape {tuple(singular_values.shape)}: "
            "torch.linalg.svdvals(matrix) gives one"
        )
    if not bool(torch.isfinite(singular_values).all()):
        raise ValueError("singular_values contain NaN or infinity: the matrix does; reload the weights first")
    squares = singular_values.detach().cpu().double().square().sort(descending=True).values
    cumulative = squares.cumsum(0)
    if float(cumulative[-1]) == 0.0:
        return 1
    # what is missing, not what is there: at energy 1 the last values are lost in the rounding of the sum
    missing = squares.flip(0).cumsum(0).flip(0)[1:]
    enough = missing <= (1.0 - energy) * cumulative[-1]
    return int(enough.int().argmax()) + 1 if bool(enough.any()) else int(squares.numel())


def break_even_rank(rows: int, columns: int) -> float:
    """m n / (m + n): at this rank two factors hold as many entries as the dense m × n matrix."""
    total = rows + columns
    return rows * columns / total if total else math.nan
