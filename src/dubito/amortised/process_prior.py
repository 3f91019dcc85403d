"""The explicit prior of a process: density, draws, and which part of it is learned."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dubito.amortised.process import BNNProcess

Order = Literal["front", "back"]


class ProcessPrior:
    """The prior over all weights of a process's network: independent layers, each Gaussian.

    A view: its parameters belong to the process's layers. Weights are named as in `process.network()`:
    `layers.0.weight` (units, inputs) and `layers.0.bias` (units,), and so on.
    """

    def __init__(self, process: BNNProcess) -> None:
        self._layers = process.layers

    def log_prob(self, weights: Sequence[Tensor] | Mapping[str, Tensor]) -> Tensor:
        """log p(W) in nats.

        Args:
            weights: of each layer (…, units, inputs + 1), or by name as in the class; leading dimensions are kept.
        """
        if isinstance(weights, Mapping):
            weights = joined(weights, len(self._layers))
        values = [layer.prior.log_prob(w) for layer, w in zip(self._layers, weights, strict=True)]
        return torch.stack(values).sum(0)

    def draw(self, samples: int, generator: torch.Generator | None = None) -> list[Tensor]:
        """Draws of each layer's weights, (S, units, inputs + 1), float64; differentiable."""
        if samples < 1:
            raise ValueError(f"samples={samples} must be at least 1")
        result = []
        for layer in self._layers:
            prior = layer.prior
            shape = (samples, prior.blocks[0], prior.noise_width)
            noise = torch.randn(
                shape, generator=generator, dtype=torch.float64, device=prior.mean.free.device
            )
            result.append(layer.shaped(prior.draw(noise)))
        return result

    @property
    def weights(self) -> int:
        """Number of weights, biases among them."""
        return sum(layer.prior.trainable.numel() for layer in self._layers)

    @property
    def trainable_fraction(self) -> float:
        """Share of the weights whose prior is learned."""
        return sum(int(layer.prior.trainable.sum()) for layer in self._layers) / self.weights

    def set_trainable(
        self,
        fraction: float | None = None,
        *,
        order: Order = "front",
        layers: Sequence[int] | None = None,
        pattern: str | Sequence[str] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Learn the prior of part of the weights only; of the others it stays as it is, whatever an optimiser does.

        Exactly one of these says which.

        Args:
            fraction: this share of all weights, in [0, 1]: whole layers from one end, and of the layer where it ends
                weights chosen at random.
            order: "front" begins at the inputs, "back" at the outputs.
            layers: all weights of these layers, by number.
            pattern: weights by name (`"layers.0.*"`, `"*.bias"`).
            generator: source of the random choice (None: one seeded with 0, so that it can be repeated).

        Raises:
            ValueError: not exactly one of the three, a fraction outside [0, 1], a pattern that matches nothing.
        """
        given = [
            name
            for name, value in (("fraction", fraction), ("layers", layers), ("pattern", pattern))
            if value is not None
        ]
        if len(given) != 1:
            raise ValueError(
                f"give exactly one of fraction, layers and pattern; got {', '.join(given) or 'none'}"
            )
        if fraction is not None:
            masks = self._from_one_end(fraction, order, generator)
        elif layers is not None:
            unknown = [n for n in layers if not 0 <= n < len(self._layers)]
            if unknown:
                raise ValueError(f"layers={list(layers)!r}: there are layers 0 to {len(self._layers) - 1}")
            masks = [torch.full_like(m, i in layers) for i, m in enumerate(self._masks())]
        else:
            assert pattern is not None
            masks = self._matching([pattern] if isinstance(pattern, str) else list(pattern))
        for layer, mask in zip(self._layers, masks, strict=True):
            layer.prior.set_trainable(mask)

    def _masks(self) -> list[Tensor]:
        return [layer.prior.trainable for layer in self._layers]

    def _from_one_end(self, fraction: float, order: str, generator: torch.Generator | None) -> list[Tensor]:
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction={fraction!r} must be a share of the weights, from 0 to 1")
        if order not in ("front", "back"):
            raise ValueError(f'order={order!r} must be "front" or "back"')
        masks = self._masks()
        left = round(fraction * self.weights)
        result = [torch.zeros_like(mask) for mask in masks]
        generator = generator or torch.Generator().manual_seed(0)
        for index in range(len(masks)) if order == "front" else reversed(range(len(masks))):
            size = masks[index].numel()
            if left >= size:
                result[index].fill_(True)
            elif left > 0:
                chosen = torch.randperm(size, generator=generator, device=generator.device)[:left]
                result[index].view(-1)[chosen.to(masks[index].device)] = True
            left = max(0, left - size)
        return result

    def _matching(self, patterns: list[str]) -> list[Tensor]:
        result = [torch.zeros_like(mask) for mask in self._masks()]
        for pattern in patterns:
            hit = False
            for index, mask in enumerate(result):
                for name, part in (("weight", mask[:, :-1]), ("bias", mask[:, -1:])):
                    if fnmatch.fnmatchcase(f"layers.{index}.{name}", pattern):
                        part.fill_(True)
                        hit = True
            if not hit:
                raise ValueError(
                    f"pattern {pattern!r} matches no weights; they are named layers.0.weight, layers.0.bias … up to "
                    f"layers.{len(result) - 1}.bias"
                )
        return result


def joined(weights: Mapping[str, Tensor], layers: int) -> list[Tensor]:
    """Weights by name as (…, units, inputs + 1) a layer, the bias last.

    Raises:
        ValueError: naming what is missing.
    """
    missing = [
        n for i in range(layers) for n in (f"layers.{i}.weight", f"layers.{i}.bias") if n not in weights
    ]
    if missing:
        raise ValueError(f"weights lack {', '.join(missing)}")
    return [
        torch.cat((weights[f"layers.{i}.weight"], weights[f"layers.{i}.bias"].unsqueeze(-1)), dim=-1)
        for i in range(layers)
    ]


def parted(weights: Sequence[Tensor]) -> dict[str, Tensor]:
    """The inverse of `joined`."""
    result = {}
    for index, value in enumerate(weights):
        result[f"layers.{index}.weight"] = value[..., :-1]
        result[f"layers.{index}.bias"] = value[..., -1]
    return result
