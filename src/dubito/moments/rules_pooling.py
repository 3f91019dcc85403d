"""Rules of sums, means, pools and maxima."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from dubito.moments import pooling_moments as formulas
from dubito.moments.function_moments import sqrt_moments, square_moments
from dubito.moments.moments import Context, Moments
from dubito.moments.operands import full_precision
from dubito.moments.registry import register

INDEPENDENT = "entries taken as independent, or correlated by the calibration's rho"
CLARK = "Clark's formula, pairwise"


def _none_is_zero(rho: Any) -> Any:
    return 0.0 if rho is None else rho


def _cast(x: Moments, dtype: Any) -> Moments:
    return x if dtype is None else Moments(x.mean.to(dtype), x.variance.to(dtype))


@register("mean", "nanmean", note=INDEPENDENT, site="pool")
def _mean(
    context: Context,
    input: Moments,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
    rho: Any = None,
    **kw: Any,
) -> Moments:
    dim = kw.get("axis", dim)
    x = _cast(input, dtype)
    return Moments(*formulas.mean_moments(x.mean, x.variance, _dims(dim), keepdim, _none_is_zero(rho)))


@register("sum", note=INDEPENDENT, site="pool")
def _sum(
    context: Context,
    input: Moments,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
    rho: Any = None,
    **kw: Any,
) -> Moments:
    dim = kw.get("axis", dim)
    x = _cast(input, dtype)
    return Moments(*formulas.sum_moments(x.mean, x.variance, _dims(dim), keepdim, _none_is_zero(rho)))


def _dims(dim: Any) -> Any:
    return None if isinstance(dim, list | tuple) and len(dim) == 0 else dim


@register("cumsum", note=INDEPENDENT)
def _cumsum(context: Context, input: Moments, dim: int, **kwargs: Any) -> Moments:
    return Moments(input.mean.cumsum(dim, **kwargs), input.variance.cumsum(dim, **kwargs))


def _average(dims: int) -> Callable[..., Moments]:
    def pool(
        context: Context, input: Moments, kernel_size: Any, *args: Any, rho: Any = None, **options: Any
    ) -> Moments:
        names = ("stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
        given = dict(zip(names, args, strict=False)) | options
        given = {k: v for k, v in given.items() if not (k == "stride" and (v is None or v == []))}
        return Moments(
            *formulas.avg_pool_moments(
                input.mean, input.variance, kernel_size, dims=dims, rho=_none_is_zero(rho), **given
            )
        )

    return pool


def _adaptive_average(dims: int) -> Callable[..., Moments]:
    def pool(context: Context, input: Moments, output_size: Any, *, rho: Any = None) -> Moments:
        size = output_size[0] if dims == 1 and isinstance(output_size, list | tuple) else output_size
        moments = formulas.adaptive_avg_pool_moments(
            input.mean, input.variance, size, dims, _none_is_zero(rho)
        )
        return Moments(*moments)

    return pool


def _maximum(dims: int) -> Callable[..., Any]:
    def pool(
        context: Context,
        input: Moments,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Moments:
        if return_indices:
            raise context.no_rule("max_pool(return_indices=True)", ": which entry is largest is random")
        stride = None if stride == [] else stride
        if context.rules.activation == "delta":
            options = (kernel_size, stride, padding, dilation, ceil_mode)
            return Moments(*formulas.routed_max_pool_moments(input.mean, input.variance, *options, dims=dims))
        return Moments(
            *formulas.max_pool_moments(
                input.mean, input.variance, kernel_size, stride, padding, dilation, ceil_mode, dims
            )
        )

    return pool


def _adaptive_maximum(dims: int) -> Callable[..., Any]:
    def pool(context: Context, input: Moments, output_size: Any, return_indices: bool = False) -> Moments:
        if return_indices:
            raise context.no_rule(
                "adaptive_max_pool(return_indices=True)", ": which entry is largest is random"
            )
        size = output_size[0] if dims == 1 and isinstance(output_size, list | tuple) else output_size
        if context.rules.activation == "delta":
            return Moments(*formulas.routed_adaptive_max_pool_moments(input.mean, input.variance, size, dims))
        return Moments(*formulas.adaptive_max_pool_moments(input.mean, input.variance, size, dims))

    return pool


for _d in (1, 2, 3):
    register(f"avg_pool{_d}d", note=INDEPENDENT, site="pool")(_average(_d))
    register(f"adaptive_avg_pool{_d}d", getattr(F, f"adaptive_avg_pool{_d}d"), note=INDEPENDENT, site="pool")(
        _adaptive_average(_d)
    )
    register(
        f"max_pool{_d}d", f"_max_pool{_d}d", getattr(F, f"max_pool{_d}d"), exactness="approximate", note=CLARK
    )(_maximum(_d))
    register(f"adaptive_max_pool{_d}d", exactness="approximate", note=CLARK)(_adaptive_maximum(_d))
    for _name in (f"max_pool{_d}d_with_indices", f"adaptive_max_pool{_d}d_with_indices"):
        _function = getattr(F, _name, None)
        if _function is not None:
            register(_function, exactness="approximate", note=CLARK)(
                _adaptive_maximum(_d) if "adaptive" in _name else _maximum(_d)
            )


@register("max", "amax", exactness="approximate", note=CLARK)
def _amax(context: Context, input: Moments, dim: Any = None, keepdim: bool = False, **kw: Any) -> Any:
    return _extreme(formulas.amax_moments, torch.maximum, input, dim, keepdim)


@register("min", "amin", exactness="approximate", note=CLARK)
def _amin(context: Context, input: Moments, dim: Any = None, keepdim: bool = False, **kw: Any) -> Any:
    return _extreme(formulas.amin_moments, torch.minimum, input, dim, keepdim)


def _extreme(formula: Any, pairwise: Any, input: Any, dim: Any, keepdim: bool) -> Any:
    if isinstance(dim, Moments | torch.Tensor):
        between = formulas.maximum_moments if pairwise is torch.maximum else formulas.minimum_moments
        both = [
            (x.mean, x.variance) if isinstance(x, Moments) else (x, torch.zeros_like(x)) for x in (input, dim)
        ]
        return Moments(*between(*both))
    return Moments(*formula(input.mean, input.variance, dim, keepdim))


# ---- second moments ---------------------------------------------------------------------------------------------

FIRST_ORDER = "entries and their mean taken as independent"


def _axes(x: Moments, dim: Any) -> list[int]:
    return list(range(x.ndim)) if dim is None or dim == [] else [dim] if isinstance(dim, int) else list(dim)


def _spread(x: Moments, dim: Any, correction: float, keepdim: bool) -> Moments:
    """The empirical variance over dimensions: `sum (x - mean)² / (n - correction)`."""
    dims = _axes(x, dim)
    count = 1
    for d in dims:
        count *= x.shape[d]
    deviation = x.mean - x.mean.mean(dims, keepdim=True)
    square = deviation.square()
    mean = (square + x.variance * (1.0 - 1.0 / count)).sum(dims, keepdim=keepdim)
    variance = (x.variance * (4.0 * square + 2.0 * x.variance)).sum(dims, keepdim=keepdim)
    return Moments(mean / (count - correction), variance / (count - correction) ** 2)


def _correction(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, float, bool]:
    """dim, correction and keepdim, of the several ways to call `var`."""
    dim, rest = kwargs.get("dim"), list(args)
    if rest and not isinstance(rest[0], bool):
        dim = rest.pop(0)
    unbiased = kwargs.get("unbiased", rest.pop(0) if rest else True)
    keepdim = kwargs.get("keepdim", rest.pop(0) if rest else False)
    correction = kwargs.get("correction")
    return dim, float(unbiased) if correction is None else float(correction), bool(keepdim)


@register("var", exactness="approximate", note=FIRST_ORDER)
def _var(context: Context, input: Moments, *args: Any, **kwargs: Any) -> Moments:
    return _spread(input, *_correction(args, kwargs))


@register("std", exactness="approximate", note=FIRST_ORDER)
def _std(context: Context, input: Moments, *args: Any, **kwargs: Any) -> Moments:
    return full_precision(sqrt_moments, _var(context, input, *args, **kwargs))


@register("var_mean", exactness="approximate", note=FIRST_ORDER)
def _var_mean(context: Context, input: Moments, *args: Any, **kwargs: Any) -> tuple[Moments, Moments]:
    dim, _, keepdim = _correction(args, kwargs)
    return _var(context, input, *args, **kwargs), _mean(context, input, dim, keepdim)


@register("std_mean", exactness="approximate", note=FIRST_ORDER)
def _std_mean(context: Context, input: Moments, *args: Any, **kwargs: Any) -> tuple[Moments, Moments]:
    dim, _, keepdim = _correction(args, kwargs)
    return _std(context, input, *args, **kwargs), _mean(context, input, dim, keepdim)


@register(
    "norm", "linalg_vector_norm", "linalg_norm", exactness="approximate", note="the root of a sum of squares"
)
def _norm(
    context: Context, input: Moments, ord: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Moments:
    ord = kwargs.get("p", ord)
    if ord not in (2, 2.0, None, "fro") or (ord is None and dim is None and input.ndim > 2):
        raise context.no_rule(f"norm(p={ord!r})", " (that of p=2 has one)")
    dims = _axes(input, dim)
    total = formulas.sum_moments(*square_moments(input.mean, input.variance), dims, keepdim)
    return full_precision(sqrt_moments, Moments(*total))
