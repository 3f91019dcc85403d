"""From the flat vector a chain moves in to named weights: whitened where the prior is Gaussian or can whiten."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dubito.patterns import REST, matching
from dubito.priors import ParameterPrior, PriorRule, PriorSpec, WeightPrior, resolve_prior
from dubito.weights.initial_scale import centre, fan_in
from dubito.weights.slots import Slot

Values = dict[str, Tensor]
Priors = PriorSpec | Mapping[str, PriorSpec]

_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class Block:
    """Weights under one prior, and whether they are sampled in whitened coordinates.

    Attributes:
        shapes: of its weights, by name.
        prior: of one parameter, or a joint one of all.
        whitened: the coordinates are those in which the prior is standard normal.
        looped: the joint prior's functions that have turned out not to run under `vmap`.
    """

    shapes: dict[str, torch.Size]
    prior: ParameterPrior | WeightPrior
    whitened: bool
    looped: set[str] = field(default_factory=set)

    def weights(self, z: Values) -> Values:
        """Weights from coordinates; draws may lead."""
        if not self.whitened:
            return z
        if isinstance(self.prior, WeightPrior):
            return self._each(self.prior.unwhiten, z)
        ((name, value),) = z.items()
        mean, sd = _moments(self.prior, value)
        return {name: mean + sd * value}

    def coordinates(self, weights: Values) -> Values:
        """Coordinates of weights; draws may lead."""
        if not self.whitened:
            return weights
        if isinstance(self.prior, WeightPrior):
            return self._each(self.prior.whiten, weights)
        ((name, value),) = weights.items()
        mean, sd = _moments(self.prior, value)
        return {name: (value - mean) / sd}

    def log_prob(self, z: Values, weights: Values) -> Tensor:
        """log density of the coordinates, in nats, for each draw that leads."""
        if not self.whitened and isinstance(self.prior, WeightPrior):
            result = self._each(self._joint_log_prob, weights)["log_prob"]
            return result
        total: Tensor | None = None
        for name, shape in self.shapes.items():
            if self.whitened:
                entries = -0.5 * z[name].square() - _HALF_LOG_TWO_PI
            else:
                assert isinstance(self.prior, ParameterPrior)
                entries = self.prior.log_prob(weights[name])
            term = entries.reshape(*entries.shape[: entries.ndim - len(shape)], -1).sum(-1)
            total = term if total is None else total + term
        assert total is not None
        return total

    def _joint_log_prob(self, weights: Values) -> Values:
        assert isinstance(self.prior, WeightPrior)
        return {"log_prob": self.prior.log_prob(weights)}

    def _each(self, function: Callable[[Values], Values], values: Values) -> Values:
        """A joint prior's function, which need not take more than one draw, for each draw that leads."""
        name, shape = next(iter(self.shapes.items()))
        if values[name].ndim == len(shape):
            return function(values)
        if function.__name__ not in self.looped:
            try:
                return torch.vmap(function)(values)
            except (
                Exception
            ):  # no batching rule, or a choice by value; or wrong weights, which the loop names
                self.looped.add(function.__name__)
        draws = [function({n: v[s] for n, v in values.items()}) for s in range(len(values[name]))]
        return {n: torch.stack([d[n] for d in draws]) for n in draws[0]}

    def draw(self, count: int, like: Tensor) -> Values:
        """Coordinates of draws from the prior, `(count, *shape)`, by the global generator.

        Raises:
            ValueError: a joint prior that is not whitened, which nothing says how to draw from.
        """
        result: Values = {}
        for name, shape in self.shapes.items():
            if self.whitened:
                result[name] = torch.randn(count, *shape, dtype=like.dtype, device=like.device)
            elif isinstance(self.prior, WeightPrior):
                raise ValueError(
                    f'init="prior" cannot draw from {type(self.prior).__name__} without whitening: give init="module", '
                    "starting weights by name, or override whiten and unwhiten"
                )
            else:
                distribution: Any = self.prior.distribution(like)
                result[name] = distribution.expand(shape).sample((count,)).to(like)
        return result


