"""Rules of sums, products and powers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dubito.moments.bilinear_moments import bilinear_moments
from dubito.moments.moments import Context, Moments
from dubito.moments.operands import made, mean_of, pair
from dubito.moments.registry import register
from dubito.moments.rules_bilinear import Operand, plus, scaled

INDEPENDENT = "operands taken as independent"


@register("add", "radd", elementwise=True, note="operands taken as independent")
def _add(context: Context, input: Any, other: Any, *, alpha: Any = 1, out: None = None) -> Any:
    return _sum(input, scaled(other, alpha))


def _sum(a: Any, b: Any) -> Any:
    """A sum in which either may be a number."""
    if isinstance(a, Tensor | Moments) and isinstance(b, Tensor | Moments):
        return plus(a, b)
    x, constant = (a, b) if isinstance(a, Moments) else (b, a)
    return Moments(x.mean + constant, x.variance)


@register("sub", "subtract", elementwise=True, note=INDEPENDENT)
def _sub(context: Context, input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return _sum(input, scaled(other, -alpha) if isinstance(other, Moments) else -alpha * other)


@register("rsub", elementwise=True, note=INDEPENDENT)
def _rsub(context: Context, input: Any, other: Any, alpha: Any = 1) -> Any:
    return _sum(other, scaled(input, -alpha) if isinstance(input, Moments) else -alpha * input)


@register("neg", "negative", elementwise=True)
def _neg(context: Context, input: Moments) -> Moments:
    return Moments(-input.mean, input.variance)


@register("positive", elementwise=True)
def _positive(context: Context, input: Moments) -> Moments:
    return input


@register("mul", "multiply", "rmul", elementwise=True, note=INDEPENDENT)
def _mul(context: Context, input: Any, other: Any) -> Any:
    if isinstance(input, Moments) and isinstance(other, Moments):
        return product(input, other)
    x, factor = (input, other) if isinstance(input, Moments) else (other, input)
    square = factor.square() if isinstance(factor, Tensor) else factor**2
    mean, variance = x.mean * factor, x.variance * square
    return Moments(mean, variance)


def product(a: Operand, b: Operand) -> Any:
    """The product of two independent tensors: exact."""
    return made(bilinear_moments(torch.mul, pair(a), pair(b)))


@register("div", "divide", "true_divide", elementwise=True, note="by a random tensor: its reciprocal's moments, "
          "operands taken as independent")  # fmt: skip
def _div(context: Context, input: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is not None:
        raise context.no_rule(f"div(rounding_mode={rounding_mode!r})")
    if not isinstance(other, Moments):
        square = other.square() if isinstance(other, Tensor) else other**2
        return Moments(input.mean / other, input.variance / square)
    return _mul(context, reciprocal(other), input)


@register("rdiv", elementwise=True, exactness="approximate", note="second-order mean, first-order variance")
def _rdiv(context: Context, input: Any, other: Any) -> Any:
    return _div(context, other, input)


def reciprocal(x: Moments) -> Moments:
    """Moments of 1/x."""
    from dubito.moments.rules_elementwise import reciprocal_rule

    return reciprocal_rule(x)


@register("addcmul", note=INDEPENDENT)
def _addcmul(context: Context, input: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> Any:
    return _sum(input, scaled(product(tensor1, tensor2), value))


@register("addcdiv", exactness="approximate", note="operands taken as independent; reciprocal by expansion")
def _addcdiv(context: Context, input: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> Any:
    random = isinstance(tensor1, Moments) or isinstance(tensor2, Moments)
    quotient = _div(context, tensor1, tensor2) if random else tensor1 / tensor2
    return _sum(input, scaled(quotient, value))


@register("lerp", note=INDEPENDENT)
def _lerp(context: Context, input: Any, end: Any, weight: Any) -> Any:
    if isinstance(weight, Moments):
        raise context.no_rule("lerp", " whose weight is random")
    return _sum(_mul_any(input, 1 - weight), _mul_any(end, weight))


def _mul_any(x: Any, factor: Any) -> Any:
    if not isinstance(x, Moments):
        return x * factor
    square = factor.square() if isinstance(factor, Tensor) else factor**2
    return Moments(x.mean * factor, x.variance * square)


@register("where")
def _where(context: Context, condition: Any, input: Any, other: Any) -> Any:
    if isinstance(condition, Moments):  # Tensor.where(x, condition, other)
        condition, input = input, condition
    if isinstance(condition, Moments):
        raise context.no_rule("where", " whose condition is random")
    mean = torch.where(condition, mean_of(input), mean_of(other))
    zero = torch.zeros((), dtype=mean.dtype, device=mean.device)
    chosen, left = (v.variance if isinstance(v, Moments) else zero for v in (input, other))
    return Moments(mean, torch.where(condition, chosen, left))


@register("masked_fill")
def _masked_fill(context: Context, input: Any, mask: Any, value: Any) -> Any:
    if isinstance(mask, Moments):
        raise context.no_rule("masked_fill", " whose mask is random")
    if isinstance(value, Moments):
        return _where(context, mask, value, input)
    return Moments(input.mean.masked_fill(mask, value), input.variance.masked_fill(mask, 0.0))


@register("maximum", "max_pairwise", exactness="exact", note="Clark's formula, operands taken as independent")
def _maximum(context: Context, input: Any, other: Any) -> Any:
    from dubito.moments.pooling_moments import maximum_moments

    return Moments(*maximum_moments(_both(input), _both(other)))


@register("minimum", exactness="exact", note="Clark's formula, operands taken as independent")
def _minimum(context: Context, input: Any, other: Any) -> Any:
    from dubito.moments.pooling_moments import minimum_moments

    return Moments(*minimum_moments(_both(input), _both(other)))


def _both(value: Any) -> tuple[Tensor, Tensor]:
    if isinstance(value, Moments):
        return value.mean, value.variance
    return value, torch.zeros_like(value)
