"""From rows to tables, targets, pictures and words."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dubito.experiments.cvp.bootstrap import Difference, Examples, compare
from dubito.experiments.cvp.contestants import ABLATION, BASELINES, CONTESTANTS, OURS, PUBLISHED, REFERENCE
from dubito.experiments.cvp.exam import unpacked
from dubito.plots import COLOURS, blank_figure, inked
from dubito.report import Picture, Row, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Values = Mapping[str, Any]
TITLES: Mapping[str, str] = {
    "resnet": "ResNet, Fashion-MNIST",
    "vit": "ViT, Fashion-MNIST",
    "bert": "BERT, sentences about films",
    "pairs": "do two digits agree?",
}
WITHIN = 1.02  # ours may have this much of the reference's AURC
MOST = 3.5  # passes
_METRICS = (
    ("accuracy", "accuracy %", 100.0, 2),
    ("nll", "NLL", 1.0, 3),
    ("ece", "ECE %", 100.0, 2),
    ("aurc", "AURC %", 1.0, 3),
    ("c05", "C@0.5 %", 1.0, 1),
    ("c1", "C@1 %", 1.0, 1),
    ("ood_auroc", "OOD AUROC", 1.0, 3),
)
_AGREEMENT = (
    ("shift_r2", "R² of the mean's shift", 2),
    ("variance_ratio", "variance ratio", 2),
    ("variance_correlation", "correlation of log variances", 2),
)
_DRAWN = (
    "mean", "mean-t", "mc-4", "mc-16", "mc-64", "mc-400",
    "streamlining-scale", "paper-nll", "cvp-matched-nll", "ours",
)  # fmt: skip


def of_part(rows: Sequence[Values], part: str) -> dict[str, list[Values]]:
    """Rows of one part by method, in the methods' order, by seed."""
    found: dict[str, list[Values]] = {}
    for method in CONTESTANTS:
        own = [r for r in rows if r["key"]["data"] == part and r["key"]["method"] == method]
        if own:
            found[method] = sorted(own, key=lambda r: int(r["key"]["seed"]))
    return found


def parts_of(rows: Sequence[Values]) -> list[str]:
    """The parts that have rows, in the tables' order."""
    return [part for part in TITLES if any(r["key"]["data"] == part for r in rows)]


def mean_of(rows: Sequence[Values], metric: str) -> float | None:
    """Mean over seeds, or None where a method has no such metric."""
    values = [float(row["metrics"][metric]) for row in rows if metric in row["metrics"]]
    return statistics.fmean(values) if values else None


def cost_of(rows: Sequence[Values], part: str, method: str, compiled: bool = False) -> float | None:
    """Of a prediction, in eager passes of the mean network; None where it was not measured."""
    found = next((r["costs"] for r in rows if r["key"]["data"] == part and "costs" in r), None)
    one = CONTESTANTS[method]
    name = f"{one.cost} compiled" if compiled else one.cost
    if found is None or name not in found:
        return None
    return float(found[name]) * one.passes


# ------------------------------------------------------------------------------------------------ tables


def tables(rows: Sequence[Values], part: str) -> tuple[Table, ...]:
    """Quality and cost; agreement with the draws; the ablation."""
    found = of_part(rows, part)
    made = [_quality(rows, found, part), _agreement(found, part)]
    if all(method in found for method in ABLATION):
        made.append(_ablation(found, part))
    return tuple(made)


def _quality(rows: Sequence[Values], found: Mapping[str, list[Values]], part: str) -> Table:
    lines = []
    for method, own in found.items():
        if method in ABLATION[1:3]:
            continue
        cells = [_cell(own, name, scale, digits) for name, _, scale, digits in _METRICS]
        lines.append(Row(CONTESTANTS[method].title, (*cells, _cost_cell(rows, part, method))))
    seeds = sorted({int(row["key"]["seed"]) for own in found.values() for row in own})
    caption = f"{TITLES[part]}; seeds {seeds}, mean ± standard deviation over them"
    columns = (*(title for _, title, _, _ in _METRICS), "cost, passes (compiled)")
    return Table(columns, tuple(lines), caption if len(seeds) > 1 else f"{TITLES[part]}; seed {seeds[0]}")


def _cell(rows: Sequence[Values], metric: str, scale: float, digits: int) -> str:
    values = [scale * float(row["metrics"][metric]) for row in rows if metric in row["metrics"]]
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def _cost_cell(rows: Sequence[Values], part: str, method: str) -> str:
    eager, whole = (cost_of(rows, part, method, compiled) for compiled in (False, True))
    if eager is None:
        return "–"
    text = f"{eager:.1f}" if eager < 100 else f"{eager:.0f}"
    return text if whole is None else f"{text} ({whole:.1f})"


def _agreement(found: Mapping[str, list[Values]], part: str) -> Table:
    lines = tuple(
        Row(CONTESTANTS[method].title, tuple(_cell(own, name, 1.0, digits) for name, _, digits in _AGREEMENT))
        for method, own in found.items()
        if "shift_r2" in own[0]["metrics"] and method != REFERENCE
    )
    caption = f"{TITLES[part]}: moments of the logits beside those of the draws"
    return Table(tuple(title for _, title, _ in _AGREEMENT), lines, caption)


