"""Pictures of ranks: singular values by layer, bounds against rank, and how the entries of `A Bᵀ` correlate.

In the style of `dubito.plots`, whose `to_svg` and `save_png` write them.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dubito.certificates.rank_sweep import RankPoint, RankSweep
from dubito.plots import COLOURS, INK, blank_figure, inked, legend
from dubito.spectrum import Spectrum
from dubito.weights.factor_moments import weight_covariance
from dubito.weights.family import WeightPosterior

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["bound_against_rank", "entry_correlations", "singular_values"]

_LAYERS = 12  # more lines cannot be told apart


def singular_values(spectrum: Spectrum, title: str = "") -> Figure:
    """Singular values of each matrix divided by its largest, and below them the energy in the first r.

    Dots mark the suggested ranks. Of more than twelve matrices the largest twelve are drawn.

    Args:
        spectrum: as `dubito.spectrum` gives it.
        title: written above.
    """
    shown = sorted(spectrum.matrices, key=lambda m: -m.rows * m.columns)[:_LAYERS]
    names = {m.name for m in shown}
    drawn = [m for m in spectrum.matrices if m.name in names]
    figure = blank_figure(4.6)
    upper, lower = figure.subplots(2, 1, sharex=True)
    styles = itertools.cycle(itertools.product(("-", "--"), COLOURS))
    for matrix, (dash, colour) in zip(drawn, styles, strict=False):
        values = matrix.singular_values.double()
        ranks = range(1, len(values) + 1)
        relative = (values / values[0].clamp_min(torch.finfo(torch.float64).tiny)).clamp_min(1e-6)
        energy = 100 * matrix.cumulative_energy
        line = {"color": colour, "linestyle": dash, "linewidth": 1.4}
        upper.plot(ranks, relative.numpy(), label=matrix.name, **line)
        lower.plot(ranks, energy.numpy(), **line)
        rank = matrix.rank_at(matrix.energy)
        lower.plot([rank], [float(energy[rank - 1])], "o", color=colour, markersize=4)
    upper.set(ylabel="σ_r / σ_1", yscale="log", title=title)
    lower.axhline(100 * spectrum.energy, color=INK, linestyle=":", linewidth=1)
    lower.set(xlabel="rank r", ylabel="energy in the first r, %", ylim=(0, 102), xscale="log")
    legend(upper)
    return inked(figure)


def bound_against_rank(sweep: RankSweep, title: str = "") -> Figure:
    """PAC-Bayes bounds of the Gibbs risk against rank, in both forms.

    Filled dots are certificates, the lines of an extrapolated sweep are forecasts; above the dotted line a bound says
    nothing. The crosses at the right edge forecast the dense matrices at the same KL a coordinate.

    Args:
        sweep: as `certificates.rank_sweep` gives it.
        title: written above.
    """
    figure = blank_figure(3.2)
    axes = figure.subplots()
    ranks = [p.rank for p in sweep.points]
    dash = "--" if sweep.extrapolated else "-"
    for label, colour, of in (
        ("inverted kl", COLOURS[0], _kl_form),
        ("square root", COLOURS[1], _sqrt_form),
    ):
        axes.plot(ranks, [of(p) for p in sweep.points], dash, color=colour, linewidth=1.4, label=label)
        certified = [p for p in sweep.points if p.certified]
        axes.plot([p.rank for p in certified], [of(p) for p in certified], "o", color=colour, markersize=5)
        if sweep.dense is not None:
            axes.plot(
                [1.0],
                [of(sweep.dense)],
                "x",
                color=colour,
                transform=axes.get_yaxis_transform(),
                clip_on=False,
            )
    axes.axhline(sweep.trivial, color=INK, linestyle=":", linewidth=1)
    axes.set(xlabel="rank r", ylabel="bound of the Gibbs risk", title=title, ylim=(0, None))
    legend(axes)
    return inked(figure)


def entry_correlations(
    weights: WeightPosterior | Tensor, rows: int | None = None, columns: int | None = None, title: str = ""
) -> Figure:
    """The correlation matrix of the entries of W, row by row, in closed form (lemma 3.5 of the singular BNN paper).

    Entries that share neither row nor column are uncorrelated, exactly: outside the diagonal blocks (same row) only the
    blocks' diagonals (same column) are coloured.

    Args:
        weights: the posterior of one factored matrix (`bayes.posterior[…]`), or the covariance (mn, mn) of a matrix's
            entries in row-major order.
        rows, columns: m and n; for a covariance.
        title: written above.

    Raises:
        TypeError: a posterior of another family.
        ValueError: a covariance of another size, or with a variance that is not positive and finite; a matrix of more
            entries than can be drawn.
    """
    if isinstance(weights, WeightPosterior):
        covariance, shape = weight_covariance(weights), weights.slots[0].shape
        rows, columns = shape[0], shape[1:].numel()
    elif rows is None or columns is None:
        raise ValueError("a covariance needs rows= and columns= of the matrix whose entries it is of")
    else:
        covariance = weights
    size = rows * columns
    if covariance.shape != (size, size):
        raise ValueError(
            f"covariance has shape {tuple(covariance.shape)}; {rows} × {columns} weights need ({size}, {size})"
        )
    variances = covariance.detach().diagonal()
    if not bool((variances > 0).all()) or not bool(torch.isfinite(covariance).all()):
        raise ValueError("covariance needs positive variances and finite entries to become a correlation")
    sd = variances.double().cpu().sqrt()
    correlation = covariance.detach().double().cpu() / sd.outer(sd)
    figure = blank_figure(3.9)
    axes = figure.subplots()
    image = axes.imshow(correlation.numpy(), cmap="PuOr", vmin=-1, vmax=1, interpolation="none")
    for edge in range(columns, size, columns):
        axes.axhline(edge - 0.5, color=INK, linewidth=0.4)
        axes.axvline(edge - 0.5, color=INK, linewidth=0.4)
    middles = [columns * i + (columns - 1) / 2 for i in range(rows)]
    if rows <= 12:
        axes.set_xticks(middles, [f"{i + 1}" for i in range(rows)])
        axes.set_yticks(middles, [f"{i + 1}" for i in range(rows)])
    axes.set(xlabel="row of W", ylabel="row of W", title=title)
    bar = figure.colorbar(image, ax=axes, shrink=0.8)
    bar.set_label("correlation")
    return inked(figure)


def _kl_form(point: RankPoint) -> float:
    return point.kl_form


def _sqrt_form(point: RankPoint) -> float:
    return point.sqrt_form
