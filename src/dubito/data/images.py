"""Labelled grey images in memory, and their division into train, validation and test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import TensorDataset


@dataclass(frozen=True)
class Images:
    """Images with labels.

    Attributes:
        images: float32, shape ``(N, C, H, W)``, values in [0, 1].
        labels: int64, shape ``(N,)``, values in ``0 … len(class_names) - 1``.
        class_names: what each label stands for.
    """

    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.images.dim() != 4 or self.images.dtype != torch.float32:
            raise ValueError(
                f"images must be float32 of shape (N, C, H, W); got {self.images.dtype} "
                f"of shape {tuple(self.images.shape)}"
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise ValueError(
                f"labels must be int64 of shape ({len(self.images)},), one an image; got "
                f"{self.labels.dtype} of shape {tuple(self.labels.shape)}"
            )
        if len(self) == 0:
            return
        low, high = float(self.images.min()), float(self.images.max())
        if not (low >= 0.0 and high <= 1.0):
            raise ValueError(f"images must lie in [0, 1] and hold no NaN; got values from {low} to {high}")
        first, last = int(self.labels.min()), int(self.labels.max())
        if first < 0 or last >= len(self.class_names):
            raise ValueError(
                f"labels must lie in 0 … {len(self.class_names) - 1}, the index of a class name; "
                f"got {first} … {last}"
            )

    def __len__(self) -> int:
        return int(self.images.shape[0])

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return int(self.images.shape[-2]), int(self.images.shape[-1])

    def subset(self, indices: Tensor) -> Images:
        """The images at ``indices``, in that order."""
        return Images(self.images[indices], self.labels[indices], self.class_names)


@dataclass(frozen=True)
class DataSplit:
    """A data set divided into three parts that share no image, and the scale of its inputs.

    ``mean`` and ``sd`` are those of the pixels of the training part alone; a network sees
    ``standardise(images)``, people see ``images``.
    """

    name: str
    train: Images
    validation: Images
    test: Images
    mean: float
    sd: float

    @classmethod
    def of(cls, name: str, train: Images, validation: Images, test: Images) -> DataSplit:
        """A split whose standardisation is measured on ``train``.

        Raises:
            ValueError: if the training images are constant, so that they cannot be standardised.
        """
        sd, mean = torch.std_mean(train.images.double())
        if not sd > 0:
            raise ValueError(f"the training images of {name!r} are constant: they cannot be standardised")
        return cls(name, train, validation, test, float(mean), float(sd))

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.train.class_names)

    def standardise(self, images: Tensor) -> Tensor:
        """Images in [0, 1] to what the network sees: ``(images - mean) / sd``, shape unchanged."""
        return (images - self.mean) / self.sd

    def dataset(self, part: Images) -> TensorDataset:
        """``part`` as pairs (standardised image, label) for a ``DataLoader``."""
        return TensorDataset(self.standardise(part.images), part.labels)


def stratified_split(labels: Tensor, sizes: Sequence[int], seed: int = 0) -> tuple[Tensor, ...]:
    """Disjoint random parts of exactly the given sizes, each with the class proportions of the whole.

    The items of each class are shuffled and spread evenly over [0, 1]; parts are consecutive pieces of
    that line, so no part's count of a class is off its proportional share by more than about one.

    Args:
        labels: int64, shape ``(N,)``.
        sizes: sizes of the parts; their sum may be less than N, the rest is left out.
        seed: the same seed gives the same parts.

    Returns:
        One sorted int64 tensor of indices a part.

    Raises:
        ValueError: if a size is negative or the sizes sum to more than N.
    """
    n = int(labels.shape[0])
    if any(size < 0 for size in sizes) or sum(sizes) > n:
        raise ValueError(f"sizes must be ≥ 0 and sum to at most the {n} items there are; got {tuple(sizes)}")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    shuffled = labels[order]
    position = torch.empty(n, dtype=torch.float64)
    for value in torch.unique(shuffled):
        where = (shuffled == value).nonzero().squeeze(-1)
        position[where] = (torch.arange(len(where), dtype=torch.float64) + 0.5) / len(where)
    line = order[torch.sort(position, stable=True).indices]
    return tuple(part.sort().values for part in line[: sum(sizes)].split(list(sizes)))


def split_images(name: str, data: Images, sizes: tuple[int, int, int], seed: int = 0) -> DataSplit:
    """Divide ``data`` by :func:`stratified_split` into train, validation and test of the given sizes.

    The test part is the same for every seed, so that what is chosen on one seed's validation part is never
    judged on images that took part in the choice; the seed divides the rest.
    """
    kept, test = stratified_split(data.labels, (sizes[0] + sizes[1], sizes[2]))
    rest = data.subset(kept)
    train, validation = stratified_split(rest.labels, sizes[:2], seed)
    return DataSplit.of(name, rest.subset(train), rest.subset(validation), data.subset(test))
