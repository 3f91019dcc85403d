"""Rules of activations and other elementwise functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.moments import activation_moments as activations
from dubito.moments import function_moments as functions
from dubito.moments.composition import as_function, out_of_place
from dubito.moments.moments import Context, Moments
from dubito.moments.operands import full_precision, in_pieces, mean_of
from dubito.moments.quadrature_moments import delta_moments
from dubito.moments.registry import Exactness, register

SERIES = "a few parts in a thousand of the variance, more in dead tails"
EXPANSION = "by the log-normal law of the same mean and variance"


def _elementwise(
    names: str,
    formula: Callable[..., tuple[Tensor, Tensor]],
    options: tuple[str, ...] = (),
    exactness: Exactness = "exact",
    note: str = "",
    site: str | None = "activation",
) -> None:
    """Register one formula under names in torch and F; `options` are the operator's further arguments, in order."""

    def rule(context: Context, function: Any, input: Any, *args: Any, **kwargs: Any) -> Moments:
        if context.rules.activation == "delta":
            whole = as_function(out_of_place(function), (input, *args), kwargs)
            return Moments(*delta_moments(whole, input.mean, input.variance))
        given = dict(zip(options, args, strict=False)) | kwargs
        given = {k: v for k, v in given.items() if k in options and k != "_"}
        return full_precision(in_pieces(formula, **given), input)

    found = names.split()
    keys: list[Any] = [*found, *(getattr(F, n) for n in found if hasattr(F, n))]
    register(*keys, exactness=exactness, note=note, site=site, elementwise=True, passes_function=True)(rule)


_elementwise("relu", activations.relu_moments)
_elementwise("relu6", activations.relu6_moments)
_elementwise(
    "leaky_relu",
    lambda m, v, negative_slope=0.01: activations.leaky_relu_moments(m, v, negative_slope),
    ("negative_slope",),
)
_elementwise(
    "elu",
    lambda m, v, alpha=1.0: activations.elu_moments(m, v, alpha),
    ("alpha",),
)
_elementwise("selu", activations.selu_moments)
_elementwise("celu", activations.celu_moments, ("alpha",))
_elementwise("gelu", activations.gelu_moments, ("approximate",), "approximate", SERIES)
_elementwise("silu", activations.silu_moments, (), "approximate", SERIES)
_elementwise("sigmoid special_expit", activations.sigmoid_moments, (), "approximate", SERIES)
_elementwise("tanh", activations.tanh_moments, (), "approximate", SERIES)
_elementwise("softplus", activations.softplus_moments, ("beta", "threshold"), "approximate", SERIES)
_elementwise(
    "hardtanh",
    lambda m, v, min_val=-1.0, max_val=1.0: activations.hardtanh_moments(m, v, min_val, max_val),
    ("min_val", "max_val"),
)
_elementwise("hardsigmoid", activations.hardsigmoid_moments)
_elementwise("softshrink", activations.softshrink_moments, ("lambd",))
_elementwise("abs", activations.abs_moments, site=None)
_elementwise("erf special_erf", functions.erf_moments, site=None)
_elementwise("special_ndtr", functions.normal_cdf_moments, site=None)
_elementwise("square", functions.square_moments, site=None)
_elementwise("exp", functions.exp_moments, site=None)
_elementwise("expm1", functions.expm1_moments, site=None)
_elementwise("sin", functions.sin_moments, site=None)
_elementwise("cos", functions.cos_moments, site=None)
_elementwise("log", functions.log_moments, (), "approximate", EXPANSION, None)
_elementwise("log1p", functions.log1p_moments, (), "approximate", EXPANSION, None)
_elementwise("rsqrt", functions.rsqrt_moments, (), "approximate", EXPANSION, None)
_elementwise("sqrt", functions.sqrt_moments, (), "approximate", EXPANSION, None)
_elementwise("reciprocal", functions.reciprocal_moments, (), "approximate", EXPANSION, None)


