"""Means, sums, pools and maxima: closed forms, Monte Carlo, and agreement of shapes with PyTorch's own."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from gaussian_expectation import monte_carlo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dubito.moments.pooling_moments import (
    adaptive_avg_pool_moments,
    adaptive_max_pool_moments,
    amax_moments,
    amin_moments,
    avg_pool_moments,
    max_pool_moments,
    maximum_moments,
    mean_moments,
    minimum_moments,
    routed_max_pool_moments,
    sum_moments,
)

Pair = tuple[Tensor, Tensor]


def gaussian(*shape: int, sd: float = 0.5, seed: int = 0) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(shape, generator=generator, dtype=torch.float64)
    return mean, torch.full_like(mean, sd**2)


def jacobian_moments(function: object, mean: Tensor, variance: Tensor, rho: float) -> Pair:
    """Moments of a linear function through its matrix: independent noise, and common noise."""
    matrix = torch.func.jacrev(function)(mean)  # type: ignore[arg-type]
    out = function(mean)  # type: ignore[operator]
    flat = matrix.reshape(*out.shape, -1)
    independent = flat.square() @ variance.flatten()
    return out, rho * (flat @ variance.flatten().sqrt()).square() + (1 - rho) * independent


AVERAGES = [
    (1, (2, 3, 9), {"kernel_size": 3, "stride": 2, "padding": 1}),
    (1, (2, 3, 9), {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False}),
    (1, (2, 3, 8), {"kernel_size": 3, "stride": 2, "ceil_mode": True}),
    (2, (2, 3, 7, 7), {"kernel_size": 2}),
    (2, (2, 3, 7, 6), {"kernel_size": (3, 2), "stride": 2, "padding": 1, "count_include_pad": False}),
    (2, (1, 3, 7, 6), {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}),
    (2, (1, 3, 6, 6), {"kernel_size": 3, "divisor_override": 2}),
    (3, (1, 2, 5, 4, 4), {"kernel_size": 2, "stride": 1}),
]


@pytest.mark.parametrize("case", range(len(AVERAGES)))
@pytest.mark.parametrize("rho", [0.0, 0.4])
def test_average_pools_are_their_matrices(case: int, rho: float) -> None:
    dims, shape, options = AVERAGES[case]
    mean, _ = gaussian(*shape)
    variance = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[dims - 1]
    expected = jacobian_moments(lambda x: pool(x, **options), mean, variance, rho)
    options = dict(options)
    out = avg_pool_moments(mean, variance, options.pop("kernel_size"), dims=dims, rho=rho, **options)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("dims", "shape", "size"),
    [(1, (2, 3, 7), 3), (2, (2, 3, 7, 5), 1), (2, (1, 2, 7, 5), (3, None)), (3, (1, 2, 4, 5, 3), (2, 3, 2))],
)
@pytest.mark.parametrize("rho", [0.0, 0.4])
def test_adaptive_average_pools_are_their_matrices(
    dims: int, shape: tuple[int, ...], size: object, rho: float
) -> None:
    mean, _ = gaussian(*shape)
    variance = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pool = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[dims - 1]
    expected = jacobian_moments(lambda x: pool(x, size), mean, variance, rho)  # type: ignore[arg-type]
    torch.testing.assert_close(adaptive_avg_pool_moments(mean, variance, size, dims, rho), expected)


@pytest.mark.parametrize("dim", [None, 1, (0, 2), -1])
@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize("rho", [0.0, 0.3])
def test_means_and_sums_are_their_matrices(dim: object, keepdim: bool, rho: float) -> None:
    mean, _ = gaussian(3, 4, 2)
    variance = torch.rand(3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for rule, plain in ((mean_moments, torch.mean), (sum_moments, torch.sum)):
        expected = jacobian_moments(lambda x: plain(x, dim=dim, keepdim=keepdim), mean, variance, rho)  # noqa: B023
        torch.testing.assert_close(rule(mean, variance, dim, keepdim, rho), expected)  # type: ignore[arg-type]


def test_rho_at_one_is_common_noise_and_may_be_fitted() -> None:
    rho = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    mean, variance = torch.zeros(1, 1, 4, 4, dtype=torch.float64), torch.ones(1, 1, 4, 4, dtype=torch.float64)
    spread = adaptive_avg_pool_moments(mean, variance, 1, rho=rho)[1]
    torch.testing.assert_close(spread.detach(), torch.ones_like(spread))
    spread.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(rho.grad, torch.tensor(1.0 - 1.0 / 16.0, dtype=torch.float64))


# ------------------------------------------------------------------------------------------------------ maxima


@settings(deadline=None, max_examples=30)
@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(-3, 0.5), st.floats(-3, 0.5))
def test_maximum_of_two_is_exact(a: float, b: float, log_a: float, log_b: float) -> None:
    means = torch.tensor([a, b], dtype=torch.float64)
    sds = torch.tensor([10.0**log_a, 10.0**log_b], dtype=torch.float64)
    # Over max(x, y): integrate the density of each times the other's distribution function.
    t = torch.linspace(-12, 12, 24001, dtype=torch.float64)
    total = torch.zeros(3, dtype=torch.float64)
    for i, j in ((0, 1), (1, 0)):
        x = means[i] + sds[i] * t
        weight = torch.exp(-0.5 * t.square()) / math.sqrt(2 * math.pi) * (t[1] - t[0])
        weight = weight * torch.special.ndtr((x - means[j]) / sds[j])
        shifted = x - means.max()
        total += torch.stack([weight.sum(), (weight * shifted).sum(), (weight * shifted.square()).sum()])
    out = maximum_moments((means[:1], sds[:1].square()), (means[1:], sds[1:].square()))
    scale = sds.max().item()
    torch.testing.assert_close(out[0][0], means.max() + total[1], rtol=0, atol=3e-3 * scale)
    torch.testing.assert_close(out[1][0], total[2] - total[1].square(), rtol=1e-2, atol=3e-3 * scale**2)


@pytest.mark.parametrize(("va", "vb"), [(1.0, 1.0), (0.3, 2.0), (1e-6, 2e-6)])
def test_maximum_is_clarks_formula_and_does_not_cancel(va: float, vb: float) -> None:
    gaps = torch.linspace(-4, 4, 33, dtype=torch.float64) * math.sqrt(va + vb)
    t = math.sqrt(va + vb)
    cdf, density = torch.special.ndtr(gaps / t), torch.exp(-0.5 * (gaps / t) ** 2) / math.sqrt(2 * math.pi)
    first = gaps * cdf + t * density
    second = (gaps**2 + va) * cdf + vb * (1 - cdf) + gaps * t * density
    for dtype, offset, tolerance in ((torch.float64, 0.0, 1e-9), (torch.float32, 0.0, 2e-5)):
        a = (gaps + offset).to(dtype), torch.full_like(gaps, va, dtype=dtype)
        b = torch.full_like(gaps, offset, dtype=dtype), torch.full_like(gaps, vb, dtype=dtype)
        out = maximum_moments(a, b)
        torch.testing.assert_close(out[0].double(), first, rtol=tolerance, atol=2e-7 * t)
        torch.testing.assert_close(out[1].double(), second - first**2, rtol=tolerance, atol=1e-12)
        low = minimum_moments((-a[0], a[1]), (-b[0], b[1]))
        torch.testing.assert_close(low, (-out[0], out[1]))


def test_maximum_without_noise_far_apart_and_its_gradients() -> None:
    a = torch.tensor([1.0, -2.0, 3.0, 1e30, 0.0], requires_grad=True)
    b = torch.tensor([2.0, -5.0, 3.0, -1e30, -1e30], requires_grad=True)
    zero = torch.zeros(5, requires_grad=True)
    out = maximum_moments((a, zero), (b, zero))
    torch.testing.assert_close(out[0], torch.maximum(a, b))
    assert (out[1] == 0).all()
    (out[0].sum() + out[1].sum()).backward()  # type: ignore[no-untyped-call]
    assert a.grad is not None
    assert zero.grad is not None
    torch.testing.assert_close(a.grad, torch.tensor([0.0, 1.0, 0.5, 1.0, 1.0]))
    assert torch.isfinite(zero.grad).all()
    x = [t.requires_grad_() for t in (*gaussian(4), *gaussian(4, seed=1))]
    assert torch.autograd.gradcheck(lambda p, q, r, s: maximum_moments((p, q), (r, s)), x)
    tied = [torch.zeros(2, dtype=torch.float64, requires_grad=True), torch.ones(2, dtype=torch.float64)] * 2
    assert torch.autograd.gradcheck(lambda p, q, r, s: maximum_moments((p, q), (r + 0.0, s)), tied)


POOLS = list(itertools.product((1, 2), (2, 3), (None, 1, 2), (0, 1), (1, 2), (False, True)))


@pytest.mark.parametrize(("dims", "kernel", "stride", "padding", "dilation", "ceil_mode"), POOLS)
def test_max_pools_without_noise_are_pytorchs(
    dims: int, kernel: int, stride: int | None, padding: int, dilation: int, ceil_mode: bool
) -> None:
    mean, _ = gaussian(2, 3, *(9, 8)[:dims])
    pool = (F.max_pool1d, F.max_pool2d)[dims - 1]
    expected = pool(mean, kernel, stride, padding, dilation, ceil_mode)
    out = max_pool_moments(mean, torch.zeros_like(mean), kernel, stride, padding, dilation, ceil_mode, dims)
    torch.testing.assert_close(out[0], expected, rtol=0, atol=1e-12)
    assert (out[1] == 0).all()
    routed = routed_max_pool_moments(
        mean, torch.rand_like(mean), kernel, stride, padding, dilation, ceil_mode, dims=dims
    )
    torch.testing.assert_close(routed[0], expected)


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (3, 3, 0)])
def test_clark_tree_against_monte_carlo(kernel: int, stride: int, padding: int) -> None:
    x = gaussian(3, 12, 12)
    mean, variance = monte_carlo(lambda a: F.max_pool2d(a, kernel, stride, padding), x, draws=3000)
    out = max_pool_moments(*x, kernel, stride, padding)
    routed = routed_max_pool_moments(*x, kernel, stride, padding)
    assert (out[0] - mean).mean().abs() < 5e-3
    assert (out[0] - mean).abs().max() < 0.05
    assert 0.93 < (out[1] / variance).mean() < 1.02
    assert (routed[0] - mean).mean() < -0.1
    assert (routed[1] / variance).mean() > 1.2


def test_unbatched_and_3d_and_empty() -> None:
    mean, variance = gaussian(3, 6, 6)
    out = max_pool_moments(mean, variance, 2)
    batched = max_pool_moments(mean[None], variance[None], 2)
    torch.testing.assert_close(out[1], batched[1][0])
    mean, variance = gaussian(1, 2, 4, 4, 4)
    out = max_pool_moments(mean, 0.0 * variance, 2, dims=3)
    torch.testing.assert_close(out[0], F.max_pool3d(mean, 2))
    with pytest.raises(ValueError, match="kernel_size=9"):
        max_pool_moments(mean, variance, 9, dims=3)
    with pytest.raises(ValueError, match="no maximum"):
        amax_moments(torch.zeros(2, 0), torch.zeros(2, 0), 1)


@pytest.mark.parametrize("size", [1, 3, (2, None)])
def test_adaptive_max_pools(size: object) -> None:
    mean, variance = gaussian(2, 3, 7, 5)
    out = adaptive_max_pool_moments(mean, torch.zeros_like(mean), size)
    expected = F.adaptive_max_pool2d(mean, size)  # type: ignore[arg-type]
    torch.testing.assert_close(out[0], expected, rtol=0, atol=1e-12)
    reference = monte_carlo(lambda a: F.adaptive_max_pool2d(a, size), (mean[0], variance[0]), draws=3000)  # type: ignore[arg-type]
    noisy = adaptive_max_pool_moments(mean, variance, size)
    assert (noisy[0][0] - reference[0]).abs().max() < 0.15


@pytest.mark.parametrize("dim", [None, 0, (1, 2), -1])
@pytest.mark.parametrize("keepdim", [True, False])
def test_maxima_over_dimensions(dim: object, keepdim: bool) -> None:
    mean, variance = gaussian(2, 3, 5)
    dims = (0, 1, 2) if dim is None else dim
    out = amax_moments(mean, torch.zeros_like(mean), dim, keepdim)  # type: ignore[arg-type]
    torch.testing.assert_close(out[0], mean.amax(dims, keepdim), rtol=0, atol=1e-12)  # type: ignore[arg-type]
    low = amin_moments(mean, variance, dim, keepdim)  # type: ignore[arg-type]
    high = amax_moments(-mean, variance, dim, keepdim)  # type: ignore[arg-type]
    torch.testing.assert_close(low, (-high[0], high[1]))
    expected = monte_carlo(lambda a: a.amax(dims, keepdim), (mean, variance), draws=4000)  # type: ignore[arg-type]
    assert (high[0].shape, high[1].shape) == (expected[0].shape, expected[1].shape)
