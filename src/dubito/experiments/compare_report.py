"""A comparison as a table for the terminal and as a report with pictures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dubito import plots
from dubito.experiments.compare import REFERENCE, Comparison, Run
from dubito.experiments.evaluation import CORRUPTIONS_JUDGED, SEVERITY
from dubito.experiments.methods import METHODS
from dubito.report import Picture, Report, Row, Section, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_IMAGES = 6  # a row of certain or uncertain images


@dataclass(frozen=True)
class _Measure:
    label: str
    note: str
    metric: str
    show: Callable[[float], str]
    relative: bool = False


def _percent(value: float) -> str:
    return f"{100 * value:.1f}\N{NO-BREAK SPACE}%"


def _times(value: float, digits: int) -> str:
    return f"{value:.{digits}f}\N{NO-BREAK SPACE}×"


def _seconds(value: float) -> str:
    return f"{value:.2f}\N{NO-BREAK SPACE}s"


_MEASURES = (
    _Measure("Accuracy ↑", "of the test images", "accuracy", _percent),
    _Measure("NLL ↓", "negative log likelihood, nats", "nll", lambda v: f"{v:.3f}"),
    _Measure("ECE ↓", "expected calibration error, 15 bins", "ece", _percent),
    _Measure("AURC ↓", "area under risk against coverage, × 100", "aurc", lambda v: f"{v:.2f}"),
    _Measure("OOD AUROC ↑", "letters told by entropy, chance 0.5", "ood_auroc", lambda v: f"{v:.3f}"),
    _Measure("Corrupted accuracy ↑", "of corrupted test images", "corrupted_accuracy", _percent),
    _Measure("Corrupted NLL ↓", "nats", "corrupted_nll", lambda v: f"{v:.3f}"),
    _Measure("Corrupted ECE ↓", "15 bins", "corrupted_ece", _percent),
    _Measure("Parameters", "trained numbers", "parameters", lambda v: f"{v:,.0f}"),
    _Measure("Training time", "relative to deterministic", "train_seconds", lambda v: _times(v, 2), True),
    _Measure("Prediction time", "relative to deterministic", "predict_seconds", lambda v: _times(v, 1), True),
)


def table(comparison: Comparison) -> Table:
    """One column a method that finished, one row a measure; mean ± standard deviation where there are seeds."""
    names = comparison.finished
    rows = []
    for measure in _MEASURES:
        relative = measure.relative and REFERENCE in names
        seconds = measure.relative and not relative
        show = _seconds if seconds else measure.show
        cells = tuple(_cell(comparison.values(name, measure.metric, relative), show) for name in names)
        rows.append(Row(measure.label, cells, "in all" if seconds else measure.note))
    return Table(tuple(METHODS[name].title for name in names), tuple(rows), _caption(comparison))


def _cell(values: list[float], show: Callable[[float], str]) -> str:
    if not values:
        return "–"
    mean = show(math.fsum(values) / len(values))
    if len(values) == 1 or max(values) == min(values):
        return mean
    number = mean.partition("\N{NO-BREAK SPACE}")[
        0
    ]  # the unit is said once, and a line broken before the ± only
    return f"{number} ±\N{NO-BREAK SPACE}{show(statistics.stdev(values))}"


def _caption(comparison: Comparison) -> str:
    seeds = len(comparison.seeds)
    spread = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    drawn = f"{comparison.samples} draws of the weights a prediction"
    text = f"{comparison.data}, {comparison.epochs} epochs, {drawn}, {spread}."
    return text if comparison.complete else f"{text} Interrupted: {len(comparison.runs)} runs finished."


def report(comparison: Comparison) -> Report:
    """The page: what was done, the table, pictures of every method.

    Raises:
        ValueError: if no run has finished.
    """
    if not comparison.runs:
        raise ValueError("there is nothing to report: no run has finished")
    sections = (
        _methods(comparison),
        _calibration(comparison),
        _selective(comparison),
        _unknown(comparison),
        _corruptions(comparison),
        _extremes(comparison),
    )
    title = "How certain, and how rightly so? Bayesian networks compared"
    return Report(title, _lead(comparison), table(comparison), sections)


def pictures(comparison: Comparison) -> dict[str, Figure]:
    """The two pictures that say most, by file name: risk against coverage, and images by certainty.

    Raises:
        ValueError: if no run has finished.
    """
    if not comparison.runs:
        raise ValueError("there is nothing to draw: no run has finished")
    shown = next((name for name in comparison.finished if name != REFERENCE), comparison.finished[0])
    extremes = _extreme_images(comparison, comparison.runs_of(shown)[0])
    return {"risk-coverage.png": _curves(comparison), "certainty.png": extremes}


def _lead(comparison: Comparison) -> tuple[str, ...]:
    split = next(iter(comparison.exams.values())).split
    first = (
        f"One small convolutional network, trained in {_count(len(comparison.finished), 'way')} on {split.name}: "
        f"{len(split.train):,} training and {len(split.test):,} test images of {split.classes} classes. Every "
        f"method has the same initial weights, order of batches and number of epochs ({comparison.epochs})."
    )
    accuracy = statistics.fmean(run.metrics["accuracy"] for run in comparison.runs)
    error = 100 * math.sqrt(max(accuracy * (1 - accuracy), 0.0) / len(split.test))
    second = (
        f"By the finite test set alone an accuracy is uncertain by about ± {error:.1f} points (one standard "
        "error). Read differences of that size as chance, and run more seeds to tell."
    )
    paragraphs = [first, second]
    if not comparison.complete:
        planned = len(comparison.methods) * len(comparison.seeds)
        paragraphs.append(
            f"The run was interrupted: {len(comparison.runs)} of {planned} trainings are shown."
        )
    return tuple(paragraphs)


def _count(number: int, noun: str) -> str:
    word = ("no", "one", "two", "three", "four", "five", "six")[number] if number < 7 else str(number)
    return f"{word} {noun}{'' if number == 1 else 's'}"


def _methods(comparison: Comparison) -> Section:
    terms = [(METHODS[name].title, METHODS[name].summary) for name in comparison.finished]
    found = [
        (f"Found wrong with {METHODS[run.method].title}, seed {run.seed}", text)
        for run in comparison.runs
        for text in run.warnings
    ]
    times = (
        "Learning rates, ranks and the weight of the KL were chosen by the negative log likelihood of the validation "
        "images of mnist-5k. Test images, letters and corruptions took no part in any choice."
    )
    clock = "processor time" if comparison.device.startswith("cpu") else "wall time"
    seconds = comparison.values(REFERENCE, "train_seconds")
    if seconds:
        predicted = 1000 * statistics.fmean(comparison.values(REFERENCE, "predict_seconds"))
        times += (
            f" Times are {clock}; the deterministic network took {statistics.fmean(seconds):.1f} s to train and "
            f"{predicted:.0f} ms to predict the test images once."
        )
    return Section("The methods", (times,), tuple(terms + found))


def _calibration(comparison: Comparison) -> Section:
    pictures = []
    for colour, name in zip(_colours(comparison), comparison.finished, strict=True):
        probs, labels = _pooled(comparison, name)
        title = METHODS[name].title
        ece = statistics.fmean(comparison.values(name, "ece"))
        alt = f"Reliability diagram of {title}: accuracy in bins of confidence; calibration error {_percent(ece)}."
        pictures.append(Picture(plots.reliability_diagram(probs, labels, title=title, colour=colour), alt))
    text = (
        "Of the images a network is 90 % sure of, 90 % should be right. Bars below the dashed line are over-confident, "
        "bars above it too modest; the lower panel shows how many images a bin holds."
    )
    return Section("Calibration", (text,), pictures=tuple(pictures))


def _curves(comparison: Comparison) -> Figure:
    curves = {}
    for name in comparison.finished:
        probs, labels = _pooled(comparison, name)
        confidence, predicted = probs.max(-1)
        curves[METHODS[name].title] = (confidence, (predicted != labels).double())
    return plots.risk_coverage_curves(curves)


def _selective(comparison: Comparison) -> Section:
    areas = ", ".join(
        f"{METHODS[name].title} {statistics.fmean(comparison.values(name, 'aurc')):.2f}"
        for name in comparison.finished
    )
    alt = f"Error among the images answered against their share. Area under each curve, times 100: {areas}."
    text = "Leave the least certain images to a person: how fast does the error among the others fall? Lower is better."
    return Section("Answering only when sure", (text,), pictures=(Picture(_curves(comparison), alt),))


def _unknown(comparison: Comparison) -> Section:
    pictures = []
    for name in comparison.finished:
        runs = comparison.runs_of(name)
        known = torch.cat([run.judgement.entropy for run in runs])
        unknown = torch.cat([run.judgement.unknown_entropy for run in runs])
        title = METHODS[name].title
        auroc = statistics.fmean(run.metrics["ood_auroc"] for run in runs)
        figure = plots.ood_histogram(known, unknown, title, ("test images", "letters"))
        alt = f"Entropy of {title}'s predictions on test images and on letters; AUROC {auroc:.3f}."
        pictures.append(Picture(figure, alt))
    text = (
        "Letters A–J in many faces, none of which the network has seen, should be met with doubt: the two histograms "
        "should part. The score is the entropy of the predicted probabilities, for every method alike."
    )
    return Section("Letters it has never seen", (text,), pictures=tuple(pictures))


def _corruptions(comparison: Comparison) -> Section:
    values = {}
    for name in comparison.finished:
        runs = comparison.runs_of(name)
        values[METHODS[name].title] = {
            corruption: 100 * statistics.fmean(run.judgement.corrupted_accuracy[corruption] for run in runs)
            for corruption in CORRUPTIONS_JUDGED
        }
    spoken = "; ".join(
        f"{title}: " + ", ".join(f"{key.replace('_', ' ')} {value:.0f} %" for key, value in row.items())
        for title, row in values.items()
    )
    exam = next(iter(comparison.exams.values()))
    each = len(next(iter(exam.corrupted.values())))
    text = f"Each corruption at severity {SEVERITY} of 5 on its own {each:,} test images, the same for every method."
    figure = plots.grouped_bars(values, "accuracy, %", (0, 100))
    return Section("Corrupted images", (text,), pictures=(Picture(figure, f"Accuracy. {spoken}."),))


def _extremes(comparison: Comparison) -> Section:
    pictures = []
    for name in comparison.finished:
        run = comparison.runs_of(name)[0]
        title = METHODS[name].title
        alt = (
            f"Images by the entropy of {title}'s predictions: the {_IMAGES} most certain test images, the {_IMAGES} "
            f"least certain, and the {_IMAGES} letters it is most certain of, with prediction and confidence."
        )
        pictures.append(Picture(_extreme_images(comparison, run), alt, title))
    text = (
        "Above, the test images each method is most certain of; in the middle, those it is least certain of; below, "
        "the letters it is most certain of, wrongly. Under each image: the prediction, what a test image is where "
        "that is wrong, and the confidence."
    )
    return Section("Most and least certain", (text,), pictures=tuple(pictures))


def _extreme_images(comparison: Comparison, run: Run) -> Figure:
    exam, judged = comparison.exams[run.seed], run.judgement
    test, unknown, names = exam.split.test, exam.unknown, exam.split.test.class_names
    order, strange = judged.entropy.argsort(stable=True), judged.unknown_entropy.argsort(stable=True)
    shown = torch.cat([order[:_IMAGES], order.flip(0)[:_IMAGES]])
    captions = [_said(judged.probs[i], names, names[int(test.labels[i])]) for i in shown.tolist()]
    captions += [_said(judged.unknown_probs[i], names) for i in strange[:_IMAGES].tolist()]
    images = torch.cat([test.images[shown], unknown.images[strange[:_IMAGES]]])
    return plots.image_grid(images, captions, columns=_IMAGES)


def _said(probs: Tensor, names: tuple[str, ...], truth: str | None = None) -> str:
    confidence, predicted = probs.max(-1)
    word = names[int(predicted)]
    remark = f"{word}, is {truth}" if truth not in (None, word) else word
    return f"{remark}\n{100 * float(confidence):.0f} %"


def _pooled(comparison: Comparison, name: str) -> tuple[Tensor, Tensor]:
    """Test probabilities and labels over all seeds."""
    runs = comparison.runs_of(name)
    labels = [comparison.exams[run.seed].split.test.labels for run in runs]
    return torch.cat([run.judgement.probs for run in runs]), torch.cat(labels)


def _colours(comparison: Comparison) -> list[str]:
    return [plots.COLOURS[i % len(plots.COLOURS)] for i in range(len(comparison.finished))]