def reciprocal_rule(x: Moments) -> Moments:
    """Moments of 1/x."""
    return full_precision(functions.reciprocal_moments, x)


@register("pow", "float_power", elementwise=True, exactness="approximate",
          note="exact for whole exponents, else " + EXPANSION)  # fmt: skip
def _pow(context: Context, input: Any, exponent: Any) -> Moments:
    if isinstance(exponent, Moments):
        raise context.no_rule("pow", " with a random exponent: write exp(b * log(a))")
    if isinstance(exponent, Tensor):
        if exponent.numel() != 1:
            raise context.no_rule("pow", " with a tensor of exponents")
        exponent = float(exponent)
    if exponent == 1:
        return input  # type: ignore[no-any-return]
    if context.rules.activation == "delta":
        return Moments(*delta_moments(lambda t: t**exponent, input.mean, input.variance))
    return full_precision(functions.pow_moments, input, exponent=float(exponent))


@register("clamp", "clip", elementwise=True)
def _clamp(context: Context, input: Moments, min: Any = None, max: Any = None) -> Moments:
    if isinstance(min, Tensor | Moments) or isinstance(max, Tensor | Moments):
        raise context.no_rule("clamp", " between tensors (torch.maximum and torch.minimum have rules)")
    return _clamped(context, input, min, max)


@register("clamp_min", "threshold_at", elementwise=True)
def _clamp_min(context: Context, input: Moments, min: Any) -> Moments:
    return _clamped(context, input, min, None)


@register("clamp_max", elementwise=True)
def _clamp_max(context: Context, input: Moments, max: Any) -> Moments:
    return _clamped(context, input, None, max)


def _clamped(context: Context, x: Moments, low: float | None, high: float | None) -> Moments:
    if context.rules.activation == "delta":
        return Moments(*delta_moments(lambda t: t.clamp(low, high), x.mean, x.variance))
    if low is not None and high is not None:
        return full_precision(activations.hardtanh_moments, x, lo=float(low), hi=float(high))
    if low is not None:  # low + max(x - low, 0)
        above = full_precision(activations.relu_moments, Moments(x.mean - low, x.variance))
        return Moments(above.mean + low, above.variance)
    if high is not None:
        below = full_precision(activations.relu_moments, Moments(high - x.mean, x.variance))
        return Moments(high - below.mean, below.variance)
    return x


@register("prelu", F.prelu, site="activation")
def _prelu(context: Context, input: Moments, weight: Any) -> Moments:
    if isinstance(weight, Moments):
        # f = x + (a - 1) min(x, 0), a independent of x: E f and E f² from the two sides of x
        return _random_prelu(input, weight)
    slope = _per_channel(weight, mean_of(input))
    return full_precision(lambda m, v: activations.leaky_relu_moments(m, v, slope), input)


def _per_channel(slope: Tensor, x: Tensor) -> Tensor:
    return slope if slope.numel() == 1 or x.ndim < 2 else slope.view(1, -1, *[1] * (x.ndim - 2))


def _random_prelu(x: Moments, slope: Moments) -> Moments:
    """PReLU of a random slope: Var = Var at the mean slope + v_slope E[min(x, 0)²]."""
    mean_slope, spread = _per_channel(slope.mean, x.mean), _per_channel(slope.variance, x.mean)
    at_mean = full_precision(lambda m, v: activations.leaky_relu_moments(m, v, mean_slope), x)
    below = full_precision(activations.relu_moments, Moments(-x.mean, x.variance))
    return Moments(at_mean.mean, at_mean.variance + spread * (below.variance + below.mean.square()))


@register(F.glu, torch.ops.aten.glu, exactness="approximate", note=SERIES)
def _glu(context: Context, input: Moments, dim: int = -1) -> Any:
    from dubito.moments.registry import apply

    value, gate = (
        Moments(m, v) for m, v in zip(input.mean.chunk(2, dim), input.variance.chunk(2, dim), strict=True)
    )
    return apply(context, torch.mul, (value, apply(context, torch.sigmoid, (gate,), {})), {})
