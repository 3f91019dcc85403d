"""Bilinear operators: exact sums over entries, Monte Carlo, and weights whose variances have structure."""

import pytest
import torch
import torch.nn.functional as F
from gaussian_expectation import monte_carlo
from torch import Tensor

from dubito.moments.bilinear_moments import (
    bilinear_moments,
    linear_moments,
    rank_one_convolution_moments,
    rank_one_linear_moments,
    rank_one_variance,
)

Pair = tuple[Tensor, Tensor]


def pair(*shape: int, spread: float = 0.3, seed: int = 0) -> Pair:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    mean = torch.randn(shape, generator=generator, dtype=torch.float64)
    return mean, (spread * torch.rand(shape, generator=generator, dtype=torch.float64)).square()


def agree(out: tuple[Tensor, Tensor | None], expected: Pair, draws: int) -> None:
    """Within four standard errors of Monte Carlo."""
    mean, variance = expected
    assert out[1] is not None
    assert out[0].shape == mean.shape
    error = (variance / draws).sqrt()
    assert ((out[0] - mean).abs() < 5 * error + 1e-9).all()
    torch.testing.assert_close(out[1], variance, rtol=6.0 * (2.0 / draws) ** 0.5, atol=1e-9)


OPERATORS = {
    "matmul": (lambda a, b: a @ b, (2, 3, 4), (2, 4, 5)),
    "linear": (F.linear, (6, 4), (3, 4)),
    "conv1d": (lambda a, b: F.conv1d(a, b, stride=2, padding=1), (2, 3, 9), (4, 3, 3)),
    "conv2d": (lambda a, b: F.conv2d(a, b, dilation=2, groups=2), (2, 4, 7, 7), (6, 2, 3, 3)),
    "transposed": (lambda a, b: F.conv_transpose2d(a, b, stride=2), (1, 3, 4, 4), (3, 2, 2, 2)),
    "einsum": (lambda a, b: torch.einsum("bik,jk->bij", a, b), (2, 3, 4), (5, 4)),
    "product": (torch.mul, (3, 4), (4,)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_bilinear_rule_against_monte_carlo(name: str) -> None:
    function, shape_a, shape_b = OPERATORS[name]
    a, b = pair(*shape_a), pair(*shape_b, seed=1)
    expected = monte_carlo(function, a, b, draws=8000)
    agree(bilinear_moments(function, a, b), expected, 8000)


def test_bilinear_rule_is_exact_for_products() -> None:
    a, b = pair(5), pair(5, seed=1)
    mean, variance = bilinear_moments(torch.mul, a, b)
    (ma, va), (mb, vb) = a, b
    torch.testing.assert_close(mean, ma * mb)
    torch.testing.assert_close(variance, va * vb + va * mb**2 + ma**2 * vb)


def test_operands_without_noise() -> None:
    (ma, va), (mb, vb) = pair(3, 4), pair(4, 2, seed=1)
    zeros_a, zeros_b = torch.zeros_like(va), torch.zeros_like(vb)
    for a, b, full in (
        ((ma, None), (mb, vb), ((ma, zeros_a), (mb, vb))),
        ((ma, va), (mb, None), ((ma, va), (mb, zeros_b))),
    ):
        out, expected = bilinear_moments(torch.matmul, a, b), bilinear_moments(torch.matmul, *full)
        torch.testing.assert_close(out, expected)
        turned = (b[0].mT, None if b[1] is None else b[1].mT)
        torch.testing.assert_close(linear_moments(a, turned), expected)
    assert bilinear_moments(torch.matmul, (ma, None), (mb, None))[1] is None
    assert linear_moments((ma, None), (mb.mT, None))[1] is None


@pytest.mark.parametrize("lead", [(), (6,), (2, 6)])
@pytest.mark.parametrize("noisy_bias", [True, False])
def test_linear_is_the_bilinear_rule_and_a_bias(lead: tuple[int, ...], noisy_bias: bool) -> None:
    x, weight, (mean_b, variance_b) = pair(*lead, 4), pair(3, 4, seed=1), pair(3, seed=2)
    mean, variance = bilinear_moments(F.linear, x, weight)
    assert variance is not None
    for second in (None, weight[0].square() + weight[1]):
        out = linear_moments(
            x, weight, (mean_b, variance_b if noisy_bias else None), weight_second_moment=second
        )
        torch.testing.assert_close(out[0], mean + mean_b)
        torch.testing.assert_close(out[1], variance + variance_b if noisy_bias else variance)


def test_a_noisy_bias_alone() -> None:
    x, weight, bias = pair(5, 4), pair(3, 4, seed=1), pair(3, seed=2)
    mean, variance = linear_moments((x[0], None), (weight[0], None), bias)
    torch.testing.assert_close(mean, F.linear(x[0], weight[0], bias[0]))
    torch.testing.assert_close(variance, bias[1].expand(5, 3))


def test_rank_one_variance_keeps_sums_and_returns_what_has_rank_one() -> None:
    row, column = torch.rand(5, dtype=torch.float64), torch.rand(1, 3, 2, 2, dtype=torch.float64)
    variance = row.view(-1, 1, 1, 1) * column
    r, c = rank_one_variance(variance)
    torch.testing.assert_close(r.view(-1, 1, 1, 1) * c, variance)
    other = torch.rand(5, 3, 2, 2, dtype=torch.float64)
    r, c = rank_one_variance(other)
    product = r.view(-1, 1, 1, 1) * c
    torch.testing.assert_close(product.sum(0), other.sum(0))
    torch.testing.assert_close(product.flatten(1).sum(1), other.flatten(1).sum(1))
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        rank_one_variance(torch.rand(3))
    zero = rank_one_variance(torch.zeros(2, 3))
    assert torch.equal(zero[0][:, None] * zero[1], torch.zeros(2, 3))


@pytest.mark.parametrize("noisy", [True, False])
def test_rank_one_weights_take_two_products_and_give_the_same(noisy: bool) -> None:
    (mean_x, variance_x), (mean_w, _), bias = pair(2, 6, 4), pair(3, 4, seed=1), pair(3, seed=2)
    x = (mean_x, variance_x if noisy else None)
    row, column = torch.rand(3, dtype=torch.float64), torch.rand(1, 4, dtype=torch.float64)
    out = rank_one_linear_moments(x, mean_w, row, column, bias)
    torch.testing.assert_close(out, linear_moments(x, (mean_w, row[:, None] * column), bias))


@pytest.mark.parametrize("noisy", [True, False])
def test_rank_one_kernels(noisy: bool) -> None:
    (mean_x, variance_x), (mean_w, _), bias = pair(2, 3, 6, 6), pair(4, 3, 3, 3, seed=1), pair(4, seed=2)
    x = (mean_x, variance_x if noisy else None)
    row, column = torch.rand(4, dtype=torch.float64), torch.rand(1, 3, 3, 3, dtype=torch.float64)

    def convolve(a: Tensor, b: Tensor) -> Tensor:
        return F.conv2d(a, b, padding=1)

    out = rank_one_convolution_moments(convolve, x, mean_w, row, column, bias)
    mean, variance = bilinear_moments(convolve, x, (mean_w, row.view(-1, 1, 1, 1) * column))
    assert variance is not None
    torch.testing.assert_close(out[0], mean + bias[0].view(-1, 1, 1))
    torch.testing.assert_close(out[1], variance + bias[1].view(-1, 1, 1))


def test_gradients() -> None:
    tensors = [t.clone().requires_grad_() for t in (*pair(3, 4), *pair(2, 4, seed=1), *pair(2, seed=2))]

    def run(*t: Tensor) -> tuple[Tensor, Tensor | None]:
        return linear_moments((t[0], t[1]), (t[2], t[3]), (t[4], t[5]))

    assert torch.autograd.gradcheck(run, tensors)
