"""Gaussian drawn weights that lower the variance of the gradient: local reparametrisation and flipout.

Local reparametrisation (Kingma, Salimans & Welling 2015) draws pre-activations instead of weights: for
independent Gaussian entries `y ~ N(x mᵀ, x² (s²)ᵀ)`, independently for each example. Flipout (Wen et al. 2018)
shares one perturbation and flips its signs for each example and channel. Both give an example the same
distribution of outputs as a drawn weight would; neither is one function over a batch, so they serve training
and marginal prediction, never function draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.weights.drawn import DrawnWeight, as_dense, rule, without_autocast

_CONVOLUTIONS = (
    F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
)  # fmt: skip
_SPATIAL = {
    F.conv1d: 1,
    F.conv2d: 2,
    F.conv3d: 3,
    F.conv_transpose1d: 1,
    F.conv_transpose2d: 2,
    F.conv_transpose3d: 3,
}


class LocalWeight(DrawnWeight):
    """Independent Gaussian entries given by mean and variance; operators draw their outputs.

    A view of one (a transpose, a slice) is another, of the same weight: its dense draw is the view of the whole's, and
    what it is used for counts as a use of its entries.
    """

    mean_: Tensor
    variance: Tensor
    noise: Tensor | None
    used: tuple[Tensor, ...]
    whole: LocalWeight | None
    counted: bool
    seen_as: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, mean: Tensor, sd: Tensor) -> LocalWeight:
        """Wrap mean and standard deviation."""
        return cls.of_variance(mean, sd.to(torch.promote_types(sd.dtype, torch.float32)).square())

    @classmethod
    def of_variance(cls, mean: Tensor, variance: Tensor) -> LocalWeight:
        """Wrap mean and variance, this in float32 at least: squares leave the range of half precision."""
        self = cls.wrap(mean.shape, (mean, variance))
        self.mean_, self.variance, self.used, self.noise, self.whole = mean, variance, (), None, None
        self.counted = True
        return self

    def dense(self) -> Tensor:
        """One shared draw; of a view, that of the whole, viewed."""
        return super().dense() if self.whole is None else self.seen_as(self.whole.dense())

    @property
    def estimator(self) -> str:
        """ "local"."""
        return "local"

    def draw_dense(self) -> Tensor:
        """One shared draw, for an operator without a rule."""
        sd = safe_sqrt(self.variance).to(self.mean_.dtype)
        if self.noise is None:  # kept: with gradient and without it is one draw
            self.noise = torch.randn_like(sd)
        return torch.addcmul(self.mean_, sd, self.noise)

    def uncounted(self) -> LocalWeight:
        """The same weight, whose uses are its own affair: for one factor of disjoint pieces of a product."""
        made = LocalWeight.of_variance(self.mean_, self.variance)
        made.whole, made.seen_as, made.counted = self, lambda dense: dense, False
        return made

    def claim(self) -> None:
        """Note one use; a second would draw an inconsistent weight.

        Raises:
            RuntimeError: at the second use of an entry.
        """
        whole = self
        while whole.whole is not None and whole.counted:
            whole = whole.whole
        if whole._memo or any(_overlap(self.mean_, other) for other in whole.used):
            raise RuntimeError(
                'the estimator "local" draws outputs, so a weight used twice in one call would be two different '
                'weights. Use estimator="weights" for this parameter'
            )
        whole.used = (*whole.used, self.mean_)

    def progress(self) -> Any:
        """The memo, the noise behind it and the entries whose outputs were drawn."""
        return super().progress(), self.noise, self.used

    def rewind(self, progress: Any) -> None:
        """Back to that point."""
        memo, self.noise, self.used = progress
        super().rewind(memo)


def _overlap(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors of one weight's means share entries; a copy may hold any of them."""
    if one.numel() == 0 or two.numel() == 0:
        return False
    try:
        if one.untyped_storage().data_ptr() != two.untyped_storage().data_ptr():
            return True
    except (RuntimeError, NotImplementedError):  # under a transform there is no storage to look at
        pass
    ends = [_ends(t) for t in (one, two)]
    if ends[0][1] < ends[1][0] or ends[1][1] < ends[0][0]:
        return False
    places = [
        torch.arange(first, last + 1).as_strided(t.shape, t.stride()).reshape(-1)
        for t, (first, last) in zip((one, two), ends, strict=True)
    ]
    return bool(torch.isin(*places).any())


