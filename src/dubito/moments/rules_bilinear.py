"""Rules of operators linear in an input and in a weight: linear layers, convolutions, matrix products, embeddings.

Weights go by the structure their family hands out (`dubito.weights.gaussian_weights`); bias and weight of a module that
share their noise are taken together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.moments.bilinear_moments import (
    bilinear_moments,
    linear_moments,
    rank_one_convolution_moments,
    rank_one_linear_moments,
)
from dubito.moments.moments import Context, Moments
from dubito.moments.operands import made, mean_of, optional_pair, pair
from dubito.moments.registry import register
from dubito.moments.rules_attention import attended
from dubito.weights.gaussian_weights import (
    CorrelatedMoments,
    FactoredMoments,
    KroneckerBias,
    KroneckerMoments,
    RankOneMoments,
)

Operand = Moments | Tensor
Bilinear = Callable[[Tensor, Tensor], Tensor]


@register("linear")
def _linear(context: Context, input: Operand, weight: Operand, bias: Operand | None = None) -> Any:
    if isinstance(weight, FactoredMoments) and weight.ndim == 2:
        hidden = _linear(context, input, Moments(weight.right.mean.mT, weight.right.variance.mT))
        return _linear(context, hidden, weight.left, bias)
    if isinstance(weight, CorrelatedMoments | KroneckerMoments) and weight.ndim == 2:
        return structured(F.linear, input, weight, bias, -1)
    if isinstance(weight, RankOneMoments) and weight.ndim == 2:
        parts = (weight.mean, weight.row, weight.column)
        return made(rank_one_linear_moments(pair(input), *parts, optional_pair(bias)))
    second = weight.second if isinstance(weight, Moments) and isinstance(input, Moments) else None
    result = linear_moments(pair(input), pair(weight), optional_pair(bias), weight_second_moment=second)
    return made(result)


def structured(
    function: Bilinear,
    x: Operand,
    weight: CorrelatedMoments | KroneckerMoments,
    bias: Operand | None,
    channel: int,
) -> Moments:
    """`function(x, weight) + bias`, exact for independent entries of x; `channel` is the output's channel axis.

    Var = Var over the weights at the mean input (their structure, bias included) + B(v_x, E[w²]).
    """
    mean_x, variance_x = pair(x)
    shared = bias is not None and getattr(bias, "source", None) is weight.source
    mean = function(mean_x, weight.mean)
    shape = [1] * mean.ndim
    shape[channel] = -1
    variance = _weight_variance(function, mean_x, weight, bias if shared else None, shape)
    if variance_x is not None:
        variance = variance + function(variance_x, weight.second)
    if bias is not None:
        mean = mean + mean_of(bias).reshape(shape)
        if isinstance(bias, Moments) and not shared:
            variance = variance + bias.variance.reshape(shape)
    return Moments(mean, variance)


def _weight_variance(
    function: Bilinear,
    x: Tensor,
    weight: CorrelatedMoments | KroneckerMoments,
    bias: Any,
    shape: list[int],
) -> Tensor:
    """The variance over weight and bias, at a fixed input."""
    if isinstance(weight, KroneckerMoments):
        hidden = function(x, weight.right)
        if isinstance(bias, KroneckerBias) and weight.bias_right is not None:
            hidden = hidden + weight.bias_right.reshape(shape)
        channel = shape.index(-1)
        return hidden.square().sum(channel, keepdim=True) * weight.row_variance.reshape(shape)
    total: Tensor | None = None
    for index, column in enumerate(weight.factor):
        part = function(x, column)
        if isinstance(bias, CorrelatedMoments):
            part = part + bias.factor[index].reshape(shape)
        total = part.square() if total is None else torch.addcmul(total, part, part)
    assert total is not None
    return total


# ---- convolutions -------------------------------------------------------------------------------------------


def _convolution(function: Any) -> Callable[..., Any]:
    def convolve(
        context: Context,
        input: Operand,
        weight: Operand,
        bias: Operand | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        def plain(x: Tensor, w: Tensor) -> Tensor:
            result: Tensor = function(x, w, None, stride, padding, dilation, groups)
            return result

        if groups == 1 and isinstance(weight, FactoredMoments):
            return _factored_convolution(context, function, plain, input, weight, bias)
        channel = 1 if mean_of(input).ndim == weight.ndim else 0
        if isinstance(weight, CorrelatedMoments) or (groups == 1 and isinstance(weight, KroneckerMoments)):
            return structured(plain, input, weight, bias, channel)
        if groups == 1 and channel == 1 and isinstance(weight, RankOneMoments):
            parts = (weight.mean, weight.row, weight.column)
            return made(rank_one_convolution_moments(plain, pair(input), *parts, optional_pair(bias)))
        return _with_bias(plain, input, weight, bias, channel)

    return convolve


def _factored_convolution(
    context: Context, function: Any, plain: Bilinear, input: Operand, weight: FactoredMoments, bias: Any
) -> Any:
    rank, (out, *kernel) = weight.left.shape[1], weight.shape
    first = weight.right.rearranged(lambda t: t.mT.reshape(rank, *kernel))
    hidden = made(bilinear_moments(plain, pair(input), pair(first)))
    ones = [1] * (len(kernel) - 1)
    last = weight.left.rearranged(lambda t: t.reshape(out, rank, *ones))
    return _convolution(function)(context, hidden, last, bias)


def _with_bias(
    function: Bilinear, input: Operand, weight: Operand, bias: Operand | None, channel: int
) -> Any:
    # Variances first and summed in place: no more than three activations are alive beside the input's two.
    variance: Tensor | None = None
    if isinstance(weight, Moments):
        variance = function(mean_of(input).square(), weight.variance)
    if isinstance(input, Moments):
        second = weight.second if isinstance(weight, Moments) else weight.square()
        through = function(input.variance, second)
        variance = through if variance is None else variance.add_(through)
    mean = function(mean_of(input), mean_of(weight))
    if bias is not None:
        shape = [1] * mean.ndim
        shape[channel] = -1
        mean = mean.add_(mean_of(bias).reshape(shape))
        if isinstance(bias, Moments):
            extra = bias.variance.reshape(shape)
            variance = extra.expand(mean.shape) if variance is None else variance.add_(extra)
    return made((mean, variance))


def _transposed_convolution(function: Any) -> Callable[..., Any]:
    def convolve(
        context: Context,
        input: Operand,
        weight: Operand,
        bias: Operand | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        def plain(x: Tensor, w: Tensor) -> Tensor:
            result: Tensor = function(x, w, None, stride, padding, output_padding, groups, dilation)
            return result

        channel = 1 if mean_of(input).ndim == weight.ndim else 0
        if isinstance(weight, CorrelatedMoments):
            return structured(plain, input, weight, bias, channel)
        return _with_bias(plain, input, weight, bias, channel)

    return convolve


for _plain in (F.conv1d, F.conv2d, F.conv3d):
    register(_plain.__name__)(_convolution(_plain))
for _function, _name in (
    (F.conv_transpose1d, "conv_transpose1d"),
    (F.conv_transpose2d, "conv_transpose2d"),
    (F.conv_transpose3d, "conv_transpose3d"),
):
    register(_name)(_transposed_convolution(_function))
    register(getattr(torch.ops.aten, _name))(_transposed_convolution(_function))


@register(torch.ops.aten.convolution)
def _aten_convolution(
    context: Context,
    input: Operand,
    weight: Operand,
    bias: Operand | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    spatial = weight.ndim - 2
    if transposed:
        transposes = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
        rule = _transposed_convolution(transposes[spatial - 1])
        return rule(context, input, weight, bias, stride, padding, output_padding, groups, dilation)
    function = (F.conv1d, F.conv2d, F.conv3d)[spatial - 1]
    return _convolution(function)(context, input, weight, bias, stride, padding, dilation, groups)


# ---- matrix products ----------------------------------------------------------------------------------------


@register("matmul", "mm", "bmm", "mv", "dot")
def _matmul(context: Context, input: Operand, other: Operand) -> Any:
    composed = attended(context, input, other)
    if composed is not None:
        return composed
    if isinstance(other, FactoredMoments | RankOneMoments) and other.ndim == 2:
        return _linear(context, input, other.transposed())
    if isinstance(other, CorrelatedMoments) and other.ndim == 2:
        return structured(torch.matmul, input, other, None, -1)
    second = other.second if isinstance(other, Moments) and isinstance(input, Moments) else None
    return made(bilinear_moments(torch.matmul, pair(input), pair(other), b_second_moment=second))


@register("rmatmul")
def _rmatmul(context: Context, other: Operand, input: Operand) -> Any:
    return _matmul(context, input, other)


@register("addmm", "baddbmm", "addbmm", "addmv")
def _addmm(
    context: Context, input: Operand, mat1: Operand, mat2: Operand, *, beta: float = 1, alpha: float = 1
) -> Any:
    if beta == 1 and alpha == 1 and isinstance(mat2, CorrelatedMoments) and mat2.ndim == 2:
        return structured(torch.matmul, mat1, mat2, input, -1)
    product = _matmul(context, mat1, mat2)
    return plus(scaled(input, beta), scaled(product, alpha))


def scaled(x: Operand, factor: Any) -> Operand:
    """A constant times x."""
    if isinstance(factor, int | float) and factor == 1:
        return x
    if isinstance(x, Moments):
        return Moments(x.mean * factor, x.variance * factor**2)
    product: Tensor = x * factor
    return product


def plus(a: Operand, b: Operand) -> Operand:
    """The sum of two independent tensors."""
    if isinstance(a, Moments) and isinstance(b, Moments):
        return Moments(a.mean + b.mean, a.variance + b.variance)
    if not isinstance(a, Moments) and not isinstance(b, Moments):
        return a + b
    mean = mean_of(a) + mean_of(b)
    variance = a.variance if isinstance(a, Moments) else b.variance  # type: ignore[union-attr]
    variance = variance if variance.shape == mean.shape else variance.expand(mean.shape)
    return Moments(mean, variance if variance.dtype == mean.dtype else variance.to(mean.dtype))


@register("einsum", note="exact where no entry is used twice in one output", exactness="exact")
def _einsum(context: Context, equation: Any, *operands: Any) -> Any:
    if not isinstance(equation, str):
        raise context.no_rule("einsum", " given as lists of axes: write the equation as a string")
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if len(operands) == 1:
        (x,) = operands
        if _repeats(equation):
            raise context.no_rule(f"einsum({equation!r})", ": an axis is repeated within one operand")
        return x.marginal().rearranged(lambda t: torch.einsum(equation, t))
    if len(operands) != 2:
        return _pairwise(context, equation, operands)
    composed = attended(context, *operands, equation=equation)
    if composed is not None:
        return composed
    a, b = operands
    return made(bilinear_moments(lambda x, w: torch.einsum(equation, x, w), pair(a), pair(b)))


def _repeats(equation: str) -> bool:
    left = equation.partition("->")[0].replace(" ", "").replace(".", "")
    return len(set(left)) != len(left)


def _pairwise(context: Context, equation: str, operands: tuple[Any, ...]) -> Any:
    """Several operands, from left to right."""
    left, _, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not right or "." in equation:
        raise context.no_rule(
            f"einsum({equation!r})", " of more than two operands without an explicit output"
        )
    later = set("".join(terms[2:])) | set(right)
    middle = "".join(dict.fromkeys(c for c in terms[0] + terms[1] if c in later))
    first = _einsum(context, f"{terms[0]},{terms[1]}->{middle}", *operands[:2])
    rest = ",".join([middle, *terms[2:]])
    if not isinstance(first, Moments) and not any(isinstance(o, Moments) for o in operands[2:]):
        return torch.einsum(f"{rest}->{right}", first, *operands[2:])
    return _einsum(context, f"{rest}->{right}", first, *operands[2:])


@register(
    F.bilinear, torch.bilinear, torch.ops.aten.bilinear, exactness="approximate", note="two bilinear steps"
)
def _bilinear(context: Context, a: Operand, b: Operand, weight: Operand, bias: Operand | None = None) -> Any:
    first = _einsum(context, "...i,oij->...oj", a, weight)
    second = made(bilinear_moments(lambda x, w: (x * w.unsqueeze(-2)).sum(-1), pair(first), pair(b)))
    return second if bias is None else plus(second, bias)


# ---- embeddings ---------------------------------------------------------------------------------------------


@register("embedding")
def _torch_embedding(context: Context, weight: Operand, indices: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _embedding(context, indices, weight)


@register(F.embedding)
def _embedding(context: Context, input: Tensor, weight: Operand, *args: Any, **kwargs: Any) -> Any:
    max_norm = args[1] if len(args) > 1 else kwargs.get("max_norm")
    if max_norm is not None:
        raise context.no_rule("embedding(max_norm=…)", ": it rewrites the table")
    if isinstance(input, Moments) or not isinstance(weight, Moments):
        raise context.no_rule("embedding", " used as indices")
    if isinstance(weight, FactoredMoments) and weight.ndim == 2:
        rows = weight.left.rearranged(lambda t: F.embedding(input, t))
        return _linear(context, rows, weight.right)
    return weight.rearranged(lambda t: F.embedding(input, t)).marginal()