class Coordinates:
    """The order and shapes of all sampled weights in a flat vector of D coordinates, and their priors.

    Args:
        blocks: the priors and the weights under each; together they cover every sampled weight once.
        order: the weights' names.
        dtype, device: of the vector.
    """

    def __init__(
        self, blocks: Sequence[Block], order: Sequence[str], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.blocks = tuple(blocks)
        shapes = {name: shape for block in blocks for name, shape in block.shapes.items()}
        self.shapes = {name: shapes[name] for name in order}
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self.like = torch.empty((), dtype=dtype, device=device)

    @property
    def size(self) -> int:
        """D."""
        return sum(self.sizes)

    def split(self, z: Tensor) -> Values:
        """(…, D) to coordinates by name, (…, *shape)."""
        parts = z.split(self.sizes, dim=-1)
        return {
            name: part.reshape(*z.shape[:-1], *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def join(self, values: Values) -> Tensor:
        """The inverse of `split`."""
        parts = []
        for name, shape in self.shapes.items():
            value = values[name]
            parts.append(value.reshape(*value.shape[: value.ndim - len(shape)], -1))
        return torch.cat(parts, dim=-1).to(self.like)

    def weights(self, z: Tensor) -> Values:
        """Weights by name from (D,) or (C, D)."""
        return self.weights_and_log_prior(z)[0]

    def weights_and_log_prior(self, z: Tensor) -> tuple[Values, Tensor]:
        """Weights by name, and the log prior density of the coordinates, () or (C,)."""
        named, total = self.split(z), z.new_zeros(z.shape[:-1])
        weights: Values = {}
        standard = all(block.whitened for block in self.blocks)
        if standard:
            total = -0.5 * z.square().sum(-1) - self.size * _HALF_LOG_TWO_PI
        for block in self.blocks:
            part = {name: named[name] for name in block.shapes}
            made = block.weights(part)
            weights.update(made)
            if not standard:
                total = total + block.log_prob(part, made)
        return {name: weights[name] for name in self.shapes}, total

    def of_weights(self, weights: Values) -> Tensor:
        """(D,) or (C, D) from weights by name."""
        values: Values = {}
        for block in self.blocks:
            values.update(block.coordinates({name: weights[name].to(self.like) for name in block.shapes}))
        return self.join(values)

    def draw(self, count: int) -> Tensor:
        """Draws from the prior, (count, D), by the global generator."""
        values: Values = {}
        for block in self.blocks:
            values.update(block.draw(count, self.like))
        return self.join(values)


def blocks_of(module: nn.Module, slots: Sequence[Slot], prior: Priors, whiten: bool | None) -> list[Block]:
    """The priors of the sampled parameters.

    Args:
        module: the network, for patterns over its modules.
        slots: the sampled parameters.
        prior: one for all (a rule or a distribution serves each parameter), or by pattern, with "rest".
        whiten: see `SamplerConfig`.

    Raises:
        ValueError: a parameter without a prior or with two, or one that cannot be whitened where that is asked for.
    """
    patterns: Mapping[str, PriorSpec] = prior if isinstance(prior, Mapping) else {REST: prior}
    chosen: dict[str, PriorSpec] = {}
    for pattern, spec in patterns.items():
        if pattern == REST:
            continue
        for slot in matching(module, slots, pattern):
            if slot.name in chosen:
                raise ValueError(f"prior: {slot.name!r} is matched by two patterns, one of them {pattern!r}")
            chosen[slot.name] = spec
    missing = [slot.name for slot in slots if slot.name not in chosen]
    if missing and REST not in patterns:
        raise ValueError(
            f'prior has none for {", ".join(map(repr, missing))}: name them or add "rest"; every sampled weight '
            "needs a prior (a parameter that is not to be sampled has requires_grad=False)"
        )
    chosen |= dict.fromkeys(missing, patterns[REST])
    joint: dict[int, tuple[WeightPrior, dict[str, torch.Size]]] = {}
    blocks = []
    for slot in slots:
        resolved = _resolved(chosen[slot.name], slot)
        if isinstance(resolved, WeightPrior):
            joint.setdefault(id(resolved), (resolved, {}))[1][slot.name] = slot.shape
        else:
            blocks.append(Block({slot.name: slot.shape}, resolved, _whitened(resolved, whiten)))
    return blocks + [Block(shapes, p, _whitened(p, whiten)) for p, shapes in joint.values()]


def _resolved(spec: PriorSpec, slot: Slot) -> ParameterPrior | WeightPrior:
    if isinstance(spec, PriorRule):
        spec = spec.begin().at(slot.owner)
    return resolve_prior(spec, slot.parameter, fan_in(slot), centre(slot))


def _whitened(prior: ParameterPrior | WeightPrior, wanted: bool | None) -> bool:
    if isinstance(prior, WeightPrior):
        able = (
            type(prior).whiten is not WeightPrior.whiten and type(prior).unwhiten is not WeightPrior.unwhiten
        )
        name, remedy = type(prior).__name__, "override whiten and unwhiten"
    else:
        able, name, remedy = prior.gaussian() is not None, prior.kind.__name__, "give a Normal"
    if wanted and not able:
        raise ValueError(
            f"whiten=True, but the prior {name} is not known to be Gaussian and cannot whiten weights: {remedy}, or "
            "leave whiten=None, which samples such weights as they are"
        )
    return able and wanted is not False


def _moments(prior: ParameterPrior, like: Tensor) -> tuple[float | Tensor, float | Tensor]:
    moments = prior.gaussian()
    assert moments is not None
    mean, sd = (m.detach().to(like) if isinstance(m, Tensor) else m for m in moments)
    return mean, sd
