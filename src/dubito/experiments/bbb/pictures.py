"""The figures of the paper, from what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dubito.experiments.bbb.regression_curve import Curve
from dubito.plots import COLOURS, INK, blank_figure, inked, legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHOWN = 200  # points of a line or cloud


def curve_figure(curve: Curve) -> Figure:
    """Data, the median of the predictive, its central 50 % and 90 %, and the network without random weights."""
    figure, axes = _axes(3.2)
    x, q = curve.grid.numpy(), curve.quantiles.numpy()
    axes.fill_between(x, q[0], q[4], color=COLOURS[0], alpha=0.2, linewidth=0, label="central 90 %")
    axes.fill_between(x, q[1], q[3], color=COLOURS[0], alpha=0.4, linewidth=0, label="central 50 %")
    axes.plot(x, q[2], color=COLOURS[0], linewidth=1.6, label="median")
    axes.plot(x, curve.plain.numpy(), color=COLOURS[1], linestyle="--", linewidth=1.2, label="plain network")
    few = curve.x[:_SHOWN].numpy(), curve.y[:_SHOWN].numpy()
    axes.plot(*few, "x", color=INK, markersize=3, alpha=0.6, label="data")
    axes.set(xlabel="x", ylabel="y", xlim=(x[0], x[-1]), ylim=(-1.3, 1.7))
    return _finish(figure, axes)


def regret_figure(regrets: Mapping[str, Tensor]) -> Figure:
    """Cumulative regret of each agent, one line a seed; shape of each ``(seeds, interactions)``."""
    figure, axes = _axes(3.2)
    for (name, lines), colour in zip(regrets.items(), COLOURS, strict=False):
        chosen = torch.linspace(0, lines.shape[1] - 1, min(lines.shape[1], _SHOWN)).round().long()
        for number, line in enumerate(lines):
            label = name if number == 0 else None
            axes.plot((chosen + 1).numpy(), line[chosen].numpy(), color=colour, linewidth=1.3, label=label)
    axes.set(xlabel="mushrooms offered", ylabel="cumulative regret", xlim=(0, None), ylim=(0, None))
    return _finish(figure, axes)


def snr_figure(ratios: Mapping[str, Tensor]) -> Figure:
    """Share of the weights whose signal-to-noise ratio is below a value (figure 3 of the paper, below).

    Args:
        ratios: by prior, sorted ratios in decibels.
    """
    figure, axes = _axes(2.8)
    for (name, values), colour in zip(ratios.items(), COLOURS, strict=False):
        share = torch.linspace(0, 100, len(values))
        axes.plot(values.numpy(), share.numpy(), color=colour, linewidth=1.6, label=name)
    for removed in (75, 95):
        axes.axhline(removed, color=INK, linewidth=0.5, linestyle=":")
    axes.set(xlabel="|mean| / sd, dB", ylabel="weights below, %", xlim=(-30, 15), ylim=(0, 100))
    return _finish(figure, axes)


def pruning_figure(errors: Mapping[str, Mapping[float, float]]) -> Figure:
    """Test error in % against the share of weights removed, by prior."""
    figure, axes = _axes(2.8)
    for (name, curve), colour in zip(errors.items(), COLOURS, strict=False):
        removed = [100 * (1 - keep) for keep in curve]
        axes.plot(removed, list(curve.values()), "o-", color=colour, linewidth=1.4, markersize=4, label=name)
    axes.set(xlabel="weights removed, %", ylabel="test error, %", yscale="log", xlim=(-2, 100))
    ticks = [t for t in (1, 2, 5, 10, 20, 50, 90) if t < 2 * max(max(c.values()) for c in errors.values())]
    axes.set_yticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    return _finish(figure, axes)


def _axes(height: float) -> tuple[Figure, Axes]:
    figure = blank_figure(height)
    axes: Any = figure.subplots()
    return figure, axes


def _finish(figure: Figure, axes: Axes) -> Figure:
    legend(axes)
    return inked(figure)
