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
        title: over the column; a chance level that is the same for all methods belongs here.
        digits: behind the point.
        chance: name of the metric that is this one's chance level, where every method has its own.
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
    where: str = "",
) -> Table:
    """A row a method: mean ± standard deviation over seeds, parameters, and seconds of training.

    Args:
        rows: measured.
        variant: whose rows are shown.
        columns: what is shown of them.
        caption: above the table.
        paper: by method, the paper's figures by metric (also "variational", "stored" and "seconds").
        where: the paper's data.
    """
    lines: list[Row] = []
    for method, own in of_variant(rows, variant).items():
        cells = [_cell(own, column) for column in columns]
        cells += [_count(own[0]["variational"]), _count(own[0]["stored"])]
        cells.append(_shown([float(row["train_seconds"]) for row in own], 0))
        lines.append(Row(CONTESTANTS[method].title, tuple(cells)))
        theirs = (paper or {}).get(method)
        if theirs is not None:
            names = (*(column.metric for column in columns), "variational", "stored", "seconds")
            lines.append(
                Row(f"· paper, {where} (other data)", tuple(theirs.get(name, NOT_GIVEN) for name in names))
            )
    titles = (
        *(column.title for column in columns),
        "variational parameters",
        "numbers stored",
        "training, s",
    )
    return Table(titles, tuple(lines), caption)


def _cell(rows: Sequence[Values], column: Column) -> str:
    text = _shown([float(row["metrics"][column.metric]) for row in rows], column.digits)
    return text if column.chance is None else f"{text} ({mean_of(rows, column.chance):.{column.digits}f})"


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
    return {f"{part}: OOD AUROC of low rank ({ours:.3f}) ≥ full-rank mean field's ({full:.3f})": ours >= full}


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
