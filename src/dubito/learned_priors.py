"""Empirical Bayes: Gaussian priors whose scales are learned with the ELBO (type-II maximum likelihood).

The ELBO bounds log evidence(gain) from below, so raising it in the gain of the prior's standard deviation is maximum
likelihood of that gain under a bound; where q can be the exact posterior it is maximum evidence (MacKay 1992).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Normal

from dubito.priors import ParameterPrior, PriorRule, PriorSpec, WeightPrior, resolve_prior
from dubito.scalar_checks import choice, computing_dtype, positive

__all__ = ["EmpiricalBayes", "LearnedScalePrior"]

Share = Literal["parameter", "module", "all"]


class LearnedScalePrior(ParameterPrior):
    """Normal(loc, gain · scale) with a learned gain: one number, by its logarithm.

    Made by `EmpiricalBayes`. The closed-form KL and its fast path are those of a fixed Gaussian prior.

    Args:
        base: a Gaussian prior, which gives loc and scale.
        log_gain: the logarithm of the gain, a scalar; several priors may hold the same one.

    Raises:
        ValueError: if `base` is not Gaussian.
    """

    def __init__(self, base: ParameterPrior, log_gain: nn.Parameter) -> None:
        moments = base.gaussian()
        if moments is None:
            raise ValueError(
                f"EmpiricalBayes learns the scale of a Gaussian prior, and its base is {base.kind.__name__}: give "
                'base="fan_in", "pretrained" or a Normal'
            )
        loc, scale = (m if isinstance(m, Tensor) else torch.tensor(m, dtype=torch.float64) for m in moments)
        super().__init__(Normal(loc, scale))
        self.log_gain = log_gain

    def gain(self) -> Tensor:
        """What the base's standard deviation is multiplied by; a differentiable scalar."""
        return self.log_gain.to(computing_dtype(self.log_gain.dtype)).exp()

    def gaussian(self) -> tuple[float | Tensor, float | Tensor]:
        """(mean, standard deviation); the latter carries the gain's gradient."""
        moments = super().gaussian()
        assert moments is not None
        return moments[0], moments[1] * self.gain()

    def distribution(self, like: Tensor) -> Distribution:
        """Normal in the dtype (float32 at least) and on the device of `like`, differentiable in the gain."""
        place: dict[str, Any] = {"dtype": computing_dtype(like.dtype), "device": like.device}
        mean, sd = self.gaussian()
        loc = mean.to(**place) if isinstance(mean, Tensor) else torch.full((), mean, **place)
        assert isinstance(sd, Tensor)
        return Normal(loc, sd.to(**place), validate_args=False)

    def extra_repr(self) -> str:
        """The base and the present gain."""
        return f"{super().extra_repr()}, gain={math.exp(float(self.log_gain.detach())):.3g} (learned)"


class EmpiricalBayes(PriorRule):
    """A Gaussian prior whose scale is learned with the ELBO: Normal(base mean, gain · base sd).

    The logarithms of the gains are parameters of the Bayesian module (each once, however often shared), are saved
    with it, and are kept out of weight decay by `parameter_groups`. Anything trained without `bayes.kl()` in its loss
    leaves them where they are. Under a restricted posterior the learned scale tends to be too small: Blundell et al.
    (2015, section 3.3) found fixed mixtures better for mean field.

    Args:
        base: what is scaled: "fan_in", "pretrained" (MOPED with a learned width), a `Normal`, or another rule that
            gives one; None is "fan_in".
        gain: where the gain starts, > 0.
        share: one gain for each "parameter" (so for each layer, weights and biases apart), each "module" (weights
            and biases of a layer together), or for "all" parameters the rule serves in one network.
            `LowRankFactors` learns one for each factor whatever is said here.

    Raises:
        TypeError: a `WeightPrior` as base.
        ValueError: gain not positive, unknown `share`, or (at use) a base that is not Gaussian.

    Example:
        ``bayesianize(net, MeanField(), prior=EmpiricalBayes(share="module"))``
    """

    def __init__(self, base: PriorSpec = None, gain: float = 1.0, share: Share = "parameter") -> None:
        if isinstance(base, WeightPrior):
            raise TypeError("base: EmpiricalBayes scales the prior of one parameter, not a joint WeightPrior")
        choice("share", share, Share)
        self.base = base
        self.gain_at_start = positive("gain", gain)
        self.share = share
        self._owner: int | None = None
        self._gains: dict[int, nn.Parameter] = {}

    def begin(self) -> EmpiricalBayes:
        """The rule for one more network, which shares no gain with the networks before it."""
        return EmpiricalBayes(self.base, self.gain_at_start, self.share)

    def at(self, owner: nn.Module) -> EmpiricalBayes:
        """The rule for the parameters of one module."""
        if self.share == "parameter":
            return self
        bound = self.begin()
        bound._owner = id(owner) if self.share == "module" else 0
        bound._gains = self._gains
        return bound

    def for_parameter(self, value: Tensor, fan_in: float, centre: float = 0.0) -> LearnedScalePrior:
        """The base prior of this parameter, with its gain."""
        base = resolve_prior(self.base, value, fan_in, centre)
        assert isinstance(base, ParameterPrior)
        if self._owner is None:
            return LearnedScalePrior(base, self._new_gain(value))
        if self._owner not in self._gains:
            self._gains[self._owner] = self._new_gain(value)
        return LearnedScalePrior(base, self._gains[self._owner])

    def _new_gain(self, value: Tensor) -> nn.Parameter:
        log_gain = torch.full((), math.log(self.gain_at_start), dtype=computing_dtype(value.dtype))
        return nn.Parameter(log_gain.to(value.device))

    def __repr__(self) -> str:
        base = "'fan_in'" if self.base is None else repr(self.base)
        return f"EmpiricalBayes({base}, gain={self.gain_at_start:g}, share={self.share!r})"
