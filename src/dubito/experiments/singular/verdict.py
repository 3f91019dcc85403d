"""From rows to tables, targets and pictures; the paper's figures stand under ours, marked as of other data."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dubito.experiments.singular.contestants import CONTESTANTS, Recipe
from dubito.plots import grouped_bars
from dubito.report import Picture, Row, Table

Values = Mapping[str, Any]
NOT_GIVEN = "–"
LEAST_SAVING = 3.0  # full-rank mean field's variational parameters over low rank's, at MLP scale


@dataclass(frozen=True)
class Column:
    """One measured quantity.

    Attributes:
        metric: its name in the rows.
        title: over the column.
        digits: behind the point.
        chance: what a score independent of the data would give, where that is the same for all methods.
    """

    metric: str
    title: str
    digits: int = 3
    chance: str | None = None


def of_variant(rows: Sequence[Values], variant: str) -> dict[str, list[Values]]:
    """Rows of one variant by method, in the methods' order."""
    found: dict[str, list[Values]] = {}
    for method in CONTESTANTS:
        own = [r for r in rows if r["key"]["network"] == variant and r["key"]["method"] == method]
        if own:
            found[method] = own
    return found


def mean_of(rows: Sequence[Values], metric: str) -> float:
    """Mean over seeds."""
    return statistics.fmean(float(row["metrics"][metric]) for row in rows)


def table(
    rows: Sequence[Values],
    variant: str,
    columns: Sequence[Column],
    caption: str,
    paper: Mapping[str, Mapping[str, str]] | None = None,
) -> Table:
    """A row a method: mean ± standard deviation over seeds; under it the paper's figures, which are of other data.

    Args:
        rows: measured.
        variant: whose rows are shown.
        columns: what is shown of them; where any has a chance level that is the same for all, a row says so.
        caption: above the table.
        paper: by method, the paper's figures by metric.
    """
    lines: list[Row] = []
    if any(column.chance is not None for column in columns):
        lines.append(Row("chance", tuple(column.chance or "" for column in columns)))
    for method, own in of_variant(rows, variant).items():
        lines.append(Row(CONTESTANTS[method].title, tuple(_cell(own, column) for column in columns)))
        theirs = (paper or {}).get(method)
        if theirs is not None:
            lines.append(Row("· paper", tuple(theirs.get(c.metric, NOT_GIVEN) for c in columns)))
    return Table(tuple(column.title for column in columns), tuple(lines), caption)


def costs(
    rows: Sequence[Values], variant: str, caption: str, paper: Mapping[str, Mapping[str, str]]
) -> Table:
    """Parameters, numbers stored, and processor seconds of training."""
    lines: list[Row] = []
    for method, own in of_variant(rows, variant).items():
        seconds = _shown([float(row["train_seconds"]) for row in own], 0)
        cells = (_count(own[0]["variational"]), _count(own[0]["stored"]), seconds)
        lines.append(Row(CONTESTANTS[method].title, cells))
        theirs = paper.get(method)
        if theirs is not None:
            given = (NOT_GIVEN, theirs.get("stored", NOT_GIVEN), theirs.get("seconds", NOT_GIVEN))
            lines.append(Row("· paper", given))
    return Table(("variational parameters", "numbers stored", "training, s"), tuple(lines), caption)


def _cell(rows: Sequence[Values], column: Column) -> str:
    return _shown([float(row["metrics"][column.metric]) for row in rows], column.digits)


def _shown(values: Sequence[float], digits: int) -> str:
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def _count(number: int) -> str:
    return f"{number:,}" if number else NOT_GIVEN


def ood_target(rows: Sequence[Values], variant: str, metric: str, part: str) -> dict[str, bool]:
    """Whether low rank tells shifted data at least as well as full-rank mean field; nothing without both."""
    found = of_variant(rows, variant)
    if not {"low-rank", "mean-field"} <= set(found):
        return {}
    ours, full = mean_of(found["low-rank"], metric), mean_of(found["mean-field"], metric)
    words = f"{part}: OOD AUROC of low rank ({ours:.3f}) ≥ full-rank mean field's ({full:.3f})"
    if max(ours, full) <= 0.5:
        words += ", though neither is above chance"
    return {words: ours >= full}


def saving_target(rows: Sequence[Values], variant: str) -> dict[str, bool]:
    """Whether low rank has at most a third of full-rank mean field's variational parameters."""
    found = of_variant(rows, variant)
    if not {"low-rank", "mean-field"} <= set(found):
        return {}
    ours, full = (int(found[name][0]["variational"]) for name in ("low-rank", "mean-field"))
    share = f"{full:,}; {ours / full:.2f}"
    words = f"variational parameters of low rank ({ours:,}) ≤ 1/3 of full-rank mean field's ({share})"
    return {words: LEAST_SAVING * ours <= full}


def recipes_in_words(recipes: Mapping[str, Recipe], search: str) -> str:
    """What was chosen; `search` says from what and how."""
    if not recipes:
        return "Every method has the default weight of the KL and initial spread."
    chosen = ", ".join(
        f"{CONTESTANTS[name].title} {one.beta:g} and {one.scale:g}" for name, one in recipes.items()
    )
    return (
        "Weight of the KL (1 is the ELBO) and initial spread (of the weights' or factors' own scale), by validation "
        f"NLL under a seed that is not reported: {chosen}. {search}"
    )


def ood_picture(rows: Sequence[Values], shown: Mapping[str, tuple[str, str]], caption: str) -> Picture:
    """Bars of OOD AUROC by method.

    Args:
        rows: measured.
        shown: by words for the legend, variant and metric.
        caption: above the picture.
    """
    bars: dict[str, dict[str, float]] = {}
    for words, (variant, metric) in shown.items():
        found = of_variant(rows, variant)
        bars[words] = {CONTESTANTS[method].title: mean_of(own, metric) for method, own in found.items()}
    alt = "; ".join(
        f"{words}: " + ", ".join(f"{name} {value:.2f}" for name, value in row.items())
        for words, row in bars.items()
    )
    return Picture(grouped_bars(bars, "OOD AUROC (chance 0.5)", (0.0, 1.0)), f"Bars. {alt}.", caption)
