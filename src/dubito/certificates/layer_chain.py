"""A plain chain of linear layers and activations, taken apart for bounds that multiply its norms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dubito.argument_checks import to_double

#: Lipschitz constants of elementwise activations (of GELU and SiLU the largest slope, rounded up).
_SLOPES: dict[type[nn.Module], float] = {
    nn.Identity: 1.0,
    nn.Dropout: 1.0,
    nn.ReLU: 1.0,
    nn.ReLU6: 1.0,
    nn.Tanh: 1.0,
    nn.Hardtanh: 1.0,
    nn.Softsign: 1.0,
    nn.LogSigmoid: 1.0,
    nn.Sigmoid: 0.25,
    nn.GELU: 1.13,
    nn.SiLU: 1.1,
}


@dataclass(frozen=True)
class Link:
    """One linear layer and the activations behind it.

    Attributes:
        name: of the linear layer.
        weight: (m, n), in float64.
        bias: (m,) or None.
        activations: in order.
        activation_norm: the product of their Lipschitz constants.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    activations: tuple[nn.Module, ...]
    activation_norm: float

    def __call__(self, x: Tensor) -> Tensor:
        """The layer and what follows it, dropout off."""
        x = torch.nn.functional.linear(x, self.weight, self.bias)
        for activation in self.activations:
            x = x if isinstance(activation, nn.Dropout) else activation(x)
        return x


def chain_of(module: nn.Module) -> list[Link]:
    """The links of a chain, first to last.

    Raises:
        TypeError: for a module that is no such chain.
        ValueError: for weights that are held as factors, or are not finite.
    """
    links: list[Link] = []
    for name, layer in _leaves(module, ""):
        if isinstance(layer, nn.Linear):
            links.append(Link(name, *_entries(name, layer), (), 1.0))
            continue
        slope = _slope(name, layer)
        if not links:
            if isinstance(layer, nn.Identity | nn.Dropout):
                continue
            raise TypeError(f"the chain begins with {type(layer).__name__} at {name!r}: begin with nn.Linear")
        last = links[-1]
        links[-1] = Link(
            last.name, last.weight, last.bias, (*last.activations, layer), last.activation_norm * slope
        )
    if not links:
        raise TypeError("the module has no nn.Linear layer")
    return links


def _leaves(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    if not isinstance(module, nn.Sequential):
        yield prefix, module
        return
    for name, child in module.named_children():
        yield from _leaves(child, f"{prefix}.{name}" if prefix else name)


def _entries(name: str, layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    if layer.weight is None:
        raise ValueError(
            f"the weight of {name!r} is held as factors: pass bayes.merge(), a plain copy at the posterior mean"
        )
    if not bool(torch.isfinite(layer.weight).all()):
        raise ValueError(f"the weight of {name!r} contains NaN or infinity")
    bias = layer.bias
    return to_double(layer.weight.detach()), None if bias is None else to_double(bias.detach())


def _slope(name: str, layer: nn.Module) -> float:
    if isinstance(layer, nn.LeakyReLU):
        return max(1.0, abs(layer.negative_slope))
    if isinstance(layer, nn.ELU):
        return max(1.0, abs(layer.alpha))
    if isinstance(layer, nn.Softplus):
        return 1.0
    slope = _SLOPES.get(type(layer), math.nan)
    if math.isnan(slope):
        raise TypeError(
            f"{type(layer).__name__} at {name!r} has no known Lipschitz constant here: the network form takes "
            "nn.Sequential of nn.Linear and elementwise activations; for anything else call eckart_young for one layer "
            "with later_norm= the Lipschitz constant of what follows"
        )
    return slope