def _ends(tensor: Tensor) -> tuple[int, int]:
    """The first and the last place in storage."""
    first = int(tensor.storage_offset())
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + int(reach)


class FlipoutWeight(DrawnWeight):
    """A mean and one drawn, symmetric perturbation, whose signs each example flips."""

    mean_: Tensor
    perturbation: Tensor

    @classmethod
    def of(cls, mean: Tensor, perturbation: Tensor) -> FlipoutWeight:
        """Wrap mean and perturbation."""
        self = cls.wrap(mean.shape, (mean, perturbation))
        self.mean_, self.perturbation = mean, perturbation
        return self

    @property
    def estimator(self) -> str:
        """ "flipout"."""
        return "flipout"

    def draw_dense(self) -> Tensor:
        """The shared draw, for an operator without a rule."""
        return self.mean_ + self.perturbation


def signs(shape: Sequence[int], like: Tensor) -> Tensor:
    """Random signs (uniform numbers are several times cheaper than Bernoulli ones, and may be vmapped)."""
    uniform = torch.rand(tuple(shape), dtype=like.dtype, device=like.device)
    return torch.where(uniform < 0.5, -1.0, 1.0).to(like.dtype)


def safe_sqrt(variance: Tensor) -> Tensor:
    """Square root with gradient 0 at 0, and no floor that would add noise of its own."""
    return variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()


def _local(
    function: Callable[..., Tensor], input: Tensor, weight: LocalWeight, bias: Any, options: tuple[Any, ...]
) -> Tensor:
    weight.claim()
    bias_variance = None
    if isinstance(bias, LocalWeight):
        bias.claim()
        bias, bias_variance = bias.mean_, bias.variance
    mean = function(input, weight.mean_, as_dense(bias), *options)
    with without_autocast(input.device.type):  # squares leave the range of half precision
        wide = torch.promote_types(input.dtype, torch.float32)
        bias_variance = None if bias_variance is None else bias_variance.to(wide)
        variance = function(input.to(wide).square(), weight.variance.to(wide), bias_variance, *options)
    return drawn_output(mean, variance)


def drawn_output(mean: Tensor, variance: Tensor) -> Tensor:
    """mean + sqrt(variance)·eps, eps ~ N(0, I); gradient 0 where the variance is 0."""
    transformed = torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling()
    if transformed or mean.dtype != variance.dtype or not variance.requires_grad:
        deviation = safe_sqrt(variance).to(mean.dtype)
        return torch.addcmul(mean, deviation, torch.randn_like(deviation))
    drawn: Tensor = _DrawnOutput.apply(mean, variance)
    return drawn


