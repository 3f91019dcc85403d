"""Pictures of a classifier's uncertainty, as matplotlib figures that need no display and no global state.

Every function returns a fresh :class:`matplotlib.figure.Figure`, narrow enough for a telephone; `to_svg`
turns one into an inline SVG that takes its ink from the page around it (light or dark) and says in words what
it shows. matplotlib is imported when a picture is asked for.
"""

from __future__ import annotations

import html
import io
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dubito.metrics import reliability
from dubito.selective import risk_coverage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Told apart by the colour-blind, and visible on white and on near-black (after Okabe and Ito).
COLOURS = ("#3d85c6", "#e0772f", "#2f9e77", "#b565a7", "#c9a227", "#6f7f8f")
#: Stands for "the colour of the surrounding text" until `to_svg` puts `currentColor` in its place.
INK = "#010203"
_WIDTH = 4.2  # inches; 1 inch becomes 72 units of the SVG
_POINTS = 200  # of a curve: more cannot be seen, and a page with thousands is slow to open


def reliability_diagram(
    probs: Tensor, y: Tensor, bins: int = 15, title: str = "", colour: str = COLOURS[0]
) -> Figure:
    """Accuracy against confidence in equal-width bins, and below it how many data each bin holds.

    A calibrated classifier's bars end on the diagonal; bars below it are over-confident (Guo et al., 2017).

    Args:
        probs: probabilities, shape ``(N, C)``.
        y: int64 labels, shape ``(N,)``.
        bins: number of bins over [0, 1].
        title: written above.
        colour: of the bars.

    Raises:
        ValueError: if the probabilities or labels are not as stated.
    """
    table = reliability(probs, y, bins=bins)
    figure = blank_figure(3.8)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    filled = table.count > 0
    left, width = table.edges[:-1][filled].cpu().numpy(), 1 / bins
    accuracy, count = table.accuracy[filled].cpu().numpy(), table.count[filled].cpu().numpy()
    upper.bar(left, accuracy, width, align="edge", color=colour, alpha=0.75, edgecolor=INK, linewidth=0.5)
    upper.plot((0, 1), (0, 1), color=INK, linestyle="--", linewidth=1)
    upper.plot(table.confidence[filled].cpu().numpy(), accuracy, ".", color=INK, markersize=4)
    upper.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy", title=title)
    lower.bar(left, count, width, align="edge", color=colour, alpha=0.75, edgecolor=INK, linewidth=0.5)
    lower.set(xlabel="confidence", ylabel="images", yscale="symlog", ylim=(0, None))
    ticks = [n for n in (0, 10, 100, 1000, 10000) if n <= max(count)]
    lower.set_yticks(ticks, [f"{n:,}" for n in ticks])
    lower.minorticks_off()
    return inked(figure)


def risk_coverage_curves(curves: Mapping[str, tuple[Tensor, Tensor]]) -> Figure:
    """Error among the data answered, as the least confident are left unanswered; one line a method.

    Args:
        curves: by name, (confidence, risk), each of shape ``(N,)``; risk 1 where wrong, 0 where right.

    Raises:
        ValueError: if there is nothing to draw.
    """
    if not curves:
        raise ValueError("curves is empty: give at least one (confidence, risk) by name")
    figure = blank_figure(3.2)
    axes = figure.subplots()
    for (name, (confidence, risk)), colour in zip(curves.items(), itertools.cycle(COLOURS)):
        curve = risk_coverage(confidence, risk)
        shown = torch.linspace(0, len(curve.risk) - 1, min(len(curve.risk), _POINTS)).round().long()
        x, y = (100 * part.detach().cpu()[shown] for part in (curve.coverage, curve.risk))
        axes.plot(x.numpy(), y.numpy(), color=colour, label=name, linewidth=1.6)
    axes.set(xlabel="images answered, %", ylabel="error among them, %", xlim=(0, 100), ylim=(0, None))
    legend(axes)
    return inked(figure)


def ood_histogram(
    in_scores: Tensor,
    out_scores: Tensor,
    title: str = "",
    names: tuple[str, str] = ("in distribution", "out of distribution"),
    score: str = "entropy, nats",
) -> Figure:
    """How an uncertainty score is distributed over known data and over data of another kind.

    Args:
        in_scores: shape ``(N,)``, higher is less certain.
        out_scores: shape ``(M,)``.
        title: written above.
        names: of the two sets.
        score: what the horizontal axis measures.

    Raises:
        ValueError: if a score is NaN or infinite, or there are none.
    """
    for which, values in (("in_scores", in_scores), ("out_scores", out_scores)):
        if values.numel() == 0 or not bool(torch.isfinite(values).all()):
            raise ValueError(f"{which} must hold at least one score, all finite")
    figure = blank_figure(2.7)
    axes = figure.subplots()
    both = torch.cat([in_scores.flatten(), out_scores.flatten()]).detach().cpu()
    edges = torch.linspace(float(both.min()), max(float(both.max()), float(both.min()) + 1e-6), 31).tolist()
    for values, name, colour in zip((in_scores, out_scores), names, COLOURS[:2], strict=True):
        share = torch.full((values.numel(),), 100 / values.numel()).numpy()
        flat = values.detach().flatten().cpu().numpy()
        axes.hist(flat, edges, weights=share, color=colour, alpha=0.6, label=name)
    axes.set(xlabel=score, ylabel="share of images, %", title=title, xlim=(edges[0], edges[-1]))
    legend(axes)
    return inked(figure)


