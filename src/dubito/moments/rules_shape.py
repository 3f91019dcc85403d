"""Rules of operators that move entries about: the operator itself, on means and on variances.

Structured weights keep their structure where it survives: transposes and rows of factors, any of these on the columns
of a low-rank covariance.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.moments.moments import Context, Moments, paired
from dubito.moments.operands import means
from dubito.moments.registry import register
from dubito.moments.rules_attention import Softmax
from dubito.weights.gaussian_weights import FactoredMoments, KroneckerMoments, RankOneMoments

_MOVES = (
    "view reshape reshape_as view_as permute movedim moveaxis swapaxes swapdims transpose squeeze unsqueeze flatten "
    "unflatten ravel expand expand_as broadcast_to contiguous select narrow unbind index_select gather take_along_dim "
    "take repeat repeat_interleave tile flip fliplr flipud roll rot90 diagonal diag_embed tril triu unfold as_strided "
    "masked_select detach data alias _unsafe_view view_copy slice index hsplit vsplit dsplit channel_shuffle "
    "pixel_shuffle pixel_unshuffle native_channel_shuffle im2col lift_fresh lift_fresh_copy _reshape_alias atleast_1d "
    "atleast_2d atleast_3d split_copy select_copy slice_copy squeeze_copy unsqueeze_copy permute_copy expand_copy "
    "cpu cuda pin_memory diag"
)


@register(
    *_MOVES.split(), F.unfold, F.pixel_shuffle, F.pixel_unshuffle, F.channel_shuffle, passes_function=True
)
def _move(context: Context, function: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(input, Moments):  # an index or a size is random
        raise context.no_rule(getattr(function, "__name__", str(function)), " used as an index")
    return rearrange(input, lambda t: function(t, *args, **kwargs))


def rearrange(x: Moments, move: Any) -> Any:
    """The moments after `move`, the identity where it is one, attention probabilities remembered."""
    if isinstance(x, FactoredMoments | KroneckerMoments | RankOneMoments):
        return x.marginal().rearranged(move)
    mean = move(x.mean)
    if mean is x.mean:
        return x
    if type(x) is not Moments:
        return x.rearranged(move)
    result = paired(mean, move(x.variance))
    if isinstance(x.origin, Softmax) and isinstance(result, Moments) and _keeps_last(x, result):
        scores = x.origin.scores
        moved = paired(move(scores.mean), move(scores.variance))
        result.origin = Softmax(moved)
    return result


def _keeps_last(x: Moments, result: Moments) -> bool:
    """Whether the distributions over the last dimension are all still there: only leading dimensions were merged."""
    same = result.shape[-1:] == x.shape[-1:] and result.mean.numel() == x.mean.numel()
    return same and result.mean.stride()[-1:] == x.mean.stride()[-1:]


def _factors_or(input: Any) -> bool:
    return isinstance(input, FactoredMoments) and input.ndim == 2


def _turns(input: Any) -> bool:
    return isinstance(input, FactoredMoments | RankOneMoments) and input.ndim == 2


@register("t", "numpy_T", "adjoint", "mT", "T", "mH", "H", passes_function=True)
def _transpose_all(context: Context, function: Any, input: Moments) -> Any:
    return input.transposed() if _turns(input) else rearrange(input, lambda t: function(t))  # type: ignore[attr-defined]


@register("transpose", "swapaxes", "swapdims", passes_function=True)
def _transpose(context: Context, function: Any, input: Moments, *args: Any, **kwargs: Any) -> Any:
    if _turns(input):
        dims = [*args, *kwargs.values()]
        return input if (dims[0] - dims[1]) % 2 == 0 else input.transposed()  # type: ignore[attr-defined]
    return rearrange(input, lambda t: function(t, *args, **kwargs))


@register("getitem", operator.getitem, passes_function=True)
def _getitem(context: Context, function: Any, input: Any, index: Any) -> Any:
    if not isinstance(input, Moments):
        raise context.no_rule("getitem", " used as an index")
    first = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    if _factors_or(input) and isinstance(first, slice):
        return input.rows(lambda t: t[first])  # type: ignore[attr-defined]
    return rearrange(input, lambda t: t[index])


@register(
    "chunk", "split", "tensor_split", "unsafe_chunk", "unsafe_split", "split_with_sizes", passes_function=True
)
def _pieces(context: Context, function: Any, input: Moments, *args: Any, **kwargs: Any) -> Any:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if _factors_or(input) and dim in (0, -2):
        return input.rows(lambda t: function(t, *args, **kwargs))  # type: ignore[attr-defined]
    return rearrange(input, lambda t: function(t, *args, **kwargs))


@register("clone", "positive")
def _clone(context: Context, input: Moments, **kwargs: Any) -> Moments:
    made = Moments(input.mean.clone(**kwargs), input.variance.clone(**kwargs))
    made.origin = input.origin
    return made


@register(
    "to",
    "float",
    "double",
    "half",
    "bfloat16",
    "type_as",
    "_to_copy",
    "type",
    "requires_grad_",
    passes_function=True,
)
def _to(context: Context, function: Any, input: Moments, *args: Any, **kwargs: Any) -> Any:
    args = tuple(means(list(args)))
    if not args and not kwargs and getattr(function, "__name__", "") == "type":
        return input.mean.type()
    mean = function(input.mean, *args, **kwargs)
    if mean is input.mean:
        return input
    if not mean.is_floating_point():
        raise context.no_rule(f"to({mean.dtype})", ": an integer cannot carry a variance")
    result = Moments(mean, function(input.variance, *args, **kwargs))
    if isinstance(input.origin, Softmax):
        result.origin = input.origin
    return result


@register("dropout", "alpha_dropout", "feature_dropout", "dropout1d", "dropout2d", "dropout3d",
          "feature_alpha_dropout", F.dropout, F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d,
          F.feature_alpha_dropout, note="of evaluation: the identity")  # fmt: skip
def _dropout(
    context: Context, input: Moments, p: float = 0.5, training: bool = True, *args: Any, **_: Any
) -> Any:
    if training and p > 0:
        raise context.no_rule("dropout(training=True)", ": propagation runs with evaluation behaviour")
    return input


@register("native_dropout")
def _native_dropout(context: Context, input: Moments, p: float, train: bool | None) -> Any:
    return _dropout(context, input, p, bool(train)), None


@register("identity", "_assert_tensor_metadata", torch.ops.aten._assert_tensor_metadata)
def _nothing(context: Context, *args: Any, **kwargs: Any) -> None:
    return None


_METADATA = (
    "sym_size sym_numel sym_stride sym_storage_offset size stride numel dim zeros_like ones_like empty_like full_like "
    "rand_like randn_like new_zeros new_ones new_empty new_full isnan isinf isfinite is_same_size"
)


@register(*_METADATA.split(), passes_function=True, note="asked of the mean: not random")
def _at_the_mean(context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*means(args), **kwargs)


# ---- several tensors ------------------------------------------------------------------------------------------


def _variances(values: Any) -> list[Tensor]:
    like = next(v for v in values if isinstance(v, Moments))
    return [
        v.variance if isinstance(v, Moments) else torch.zeros_like(v, dtype=like.variance.dtype)
        for v in values
    ]


@register("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack", "row_stack",
          "broadcast_tensors", "meshgrid", "block_diag", passes_function=True)  # fmt: skip
def _join(context: Context, function: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(tensors, list | tuple):
        mean = function(means(list(tensors)), *args, **kwargs)
        return paired(mean, function(_variances(tensors), *args, **kwargs))
    together = [tensors, *args]  # broadcast_tensors(a, b)
    return paired(function(*means(together), **kwargs), function(*_variances(together), **kwargs))


@register("pad", "constant_pad_nd", F.pad, passes_function=True)
def _pad(context: Context, function: Any, input: Moments, pad: Any, *args: Any, **kwargs: Any) -> Moments:
    mean = function(input.mean, pad, *args, **kwargs)
    if name_says_constant(args, kwargs):
        return Moments(mean, F.pad(input.variance, pad))
    return Moments(mean, function(input.variance, pad, *args, **kwargs))


def name_says_constant(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether padding is by a constant, whose variance is zero."""
    mode = kwargs.get("mode", args[0] if args and isinstance(args[0], str) else "constant")
    return bool(mode == "constant")


