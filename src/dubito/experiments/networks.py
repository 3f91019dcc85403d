"""The networks that the comparisons train: small enough for two cores."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def small_cnn(size: tuple[int, int], classes: int, channels: int = 1) -> nn.Module:
    """Two convolutions with pooling, then two linear layers: about 52,000 parameters at 28×28.

    Modules are called ``conv1``, ``conv2``, ``hidden`` and ``out``, so that families can be given by name.

    Args:
        size: height and width of the images, each at least 4.
        classes: number of outputs (logits).
        channels: of the images.

    Raises:
        ValueError: if the images are too small to be pooled twice.
    """
    height, width = size
    if min(size) < 4:
        raise ValueError(f"size must be at least 4 pixels each way, to be halved twice; got {size}")
    layers: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(channels, 8, 3, padding=1)),
        ("relu1", nn.ReLU()),
        ("pool1", nn.MaxPool2d(2)),
        ("conv2", nn.Conv2d(8, 16, 3, padding=1)),
        ("relu2", nn.ReLU()),
        ("pool2", nn.MaxPool2d(2)),
        ("flatten", nn.Flatten()),
        ("hidden", nn.Linear(16 * (height // 4) * (width // 4), 64)),
        ("relu3", nn.ReLU()),
        ("out", nn.Linear(64, classes)),
    ]
    return nn.Sequential(OrderedDict(layers))
