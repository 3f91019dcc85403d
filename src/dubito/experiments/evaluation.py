"""How a trained classifier is judged: on test images, on letters it has never seen, and on corrupted images."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from dubito.data import DataSplit, Images, corrupt, letters
from dubito.experiments.methods import Trained
from dubito.metrics import classification_metrics
from dubito.ood import ood_metrics
from dubito.predictive import Predictive

CORRUPTIONS_JUDGED = ("gaussian_noise", "gaussian_blur", "contrast", "rotation", "occlusion")
SEVERITY = 3

Result = TypeVar("Result")


@dataclass(frozen=True)
class Exam:
    """The images every method of a comparison is judged on.

    Attributes:
        split: the data; its test part is used whole.
        unknown: out-of-distribution images of the same size.
        corrupted: by corruption, test images under it; each corruption has its own share of the test part, so
            that together they are as many as the test part.
    """

    split: DataSplit
    unknown: Images
    corrupted: Mapping[str, Images]

    @classmethod
    def of(cls, split: DataSplit, seed: int = 0) -> Exam:
        """The exam on a data set: as many letters as test images, but not more than 1,000."""
        unknown = letters(min(1000, len(split.test)), split.test.size, seed)
        order = torch.randperm(len(split.test), generator=torch.Generator().manual_seed(seed))
        corrupted = {}
        for i, name in enumerate(CORRUPTIONS_JUDGED):
            part = split.test.subset(order[i :: len(CORRUPTIONS_JUDGED)])
            images = corrupt(part.images, name, SEVERITY, seed)
            corrupted[name] = Images(images, part.labels, part.class_names)
        return cls(split, unknown, corrupted)


@dataclass(frozen=True)
class Judgement:
    """What came out of an exam.

    Attributes:
        metrics: by name; see `judge`.
        probs: of the test images, shape ``(N, C)``.
        entropy: of those predictions in nats, shape ``(N,)``.
        unknown_entropy: of the predictions on the out-of-distribution images, shape ``(M,)``.
        unknown_probs: those predictions, shape ``(M, C)``.
        corrupted_accuracy: by corruption.
    """

    metrics: Mapping[str, float]
    probs: Tensor
    entropy: Tensor
    unknown_entropy: Tensor
    unknown_probs: Tensor
    corrupted_accuracy: Mapping[str, float] = field(default_factory=dict)


def judge(trained: Trained, exam: Exam) -> Judgement:
    """Predict everything and measure: no image here has been seen in training, no label is fed back.

    Metrics: ``accuracy``, ``nll`` (nats), ``brier``, ``ece`` (15 bins of equal width), ``aurc`` (× 100),
    ``ood_auroc`` by the entropy of the predictive (letters positive, chance 0.5), ``ood_fpr95``,
    ``corrupted_accuracy``, ``corrupted_nll``, ``corrupted_ece`` over all corruptions together, and
    ``predict_seconds`` for the test part.
    """
    test = exam.split.test
    predictive, seconds = timed(lambda: _predict(trained, exam, test.images), trained.device)
    unknown = _predict(trained, exam, exam.unknown.images)
    corrupted = {name: _predict(trained, exam, part.images) for name, part in exam.corrupted.items()}
    worn_labels = torch.cat([part.labels for part in exam.corrupted.values()])
    worn = classification_metrics(Predictive.concatenate(list(corrupted.values())), worn_labels)
    plain = classification_metrics(predictive, test.labels)
    separation = ood_metrics(predictive.entropy, unknown.entropy)
    metrics = {name: plain[name] for name in ("accuracy", "nll", "brier", "ece", "aurc")}
    metrics |= {"ood_auroc": separation.auroc, "ood_fpr95": separation.fpr95}
    metrics |= {f"corrupted_{name}": worn[name] for name in ("accuracy", "nll", "ece")}
    metrics |= {"predict_seconds": seconds}
    by_corruption = {
        name: float((part.prediction == exam.corrupted[name].labels).double().mean())
        for name, part in corrupted.items()
    }
    return Judgement(
        metrics, predictive.probs, predictive.entropy, unknown.entropy, unknown.probs, by_corruption
    )


def _predict(trained: Trained, exam: Exam, images: Tensor) -> Predictive:
    """The predictive of images in [0, 1], back on the CPU where the labels are."""
    return trained.predict(exam.split.standardise(images).to(trained.device)).cpu()


def timed(work: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """The result of `work` and its cost in seconds: the median of up to five runs, as many as take half a second."""
    spent: list[float] = []
    while True:
        watch = Stopwatch()
        result = work()
        spent.append(watch.seconds(device))
        if len(spent) == 5 or sum(spent) > 0.5:
            return result, statistics.median(spent)


class Stopwatch:
    """Counts seconds from when it is made.

    On a CPU those are seconds of processor time, which nothing else the machine does can lengthen; on any other
    device, seconds of wall time until the device has finished what it was given.
    """

    def __init__(self) -> None:
        self._processor, self._wall = time.process_time(), time.perf_counter()

    def seconds(self, device: torch.device) -> float:
        """Seconds so far, for work done on `device`."""
        if device.type == "cpu":
            return time.process_time() - self._processor
        torch.accelerator.synchronize(device)
        return time.perf_counter() - self._wall