def grouped_bars(
    values: Mapping[str, Mapping[str, float]], ylabel: str, limits: tuple[float, float] | None = None
) -> Figure:
    """One group a category, one bar a method, lying on its side so that long names stay readable.

    Args:
        values: by method, by category; all methods have the same categories.
        ylabel: what is measured.
        limits: ends of the measured axis.

    Raises:
        ValueError: if there is nothing to draw or a method lacks a category.
    """
    categories = list(next(iter(values.values()), {}))
    if not categories or any(list(row) != categories for row in values.values()):
        raise ValueError(f"every method needs the same categories, at least one; got {dict(values)}")
    figure = blank_figure(0.9 + 0.13 * len(categories) * (len(values) + 1.5))
    axes = figure.subplots()
    height = 0.8 / len(values)
    for i, ((name, row), colour) in enumerate(zip(values.items(), itertools.cycle(COLOURS))):
        places = [k + i * height for k in range(len(categories))]
        axes.barh(places, list(row.values()), height * 0.9, align="edge", color=colour, label=name)
    axes.set_yticks([k + 0.4 for k in range(len(categories))], [c.replace("_", " ") for c in categories])
    axes.invert_yaxis()
    axes.set(xlabel=ylabel, xlim=limits)
    legend(axes, above=True)
    return inked(figure)


def image_grid(images: Tensor, captions: Sequence[str], columns: int = 6) -> Figure:
    """Small images in rows, a caption under each.

    Args:
        images: values in [0, 1], shape ``(N, 1, H, W)`` (grey) or ``(N, 3, H, W)``.
        captions: one an image; may have several lines.
        columns: images a row.

    Raises:
        ValueError: if there are no images, as many captions as images are not given, or the channels are
            neither 1 nor 3.
    """
    if images.dim() != 4 or len(images) == 0 or images.shape[1] not in (1, 3):
        raise ValueError(f"images must be (N, 1 or 3, H, W) with N ≥ 1; got {tuple(images.shape)}")
    if len(captions) != len(images):
        raise ValueError(f"there must be one caption an image; got {len(captions)} for {len(images)}")
    side, line = _WIDTH / columns, 0.13  # inches
    below = line * (1 + max(caption.count("\n") for caption in captions)) + 0.08
    rows, aspect = -(-len(images) // columns), images.shape[-2] / images.shape[-1]
    step = 0.92 * side * aspect + below
    figure = blank_figure(rows * step)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))  # one for all: an axes an image takes seconds to lay out
    for i, (image, caption) in enumerate(zip(images.detach().cpu(), captions, strict=True)):
        left, top = (i % columns + 0.04) * side, (i // columns) * step
        picture = image[0] if len(image) == 1 else image.permute(1, 2, 0)
        box = (left, left + 0.92 * side, top + 0.92 * side * aspect, top)
        axes.imshow(picture.numpy(), cmap="gray", vmin=0, vmax=1, interpolation="none", extent=box)
        place = (left + 0.46 * side, top + 0.92 * side * aspect + 0.03)
        axes.text(*place, caption, fontsize=8, ha="center", va="top", color=INK)
    axes.set(xlim=(0, _WIDTH), ylim=(rows * step, 0))
    axes.axis("off")
    return figure


def to_svg(figure: Figure, alt: str, prefix: str) -> str:
    """The figure as an ``<svg>`` element to put into a page.

    It scales to the width it is given, takes the colour of the text around it, and is announced as an image
    with the words of ``alt``.

    Args:
        figure: as the functions above return it.
        alt: what the picture shows, in words.
        prefix: unique in the page; begins every id inside, since inline pictures share the page's ids.

    Raises:
        ValueError: if ``alt`` is blank or ``prefix`` is no identifier.
    """
    if not alt.strip():
        raise ValueError("alt must say in words what the picture shows; it is blank")
    if not re.fullmatch(r"[A-Za-z][\w-]*", prefix):
        raise ValueError(f"prefix must be a letter followed by letters, digits, - or _; got {prefix!r}")
    import matplotlib

    buffer = io.StringIO()
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # would rule the whole page
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r" ?font-family: [^;\"]*;?", "", svg).replace(INK, "currentColor")
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}-", svg)
    svg = re.sub(r'href="#', f'href="#{prefix}-', svg)
    box = re.search(r'viewBox="[^"]*"', svg)
    head = f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {box[0] if box else ""} stroke-linejoin="round"'
    label = f' role="img" aria-labelledby="{prefix}-alt"><title id="{prefix}-alt">{html.escape(alt)}</title>'
    return head + label + svg[svg.index(">") + 1 :].strip()


def save_png(figure: Figure, path: str | Path, dpi: int = 160) -> Path:
    """Write the figure to ``path`` on white, for places that take no SVG. Returns the path."""
    figure.savefig(path, format="png", dpi=dpi, facecolor="white")
    return Path(path)


def blank_figure(height: float, width: float = _WIDTH) -> Figure:
    """An empty figure, in inches; by default of the report's width."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # rendering that needs no display, whatever backend the process has chosen
    return figure


def legend(axes: Axes, above: bool = False) -> None:
    """The house's legend, where it fits best or above the axes."""
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 2} if above else {"loc": "best"}
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, **place)


def inked(figure: Figure) -> Figure:
    """Lines and letters in the ink that `to_svg` exchanges."""
    for axes in figure.axes:
        axes.set_facecolor("none")
        axes.title.set(color=INK, fontsize=10)
        axes.tick_params(colors=INK, which="both", labelsize=8)
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set(color=INK, fontsize=9)
        for name, spine in axes.spines.items():
            spine.set_edgecolor(INK)
            spine.set_visible(name in ("left", "bottom"))
    return figure
