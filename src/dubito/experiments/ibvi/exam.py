"""What the methods of the comparison are judged on: test images, another data set's, and fifteen corruptions."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from dubito.data import CORRUPTIONS, DataSplit, Images, corrupt, stratified_split
from dubito.metrics import classification_metrics
from dubito.ood import ood_metrics
from dubito.predictive import Predictive

HIGHEST = 5  # severity


@dataclass(frozen=True)
class Sizes:
    """How many images of each kind; None takes all there are."""

    train: int | None = 10_000
    validation: int | None = 2_000
    test: int | None = 5_000
    corrupted: int | None = 1_000
    unknown: int | None = 1_000


@dataclass(frozen=True)
class Material:
    """Standardised images and labels of one data set, for training and for the exam.

    Attributes:
        train, validation, test: images and labels.
        unknown: images of the other data set, standardised as the network's own are.
        corrupted: by corruption at the highest severity, images and labels.
    """

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    unknown: Tensor
    corrupted: Mapping[str, tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, split: DataSplit, other: DataSplit, sizes: Sizes, seed: int = 0) -> Material:
        """Stratified parts of the sizes asked for; the same seed takes the same images."""
        train, validation = (
            _part(split.train, sizes.train, seed),
            _part(split.validation, sizes.validation, seed),
        )
        known = DataSplit.of(split.name, train, validation, _part(split.test, sizes.test, seed))
        worn = _part(split.test, sizes.corrupted, seed)
        return cls(
            _pair(known, train),
            _pair(known, validation),
            _pair(known, known.test),
            known.standardise(_part(other.test, sizes.unknown, seed).images),
            {
                name: (known.standardise(corrupt(worn.images, name, HIGHEST, seed)), worn.labels)
                for name in CORRUPTIONS
            },
        )


def judge(predict: Callable[[Tensor], Predictive], material: Material) -> dict[str, float]:
    """Test `error`, `nll` (nats), `ece`, `ood_auroc` (entropy) and the means of the first three over corruptions."""
    x, y = material.test
    known = predict(x)
    found = _scores(known, y)
    found["ood_auroc"] = ood_metrics(known.entropy, predict(material.unknown).entropy).auroc
    worn = by_corruption(predict, material)
    for name in ("error", "nll", "ece"):
        found[f"corrupted_{name}"] = statistics.fmean(scores[name] for scores in worn.values())
    return found


def by_corruption(predict: Callable[[Tensor], Predictive], material: Material) -> dict[str, dict[str, float]]:
    """`error`, `nll` and `ece` of each corruption."""
    return {name: _scores(predict(x), y) for name, (x, y) in material.corrupted.items()}


def _scores(predictive: Predictive, y: Tensor) -> dict[str, float]:
    found = classification_metrics(predictive, y)
    return {"error": 1.0 - found["accuracy"], "nll": found["nll"], "ece": found["ece"]}


def _part(images: Images, size: int | None, seed: int) -> Images:
    if size is None or size >= len(images):
        return images
    (chosen,) = stratified_split(images.labels, (size,), seed)
    return images.subset(chosen)


def _pair(split: DataSplit, part: Images) -> tuple[Tensor, Tensor]:
    return split.standardise(part.images), part.labels
