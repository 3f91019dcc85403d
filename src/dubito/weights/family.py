"""The contract of a family of random weights.

A `Family` is a small frozen configuration ("mean field with this prior"). Attached to a group of parameters it
makes a `WeightPosterior`: an `nn.Module` that holds the variational parameters of q(w) for that group and knows
how to draw from it. A draw is made in three steps, so that many draws can be made at once, kept, replayed and
run under `torch.func.vmap`:

    noise       = posterior.noise(generator)        one draw's standard noise: plain tensors, no gradient
    components  = posterior.components(noise)       what a draw is made of, differentiable in the variational
                                                    parameters; leading dimensions of the noise are kept
    weights     = posterior.realize(components)     what stands in the slots for one call: plain tensors, or
                                                    structured drawn weights (`dubito.weights.drawn`)

Everything else (training, prediction, saving, objectives) is written against this contract; a new family is one
file here and one line in the conformance battery (`tests/conformance.py`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from dubito.divergences import KLMethod
from dubito.priors import ParameterPrior, PriorRule, PriorSpec, WeightPrior, resolve_prior
from dubito.weights.gaussian_weights import Moments
from dubito.weights.initial_scale import centre, fan_in
from dubito.weights.slots import Slot

Noise = dict[str, Tensor]
Components = dict[str, Tensor]
Granularity = Literal["parameter", "module", "all"]


class CapabilityError(NotImplementedError):
    """A family was asked for something it does not have; the message says what to use instead."""


class DubitoWarning(UserWarning):
    """A choice was made on the user's behalf, or a combination is known to go wrong; said once."""


class SpreadRate(NamedTuple):
    """How a parameter of spread follows its weight's learning rate (`dubito.mup`).

    Attributes:
        parameter: the parameter of spread.
        like: the slot whose mean's learning rate it is based on, or None for the plain one.
        rank: R, the number of terms of a draw it takes part in: the rate is divided by R for SGD, by its root for Adam.
    """

    parameter: nn.Parameter
    like: str | None
    rank: int


@dataclass(frozen=True)
class Group:
    """The parameters that one posterior covers.

    Attributes:
        slots: the parameters, in `named_parameters()` order.
        prior: the prior in force: the family's own, else `bayesianize`'s, else None (the family's default).
        alone: whether the user's pattern named this group only, so that an impossible request is an error rather
            than something to adapt, and say.
    """

    slots: tuple[Slot, ...]
    prior: PriorSpec
    alone: bool


@dataclass(frozen=True)
class Family(ABC):
    """Which random weights: the configuration of a posterior family. Subclasses are frozen dataclasses."""

    granularity: ClassVar[Granularity] = "parameter"

    @property
    def own_prior(self) -> PriorSpec:
        """The prior given to the family itself (it wins over `bayesianize`'s), or None."""
        return getattr(self, "prior", None)

    def substitute(self, slot: Slot) -> Family | None:
        """The family to use instead for a parameter this one does not fit (None: it fits)."""
        return None

    @abstractmethod
    def attach(self, group: Group) -> WeightPosterior | None:
        """Make the posterior of a group of parameters; nothing of the module is changed here.

        Returns:
            The posterior, or None where the parameters stay as they are.
        """


