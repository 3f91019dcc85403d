"""Run operators on one draw of the weights, recording the sites of calibration as a propagation would.

What a calibration compares propagated variances with: the spread of draws at the very same sites.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dubito.moments.moments import Context, Moments
from dubito.moments.operands import means
from dubito.moments.registry import name_of, resolve
from dubito.moments.rules_attention import Softmax, is_attention

_SOFTMAX = frozenset(("softmax", "_softmax", "special_softmax"))
_PRODUCTS = frozenset(("matmul", "mm", "bmm", "einsum"))


def run_on_draw(context: Context, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator itself; its results are `Moments` without a variance, so that they are followed further.

    Args:
        context: the propagation.
        function: the operator.
        args, kwargs: its arguments, those that depend on the draw as `Moments`.
    """
    rule = resolve(function)
    site = _site(context, rule.site if rule is not None else None, function, args)
    result = function(*means(args), **{k: means(v) for k, v in kwargs.items()})
    made = _followed(result)
    if isinstance(made, Moments):
        _remember(function, args, made)
        if site is not None:
            context.observe(site, made)
    return made


def _site(context: Context, kind: str | None, function: Any, args: tuple[Any, ...]) -> str | None:
    """The name of the site whose result is recorded; what enters an activation or a norm is recorded here."""
    if kind in ("pool", "attention"):
        return context.name_site(kind)
    if kind is not None and args and isinstance(args[0], Moments):
        context.site(kind, args[0])
    if name_of(function) not in _PRODUCTS or len(args) < 2:
        return None
    equation = args[0] if isinstance(args[0], str) else None
    operands = args[:2] if equation is None else args[1:]
    if len(operands) == 2 and is_attention(operands[0], operands[1], equation):
        return context.name_site("attention")
    return None


def _followed(result: Any) -> Any:
    if isinstance(result, Tensor):
        return Moments(result, None) if result.is_floating_point() else result  # type: ignore[arg-type]
    return type(result)(_followed(r) for r in result) if type(result) in (list, tuple) else result


def _remember(function: Any, args: tuple[Any, ...], result: Moments) -> None:
    """That a result is a softmax's, moved about at most."""
    first = args[0] if args else None
    if not isinstance(first, Moments):
        return
    if name_of(function) in _SOFTMAX:
        result.origin = Softmax(first)
    elif isinstance(first.origin, Softmax):
        same = result.shape[-1:] == first.shape[-1:] and result.mean.numel() == first.mean.numel()
        rule = resolve(function)
        if same and rule is not None and not rule.elementwise and rule.site is None:
            result.origin = first.origin
