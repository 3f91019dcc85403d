"""Mean field: independent Gaussian weights, `q(w) = prod N(w_i; m_i, s_i²)` (Graves 2011; Blundell et al. 2015).

The means are the module's own parameters. The standard deviations are parametrised by their logarithm, or by the
paper's softplus. Drawing `w = m + s·eps` and the closed-form KL share one autograd function: each is bound by memory
traffic, and together they read the parameters once and write one gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from dubito.divergences import KLMethod, wasserstein2_gaussian_diagonal
from dubito.priors import PriorSpec
from dubito.weights.drawn_gaussian import FlipoutWeight, LocalWeight
from dubito.weights.family import CapabilityError, Components, Family, Group, Noise, WeightPosterior
from dubito.weights.gaussian_entries import (
    Parametrization,
    Pending,
    draw_with_kl,
    entries_kl,
    log_sd_of,
    moments_with_kl,
    sd_of,
    spread_of_sd,
)
from dubito.weights.initial_scale import fan_in
from dubito.weights.slots import Slot

Estimator = Literal["weights", "local", "flipout"]


@dataclass(frozen=True)
class MeanField(Family):
    """Independent Gaussian weights.

    Args:
        prior: a `torch.distributions` object, a prior rule, a `WeightPrior`, `"fan_in"` or `"pretrained"`; None
            takes `bayesianize`'s, else the default `Normal(0, fan_in ** -0.5)`.
        scale: initial standard deviation as a fraction of the fan-in scale (`weights/initial_scale.py`).
        estimator: how a training call draws: `"weights"` (one draw a call, shared by the batch), `"local"` (local
            reparametrisation: pre-activations drawn for each example, Kingma et al. 2015) or `"flipout"` (one
            perturbation, signs for each example and channel, Wen et al. 2018). Where an operator has no rule for
            `"local"` or `"flipout"`, it gets one shared draw.
        parametrization: `"log"` (log s) or `"softplus"` (s = log(1 + exp rho), Blundell et al. 2015).
        kl_samples: draws of a Monte Carlo KL, where the prior has no closed form or bound.

    Raises:
        ValueError: for a scale that is not positive, an unknown estimator or parametrisation.
    """

    prior: PriorSpec = None
    scale: float = 0.1
    estimator: Estimator = "weights"
    parametrization: Parametrization = "log"
    kl_samples: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(
                f"scale={self.scale!r} must be a positive fraction of the fan-in scale, such as 0.1"
            )
        if self.estimator not in ("weights", "local", "flipout"):
            raise ValueError(f'estimator={self.estimator!r} must be "weights", "local" or "flipout"')
        if self.parametrization not in ("log", "softplus"):
            raise ValueError(f'parametrization={self.parametrization!r} must be "log" or "softplus"')
        if self.kl_samples < 1:
            raise ValueError(f"kl_samples={self.kl_samples} must be at least 1")

    def attach(self, group: Group) -> MeanFieldPosterior:
        """The posterior of one parameter."""
        (slot,) = group.slots
        if self.estimator == "local" and slot.tied:
            raise ValueError(
                f'estimator="local" cannot serve {slot.name!r}, which is tied to {", ".join(slot.aliases[1:])}: '
                'each use would draw a different weight. Give it estimator="weights" by a pattern of its own'
            )
        return MeanFieldPosterior(group, self)


class MeanFieldPosterior(WeightPosterior):
    """The posterior that `MeanField` makes for one parameter."""

    estimators = ("weights", "local", "flipout")
    diagonal = True

    def __init__(self, group: Group, family: MeanField) -> None:
        super().__init__(group)
        slot = self.slot
        self.family = family
        self.parametrization = family.parametrization
        sd = torch.full_like(slot.parameter.detach(), family.scale * fan_in(slot) ** -0.5)
        # named for what it is, so that a state of one parametrisation is not read as the other's
        self._spread_name = "log_sigma" if self.parametrization == "log" else "rho"
        self.register_parameter(self._spread_name, nn.Parameter(spread_of_sd(sd, self.parametrization)))
        self.set_prior(slot, group.prior)
        self._pending: Pending | None = None

    @property
    def slot(self) -> Slot:
        """The one parameter."""
        return self.slots[0]

    @property
    def spread(self) -> nn.Parameter:
        """log sigma, or rho with sigma = softplus(rho): the trainable parameter of spread."""
        parameter = self._parameters[self._spread_name]
        assert parameter is not None
        return parameter

    # ---- moments ----------------------------------------------------------------------------------------

    def sd(self) -> Tensor:
        """Standard deviations, in the parameter's shape, differentiable."""
        return sd_of(self.spread, self.parametrization)

    def log_sd(self) -> Tensor:
        """Their logarithms."""
        return log_sd_of(self.spread, self.parametrization)

    def mean(self) -> dict[str, Tensor]:
        """The module's own parameter."""
        return {self.slot.name: self.slot.parameter}

    def variance(self) -> dict[str, Tensor]:
        """s²."""
        return {self.slot.name: self.sd().square()}

    @torch.no_grad()
    def rescale_spread_(self, factor: float) -> None:
        """s ← factor·s."""
        self.spread.copy_(spread_of_sd(self.sd() * factor, self.parametrization))

    @torch.no_grad()
    def reset_spread_(self, scales: Mapping[str, float], generator: torch.Generator | None = None) -> None:
        """s ← the family's fraction of the initial standard deviation."""
        sd = torch.full_like(self.spread, self.family.scale * scales[self.slot.name])
        self.spread.copy_(spread_of_sd(sd, self.parametrization))

    # ---- drawing ------------------------------------------------------------------------------------------

    def noise(self, generator: torch.Generator | None = None) -> Noise:
        """eps ~ N(0, I)."""
        s = self.spread
        return {"eps": torch.randn(s.shape, generator=generator, dtype=s.dtype, device=s.device)}

    def noise_like(self) -> Noise:
        """The spread."""
        return {"eps": self.spread}

    def components(self, noise: Noise) -> Components:
        """w = m + s·eps."""
        return {"weight": torch.addcmul(self.slot.parameter, self.sd(), noise["eps"])}

    def realize(self, components: Components) -> dict[str, Tensor]:
        """The dense draw."""
        return {self.slot.name: components["weight"]}

    def training_weights(self) -> dict[str, Tensor]:
        """One draw by the family's estimator; under `"weights"` the closed-form KL is made with it."""
        estimated = self.estimated_weights()
        if estimated is not None:
            return estimated
        if self.parametrization == "log" and not self.joint_prior:
            made = draw_with_kl(self.slot.parameter, self.spread, self.prior_of(self.slot))
            if made is not None:
                weight, self._pending = made
                return {self.slot.name: weight}
        return super().training_weights()

    def estimated_weights(self, estimator: str | None = None) -> dict[str, Tensor] | None:
        """Moments for operators that draw their outputs, or a perturbation whose signs they flip."""
        estimator = estimator or self.family.estimator
        if estimator == "local":
            prior = None if self.joint_prior else self.prior_of(self.slot)
            mean, variance, self._pending = moments_with_kl(
                self.slot.parameter, self.spread, self.parametrization, prior
            )
            return {self.slot.name: LocalWeight.of_variance(mean, variance)}
        if estimator == "flipout":
            sd = self.sd()
            return {self.slot.name: FlipoutWeight.of(self.slot.parameter, sd * torch.randn_like(sd))}
        return None

    # ---- divergences ----------------------------------------------------------------------------------------

    def kl(
        self, method: KLMethod = "auto", samples: int | None = None, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """KL(q || prior) in nats; closed form for a Gaussian prior."""
        pending, self._pending = self._pending, None
        count = samples if samples is not None else self.family.kl_samples
        value = entries_kl(
            self.slot.parameter,
            self.spread,
            self.parametrization,
            self.prior_of(self.slot),
            method=method,
            samples=count,
            generator=generator,
            pending=pending,
        )
        return {self.slot.name: value}

    def wasserstein(self, other: WeightPosterior) -> Tensor:
        """Squared 2-Wasserstein distance to another mean-field posterior of the same parameter."""
        if not isinstance(other, MeanFieldPosterior):
            raise CapabilityError(f"no closed form between MeanField and {type(other).__name__}")
        return wasserstein2_gaussian_diagonal(
            self.slot.parameter, self.sd(), other.slot.parameter, other.sd()
        )

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """log q(w), summed over the parameter's entries."""
        value: Tensor = Normal(self.slot.parameter, self.sd(), validate_args=False).log_prob(
            weights[self.slot.name]
        )
        return value.sum(dim=tuple(range(-len(self.slot.shape), 0))) if self.slot.shape else value

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pending": None}  # part of a graph, and of no copy

    def extra_repr(self) -> str:
        """Parameter and estimator."""
        return f'{super().extra_repr()}, estimator="{self.family.estimator}"'