class WeightPosterior(nn.Module, ABC):
    """q(w) over a group of parameters.

    Attributes:
        slots: where the parameters live. They are not registered here: a Gaussian mean *is* the module's own
            parameter, so `state_dict`, `.to`, optimisers and `deepcopy` meet it once.
        notes: what was decided on the user's behalf, in words; `bayesianize` says them.
        takes_over: whether the dense parameters leave storage (factored families).
        estimators: the estimators this posterior offers for training, the default first.
        diagonal: whether the covariance is diagonal (its expected loss collapses it to a point).
        collapses: what the expected loss alone does to this covariance where it is not diagonal, to follow "the
            covariance of …" in a warning; None where the implicit bias keeps what no data speak of.
    """

    takes_over: ClassVar[bool] = False
    estimators: ClassVar[tuple[str, ...]] = ("weights",)
    diagonal: ClassVar[bool] = False
    collapses: ClassVar[str | None] = None
    realizes_stacks: ClassVar[bool] = False

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.slots = group.slots
        self.priors = nn.ModuleDict()
        self.joint_prior: tuple[
            WeightPrior, ...
        ] = ()  # a tuple: held by the BayesianModule, not registered here
        self.notes: list[str] = []

    # ---- what every family must give -----------------------------------------------------------------

    @abstractmethod
    def noise(self, generator: torch.Generator | None = None) -> Noise:
        """One draw's standard noise, in the posterior's dtype and on its device."""

    def numbered_noise(self, number: int, total: int, generator: torch.Generator | None = None) -> Noise:
        """The noise of draw `number` (from 0) of `total` that are made together; a family may tell them apart."""
        return self.noise(generator)

    def noise_like(self) -> Noise | None:
        """Tensors of the shape, dtype and device of `noise`'s, in its order, where that is all standard normal.

        It lets many draws be made in place. None (the default) where the noise is anything else.
        """
        return None

    @abstractmethod
    def components(self, noise: Noise) -> Components:
        """What a draw is made of; leading dimensions of the noise lead in every component."""

    @abstractmethod
    def realize(self, components: Components) -> dict[str, Tensor]:
        """What stands in each slot (by slot name) for one draw; called inside `vmap` for many."""

    @abstractmethod
    def mean(self) -> dict[str, Tensor]:
        """E[w] by slot name, dense.

        Raises:
            CapabilityError: where no closed form exists.
        """

    @abstractmethod
    def variance(self) -> dict[str, Tensor]:
        """Marginal variances Var[w] by slot name, in the parameters' shapes."""

    @abstractmethod
    def rescale_spread_(self, factor: float) -> None:
        """Multiply the standard deviations of the random quantities by `factor` >= 0, in place."""

    def spread_parameters(self) -> list[nn.Parameter]:
        """The variational parameters that describe spread (log sigma, S): kept out of weight decay."""
        return [p for p in self.parameters() if p.requires_grad]

    # ---- what a family may refine ---------------------------------------------------------------------

    def settle(self) -> None:
        """Take the parameters over, once every posterior of the network has been made without an error."""
        if self.takes_over:
            for slot in self.slots:
                slot.put(None)

    def reset_spread_(self, scales: Mapping[str, float], generator: torch.Generator | None = None) -> None:
        """Start the spread anew, in place, given the standard deviation that each slot's mean was initialised with.

        Raises:
            CapabilityError: where the family has scales of its own.
        """
        raise CapabilityError(f"{type(self).__name__} starts its spread at scales of its own")

    def spread_rates(self) -> list[SpreadRate]:
        """How the parameters of spread follow their weights' learning rates; those not listed take the plain one."""
        return []

    def training_weights(self) -> dict[str, Tensor]:
        """What stands in the slots for one training call, by the family's estimator, with gradients."""
        return self.realize(self.components(self.noise()))

    def estimated_weights(self, estimator: str | None = None) -> dict[str, Tensor] | None:
        """What stands in the slots under an estimator that is no function draw ("local", "flipout").

        It is called once for each draw, inside `vmap` for several.

        Args:
            estimator: None for the family's own.

        Returns:
            None where the estimator is "weights", or not offered here: dense draws are then used.
        """
        return None

    def mean_weights(self) -> dict[str, Tensor] | None:
        """What stands in the slots for a call at the mean; None where the module already holds it."""
        return None

    def gaussian_weights(self) -> dict[str, Moments]:
        """What a single pass propagates, by slot name, differentiable: marginal means and variances.

        A family whose entries are correlated hands out its structure (`dubito.weights.gaussian_weights`) where a rule
        can use it.
        """
        mean, variance = self.mean(), self.variance()
        return {slot.name: Moments(mean[slot.name], variance[slot.name]) for slot in self.slots}

    def dense(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Plain tensors from what `realize` gave."""
        from dubito.weights.drawn import DrawnWeight

        return {n: w.dense() if isinstance(w, DrawnWeight) else w for n, w in weights.items()}

    def draw(
        self, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Dense draws, `sample_shape + parameter shape` by slot name, differentiable."""
        sample_shape = tuple(sample_shape)
        count = math.prod(sample_shape)
        if self.realizes_stacks and count:
            noises = [self.noise(generator) for _ in range(count)]
            noise = {
                key: torch.stack([n[key] for n in noises]).reshape(*sample_shape, *value.shape)
                for key, value in noises[0].items()
            }
            return self.realize(self.components(noise))
        drawn = []
        for _ in range(count):
            drawn.append(self.dense(self.realize(self.components(self.noise(generator)))))
        return {
            slot.name: torch.stack([d[slot.name] for d in drawn]).reshape(*sample_shape, *slot.shape)
            for slot in self.slots
        }

    def kl(
        self, method: KLMethod = "auto", samples: int | None = None, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """KL(q || prior) in nats, summed, by slot name.

        Args:
            method: "auto" (closed form, else bound for mixtures, else Monte Carlo), "closed", "bound" or
                "monte_carlo".
            samples: draws for Monte Carlo (None: the family's own number).
            generator: source of Monte Carlo noise.

        Raises:
            CapabilityError: where the KL is infinite or undefined; the message names the remedy.
        """
        raise CapabilityError(f"{type(self).__name__} has no KL divergence to a prior")

    def wasserstein(self, other: WeightPosterior) -> Tensor:
        """Squared 2-Wasserstein distance to another posterior over the same parameters."""
        raise CapabilityError(f"{type(self).__name__} has no closed-form 2-Wasserstein distance")

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """log q(w) of dense weights (by slot name), summed over entries; leading dimensions kept."""
        raise CapabilityError(f"{type(self).__name__} has no density over dense weights")

    # ---- shared by implementations ----------------------------------------------------------------------

    def set_prior(self, slot: Slot, spec: PriorSpec) -> None:
        """Resolve the prior of one slot and keep it (buffers move with the module)."""
        spec = spec.at(slot.owner) if isinstance(spec, PriorRule) else spec
        resolved = resolve_prior(spec, slot.parameter, fan_in(slot), centre(slot))
        if isinstance(resolved, WeightPrior):
            self.joint_prior = (resolved,)
        else:
            self.priors[key_of(slot.name)] = resolved

    def prior_of(self, slot: Slot) -> ParameterPrior:
        """The prior of one slot (where the prior is not a joint one)."""
        prior: Any = self.priors[key_of(slot.name)]
        return prior  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """The parameters covered, for `print`."""
        return ", ".join(f"{slot.name}{list(slot.shape)}" for slot in self.slots)


def key_of(name: str) -> str:
    """A parameter's name as a key of `nn.ModuleDict`, where a dot is not allowed."""
    return name.replace(".", "/")


def check_finite(slot: Slot) -> None:
    """Refuse a parameter that already holds NaN or infinity.

    Raises:
        ValueError: naming the parameter.
    """
    value = slot.parameter
    if not bool(torch.isfinite(value).all()):
        bad = int((~torch.isfinite(value)).sum())
        raise ValueError(
            f"parameter {slot.name!r} holds {bad} NaN or infinite of {value.numel()} entries; "
            "a posterior cannot start there: reload or re-initialise the module first"
        )


def check_real(slot: Slot) -> None:
    """Refuse random weights that are no real numbers, or that no draw would reach.

    Raises:
        TypeError: for integers and complex numbers, and for scripted modules, naming the parameter.
    """
    if any(isinstance(owner, torch.jit.ScriptModule) for owner, _ in slot.places):
        raise TypeError(
            f"parameter {slot.name!r} belongs to a scripted module, whose compiled code cannot be called with other "
            "weights: bayesianize the module first (before torch.jit.script), or leave this part out of the patterns"
        )
    dtype = slot.parameter.dtype
    if not dtype.is_floating_point:
        raise TypeError(
            f"parameter {slot.name!r} holds {dtype}, but random weights are real numbers: leave it as it is by "
            f'{{"rest": …, {slot.name!r}: dubito.Point()}}, or hold a complex weight as its real and imaginary parts'
        )
