"""Rules of sums, means, pools and maxima."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from dubito.moments import pooling_moments as formulas
from dubito.moments.moments import Context, Moments
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


@register("var", "std", "norm", "linalg_vector_norm", exactness="approximate", note="by its parts")
def _refuse(context: Context, *_: Any, **__: Any) -> Any:
    raise context.no_rule("var, std or norm", " (written out by mean, square and rsqrt it has)")