@register("__setitem__", "copy")
def _setitem(context: Context, input: Moments, *args: Any) -> Moments:
    """`x[index] = value` (or `x.copy_(value)`) as a new tensor; the front end writes it."""
    index, value = args if len(args) == 2 and not isinstance(args[1], bool) else (..., args[0])
    random = isinstance(value, Moments)
    mean, variance = input.mean.clone(), input.variance.clone()
    mean[index] = value.mean if random else value
    variance[index] = value.variance if random else 0.0
    return Moments(mean, variance)


@register("zero", "fill")
def _fill(context: Context, input: Moments, value: float = 0.0) -> Moments:
    return Moments(torch.full_like(input.mean, value), torch.zeros_like(input.variance))


@register("index_put", "index_copy", "index_fill", "masked_scatter", "scatter", "slice_scatter", "select_scatter",
          passes_function=True)  # fmt: skip
def _scatter(context: Context, function: Any, input: Any, *args: Any, **kwargs: Any) -> Moments:
    if kwargs.get("reduce") is not None or (args and args[-1] is True):
        raise context.no_rule(getattr(function, "__name__", "scatter"), " that accumulates")
    base = input if isinstance(input, Moments) else Moments(input, torch.zeros_like(input))
    zero = [a.variance if isinstance(a, Moments) else _no_variance(a) for a in args]
    return Moments(
        function(base.mean, *means(list(args)), **kwargs), function(base.variance, *zero, **kwargs)
    )


def _no_variance(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return torch.zeros_like(value)
    return 0.0 if isinstance(value, float) else value


_UPSAMPLED = (
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa"
)


@register(F.interpolate, *_UPSAMPLED.split(), passes_function=True)
def _interpolate(context: Context, function: Any, input: Moments, *args: Any, **kwargs: Any) -> Moments:
    """Each output is a weighted sum of independent entries: variances by the squared weights, axis by axis."""
    mean, variance = function(input.mean, *args, **kwargs), input.variance
    spatial = input.ndim - 2
    for axis in range(spatial):
        length = input.shape[2 + axis]
        sizes = [1] * spatial
        sizes[axis] = length
        ones = torch.eye(length, dtype=mean.dtype, device=mean.device).reshape(length, 1, *sizes)
        full = ones.expand(length, 1, *input.shape[2:])
        answer = function(full, *args, **kwargs)  # weights along the other axes sum to one
        index = [slice(None), 0, *[0] * spatial]
        index[2 + axis] = slice(None)
        weights = answer[tuple(index)].square()
        variance = torch.tensordot(variance, weights, dims=([2 + axis], [0])).movedim(-1, 2 + axis)
    return Moments(mean, variance)
