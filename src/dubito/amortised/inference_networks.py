"""Inference networks: from a datum to what a layer is made to believe about it.

For every layer, g_l(x, y) gives a pseudo-observation v and its standard deviation for each unit, as though someone
had measured the unit's output at x. A network whose answer for one datum depends on no other (`per_datum`) lets a
context be worked through in batches without changing anything; one that looks at the whole set does not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

LOG_SD_SHIFT = -2.0  # pseudo-observations start with a standard deviation of 0.135


class PseudoObservations(NamedTuple):
    """What one layer's units are taken to have been observed at.

    Attributes:
        values: (tasks, points, units), or None where the layer's targets are the outcomes themselves.
        precisions: (tasks, points, units), float64.
    """

    values: Tensor | None
    precisions: Tensor


class LayerOutputs(NamedTuple):
    """What an inference network must give for a layer: its units, and whether their values or only precisions."""

    units: int
    values: bool


class InferenceNetwork(nn.Module, ABC):
    """g_l(x, y) for every layer that is amortised.

    Args:
        layers: what each layer wants; None for a layer that needs nothing (its noise is the likelihood's).
        max_precision: highest precision of a pseudo-observation, in units of one over squared pre-activations.
    """

    per_datum: ClassVar[bool] = True

    def __init__(self, layers: Sequence[LayerOutputs | None], max_precision: float = 1e4) -> None:
        super().__init__()
        if not max_precision > 0:
            raise ValueError(f"max_precision={max_precision!r} must be above zero")
        self.layers = tuple(layers)
        self.max_precision = max_precision

    @abstractmethod
    def raw(self, layer: int, data: Tensor, mask: Tensor) -> Tensor:
        """Outputs for one layer, (tasks, points, 2 · units) or (tasks, points, units) where only precisions."""

    def forward(self, layer: int, data: Tensor, mask: Tensor) -> PseudoObservations:
        """Pseudo-observations of a layer.

        Args:
            layer: its number from 0.
            data: x and encoded y side by side, (tasks, points, features).
            mask: which points exist, (tasks, points).
        """
        wanted = self.layers[layer]
        assert wanted is not None
        raw = self.raw(layer, data, mask).to(torch.float64)
        values, log_sd = raw.split(wanted.units, -1) if wanted.values else (None, raw)
        variance = (2 * (log_sd + LOG_SD_SHIFT)).exp() + 1 / self.max_precision
        return PseudoObservations(values, variance.reciprocal())


class LayerwiseInference(InferenceNetwork):
    """A perceptron of its own for every layer (the default).

    Args:
        features: width of x and encoded y together.
        layers: see `InferenceNetwork`.
        hidden: widths of the hidden layers.
        max_precision: see `InferenceNetwork`.
    """

    def __init__(
        self,
        features: int,
        layers: Sequence[LayerOutputs | None],
        hidden: Sequence[int] = (64, 64),
        max_precision: float = 1e4,
    ) -> None:
        super().__init__(layers, max_precision)
        self.networks = nn.ModuleList(
            nn.Identity() if wanted is None else _perceptron(features, hidden, _width(wanted))
            for wanted in layers
        )

    def raw(self, layer: int, data: Tensor, mask: Tensor) -> Tensor:
        """See `InferenceNetwork.raw`."""
        network = self.networks[layer]
        return network(data.to(_dtype(network)))  # type: ignore[no-any-return]


class SharedInference(InferenceNetwork):
    """One trunk for all layers; each adapts the trunk's last layer by a low-rank term and has a head of its own.

    Args:
        features: width of x and encoded y together.
        layers: see `InferenceNetwork`.
        hidden: widths of the trunk.
        rank: of the adapters.
        max_precision: see `InferenceNetwork`.
    """

    def __init__(
        self,
        features: int,
        layers: Sequence[LayerOutputs | None],
        hidden: Sequence[int] = (64, 64),
        rank: int = 4,
        max_precision: float = 1e4,
    ) -> None:
        super().__init__(layers, max_precision)
        if not hidden or rank < 1:
            raise ValueError(
                f"a shared trunk needs hidden widths and a rank of at least 1; got {hidden!r}, {rank}"
            )
        self.trunk = _perceptron(features, hidden[:-1], hidden[-1])
        self.down = nn.ParameterList(torch.randn(rank, features) * features**-0.5 for _ in layers)
        self.up = nn.ParameterList(torch.zeros(hidden[-1], rank) for _ in layers)  # adapters start at nothing
        self.heads = nn.ModuleList(
            nn.Identity() if wanted is None else nn.Linear(hidden[-1], _width(wanted)) for wanted in layers
        )

    def raw(self, layer: int, data: Tensor, mask: Tensor) -> Tensor:
        """See `InferenceNetwork.raw`."""
        data = data.to(self.down[layer].dtype)
        adapted = self.trunk(data) + (data @ self.down[layer].mT) @ self.up[layer].mT
        return self.heads[layer](nn.functional.silu(adapted))  # type: ignore[no-any-return]


class SetInference(InferenceNetwork):
    """Self-attention over the whole context before a head for every layer: each answer depends on all data.

    A context can then not be worked through in batches.

    Args:
        features: width of x and encoded y together.
        layers: see `InferenceNetwork`.
        width: of the embedding.
        depth: attention layers.
        heads: attention heads.
        max_precision: see `InferenceNetwork`.
    """

    per_datum = False

    def __init__(
        self,
        features: int,
        layers: Sequence[LayerOutputs | None],
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        max_precision: float = 1e4,
    ) -> None:
        super().__init__(layers, max_precision)
        self.embed = nn.Linear(features, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.heads = nn.ModuleList(
            nn.Identity() if wanted is None else nn.Linear(width, _width(wanted)) for wanted in layers
        )

    def raw(self, layer: int, data: Tensor, mask: Tensor) -> Tensor:
        """See `InferenceNetwork.raw`."""
        hidden = self.embed(data.to(self.embed.weight.dtype))
        empty = ~mask
        empty[:, :1] &= mask.any(-1, keepdim=True)  # attention needs one key, even where a task has no points
        for block in self.blocks:
            hidden = block(hidden, src_key_padding_mask=empty)
        return self.heads[layer](hidden)  # type: ignore[no-any-return]


def _width(wanted: LayerOutputs) -> int:
    return wanted.units * (2 if wanted.values else 1)


def _perceptron(features: int, hidden: Sequence[int], out: int) -> nn.Sequential:
    widths = [features, *hidden, out]
    modules: list[nn.Module] = []
    for index, (before, after) in enumerate(pairwise(widths)):
        modules += [nn.SiLU()] if index else []
        modules.append(nn.Linear(before, after))
    return nn.Sequential(*modules)


def _dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype
