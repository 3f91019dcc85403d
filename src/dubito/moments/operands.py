"""Arguments of rules, random or not, in the forms that the formulas take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dubito.moments.bilinear_moments import Pair
from dubito.moments.elementwise import is_fused
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


PIECE = 2**15  # entries: a formula's temporaries of a piece stay in the cache


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


def in_pieces(
    formula: Callable[..., tuple[Tensor, Tensor]], **options: Any
) -> Callable[..., tuple[Tensor, Tensor]]:
    """An elementwise formula, a piece of the entries at a time where that is possible and saves memory and time.

    Formulas of activations make some twenty temporaries; of a whole activation they are most of a pass's memory, and
    go through main memory one by one.
    """

    def run(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        if (
            is_fused()
        ):  # the network's own compiled parts run eagerly meanwhile (`propagate.py`), these kernels do not
            with torch.compiler.set_stance("default"):
                return formula(mean, variance, **options)
        if mean.numel() <= 2 * PIECE or mean.device.type != "cpu" or not _may_split(mean, variance):
            return formula(mean, variance, **options)
        made = torch.empty_like(mean), torch.empty_like(mean)
        # entry by entry, so in any order that both share
        order = [t.permute(_memory_order(mean)).reshape(-1) for t in (mean, variance, *made)]
        for start in range(0, mean.numel(), PIECE):
            part = [t[start : start + PIECE] for t in order]
            for target, value in zip(part[2:], formula(*part[:2], **options), strict=True):
                target.copy_(value)
        return made

    return run


def _memory_order(x: Tensor) -> list[int]:
    strides = x.stride()
    return sorted(range(x.ndim), key=lambda d: -strides[d])


def _may_split(mean: Tensor, variance: Tensor) -> bool:
    """Whether both lie in memory alike and dense, nothing records the operators, and one kernel does not do it all."""
    if mean.shape != variance.shape or mean.stride() != variance.stride():
        return False
    recorded = torch.is_grad_enabled() and (mean.requires_grad or variance.requires_grad)
    traced = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    busy = torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(mean)
    if recorded or traced or busy or type(mean) not in (Tensor, nn.Parameter):
        return False
    expected = 1
    for dim in reversed(_memory_order(mean)):
        if mean.shape[dim] != 1 and mean.stride(dim) != expected:
            return False
        expected *= mean.shape[dim]
    return True
