"""Methods side by side: the same network, the same data, the same epochs, one table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dubito.data import DataSplit, check_dataset_name, load_dataset
from dubito.experiments.evaluation import Exam, Judgement, Stopwatch, judge
from dubito.experiments.methods import METHODS, Job, check_method_names
from dubito.experiments.networks import small_cnn

DEFAULT_DATA = "mnist-5k"
DEFAULT_EPOCHS = 15
DEFAULT_SAMPLES = 32
REFERENCE = "deterministic"


@dataclass(frozen=True)
class Run:
    """One method trained once.

    Attributes:
        method: its name in `METHODS`.
        seed: of the division into train and validation, the initial weights, the order of batches and the draws.
        metrics: those of `dubito.experiments.evaluation.judge`, with ``parameters`` and ``train_seconds``.
        judgement: what pictures are made of.
        warnings: what training found wrong, in words.
    """

    method: str
    seed: int
    metrics: dict[str, float]
    judgement: Judgement = field(repr=False)
    warnings: tuple[str, ...] = ()


@dataclass
class Comparison:
    """The outcome of `compare`; it grows run by run.

    Attributes:
        data: name of the data set.
        methods: names of the methods asked for.
        seeds: seeds asked for.
        epochs: passes over the training part, for every method.
        samples: draws of the weights in a prediction.
        device: the device that trained.
        exams: by seed, what was predicted.
        runs: one a method and seed, in the order in which they finished.
    """

    data: str
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    epochs: int
    samples: int
    device: str = ""
    exams: dict[int, Exam] = field(default_factory=dict, repr=False)
    runs: list[Run] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every method has been trained under every seed."""
        return len(self.runs) == len(self.methods) * len(self.seeds)

    @property
    def finished(self) -> tuple[str, ...]:
        """The methods with at least one run, in the order asked for."""
        done = {run.method for run in self.runs}
        return tuple(name for name in self.methods if name in done)

    def runs_of(self, method: str) -> list[Run]:
        """The finished runs of a method, by seed."""
        return [run for run in self.runs if run.method == method]

    def values(self, method: str, metric: str, relative: bool = False) -> list[float]:
        """A metric of every finished run of a method.

        Args:
            method: its name.
            metric: its name.
            relative: divide each by that of the deterministic network of the same seed; seeds without one are
                left out.
        """
        runs = self.runs_of(method)
        if not relative:
            return [run.metrics[metric] for run in runs]
        base = {run.seed: run.metrics[metric] for run in self.runs_of(REFERENCE)}
        return [run.metrics[metric] / base[run.seed] for run in runs if base.get(run.seed, 0.0) > 0]

    def as_dict(self) -> dict[str, Any]:
        """Everything but images and predictions, as plain values for JSON."""
        return {
            "data": self.data,
            "methods": list(self.methods),
            "seeds": list(self.seeds),
            "epochs": self.epochs,
            "samples": self.samples,
            "device": self.device,
            "complete": self.complete,
            "runs": [
                {
                    "method": run.method,
                    "seed": run.seed,
                    "metrics": run.metrics,
                    "corrupted_accuracy_by_corruption": dict(run.judgement.corrupted_accuracy),
                    "warnings": list(run.warnings),
                }
                for run in self.runs
            ],
            "summary": {
                name: {
                    metric: _mean_sd(self.values(name, metric)) for metric in self.runs_of(name)[0].metrics
                }
                for name in self.finished
            },
        }


def compare(
    data: str | DataSplit = DEFAULT_DATA,
    methods: Sequence[str] | None = None,
    epochs: int = DEFAULT_EPOCHS,
    seeds: int | Sequence[int] = 1,
    samples: int = DEFAULT_SAMPLES,
    progress: bool = False,
    on_start: Callable[[Comparison, str, int], None] | None = None,
    on_run: Callable[[Comparison], None] | None = None,
) -> Comparison:
    """Train every method on the same images and judge each by the same exam.

    A seed decides which images train and which validate, the initial weights (the same for all methods), the
    order of batches and the draws. Test images, letters and corruptions are predicted after training and never
    before. Whoever wants to keep what is finished when a later run is interrupted takes it from ``on_run``.

    Args:
        data: a name in `dubito.data.DATASETS` (all but its test part divided anew for every seed) or a `DataSplit`
            (as it is).
        methods: names in `METHODS`; None takes all.
        epochs: passes over the training part, the same for every method.
        seeds: how many (0, 1, …), or which.
        samples: draws of the weights in a prediction.
        progress: show each training's progress bar on a terminal.
        on_start: called before each run with the comparison so far, the method and the seed.
        on_run: called after each run with the comparison so far.

    Returns:
        All runs; `dubito.experiments.compare_report.table` makes a table of them.

    Raises:
        UnknownDataError, UnknownMethodError: listing the names there are, before anything is loaded.
        ValueError: if a number is below 1, or seeds are none or repeated.
        MissingExtraError, FileNotFoundError: if the data are not there.
    """
    names = check_method_names(METHODS if methods is None else methods)
    if isinstance(data, str):
        check_dataset_name(data)
    for what, number in (("epochs", epochs), ("samples", samples)):
        _at_least_one(what, number)
    chosen = _seeds(seeds)
    title = data if isinstance(data, str) else data.name
    comparison = Comparison(title, names, chosen, epochs, samples)
    for split, seed in _splits(data, chosen):
        comparison.exams[seed] = Exam.of(split, seed)
        if not comparison.runs:
            _warm_up(split)
        for name in names:
            if on_start is not None:
                on_start(comparison, name, seed)
            run, device = _run(name, seed, comparison, progress)
            comparison.runs.append(run)
            comparison.device = str(device)
            if on_run is not None:
                on_run(comparison)
    return comparison


def _run(name: str, seed: int, comparison: Comparison, progress: bool) -> tuple[Run, torch.device]:
    exam = comparison.exams[seed]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = small_cnn(exam.split.test.size, exam.split.classes, exam.split.test.images.shape[1])
        job = Job(network, exam.split, comparison.epochs, comparison.samples, seed, progress)
        watch = Stopwatch()
        trained = METHODS[name].train(job)
        seconds = watch.seconds(trained.device)
        judgement = judge(trained, exam)
    metrics = dict(judgement.metrics) | {"parameters": float(trained.parameters), "train_seconds": seconds}
    return Run(name, seed, metrics, judgement, trained.warnings), trained.device


def _warm_up(split: DataSplit) -> None:
    """A few steps thrown away, so that the first method's time does not hold the imports of all."""
    few = replace(split, train=split.train.subset(torch.arange(min(len(split.train), 128))))
    with torch.random.fork_rng():
        network = small_cnn(split.test.size, split.classes, split.test.images.shape[1])
        METHODS[REFERENCE].train(Job(network, few, epochs=1, samples=1, seed=0))


def _splits(data: str | DataSplit, seeds: tuple[int, ...]) -> Iterator[tuple[DataSplit, int]]:
    for seed in seeds:
        yield (load_dataset(data, seed) if isinstance(data, str) else data), seed


def _seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(seeds, int):
        _at_least_one("seeds", seeds)
        return tuple(range(seeds))
    chosen = tuple(seeds)
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"seeds must be at least one, each different; got {chosen}")
    return chosen


def _at_least_one(name: str, number: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"{name} must be a whole number of at least 1; got {number!r}")


def _mean_sd(values: Sequence[float]) -> dict[str, float | None]:
    spread = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": math.fsum(values) / len(values), "sd": spread}
