"""Mean and variance of means, sums, pools and maxima.

Averages: independent entries give `sum w² v`; entries whose noise is common give `(sum w sd)²`. `rho` interpolates,
`var = rho (sum w sd)² + (1 - rho) sum w² v`, for noise that comes from weights shared by all positions.

Maxima: Clark's formula for two independent Gaussians, applied pairwise along each dimension. In terms of
a = |m1 - m2| / t, t² = v1 + v2, and the unit normal loss l(a): mean = max(m1, m2) + t l(a) and
variance = v_larger Phi(a) + v_smaller (1 - Phi(a)) - t² l (a + l), both free of cancellation. Each pair is exact; the
tree treats each maximum as Gaussian, and its error grows with the number of near-equal candidates. Measured with
windows of 4 to 9: means of unit spread and sd 0.5, bias of the mean below 0.002, variance too small by 2 to 5 % on
average; all candidates equal, 0.006 and 5 to 16 %; 64 equal ones, the mean 0.13 sd too low and the variance half.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.moments.normal_functions import safe_sd, side_of

Moments = tuple[Tensor, Tensor]
Size = int | Sequence[int]
Rho = float | Tensor
# Means further apart than this are compared as if this far: their gradients stay finite.
FARTHEST_APART = 1e12
# What padding holds: no maximum ever, and finite.
PADDING = -1e30


def _tuple(size: Size, count: int) -> tuple[int, ...]:
    values = (size,) if isinstance(size, int) else tuple(size)
    return values * count if len(values) == 1 else values


def _mixed(independent: Tensor, common: Tensor | None, rho: Rho) -> Tensor:
    return independent if common is None else rho * common + (1.0 - rho) * independent


def _correlates(rho: Rho) -> bool:
    return isinstance(rho, Tensor) or rho != 0.0


def sum_moments(
    mean: Tensor, variance: Tensor, dim: Size | None = None, keepdim: bool = False, rho: Rho = 0.0
) -> Moments:
    """Moments of a sum over dimensions (all of them for None)."""
    dims = list(range(mean.dim())) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    total = variance.sum(dims, keepdim=keepdim)
    common = safe_sd(variance).sum(dims, keepdim=keepdim).square() if _correlates(rho) else None
    return mean.sum(dims, keepdim=keepdim), _mixed(total, common, rho)


def mean_moments(
    mean: Tensor, variance: Tensor, dim: Size | None = None, keepdim: bool = False, rho: Rho = 0.0
) -> Moments:
    """Moments of a mean over dimensions (all of them for None)."""
    out, spread = sum_moments(mean, variance, dim, keepdim, rho)
    count = mean.numel() / max(out.numel(), 1)
    return out / count, spread / count**2


def avg_pool_moments(
    mean: Tensor,
    variance: Tensor,
    kernel_size: Size,
    *args: Any,
    dims: int = 2,
    rho: Rho = 0.0,
    **options: Any,
) -> Moments:
    """Moments of `F.avg_pool1d/2d/3d` (`dims`); further arguments are that function's own.

    Padding, `ceil_mode`, `count_include_pad` and `divisor_override` are honoured: the weight and the count of each
    window are read off pools of ones.
    """
    pool: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[dims - 1]
    names = ("stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
    options = dict(zip(names, args, strict=False)) | options
    sds = safe_sd(variance) if _correlates(rho) else None

    def run(x: Tensor) -> Tensor:
        out: Tensor = pool(x, kernel_size, **options)
        return out

    # All weights of a window are equal, w, so sum w² v = w · pool(v).
    common = None if sds is None else run(sds).square()
    return run(mean), _mixed(run(variance) * _window_weight(mean, kernel_size, options, dims), common, rho)


def _window_weight(x: Tensor, kernel_size: Size, options: dict[str, Any], dims: int) -> Tensor:
    """The weight of an entry in each window: `(1, …, *output positions)`."""
    ones = x.new_ones((1, 1, *x.shape[-dims:]))
    if dims == 1:
        # 1-d pooling has no divisor_override: a column of 2-d.
        as_2d = {
            k: (v if isinstance(v, bool) else (_tuple(v, 1)[0], 1 if k == "stride" else 0))
            for k, v in options.items()
            if v is not None
        }
        weight = _window_weight(ones.unsqueeze(-1), (_tuple(kernel_size, 1)[0], 1), as_2d, 2).squeeze(-1)
    else:
        pool: Any = F.avg_pool2d if dims == 2 else F.avg_pool3d
        counts = pool(ones, kernel_size, **(options | {"divisor_override": 1}))
        weight = pool(ones, kernel_size, **options) / counts.clamp_min(1.0)
    return weight.view(weight.shape[-dims:])


def _adaptive_windows(length: int, count: int) -> list[tuple[int, int]]:
    return [((i * length) // count, -((-(i + 1) * length) // count)) for i in range(count)]


def _adaptive_sizes(shape: Sequence[int], output_size: Any, dims: int) -> list[int]:
    sizes = [output_size] * dims if isinstance(output_size, int) or output_size is None else list(output_size)
    return [n if size is None else int(size) for n, size in zip(shape[-dims:], sizes, strict=True)]


def adaptive_avg_pool_moments(
    mean: Tensor, variance: Tensor, output_size: Any, dims: int = 2, rho: Rho = 0.0
) -> Moments:
    """Moments of `F.adaptive_avg_pool1d/2d/3d` (`dims`)."""
    pool = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[dims - 1]
    sizes = _adaptive_sizes(mean.shape, output_size, dims)
    target: Any = sizes[0] if dims == 1 else sizes
    count = mean.new_ones(())
    for length, size in zip(mean.shape[-dims:], sizes, strict=True):
        widths = [end - start for start, end in _adaptive_windows(length, size)]
        count = count.unsqueeze(-1) * mean.new_tensor(widths)
    common = pool(safe_sd(variance), target).square() if _correlates(rho) else None
    return pool(mean, target), _mixed(pool(variance, target) / count, common, rho)


# ------------------------------------------------------------------------------------------------------ maxima


def maximum_moments(a: Moments, b: Moments) -> Moments:
    """Exact moments of the larger of two independent Gaussians (Clark 1961)."""
    (mean_a, variance_a), (mean_b, variance_b) = a, b
    both = variance_a + variance_b
    t = safe_sd(both)
    side = side_of((mean_a - mean_b).clamp(-FARTHEST_APART, FARTHEST_APART) / t)
    above = side.above
    # lerp takes an end exactly, however far apart they are.
    largest = torch.lerp(mean_b, mean_a, side.positive)
    variance = torch.addcmul(variance_b, above, variance_a - variance_b) - both * side.spread
    return largest + t * side.loss, variance.clamp_min(0.0)


def minimum_moments(a: Moments, b: Moments) -> Moments:
    """Exact moments of the smaller of two independent Gaussians."""
    mean, variance = maximum_moments((-a[0], a[1]), (-b[0], b[1]))
    return -mean, variance


def amax_moments(mean: Tensor, variance: Tensor, dim: Size | None = None, keepdim: bool = False) -> Moments:
    """Moments of the maximum over dimensions (all of them for None), by a tree of pairs."""
    dims = list(range(mean.dim())) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    dims = sorted({d % mean.dim() for d in dims})
    for d in dims:
        mean, variance = _tree(mean, variance, d)
    if not keepdim:
        for d in reversed(dims):
            mean, variance = mean.squeeze(d), variance.squeeze(d)
    return mean, variance


def amin_moments(mean: Tensor, variance: Tensor, dim: Size | None = None, keepdim: bool = False) -> Moments:
    """Moments of the minimum over dimensions, as `amax_moments`."""
    out, spread = amax_moments(-mean, variance, dim, keepdim)
    return -out, spread


def _tree(mean: Tensor, variance: Tensor, dim: int) -> Moments:
    """Maximum along one dimension, which is kept with length 1: halves against halves, the odd one waits."""
    length = mean.shape[dim]
    if length == 0:
        raise ValueError(f"dimension {dim} of shape {tuple(mean.shape)} is empty: it has no maximum")
    while length > 1:
        half = length // 2
        low, high = (
            (mean.narrow(dim, 0, half), variance.narrow(dim, 0, half)),
            _part(mean, variance, dim, half),
        )
        out = maximum_moments(low, high)
        if length % 2:
            last = mean.narrow(dim, length - 1, 1), variance.narrow(dim, length - 1, 1)
            out = torch.cat([out[0], last[0]], dim), torch.cat([out[1], last[1]], dim)
        mean, variance = out
        length = mean.shape[dim]
    return mean, variance


def _part(mean: Tensor, variance: Tensor, dim: int, half: int) -> Moments:
    return mean.narrow(dim, half, half), variance.narrow(dim, half, half)


def _pairwise(candidates: list[Moments]) -> Moments:
    while len(candidates) > 1:
        pairs = zip(candidates[0::2], candidates[1::2], strict=False)
        rest = candidates[-1:] if len(candidates) % 2 else []
        candidates = [maximum_moments(a, b) for a, b in pairs] + rest
    return candidates[0]


def max_pool_moments(
    mean: Tensor,
    variance: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    dims: int = 2,
) -> Moments:
    """Moments of `F.max_pool1d/2d/3d` (`dims`), one dimension after the other, each by a tree of pairs.

    Overlapping windows share their partial maxima. The tree's error is said above, in the module.
    """
    kernels, paddings, dilations = (_tuple(s, dims) for s in (kernel_size, padding, dilation))
    strides = kernels if stride is None or stride == [] else _tuple(stride, dims)
    for i in range(dims):
        axis = mean.dim() - dims + i
        window = (kernels[i], strides[i], paddings[i], dilations[i])
        mean, variance = _max_pool_axis(mean, variance, axis, window, ceil_mode)
    return mean, variance


def _max_pool_axis(
    mean: Tensor, variance: Tensor, axis: int, window: tuple[int, int, int, int], ceil_mode: bool
) -> Moments:
    kernel, stride, padding, dilation = window
    length = mean.shape[axis]
    reach = dilation * (kernel - 1)
    span = length + 2 * padding - reach - 1
    count = span // stride + 1
    # With ceil_mode a last window counts if it starts inside the input or its left padding.
    if ceil_mode and span % stride and count * stride < length + padding:
        count += 1
    if count < 1:
        raise ValueError(
            f"kernel_size={kernel} with dilation={dilation} is larger than the padded input, {length}"
        )
    after = max((count - 1) * stride + reach + 1 - length - padding, 0)
    if padding or after:
        pad = [0, 0] * (mean.dim() - axis - 1) + [padding, after]
        mean, variance = F.pad(mean, pad, value=PADDING), F.pad(variance, pad)
    end = (count - 1) * stride + 1
    candidates = [
        tuple(
            t.narrow(axis, k * dilation, end)[(slice(None),) * axis + (slice(None, None, stride),)]
            for t in both
        )
        for both in [(mean, variance)]
        for k in range(kernel)
    ]
    return _pairwise([(c[0], c[1]) for c in candidates])


def adaptive_max_pool_moments(mean: Tensor, variance: Tensor, output_size: Any, dims: int = 2) -> Moments:
    """Moments of `F.adaptive_max_pool1d/2d/3d` (`dims`), by trees of pairs."""
    sizes = _adaptive_sizes(mean.shape, output_size, dims)
    for i, size in enumerate(sizes):
        axis = mean.dim() - dims + i
        parts = [
            _tree(mean.narrow(axis, start, end - start), variance.narrow(axis, start, end - start), axis)
            for start, end in _adaptive_windows(mean.shape[axis], size)
        ]
        mean, variance = (torch.cat([p[k] for p in parts], axis) for k in (0, 1))
    return mean, variance


def routed_max_pool_moments(
    mean: Tensor, variance: Tensor, kernel_size: Size, *args: Any, dims: int = 2, **options: Any
) -> Moments:
    """Max pooling at the mean, each output taking the variance of the entry that wins there.

    The cheap baseline: with sd 0.5 the mean is too low by 0.12 and the variance 24 % too large.
    """
    pool: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[dims - 1]
    names = ("stride", "padding", "dilation", "ceil_mode")
    options = dict(zip(names, args, strict=False)) | options
    return _routed(pool(mean, kernel_size, return_indices=True, **options), variance, dims)


def routed_adaptive_max_pool_moments(mean: Tensor, variance: Tensor, output_size: Size, dims: int) -> Moments:
    """The same for adaptive max pooling."""
    pool: Any = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)[dims - 1]
    return _routed(pool(mean, output_size, return_indices=True), variance, dims)


def _routed(pooled: tuple[Tensor, Tensor], variance: Tensor, dims: int) -> Moments:
    largest, index = pooled
    return largest, variance.flatten(-dims).gather(-1, index.flatten(-dims)).view(largest.shape)
