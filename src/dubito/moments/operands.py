"""Arguments of rules, random or not, in the forms that the formulas take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dubito.moments.bilinear_moments import Pair
from dubito.moments.moments import Moments


def pair(value: Moments | Tensor) -> Pair:
    """(mean, variance), the variance None for what is not random."""
    return (value.mean, value.variance) if isinstance(value, Moments) else (value, None)


def optional_pair(value: Moments | Tensor | None) -> Pair | None:
    """The same, or None."""
    return None if value is None else pair(value)


def mean_of(value: Any) -> Any:
    """The mean of a random tensor; anything else unchanged."""
    return value.mean if isinstance(value, Moments) else value


def means(values: Any) -> Any:
    """The means of random tensors in nested lists."""
    return type(values)(means(v) for v in values) if type(values) in (list, tuple) else mean_of(values)


def made(result: tuple[Tensor, Tensor | None]) -> Any:
    """`Moments` of a pair; a plain tensor where nothing is random."""
    mean, variance = result
    if variance is None:
        return mean
    if variance.shape != mean.shape:
        variance = variance.expand(mean.shape)
    return Moments(mean, variance)


def full_precision(
    formula: Callable[..., tuple[Tensor, Tensor]], x: Moments, *args: Any, **kwargs: Any
) -> Moments:
    """A formula computed in single precision at least, with autocast off; the result in the input's dtype."""
    if x.dtype not in (torch.float16, torch.bfloat16) and not torch.is_autocast_enabled(x.device.type):
        return Moments(*formula(x.mean, x.variance, *args, **kwargs))
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        mean, variance = formula(x.mean.to(wide), x.variance.to(wide), *args, **kwargs)
    return Moments(mean.to(x.dtype), variance.to(x.dtype))