class _DrawnOutput(torch.autograd.Function):
    """`drawn_output` keeping one tensor for backward: the slope eps / (2 sqrt(variance))."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor) -> Tensor:
        deviation = variance.sqrt()
        slope = torch.randn_like(deviation)
        drawn = torch.addcmul(mean, deviation, slope)
        # eps·sd / (2 variance), so that it is 0 where both are
        floor = variance.clamp_min(torch.finfo(variance.dtype).tiny)
        slope = slope.mul_(deviation.mul_(0.5)).div_(floor)
        ctx.save_for_backward(slope)
        return drawn

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (slope,) = ctx.saved_tensors
        return grad, grad * slope


def _flipout(
    function: Callable[..., Tensor],
    input: Tensor,
    weight: FlipoutWeight,
    bias: Any,
    options: tuple[Any, ...],
    spatial: int,
) -> Tensor:
    bias_perturbation = None
    if isinstance(bias, FlipoutWeight):
        bias, bias_perturbation = bias.mean_, bias.perturbation
    mean = function(input, weight.mean_, as_dense(bias), *options)
    if spatial:
        shape_in = (*input.shape[:-spatial], *[1] * spatial)
        shape_out = (*mean.shape[:-spatial], *[1] * spatial)
    else:
        middle = [1] * (input.ndim - 2)
        shape_in = (*input.shape[:1], *middle, input.shape[-1]) if input.ndim > 1 else input.shape
        shape_out = (*mean.shape[:1], *middle, mean.shape[-1]) if mean.ndim > 1 else mean.shape
    flipped = input * signs(shape_in, input)
    return mean + function(flipped, weight.perturbation, bias_perturbation, *options) * signs(shape_out, mean)


def _apply(
    function: Callable[..., Tensor],
    spatial: int,
    input: Any,
    weight: Any,
    bias: Any,
    options: tuple[Any, ...],
) -> Any:
    if isinstance(input, DrawnWeight):
        return NotImplemented
    if isinstance(weight, LocalWeight):
        return _local(function, input, weight, bias, options)
    if isinstance(weight, FlipoutWeight):
        return _flipout(function, input, weight, bias, options, spatial)
    return NotImplemented


@rule(FlipoutWeight, F.linear)
@rule(LocalWeight, F.linear)
def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    return _apply(F.linear, 0, input, weight, bias, ())


@rule(FlipoutWeight, torch.addmm)
@rule(LocalWeight, torch.addmm)
def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    if beta != 1 or alpha != 1 or not isinstance(mat2, LocalWeight | FlipoutWeight):
        return NotImplemented
    return _apply(_linear_stored_in_out, 0, mat1, mat2, input, ())


def _linear_stored_in_out(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(input, weight.mT, bias)


def _both(weight: Any, take: Callable[[Tensor], Any]) -> Any:
    """Apply a view to both tensors a Gaussian drawn weight is made of."""
    if isinstance(weight, LocalWeight):
        return _views(weight, take)
    means, others = take(weight.mean_), take(weight.perturbation)
    if isinstance(means, Tensor):
        return FlipoutWeight.of(means, others)
    return tuple(FlipoutWeight.of(a, b) for a, b in zip(means, others, strict=True))


def _views(weight: LocalWeight, take: Callable[[Tensor], Any]) -> Any:
    def view(mean: Tensor, variance: Tensor, of: Callable[[Tensor], Tensor]) -> LocalWeight:
        made = LocalWeight.of_variance(mean, variance)
        made.whole, made.seen_as = weight, of
        return made

    means, variances = take(weight.mean_), take(weight.variance)
    if isinstance(means, Tensor):
        return view(means, variances, take)
    pairs = enumerate(zip(means, variances, strict=True))
    return tuple(view(m, v, lambda dense, i=i: take(dense)[i]) for i, (m, v) in pairs)  # type: ignore[misc]


def _view_rule(function: Any) -> None:
    def view(weight: Any, *args: Any, **kwargs: Any) -> Any:
        return _both(weight, lambda part: function(part, *args, **kwargs))

    rule(LocalWeight, function)(view)
    rule(FlipoutWeight, function)(view)


_TRANSPOSED_VIEWS: tuple[Any, ...] = (Tensor.T.__get__, Tensor.mT.__get__)  # type: ignore[attr-defined]
_VIEWS: tuple[Any, ...] = (
    *_TRANSPOSED_VIEWS, torch.chunk, Tensor.chunk, torch.split, Tensor.split, Tensor.__getitem__, torch.t, Tensor.t,
    torch.transpose, Tensor.transpose, torch.reshape, Tensor.reshape, Tensor.view, Tensor.repeat,
)  # fmt: skip
for _view in _VIEWS:
    _view_rule(_view)


def _convolution_rule(function: Any) -> None:
    names = ["stride", "padding", "dilation", "groups"]
    if "transpose" in function.__name__:
        names = ["stride", "padding", "output_padding", "groups", "dilation"]
    defaults = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "output_padding": 0}

    def convolve(input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Any:
        options = args + tuple(kwargs.get(n, defaults[n]) for n in names[len(args) :])
        return _apply(function, _SPATIAL[function], input, weight, bias, options)

    rule(LocalWeight, function)(convolve)
    rule(FlipoutWeight, function)(convolve)


for _convolution in _CONVOLUTIONS:
    _convolution_rule(_convolution)
