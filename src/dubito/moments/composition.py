"""Elementwise functions of one random tensor, taken together.

In `x * torch.sigmoid(x)` the two factors are functions of the same variable, and a product rule for independent ones
would be wrong. Every elementwise result therefore remembers the variable and the function of it, for as long as the
variable itself is alive; where two such results meet, the whole function is integrated over that variable.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from dubito.moments.moments import Context, Moments
from dubito.moments.quadrature_moments import delta_moments, quadrature_moments

NODES = 9  # of Gauss-Hermite: composed functions bend more than their parts


@dataclass
class Pointwise:
    """`x = function(base)`, entry by entry."""

    base: weakref.ReferenceType[Moments]
    function: Callable[[Tensor], Tensor]


def base_of(x: Moments) -> tuple[Moments, Callable[[Tensor], Tensor] | None]:
    """The variable that `x` is a function of and that function; itself and None where there is none."""
    if isinstance(x.origin, Pointwise):
        base = x.origin.base()
        if base is not None:
            return base, x.origin.function
    return x, None


def share_a_base(randoms: Sequence[Moments]) -> bool:
    """Whether all are functions of one variable."""
    first = base_of(randoms[0])[0]
    return all(base_of(x)[0] is first for x in randoms[1:])


def as_function(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """The operator as a function of the variable that its random arguments are functions of.

    It holds none of them, so that they can die.
    """

    def stand_in(value: Any) -> Any:
        return _Variable(base_of(value)[1]) if isinstance(value, Moments) else value

    fixed = [stand_in(a) for a in args]
    named = {k: stand_in(v) for k, v in kwargs.items()}

    def whole(t: Tensor) -> Tensor:
        def at(value: Any) -> Any:
            if not isinstance(value, _Variable):
                return value
            return t if value.function is None else value.function(t)

        result: Tensor = function(*[at(a) for a in fixed], **{k: at(v) for k, v in named.items()})
        return result

    return whole


@dataclass
class _Variable:
    function: Callable[[Tensor], Tensor] | None


def composed(
    context: Context, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], randoms: Sequence[Moments]
) -> Moments:
    """An elementwise operator whose random arguments are all functions of one variable: integrated over it."""
    whole = as_function(out_of_place(function), args, kwargs)
    base = base_of(randoms[0])[0]
    if context.rules.activation == "delta":
        result = Moments(*delta_moments(whole, base.mean, base.variance))
    else:
        result = Moments(*quadrature_moments(whole, base.mean, base.variance, NODES))
    result.origin = Pointwise(weakref.ref(base), whole)
    return result


def compose(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], x: Moments, result: Moments
) -> None:
    """Let `result = function(x, …)` remember the variable."""
    base, _ = base_of(x)
    if result is x or result.origin is not None:
        return
    whole = as_function(out_of_place(function), args, kwargs)
    result.origin = Pointwise(weakref.ref(base), whole)


def out_of_place(function: Any) -> Any:
    """The operator that gives what an in-place one writes."""
    name = getattr(function, "__name__", "")
    if isinstance(function, OpOverload):
        packet = function.overloadpacket
        plain = str(packet._qualified_op_name.split("::")[-1])
        if plain.endswith("_") and not plain.endswith("__"):
            return getattr(torch.ops.aten, plain[:-1])
        return function
    if name.startswith("__i") and name.endswith("__"):
        return getattr(torch.Tensor, f"__{name[3:]}", function)
    if name.endswith("_") and not name.endswith("__"):
        return getattr(torch.Tensor, name[:-1], None) or getattr(torch.nn.functional, name[:-1], function)
    return function
