"""Radial weights (Farquhar, Osborne & Gal 2020, "Radial Bayesian neural networks").

`w = m + σ ⊙ (eps / ||eps||) · r` with `eps ~ N(0, I_D)`, `r ~ N(0, 1)` and one r for each parameter tensor of D entries
(their equation 4). A high-dimensional Gaussian lives on a shell of radius √D; the radial law keeps its mass near the
mean whatever D, which makes gradients of many weights less noisy.

A deviation has marginal variance σ²/D, *not* σ². It is kept here as `s = σ / √D`, so that `sd()` is the standard
deviation of an entry, starts by the same policy as in every other family, and a radial draw perturbs a layer as much
as a mean-field draw of the same `sd()` does.

Entropy. For x = u·r with u uniform on the sphere, |r| is half normal, and in polar coordinates x has density
`2 φ(|x|) / (A_D |x|^(D-1))` with `A_D = 2 π^(D/2) / Γ(D/2)` the sphere's area. With E log|r| = -(γ + log 2)/2,

    H(x) = ½ log 2π + ½ - log 2 + log A_D - (D - 1)(γ + log 2)/2,      H(w) = H(x) + sum log σ_i

(γ Euler's constant). The paper gives H up to the constant. Since cross-entropy with a Gaussian depends on the first two
moments alone, KL(radial || Gaussian) is the Gaussian KL at the same moments plus a constant of D.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import MixtureSameFamily, Normal

from dubito.divergences import KLMethod
from dubito.priors import ParameterPrior, PriorSpec
from dubito.scalar_checks import computing_dtype, count, positive
from dubito.scale_mixture import ScaleMixture
from dubito.weights.family import CapabilityError, Components, Family, Group, Noise, WeightPosterior
from dubito.weights.gaussian_entries import entries_kl, log_sd_of, sd_of, spread_of_sd
from dubito.weights.initial_scale import fan_in
from dubito.weights.slots import Slot

_EULER = 0.57721566490153286
_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True)
class Radial(Family):
    """Weights whose direction is uniform and whose distance from the mean is half normal, for each parameter.

    Entries of one parameter are uncorrelated but not independent (they share r); parameters are independent.

    Args:
        prior: as for `MeanField`; None takes `bayesianize`'s, else the default `Normal(0, fan_in ** -0.5)`.
        scale: initial standard deviation of an entry as a fraction of the fan-in scale, as for `MeanField`. The
            paper's σ is √D times that.
        kl_samples: draws of a Monte Carlo KL, where the prior is neither Gaussian nor a mixture of Gaussians.

    Raises:
        ValueError: for a scale that is not positive, `kl_samples` below 1.
    """

    prior: PriorSpec = None
    scale: float = 0.1
    kl_samples: int = 1

    def __post_init__(self) -> None:
        positive("scale", self.scale)
        count("kl_samples", self.kl_samples, "draws of a Monte Carlo KL")

    def attach(self, group: Group) -> RadialPosterior:
        """The posterior of one parameter."""
        return RadialPosterior(group, self)


class RadialPosterior(WeightPosterior):
    """The posterior that `Radial` makes for one parameter.

    Attributes:
        spread: log s, the logarithm of an entry's standard deviation (σ = √D s), in the parameter's shape.
    """

    diagonal = True

    def __init__(self, group: Group, family: Radial) -> None:
        super().__init__(group)
        self.family = family
        sd = torch.full_like(self.slot.parameter.detach(), family.scale * fan_in(self.slot) ** -0.5)
        self.spread = nn.Parameter(spread_of_sd(sd, "log"))
        self.set_prior(self.slot, group.prior)

    @property
    def slot(self) -> Slot:
        """The one parameter."""
        return self.slots[0]

    # ---- moments ----------------------------------------------------------------------------------------

    def sd(self) -> Tensor:
        """Standard deviations of the entries, s = σ/√D, differentiable."""
        return sd_of(self.spread, "log")

    def sigma(self) -> Tensor:
        """The paper's σ = √D s."""
        return self.sd() * math.sqrt(max(1, self.spread.numel()))

    def mean(self) -> dict[str, Tensor]:
        """The module's own parameter."""
        return {self.slot.name: self.slot.parameter}

    def variance(self) -> dict[str, Tensor]:
        """s² = σ²/D (E r² = 1, and a direction's entries have mean square 1/D)."""
        return {self.slot.name: self.sd().square()}

    @torch.no_grad()
    def rescale_spread_(self, factor: float) -> None:
        """s ← factor·s."""
        self.spread.copy_(spread_of_sd(self.sd() * factor, "log"))

    @torch.no_grad()
    def reset_spread_(self, scales: Mapping[str, float], generator: torch.Generator | None = None) -> None:
        """s ← the family's fraction of the initial standard deviation."""
        sd = torch.full_like(self.spread, self.family.scale * scales[self.slot.name])
        self.spread.copy_(spread_of_sd(sd, "log"))

    # ---- drawing ------------------------------------------------------------------------------------------

    def noise(self, generator: torch.Generator | None = None) -> Noise:
        """√D · (eps/||eps||) · r, whose entries have variance 1."""
        like, dtype = self.spread, computing_dtype(self.spread.dtype)
        eps = torch.randn(like.shape, generator=generator, dtype=dtype, device=like.device)
        r = torch.randn((), generator=generator, dtype=dtype, device=like.device)
        norm = eps.square().sum().clamp_min(torch.finfo(dtype).tiny).sqrt()
        return {"eps": (eps * (r * math.sqrt(max(1, eps.numel())) / norm)).to(like.dtype)}

    def components(self, noise: Noise) -> Components:
        """w = m + s·noise."""
        return {"weight": torch.addcmul(self.slot.parameter, self.sd(), noise["eps"])}

    def realize(self, components: Components) -> dict[str, Tensor]:
        """The dense draw."""
        return {self.slot.name: components["weight"]}

    # ---- divergences ----------------------------------------------------------------------------------------

    def entropy(self) -> Tensor:
        """Differential entropy in nats, exact."""
        size = self.spread.numel()
        log_sigma = log_sd_of(self.spread.to(computing_dtype(self.spread.dtype)), "log").sum()
        return log_sigma + 0.5 * size * math.log(max(1, size)) + standard_entropy(size)

    def kl(
        self, method: KLMethod = "auto", samples: int | None = None, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """KL(q || prior) in nats: closed for a Gaussian prior, bounded for a mixture, else by Monte Carlo.

        Monte Carlo concerns the cross-entropy alone, the entropy is exact; but for "stick_the_landing", which is
        log q(w) - log p(w) with q's parameters held fixed in log q.

        Raises:
            CapabilityError: "closed" or "bound" where the prior allows neither.
        """
        prior = self.prior_of(self.slot)
        sample = method in ("monte_carlo", "stick_the_landing")
        if not sample and _has_moment_form(prior, self.spread, method):
            value = entries_kl(self.slot.parameter, self.spread, "log", prior, method=method)
            return {self.slot.name: value + gaussian_excess(self.spread.numel())}
        if not sample and method != "auto":
            raise CapabilityError(
                f"method={method!r} is not there for a radial posterior under this prior ({prior.kind.__name__}): use "
                '"auto" or "monte_carlo"'
            )
        wanted = samples if samples is not None else self.family.kl_samples
        total = torch.zeros((), dtype=computing_dtype(self.spread.dtype), device=self.spread.device)
        for _ in range(count("samples", wanted, "draws of a Monte Carlo KL")):
            weight = self.components(self.noise(generator))["weight"]
            total = total - prior.log_prob(weight).sum()
            if method == "stick_the_landing":
                total = total + self._log_density(weight, self.slot.parameter.detach(), self.spread.detach())
        if method == "stick_the_landing":
            return {self.slot.name: total / wanted}
        return {self.slot.name: total / wanted - self.entropy()}

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """log q(w) over the whole parameter, leading dimensions kept; infinite at the mean where D > 1."""
        return self._log_density(weights[self.slot.name], self.slot.parameter, self.spread)

    def _log_density(self, weight: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
        dtype = computing_dtype(spread.dtype)
        size, log_sd = spread.numel(), log_sd_of(spread.to(dtype), "log")
        deviation = (weight.to(dtype) - mean.to(dtype)) / log_sd.exp()
        squares = deviation.square()
        axes = tuple(range(-spread.dim(), 0))
        radius_squared = (squares.sum(dim=axes) if axes else squares) / max(1, size)
        log_sigma = log_sd.sum() + 0.5 * size * math.log(max(1, size))
        constant = math.log(2.0) - _HALF_LOG_TWO_PI - _log_area(size)
        return constant - 0.5 * radius_squared - 0.5 * (size - 1) * radius_squared.log() - log_sigma

    def wasserstein(self, other: WeightPosterior) -> Tensor:
        """No closed form: raises."""
        raise CapabilityError(
            "Radial has no closed-form 2-Wasserstein distance; use MeanField where it is needed"
        )


def standard_entropy(size: int) -> float:
    """Entropy in nats of (eps/||eps||)·r in `size` >= 1 dimensions."""
    mean_log_radius = -0.5 * (_EULER + math.log(2.0))
    return _HALF_LOG_TWO_PI + 0.5 - math.log(2.0) + _log_area(size) + (size - 1) * mean_log_radius


def gaussian_excess(size: int) -> float:
    """How many nats a Gaussian of the same moments has more: KL(radial || N) less that of the Gaussian, >= 0."""
    if size < 1:
        return 0.0
    return size * (_HALF_LOG_TWO_PI + 0.5) - 0.5 * size * math.log(size) - standard_entropy(size)


def _log_area(size: int) -> float:
    """Logarithm of the surface area of the unit sphere in `size` dimensions."""
    return math.log(2.0) + 0.5 * size * math.log(math.pi) - math.lgamma(0.5 * size)


def _has_moment_form(prior: ParameterPrior, like: Tensor, method: KLMethod) -> bool:
    """Whether cross-entropy (or its bound) depends on the first two moments only: Gaussians and their mixtures."""
    if prior.gaussian() is not None:
        return method in ("auto", "closed")
    if method == "closed":
        return False
    mixture = prior.distribution(like)
    gaussian = isinstance(mixture, MixtureSameFamily) and type(mixture.component_distribution) is Normal
    return isinstance(mixture, ScaleMixture) or gaussian
