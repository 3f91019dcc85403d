"""The singular values of every weight matrix: how fast they decay, and which rank that suggests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dubito.bayesian import BayesianModule
from dubito.patterns import Pattern, matching
from dubito.scalar_checks import computing_dtype
from dubito.weights.low_rank_factors import LowRankFactorsPosterior
from dubito.weights.rank_choice import break_even_rank, rank_for_energy
from dubito.weights.slots import find_slots

__all__ = ["MatrixSpectrum", "Spectrum", "spectrum"]


@dataclass(frozen=True)
class MatrixSpectrum:
    """One weight matrix (a kernel as outputs by the rest, as `LowRankFactors` takes it).

    Attributes:
        name: the parameter.
        rows, columns: m and n.
        singular_values: (min(m, n),), largest first, in float32 at least, on the CPU.
        rank: r of its factors, or None where it is no `LowRankFactors`.
        energy: the fraction of the sum of squares that the suggestion keeps.
    """

    name: str
    rows: int
    columns: int
    singular_values: Tensor = field(repr=False)
    rank: int | None
    energy: float

    @property
    def cumulative_energy(self) -> Tensor:
        """Fraction of Σ σ² in the first 1, 2, … singular values, float64; zeros for a matrix of zeros."""
        squares = self.singular_values.double().square()
        return squares.cumsum(0) / squares.sum().clamp_min(torch.finfo(torch.float64).tiny)

    @property
    def stable_rank(self) -> float:
        """‖W‖_F² / ‖W‖₂², from 1 to the rank; 0 for a matrix of zeros."""
        squares = self.singular_values.double().square()
        return float(squares.sum() / squares[0]) if float(squares[0]) > 0 else 0.0

    def rank_at(self, energy: float) -> int:
        """The smallest rank that keeps a fraction of Σ σ², such as 0.9."""
        return rank_for_energy(self.singular_values, energy)

    @property
    def break_even(self) -> float:
        """m n / (m + n): from this rank on, factors hold no fewer entries than the matrix."""
        return break_even_rank(self.rows, self.columns)

    @property
    def suggested_rank(self) -> int | None:
        """The rank at `energy`, or None where that is at or above break-even: leave the matrix dense."""
        rank = self.rank_at(self.energy)
        return rank if rank < self.break_even else None


@dataclass(frozen=True)
class Spectrum:
    """The singular values of a network's matrices; `print` it, or draw it by `dubito.rank_plots.singular_values`.

    Attributes:
        matrices: one a weight matrix, in the network's order.
        energy: the fraction that suggested ranks keep.
    """

    matrices: tuple[MatrixSpectrum, ...]
    energy: float

    def __getitem__(self, name: str) -> MatrixSpectrum:
        """The matrix of a parameter.

        Raises:
            KeyError: if there is none of that name.
        """
        for matrix in self.matrices:
            if matrix.name == name:
                return matrix
        raise KeyError(f"no weight matrix {name!r}; there are: {', '.join(m.name for m in self.matrices)}")

    def suggested_ranks(self) -> dict[str, int]:
        """Suggested ranks by parameter, without the matrices that are better left dense."""
        return {m.name: m.suggested_rank for m in self.matrices if m.suggested_rank is not None}

    def __str__(self) -> str:
        head = ("weight", "m × n", "rank", "σ_1", "stable rank", "r at 90 %", "95 %", "99 %", "break-even")
        cells: list[tuple[str, ...]] = [(*head, f"suggested ({self.energy:.3g})")]
        for m in self.matrices:
            ranks = [str(m.rank_at(e)) for e in (0.90, 0.95, 0.99)]
            size, own = f"{m.rows} × {m.columns}", "" if m.rank is None else str(m.rank)
            rank = "dense" if m.suggested_rank is None else str(m.suggested_rank)
            first = f"{float(m.singular_values[0]):.3g}"
            cells.append(
                (m.name, size, own, first, f"{m.stable_rank:.1f}", *ranks, f"{m.break_even:.1f}", rank)
            )
        widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
        lines = [
            "  ".join(
                c.ljust(w) if i == 0 else c.rjust(w)
                for i, (c, w) in enumerate(zip(line, widths, strict=True))
            )
            for line in cells
        ]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


@torch.no_grad()
def spectrum(
    module: nn.Module, energy: float = 0.95, only: Pattern | Sequence[Pattern] | None = None
) -> Spectrum:
    """The singular values of every weight matrix of a network.

    Args:
        module: any `nn.Module`; of a `BayesianModule` the posterior means are taken (of factors, their product's).
        energy: fraction of the sum of squares that suggested ranks keep. It says nothing of the loss: see
            `dubito.certificates.eckart_young`.
        only: these parameters alone: one pattern or several, as for `bayesianize`.

    Raises:
        ValueError: no weight matrix, an energy outside (0, 1], a pattern without a parameter, or NaN in a weight.
        CapabilityError: a posterior without a closed-form mean.
    """
    if not 0 < energy <= 1:
        raise ValueError(f"energy={energy!r} must be a fraction in (0, 1], such as 0.95")
    ranks: dict[str, int] = {}
    plain = module
    if isinstance(module, BayesianModule):
        plain = module.merge()
        factored = [p for p in module.posteriors() if isinstance(p, LowRankFactorsPosterior)]
        ranks = {p.slot.name: p.rank for p in factored}
    slots = [slot for slot in find_slots(plain) if len(slot.shape) >= 2 and slot.shape.numel()]
    if only is not None:
        patterns = [only] if isinstance(only, str | type) else list(only)
        chosen = {s.name for pattern in patterns for s in matching(plain, slots, pattern)}
        slots = [slot for slot in slots if slot.name in chosen]
    if not slots:
        raise ValueError(f"{type(plain).__name__} has no weight matrix, so there are no singular values")
    matrices = []
    for slot in slots:
        rows, columns = slot.shape[0], slot.shape[1:].numel()
        value = slot.parameter.detach()
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"parameter {slot.name!r} contains NaN or infinity")
        values = torch.linalg.svdvals(value.to(computing_dtype(value.dtype)).reshape(rows, columns)).cpu()
        matrices.append(MatrixSpectrum(slot.name, rows, columns, values, ranks.get(slot.name), energy))
    return Spectrum(tuple(matrices), energy)
