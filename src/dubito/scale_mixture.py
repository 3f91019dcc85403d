"""The scale mixture of two Gaussians, the prior of Bayes by Backprop."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Normal, constraints
from torch.distributions.utils import broadcast_all

from dubito.scalar_checks import brief

__all__ = ["ScaleMixture"]

_SQRT_HALF = math.sqrt(0.5)
_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)
_ONE_DRAW = torch.Size()


class ScaleMixture(Distribution):
    """Two zero-centred Gaussians of different widths: pi N(loc, s1²) + (1 - pi) N(loc, s2²).

    The spike-and-slab-like prior of Bayes by Backprop (Blundell et al. 2015, equation 7), usually with
    pi = 1/2, s1 = 1 and s2 = exp(-6). `s1` and `s2` are **standard deviations**. The log density is a
    log-sum-exp, so it and its gradient stay right arbitrarily far out in the tails.

    Args:
        pi: weight of the first component, in the open interval (0, 1).
        s1: standard deviation of the first component, > 0.
        s2: standard deviation of the second component, > 0.
        loc: common centre.
        validate_args: False skips every check (for repeated construction from checked values).

    Raises:
        ValueError: `pi` outside (0, 1), `s1` or `s2` not a positive finite number, `loc` not finite.
    """

    arg_constraints = {  # noqa: RUF012 (declared as a class attribute by torch)
        "pi": constraints.unit_interval,
        "s1": constraints.positive,
        "s2": constraints.positive,
        "loc": constraints.real,
    }
    support = constraints.real
    has_rsample = True
    pi: Tensor
    s1: Tensor
    s2: Tensor
    loc: Tensor

    def __init__(
        self,
        pi: float | Tensor,
        s1: float | Tensor,
        s2: float | Tensor,
        loc: float | Tensor = 0.0,
        validate_args: bool | None = None,
    ) -> None:
        self.pi, self.s1, self.s2, self.loc = broadcast_all(*(_floating(v) for v in (pi, s1, s2, loc)))
        if validate_args is not False:
            self._check()
        super().__init__(self.loc.shape, validate_args=validate_args)

    def _check(self) -> None:
        if not bool(((self.pi > 0) & (self.pi < 1)).all()):
            raise ValueError(
                f"pi must lie strictly between 0 and 1, got {brief(self.pi)}; for one Gaussian use Normal."
            )
        for name in ("s1", "s2"):
            value = getattr(self, name)
            if not bool(((value > 0) & value.isfinite()).all()):
                raise ValueError(
                    f"{name} is a standard deviation and must be positive and finite, got {brief(value)}."
                )
        if not bool(self.loc.isfinite().all()):
            raise ValueError(f"loc must be finite, got {brief(self.loc)}.")

    @property
    def mean(self) -> Tensor:
        """The common centre."""
        return self.loc

    @property
    def mode(self) -> Tensor:
        """The common centre."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """pi s1² + (1 - pi) s2²."""
        return self.pi * self.s1.square() + (1.0 - self.pi) * self.s2.square()

    def expand(self, batch_shape: Any, _instance: Any = None) -> ScaleMixture:
        """The same mixture with its parameters broadcast to `batch_shape`."""
        new = self._get_checked_instance(ScaleMixture, _instance)
        shape = torch.Size(batch_shape)
        for name in ("pi", "s1", "s2", "loc"):
            setattr(new, name, getattr(self, name).expand(shape))
        super(ScaleMixture, new).__init__(shape, validate_args=False)
        new._validate_args = self._validate_args
        return new  # type: ignore[no-any-return]

    def components(self) -> tuple[tuple[Tensor, Normal], tuple[Tensor, Normal]]:
        """The two (log weight, Normal) pairs."""
        first = Normal(self.loc, self.s1, validate_args=False)
        second = Normal(self.loc, self.s2, validate_args=False)
        return (self.pi.log(), first), (torch.log1p(-self.pi), second)

    def log_prob(self, value: Tensor) -> Tensor:
        """Elementwise log density, by log-sum-exp."""
        if self._validate_args:
            self._validate_sample(value)
        deviation = value - self.loc
        first = self.pi.log() - self.s1.log() - 0.5 * (deviation / self.s1).square()
        second = torch.log1p(-self.pi) - self.s2.log() - 0.5 * (deviation / self.s2).square()
        return torch.logaddexp(first, second) - _HALF_LOG_TWO_PI

    def cdf(self, value: Tensor) -> Tensor:
        """Elementwise probability of lying below `value`."""
        if self._validate_args:
            self._validate_sample(value)
        deviation = (value - self.loc) * _SQRT_HALF
        first, second = torch.erf(deviation / self.s1), torch.erf(deviation / self.s2)
        return 0.5 * (1.0 + self.pi * first + (1.0 - self.pi) * second)

    def sample(self, sample_shape: Any = _ONE_DRAW, generator: torch.Generator | None = None) -> Tensor:
        """Draws of shape `sample_shape + batch_shape`, without gradient."""
        with torch.no_grad():
            shape = torch.Size(sample_shape) + self.batch_shape
            dtype, device = self.loc.dtype, self.loc.device
            chance = torch.rand(shape, generator=generator, dtype=dtype, device=device)
            noise = torch.randn(shape, generator=generator, dtype=dtype, device=device)
            return self.loc + torch.where(chance < self.pi, self.s1, self.s2) * noise

    def rsample(self, sample_shape: Any = _ONE_DRAW, generator: torch.Generator | None = None) -> Tensor:
        """Draws that carry the gradient to every parameter, `pi` included.

        The value is that of `sample`; the gradient is the implicit reparametrisation -(dF/dtheta)/f of the
        distribution function F (Figurnov et al. 2018), since the choice of component has none of its own.
        """
        draw = self.sample(sample_shape, generator)
        parameters = (self.pi, self.s1, self.s2, self.loc)
        if not (torch.is_grad_enabled() and any(p.requires_grad for p in parameters)):
            return draw
        below = self.cdf(draw)
        return draw + (below.detach() - below) / self.log_prob(draw).detach().exp()


def _floating(value: float | Tensor) -> float | Tensor:
    return value.float() if isinstance(value, Tensor) and not value.is_floating_point() else value