def _ablation(found: Mapping[str, list[Values]], part: str) -> Table:
    words = {"cvp-matched-nll": "whole", "cvp": "· without calibration"}
    chosen = [column for column in _METRICS if column[0] in ("nll", "ece", "aurc", "c1", "ood_auroc")]
    lines = tuple(
        Row(
            words.get(method, CONTESTANTS[method].title),
            tuple(_cell(found[method], name, scale, digits) for name, _, scale, digits in chosen),
        )
        for method in ABLATION
    )
    return Table(
        tuple(title for _, title, _, _ in chosen), lines, f"{TITLES[part]}: without each of the parts"
    )


# ------------------------------------------------------------------------------------------------ targets


def examples_of(rows: Sequence[Values]) -> list[Examples]:
    """By row, confidences and errors of the test examples."""
    return [(unpacked(r["confidence"], torch.float32), unpacked(r["wrong"], torch.uint8)) for r in rows]


def differences(rows: Sequence[Values], part: str) -> dict[str, Difference]:
    """AURC of CVP less each baseline's, and ours less 1.02 of the reference's; only what has been measured."""
    found = of_part(rows, part)

    def gap(first: str, second: str, factor: float = 1.0) -> Difference:
        seeds = [{int(r["key"]["seed"]) for r in found[m]} for m in (first, second)]
        common = set.intersection(*seeds)
        pair = [[r for r in found[m] if int(r["key"]["seed"]) in common] for m in (first, second)]
        return compare(examples_of(pair[0]), examples_of(pair[1]), factor)

    result = {}
    for other in BASELINES:
        if {PUBLISHED, other} <= set(found):
            result[f"CVP's AURC below that of: {CONTESTANTS[other].title}"] = gap(PUBLISHED, other)
    if {OURS, REFERENCE} <= set(found):
        result["ours within 2 % of the AURC of 400 draws"] = gap(OURS, REFERENCE, WITHIN)
    return result


def targets(rows: Sequence[Values], part: str) -> dict[str, bool]:
    """What the intervals decide, and the cost of ours; what they leave open is no target (see `in_words`)."""
    decided = {
        f"{TITLES[part]}: {what} ({gap})": gap.verdict
        for what, gap in differences(rows, part).items()
        if gap.verdict is not None
    }
    result = {what: bool(verdict) for what, verdict in decided.items()}
    cheapest = _cheapest(rows, part)
    if cheapest is not None:
        result[f"{TITLES[part]}: ours takes at most {MOST} eager passes ({cheapest:.1f})"] = cheapest <= MOST
    return result


def _cheapest(rows: Sequence[Values], part: str) -> float | None:
    costs = [cost_of(rows, part, OURS, compiled) for compiled in (False, True)]
    return min((c for c in costs if c is not None), default=None)


def overall(rows: Sequence[Values]) -> dict[str, bool]:
    """Over all four parts, once they are there: CVP below both baselines on most; ours near and cheap on most."""
    parts = parts_of(rows)
    if len(parts) < len(TITLES):
        return {}
    found = {part: list(differences(rows, part).values()) for part in parts}
    if any(len(gaps) < 3 for gaps in found.values()):
        return {}
    better = sum(gaps[0].verdict is True and gaps[1].verdict is True for gaps in found.values())
    near = sum(gaps[2].verdict is True for gaps in found.values())
    cheap = sum((_cheapest(rows, part) or MOST + 1) <= MOST for part in parts)
    most = len(TITLES) // 2 + 1
    return {
        f"CVP's AURC below the mean network's and Streamlining's on most of the four ({better})": better
        >= most,
        f"ours within 2 % of the AURC of 400 draws on most of the four ({near}), at most {MOST} passes ({cheap})": (
            near >= most and cheap >= most
        ),
    }


def in_words(rows: Sequence[Values], part: str) -> tuple[str, ...]:
    """Every difference with its interval and what it decides."""
    verdicts = {True: "shown", False: "refuted", None: "neither"}
    return tuple(
        f"{what}: {verdicts[gap.verdict]} (difference in AURC × 100 and 95 % of resamples {gap})."
        for what, gap in differences(rows, part).items()
    )


# ------------------------------------------------------------------------------------------------ picture


def picture(rows: Sequence[Values], part: str) -> Picture:
    """Cost against AURC, one point a method."""
    found = of_part(rows, part)
    points = {}
    for method in _DRAWN:
        cost = cost_of(rows, part, method, compiled=True) or cost_of(rows, part, method)
        if method in found and cost is not None:
            aurc = mean_of(found[method], "aurc")
            assert aurc is not None
            points[method] = (cost, aurc)
    alt = "; ".join(f"{CONTESTANTS[m].title} {c:.1f} passes, AURC {a:.2f}" for m, (c, a) in points.items())
    return Picture(_figure(points), f"Points. {alt}.", f"{TITLES[part]}: cost and quality")


def _figure(points: Mapping[str, tuple[float, float]]) -> Figure:
    figure = blank_figure(3.6)
    axes = figure.subplots()
    sampled = [points[m] for m in points if m.startswith("mc-")]
    if sampled:
        axes.plot(*zip(*sampled, strict=True), color=COLOURS[0], linewidth=1, zorder=1)
    for method, (cost, aurc) in points.items():
        colour = COLOURS[0] if method.startswith("mc-") else COLOURS[1] if method in (OURS,) else COLOURS[2]
        axes.plot([cost], [aurc], "o", color=colour, markersize=5)
        axes.annotate(CONTESTANTS[method].title, (cost, aurc), (4, 3), textcoords="offset points", fontsize=7)
    axes.set(xscale="log", xlabel="cost, eager passes of the mean network", ylabel="AURC (%)")
    return inked(figure)
