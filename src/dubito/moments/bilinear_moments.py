"""Mean and variance of operators that are linear in each of two random operands.

One rule serves linear layers, convolutions, matrix products, two-operand einsums and products: with independent
entries, `mean = B(mean_x, mean_w)` and `variance = B(v_x, mean_w² + v_w) + B(mean_x², v_w)`. It is exact where no
entry is shared within one output, as in linear layers and convolutions. A variance of None marks an operand without
noise; its terms are not computed.

Weights whose variances have structure go by their structure: rank one (`V ≈ r cᵀ`), two random factors
(`W = A Bᵀ`), a low-rank covariance (`w = mean + sum_k S_k z_k`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Pair = tuple[Tensor, Tensor | None]
Bilinear = Callable[[Tensor, Tensor], Tensor]


def _added(own: Tensor, other: Tensor) -> Tensor:
    """`own + other`, into the memory of `own`, which the caller has just made, where nothing needs its old value."""
    alike = own.shape == other.shape and own.dtype == other.dtype
    return own.add_(other) if alike and _writable(own, other) else own + other


def _writable(*tensors: Tensor) -> bool:
    """Whether no gradient and no function transform follows these tensors."""
    followed = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return not followed and not any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors)


def bilinear_moments(
    function: Bilinear, a: Pair, b: Pair, *, b_second_moment: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Moments of `function(a, b)`, bilinear with coefficients 0 and 1 (a factor c outside it scales variances by c²).

    Args:
        function: the operator on plain tensors.
        a: mean and variance of the first operand.
        b: mean and variance of the second.
        b_second_moment: mean² + variance of `b` where the caller keeps it.

    Returns:
        Mean and variance; the variance is None where neither operand has one.
    """
    (mean_a, variance_a), (mean_b, variance_b) = a, b
    mean = function(mean_a, mean_b)
    through_a = through_b = None
    if variance_a is not None:
        if b_second_moment is None:
            b_second_moment = second_moment(b)
        through_a = function(variance_a, b_second_moment)
    if variance_b is not None:
        through_b = function(mean_a.square(), variance_b)
    if through_a is not None and through_b is not None:
        return mean, _added(through_a, through_b)
    return mean, through_b if through_a is None else through_a


def second_moment(pair: Pair) -> Tensor:
    """mean² + variance, entry by entry."""
    mean, variance = pair
    return mean.square() if variance is None else torch.addcmul(variance, mean, mean)


def linear_moments(
    x: Pair, weight: Pair, bias: Pair | None = None, *, weight_second_moment: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Moments of `x Wᵀ + b`, shapes as in `F.linear`; exact for independent entries.

    Three matrix products at most; the last adds into the sum of the others.
    """
    (mean_x, variance_x), (mean_w, variance_w) = x, weight
    mean_b, variance_b = bias if bias is not None else (None, None)
    mean = F.linear(mean_x, mean_w, mean_b)
    if variance_x is None and variance_w is None:
        return mean, None if variance_b is None else variance_b.expand(mean.shape)
    if variance_x is None:
        assert variance_w is not None
        return mean, F.linear(mean_x.square(), variance_w, variance_b)
    if weight_second_moment is None:
        weight_second_moment = second_moment(weight)
    through_x = F.linear(variance_x, weight_second_moment, variance_b)
    if variance_w is None:
        return mean, through_x
    if through_x.dim() < 2 or variance_w.dim() != 2:
        return mean, through_x + F.linear(mean_x.square(), variance_w)
    squares = mean_x.square().expand(*through_x.shape[:-1], mean_x.shape[-1])
    flat = through_x.reshape(-1, through_x.shape[-1])
    squares = squares.reshape(-1, squares.shape[-1])
    if flat.dtype == squares.dtype == variance_w.dtype and _writable(flat, squares, variance_w):
        total = flat.addmm_(squares, variance_w.t())
    else:
        total = torch.addmm(flat, squares, variance_w.t())
    return mean, total.view(through_x.shape)


def rank_one_variance(variance: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of the rank-one form of a weight's variances: `V[o, i] ≈ row[o] · column[i]`.

    Row means times column means over the overall mean: the sums over rows and over columns are kept, and a variance
    of rank one is returned exactly. Kernels are taken as (out, everything else).

    Returns:
        row of shape `(out,)` and column of shape `(1, *rest)`.
    """
    if variance.dim() < 2:
        raise ValueError(f"a rank-one variance needs a matrix or a kernel, got shape {tuple(variance.shape)}")
    column = variance.mean(0, keepdim=True)
    row = variance.flatten(1).mean(1)
    return row, column / column.mean().clamp_min(torch.finfo(variance.dtype).tiny)


def rank_one_linear_moments(
    x: Pair, weight_mean: Tensor, row: Tensor, column: Tensor, bias: Pair | None = None
) -> tuple[Tensor, Tensor | None]:
    """`linear_moments` with weight variances `row[o] · column[i]`: two matrix products in place of three.

    var = v_x (mean_w²)ᵀ + ((v_x + mean_x²) · column) rowᵀ; exact where the variances have rank one.
    """
    mean_x, variance_x = x
    mean_b, variance_b = bias if bias is not None else (None, None)
    mean = F.linear(mean_x, weight_mean, mean_b)
    energy = F.linear(second_moment(x), column.reshape(1, -1))
    outer = energy * row if variance_b is None else torch.addcmul(variance_b, energy, row)
    if variance_x is None:
        return mean, outer
    return mean, F.linear(variance_x, weight_mean.square()).add_(outer)


def rank_one_convolution_moments(
    function: Bilinear, x: Pair, weight_mean: Tensor, row: Tensor, column: Tensor, bias: Pair | None = None
) -> tuple[Tensor, Tensor | None]:
    """Moments of a convolution (groups = 1) with kernel variances `row[o] · column[0, i, …]`.

    Args:
        function: the convolution without bias, `function(input, kernel)`.
        x: input, `(batch, in, …)`.
        weight_mean: kernel means, `(out, in, …)`.
        row: `(out,)`.
        column: `(1, in, …)`.
        bias: mean and variance, `(out,)` each, or None.
    """
    mean_x, variance_x = x
    spatial = (-1,) + (1,) * (weight_mean.dim() - 2)
    mean = function(mean_x, weight_mean)
    variance = function(second_moment(x), column) * row.view(spatial)
    if variance_x is not None:
        variance = variance + function(variance_x, weight_mean.square())
    if bias is not None:
        mean = mean + bias[0].view(spatial)
        variance = variance if bias[1] is None else variance + bias[1].view(spatial)
    return mean, variance


def low_rank_deviations(function: Bilinear, mean_x: Tensor, factors: Tensor) -> Tensor:
    """What each shared direction adds to the output at the mean input: `(R, *output)`.

    Biases that share z add theirs here before the squares are summed.
    """
    return torch.stack([function(mean_x, factor) for factor in factors])
