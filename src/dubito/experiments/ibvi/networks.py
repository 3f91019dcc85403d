"""The networks of the comparison: LeNet-5 and a small residual network with group normalisation."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

SIDE = 28  # of the grey images both are made for


def lenet5(classes: int = 10) -> nn.Module:
    """LeNet-5 (LeCun et al. 1998) with ReLU and max pooling: 61,706 parameters, modules `conv1` … `out`."""
    return nn.Sequential(
        OrderedDict(
            [
                ("conv1", nn.Conv2d(1, 6, 5, padding=2)),
                ("relu1", nn.ReLU()),
                ("pool1", nn.MaxPool2d(2)),
                ("conv2", nn.Conv2d(6, 16, 5)),
                ("relu2", nn.ReLU()),
                ("pool2", nn.MaxPool2d(2)),
                ("flatten", nn.Flatten()),
                ("hidden1", nn.Linear(400, 120)),
                ("relu3", nn.ReLU()),
                ("hidden2", nn.Linear(120, 84)),
                ("relu4", nn.ReLU()),
                ("out", nn.Linear(84, classes)),
            ]
        )
    )


class Block(nn.Module):
    """Two 3×3 convolutions with group normalisation, added to the input (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, inputs, H, W)` to `(batch, outputs, H / stride, W / stride)`."""
        y = self.norm1(self.conv1(x)).relu()
        y = self.norm2(self.conv2(y))
        result: Tensor = (y + self.shortcut(x)).relu()
        return result


def small_resnet(classes: int = 10, width: int = 16) -> nn.Module:
    """A convolution of stride 2, three blocks of width `width`, 2·`width`, 4·`width`, the mean over places, `out`.

    77,562 parameters at width 16 and ten classes. The stride at the start keeps it at the cost that two cores allow.
    """
    return nn.Sequential(
        OrderedDict(
            [
                ("conv1", nn.Conv2d(1, width, 3, 2, 1, bias=False)),
                ("norm1", nn.GroupNorm(4, width)),
                ("relu1", nn.ReLU()),
                ("block1", Block(width, width, 1)),
                ("block2", Block(width, 2 * width, 2)),
                ("block3", Block(2 * width, 4 * width, 2)),
                ("pool", nn.AdaptiveAvgPool2d(1)),
                ("flatten", nn.Flatten()),
                ("out", nn.Linear(4 * width, classes)),
            ]
        )
    )
