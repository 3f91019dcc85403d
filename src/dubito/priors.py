"""Priors: distributions of one parameter, rules that make them, and priors over named groups of parameters.

A prior is any `torch.distributions` object over the real line, the scale mixture of Bayes by Backprop, a
`PriorRule` (a recipe that looks at the parameter first) or a `WeightPrior` (a joint density over several
parameters at once). `resolve_prior` turns whichever was given into a module that the posterior can hold.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Normal, constraints

from dubito.scalar_checks import brief, broadcasts_to, computing_dtype, positive
from dubito.scale_mixture import ScaleMixture

__all__ = [
    "FanIn",
    "ParameterPrior",
    "Pretrained",
    "PriorRule",
    "PriorSpec",
    "ScaleMixture",
    "WeightPrior",
    "resolve_prior",
]


class PriorRule(ABC):
    """A rule that makes a prior from the parameter it is for (its value, its fan-in, its natural centre)."""

    def begin(self) -> PriorRule:
        """The rule as one network is to use it: a fresh copy, if priors made by it share anything."""
        return self

    def at(self, owner: nn.Module) -> PriorRule:
        """The rule for the parameters of one module, if it matters whose they are."""
        return self

    @abstractmethod
    def for_parameter(
        self, value: Tensor, fan_in: float, centre: float = 0.0
    ) -> Distribution | ParameterPrior:
        """The prior of one parameter.

        Args:
            value: the parameter as it stands when the network becomes Bayesian.
            fan_in: number of inputs that feed one output of the parameter's layer, > 0.
            centre: the value at which the parameter does nothing (1 for a normalisation scale, else 0).
        """


class FanIn(PriorRule):
    """Normal(centre, gain / sqrt(fan_in)): pre-activations keep their size at any width. The default prior.

    With a fixed Normal(0, 1) the KL of a wide layer exceeds the whole likelihood before training begins.

    Args:
        gain: multiplies the standard deviation, > 0.

    Raises:
        ValueError: `gain` not positive and finite; at use, `fan_in` not positive and finite.
    """

    def __init__(self, gain: float = 1.0) -> None:
        self.gain = positive("gain", gain)

    def for_parameter(self, value: Tensor, fan_in: float, centre: float = 0.0) -> Normal:
        """Normal(centre, gain / sqrt(fan_in)), as exact scalars."""
        scale = self.gain * positive("fan_in", fan_in) ** -0.5
        # float64 so that the scalars stay exact whatever dtype the parameter has or later takes
        like = torch.empty((), dtype=torch.float64, device=value.device)
        return Normal(torch.full_like(like, float(centre)), torch.full_like(like, scale))

    def __repr__(self) -> str:
        return f"FanIn(gain={self.gain:g})"


class Pretrained(PriorRule):
    """Normal(the parameter's present value, scale): the prior trusts the pretrained network (MOPED).

    Krishnan et al. 2020, "Specifying weight priors in Bayesian deep neural networks with empirical Bayes".
    The prior then depends on the data the network was trained on: it is not "fixed before the data", which
    PAC-Bayes certificates require.

    Args:
        scale: standard deviation of the prior, > 0; None means gain / sqrt(fan_in).
        gain: multiplies the fan-in scale where `scale` is None.

    Raises:
        ValueError: `scale` or `gain` not positive and finite; at use, NaN or infinity in the parameter.
    """

    def __init__(self, scale: float | None = None, gain: float = 1.0) -> None:
        self.scale = None if scale is None else positive("scale", scale)
        self.gain = positive("gain", gain)

    def for_parameter(self, value: Tensor, fan_in: float, centre: float = 0.0) -> Normal:
        """Normal(value, scale); `centre` plays no part."""
        loc = value.detach().to(computing_dtype(value.dtype)).clone()
        if not bool(loc.isfinite().all()):
            raise ValueError(
                "the parameter contains NaN or infinity, so it cannot centre a Pretrained prior: "
                "load sound weights first, or use FanIn()."
            )
        scale = self.scale if self.scale is not None else self.gain * positive("fan_in", fan_in) ** -0.5
        return Normal(loc, torch.full((), scale, dtype=loc.dtype, device=loc.device))

    def __repr__(self) -> str:
        return f"Pretrained(scale={self.scale}, gain={self.gain:g})"


class ParameterPrior(nn.Module):
    """The prior of one parameter tensor.

    A distribution described by plain tensors (Normal, Laplace, StudentT, Cauchy, ScaleMixture, …) is taken
    apart: scalars become Python floats, exact in any dtype, and larger tensors become buffers, so that
    `.to()` and `state_dict()` carry them. One that cannot be (MixtureSameFamily, TransformedDistribution, …)
    is kept and used as it was given: it stays on its own device and in its own dtype, outside `state_dict()`.

    Args:
        distribution: a scalar distribution (no event dimensions) over the real line.

    Raises:
        TypeError: not a `torch.distributions.Distribution`, or one without `log_prob`.
        ValueError: wrong support, event dimensions, parameters that are NaN, infinite, out of their range or
            that require gradient (a learned prior is a `WeightPrior`).
    """

    def __init__(self, distribution: Distribution) -> None:
        super().__init__()
        _check_distribution(distribution)
        self.kind: type[Distribution] = type(distribution)
        self.batch_shape = distribution.batch_shape
        self._scalars: dict[str, float] = {}
        self._tensor_names: list[str] = []
        self._given: Distribution | None = None
        parameters = _plain_parameters(distribution)
        if parameters is None:
            self._given = distribution
            return
        for name, tensor in parameters.items():
            if tensor.numel() == 1:
                self._scalars[name] = float(tensor)
            else:
                self.register_buffer(name, tensor.to(computing_dtype(tensor.dtype)).clone())
                self._tensor_names.append(name)

    def distribution(self, like: Tensor) -> Distribution:
        """The prior as a distribution in the dtype (float32 at least) and on the device of `like`."""
        if self._given is not None:
            return self._given
        place: dict[str, Any] = {"dtype": computing_dtype(like.dtype), "device": like.device}
        # a fill, unlike torch.tensor, copies nothing from the host
        arguments = {name: torch.full((), number, **place) for name, number in self._scalars.items()}
        arguments |= {name: getattr(self, name).to(**place) for name in self._tensor_names}
        rebuild: Any = self.kind
        return rebuild(**arguments, validate_args=False)  # type: ignore[no-any-return]

    def gaussian(self) -> tuple[float | Tensor, float | Tensor] | None:
        """(mean, standard deviation) where the prior is a Normal, else None.

        Floats where the prior is scalar, which is what the hot path of the KL wants.
        """
        if self.kind is not Normal or self._given is not None:
            return None
        mean, sd = (self._scalars[n] if n in self._scalars else getattr(self, n) for n in ("loc", "scale"))
        return mean, sd

    def scale_mixture(self) -> tuple[float, float, float, float] | None:
        """(pi, s1, s2, loc) where the prior is a `ScaleMixture` of scalars, else None."""
        if self.kind is not ScaleMixture or self._given is not None or self._tensor_names:
            return None
        return self._scalars["pi"], self._scalars["s1"], self._scalars["s2"], self._scalars["loc"]

    def log_prob(self, value: Tensor) -> Tensor:
        """Elementwise log density in nats; leading dimensions of draws are allowed."""
        value = value.to(computing_dtype(value.dtype))
        return self.distribution(value).log_prob(value)

    def extra_repr(self) -> str:
        """The kind of distribution and its parameters."""
        if self._given is not None:
            return repr(self._given)
        shown = [f"{name}={number:g}" for name, number in self._scalars.items()]
        shown += [f"{name}={tuple(getattr(self, name).shape)}" for name in self._tensor_names]
        return f"{self.kind.__name__}({', '.join(shown)})"


class WeightPrior(nn.Module, ABC):
    """A joint prior over a named group of parameters: full covariances and learned priors enter here.

    Only `log_prob` is needed. `kl`, `whiten` and `unwhiten` are capabilities: a prior that can should
    override them, one that cannot says so with the remedy.
    """

    @abstractmethod
    def log_prob(self, weights: dict[str, Tensor]) -> Tensor:
        """Scalar log density in nats of one draw of the group, keyed by parameter name."""

    def kl(self, posterior: Any) -> Tensor:
        """KL(posterior || prior) in nats where a closed form exists."""
        raise NotImplementedError(
            f"{type(self).__name__} has no closed-form KL: ask for method='monte_carlo', "
            "or override kl(posterior)."
        )

    def whiten(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights in coordinates in which the prior is a standard normal."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot whiten weights: override whiten and unwhiten with a map to and "
            "from standard normal coordinates, or use a method that works in the weights themselves."
        )

    def unwhiten(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `whiten`."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot unwhiten weights: override whiten and unwhiten with a map to and "
            "from standard normal coordinates, or use a method that works in the weights themselves."
        )


PriorSpec = Distribution | PriorRule | WeightPrior | ParameterPrior | str | None
"""What may be given as a prior; strings are "fan_in" and "pretrained", None means "fan_in"."""

_RULES: dict[str, type[PriorRule]] = {"fan_in": FanIn, "pretrained": Pretrained}


def resolve_prior(
    spec: PriorSpec, value: Tensor, fan_in: float, centre: float = 0.0
) -> ParameterPrior | WeightPrior:
    """The prior of one parameter, whichever way it was asked for.

    Args:
        spec: a distribution (taken literally), a rule, a `WeightPrior` or `ParameterPrior` (returned as it
            is), "fan_in", "pretrained" or None, which is "fan_in".
        value: the parameter, for its shape, device and (Pretrained) value.
        fan_in: number of inputs that feed one output of the parameter's layer.
        centre: centre of the prior where a rule makes it.

    Raises:
        TypeError: something that is no prior.
        ValueError: an unknown name, or a distribution that cannot be this parameter's prior.
    """
    if isinstance(spec, WeightPrior):
        return spec
    if spec is None or isinstance(spec, str):
        name = "fan_in" if spec is None else spec
        if name not in _RULES:
            known = ", ".join(repr(rule) for rule in _RULES)
            raise ValueError(f"unknown prior {name!r}: give one of {known}, or a torch.distributions object.")
        spec = _RULES[name]()
    if isinstance(spec, PriorRule):
        spec = spec.for_parameter(value, fan_in, centre)
    prior = spec if isinstance(spec, ParameterPrior) else ParameterPrior(spec)
    _check_shape(prior.batch_shape, value.shape)
    return prior


def _check_shape(batch_shape: torch.Size, shape: torch.Size) -> None:
    if not broadcasts_to(batch_shape, shape):
        raise ValueError(
            f"prior of batch shape {tuple(batch_shape)} does not broadcast to the parameter's shape "
            f"{tuple(shape)}: give scalar parameters, or tensors of the parameter's shape."
        )


def _check_distribution(distribution: object) -> None:
    if isinstance(distribution, type):
        raise TypeError(
            f"prior is the class {distribution.__name__}: give an instance, {distribution.__name__}(…)."
        )
    if not isinstance(distribution, Distribution):
        raise TypeError(
            "prior must be a torch.distributions object, a PriorRule, a WeightPrior, 'fan_in' or "
            f"'pretrained', got {type(distribution).__name__}: to use another density, subclass "
            "torch.distributions.Distribution or WeightPrior and define log_prob."
        )
    kind = type(distribution)
    if kind.log_prob is Distribution.log_prob:
        raise TypeError(f"prior {kind.__name__} has no log_prob: define it, or choose another distribution.")
    if distribution.event_shape:
        raise ValueError(
            f"prior {kind.__name__} has event shape {tuple(distribution.event_shape)}, but the prior of one "
            "parameter is elementwise: give a scalar distribution (of an Independent, its base_dist), or a "
            "WeightPrior for a joint density."
        )
    if not _covers_real_line(distribution):
        raise ValueError(
            f"prior on the wrong support: {kind.__name__} lives on {distribution.support}, but a weight may "
            "take any real value. Use Normal, Laplace, StudentT, Cauchy or ScaleMixture."
        )


def _covers_real_line(distribution: Distribution) -> bool:
    try:
        support: Any = distribution.support
    except NotImplementedError:  # a user's class that does not say
        return True
    if support is None or isinstance(support, type(constraints.real)):
        return True
    if getattr(support, "event_dim", 0) or getattr(support, "is_discrete", False):
        return False
    device = next((v.device for v in vars(support).values() if isinstance(v, Tensor)), None)
    far = torch.tensor([-1e30, -1.0, 0.0, 0.5, 1e30], device=device)
    return bool(support.check(far.reshape(-1, *(1 for _ in distribution.batch_shape))).all())


def _plain_parameters(distribution: Distribution) -> dict[str, Tensor] | None:
    """The tensors that rebuild the distribution, without their broadcast copies; None where it is exotic."""
    kind = type(distribution)
    names = list(distribution.arg_constraints) if _has_plain_arguments(distribution) else []
    whole = {name: getattr(distribution, name) for name in names}
    for name, tensor in whole.items():
        _check_parameter(kind.__name__, name, tensor, distribution.arg_constraints[name])
    parameters = {name: _without_copies(tensor.detach()) for name, tensor in whole.items()}
    if not names or not _rebuilds(distribution, parameters):
        _check_as_given(distribution)
        return None
    return parameters


def _has_plain_arguments(distribution: Distribution) -> bool:
    try:
        named = distribution.arg_constraints
    except NotImplementedError:
        return False
    accepted = set(inspect.signature(type(distribution).__init__).parameters) - {"self"}
    # nothing beyond the constrained arguments, or what is rebuilt would forget it
    exact = "validate_args" in accepted and accepted - {"validate_args"} == set(named)
    return exact and all(isinstance(getattr(distribution, name, None), Tensor) for name in named)


def _check_parameter(kind: str, name: str, tensor: Tensor, constraint: Any) -> None:
    if tensor.requires_grad:
        raise ValueError(
            f"prior {kind}: {name} requires gradient, which a fixed prior would drop. Detach it, or learn "
            "the prior's scale by EmpiricalBayes (anything else by a WeightPrior)."
        )
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"prior {kind}: {name} contains NaN or infinity ({brief(tensor)}).")
    if not bool(constraint.check(tensor).all()):
        raise ValueError(f"prior {kind}: {name} must satisfy {constraint}, got {brief(tensor)}.")


def _check_as_given(distribution: Distribution) -> None:
    density = distribution.log_prob(_origin(distribution))
    if density.requires_grad:
        raise ValueError(
            f"prior {type(distribution).__name__} has parameters that require gradient, which a fixed prior "
            "would not train. Detach them, or learn the prior as a WeightPrior."
        )
    if bool(density.isnan().any()):
        raise ValueError(
            f"prior {type(distribution).__name__} has log_prob NaN at 0: check its parameters for NaN."
        )


def _rebuilds(distribution: Distribution, parameters: dict[str, Tensor]) -> bool:
    """Whether a class from outside torch is the same again after being built from its own attributes."""
    kind: Any = type(distribution)
    if kind is ScaleMixture or kind.__module__.startswith("torch.distributions."):
        return True
    again = kind(**parameters, validate_args=False)
    origin = _origin(distribution)
    return all(
        torch.allclose(again.log_prob(origin + shift), distribution.log_prob(origin + shift))
        for shift in (-1.0, 0.0, 2.0)
    )


def _origin(distribution: Distribution) -> Tensor:
    """Zeros where the distribution lives. Not from a draw: making a prior must not advance the generator."""
    try:
        return torch.zeros_like(distribution.mean)
    except NotImplementedError:
        return torch.zeros(distribution.batch_shape)


def _without_copies(tensor: Tensor) -> Tensor:
    """The tensor with dimensions that `expand` made (stride 0) cut to one: a scalar scale stays a scalar."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
