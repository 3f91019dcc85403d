"""Empirical: a posterior that is a set of equally weighted draws, such as those of a Markov chain or an ensemble.

q(w) = 1/S Σ_s δ(w - w_s). The draws are joint: one draw of the network takes the s-th value of every parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NoReturn

import torch
from torch import Tensor, nn

from dubito.divergences import KLMethod
from dubito.scalar_checks import computing_dtype
from dubito.weights.family import (
    CapabilityError,
    Components,
    Family,
    Granularity,
    Group,
    Noise,
    WeightPosterior,
    key_of,
)
from dubito.weights.slots import Slot


@dataclass(frozen=True, eq=False)
class Empirical(Family):
    """Weights that take one of S given values, each with probability 1/S, all parameters together.

    A call in `train()` picks a draw at random. `bayes.predict(x, samples=S)`, and any other request for as many draws
    as there are (or a multiple), takes each exactly once and in order: the result is the exact average. A request for
    another number picks at random, with replacement.

    In `eval()` a call runs at the mean of the draws, as with every family. Draws of a network's weights usually sit in
    many modes that are permutations of each other, and then their mean is no good network: predict.

    Args:
        draws: for every parameter the pattern names, its draws of shape `(S, *parameter.shape)`.
        exact: take each draw once where their number is asked for; False always picks at random.

    Raises:
        TypeError: draws that are no mapping of names to tensors of real numbers.
        ValueError: no draws, unequal numbers of them, NaN or infinity; at attachment a parameter without draws, draws
            without a parameter, or a wrong shape.
    """

    granularity: ClassVar[Granularity] = "all"

    draws: Mapping[str, Tensor]
    exact: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.draws, Mapping):
            raise TypeError(
                f"draws must map parameter names to tensors of shape (S, *shape), got {type(self.draws).__name__}"
            )
        if not self.draws:
            raise ValueError("draws is empty: give the draws of at least one parameter")
        for name, value in self.draws.items():
            _check_draws(name, value)
        counts = {name: len(value) for name, value in self.draws.items()}
        if len(set(counts.values())) > 1:
            shown = ", ".join(f"{count} of {name!r}" for name, count in counts.items())
            raise ValueError(f"draws: every parameter needs the same number of draws, got {shown}")

    def attach(self, group: Group) -> EmpiricalPosterior:
        """The posterior of all the parameters named."""
        return EmpiricalPosterior(group, self)


class EmpiricalPosterior(WeightPosterior):
    """The posterior that `Empirical` makes. It takes the dense parameters over.

    Attributes:
        draws: each parameter's draws, `(S, *shape)`, in its dtype; they need no gradient, so optimisers leave them.
    """

    takes_over = True

    def __init__(self, group: Group, family: Empirical) -> None:
        super().__init__(group)
        self.exact = family.exact
        values = _draws_of(group.slots, family.draws)
        self.draws = nn.ParameterDict(
            {key_of(name): nn.Parameter(value, requires_grad=False) for name, value in values.items()}
        )

    @property
    def count(self) -> int:
        """S, the number of draws."""
        return len(self._values(self.slots[0]))

    def _values(self, slot: Slot) -> Tensor:
        values: Tensor = self.draws[key_of(slot.name)]
        return values

    # ---- moments ------------------------------------------------------------------------------------------

    def mean(self) -> dict[str, Tensor]:
        """The average of the draws."""
        return {s.name: _average(self._values(s)) for s in self.slots}

    def variance(self) -> dict[str, Tensor]:
        """Marginal variances of the draws about their mean (divided by S: they are the whole distribution)."""
        result = {}
        for slot in self.slots:
            values = self._values(slot)
            wide = values.to(computing_dtype(values.dtype))
            result[slot.name] = wide.var(dim=0, unbiased=False).to(values.dtype)
        return result

    def mean_weights(self) -> dict[str, Tensor]:
        """The means, which the module does not hold."""
        return self.mean()

    @torch.no_grad()
    def rescale_spread_(self, factor: float) -> None:
        """Every draw's deviation from the mean ← factor · deviation."""
        for slot in self.slots:
            values = self._values(slot)
            mean = _average(values)
            values.copy_(mean + factor * (values - mean))

    # ---- drawing ------------------------------------------------------------------------------------------

    def noise(self, generator: torch.Generator | None = None) -> Noise:
        """Which draw: a number below S, at random."""
        device = self._values(self.slots[0]).device
        return {"index": torch.randint(self.count, (), generator=generator, device=device)}

    def numbered_noise(self, number: int, total: int, generator: torch.Generator | None = None) -> Noise:
        """The draw of that number where as many draws as there are (or a multiple) are made together."""
        if not self.exact or total % self.count:
            return self.noise(generator)
        return {"index": torch.tensor(number % self.count, device=self._values(self.slots[0]).device)}

    def components(self, noise: Noise) -> Components:
        """The draws of these numbers."""
        index = noise["index"]
        flat = index.reshape(-1)
        return {
            key: values.index_select(0, flat).reshape(*index.shape, *values.shape[1:])
            for key, values in self.draws.items()
        }

    def realize(self, components: Components) -> dict[str, Tensor]:
        """Dense draws."""
        return {slot.name: components[key_of(slot.name)] for slot in self.slots}

    def draw(
        self, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Draws picked at random, `sample_shape + parameter shape` by slot name."""
        device = self._values(self.slots[0]).device
        index = torch.randint(self.count, tuple(sample_shape), generator=generator, device=device)
        return self.realize(self.components({"index": index}))

    # ---- what points do not have --------------------------------------------------------------------------

    def kl(
        self, method: KLMethod = "auto", samples: int | None = None, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Infinite for a set of points: raises."""
        _refuse("KL divergence to a prior with a density (it is infinite)")

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """No density: raises."""
        _refuse("density over weights")

    def wasserstein(self, other: WeightPosterior) -> Tensor:
        """An assignment problem, no closed form: raises."""
        _refuse("closed-form 2-Wasserstein distance")

    def extra_repr(self) -> str:
        """Parameters, and how many draws."""
        return f"{super().extra_repr()}, {self.count} draws"


def _refuse(what: str) -> NoReturn:
    raise CapabilityError(
        f"Empirical is a set of equally weighted draws and has no {what}. They already are a posterior: predict with "
        "them. Where a density is needed, fit MeanField or FullCovariance, or give the draws' moments to from_variances"
    )


def _average(values: Tensor) -> Tensor:
    return values.to(computing_dtype(values.dtype)).mean(0).to(values.dtype)


def _check_draws(name: str, value: object) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        given = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"draws[{name!r}] must be a tensor of real numbers, got {given}")
    if value.ndim == 0 or len(value) == 0:
        raise ValueError(
            f"draws[{name!r}] has shape {tuple(value.shape)}: the draws lead, and there is at least one"
        )
    if not bool(value.isfinite().all()):
        bad = int((~value.isfinite()).sum())
        raise ValueError(
            f"draws[{name!r}] holds {bad} NaN or infinite of {value.numel()} entries: drop those draws, and look for "
            "what made the chain or the training diverge"
        )


def _draws_of(slots: Sequence[Slot], draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of each slot's draws, in its dtype and on its device."""
    found: dict[str, Tensor] = {}
    known: set[str] = set()
    for slot in slots:
        name = next((alias for alias in slot.aliases if alias in draws), None)
        if name is None:
            raise ValueError(
                f"draws has none for the parameter {slot.name!r}: leave it out of the pattern, as in "
                f'{{{slot.name!r}: dubito.Point(), "rest": dubito.Empirical(draws)}}, or give its draws'
            )
        value = draws[name]
        if value.shape[1:] != slot.shape:
            raise ValueError(
                f"draws[{name!r}] has shape {tuple(value.shape)}, but the parameter is {tuple(slot.shape)}: draws of "
                f"shape (S, {', '.join(map(str, slot.shape))}) are needed"
            )
        like = slot.parameter
        found[slot.name] = value.detach().to(dtype=like.dtype, device=like.device, copy=True).contiguous()
        known.update(slot.aliases)
    strange = [name for name in draws if name not in known]
    if strange:
        raise ValueError(
            f"draws are given for {', '.join(map(repr, strange))}, which the pattern does not name; this module's "
            f"parameters here are {', '.join(repr(slot.name) for slot in slots[:6])}"
        )
    return found
