"""Elementary functions and quadrature against dense quadrature; the normal law's own functions against scipy's."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from gaussian_expectation import reference_moments
from torch import Tensor

from dubito.moments import function_moments as rules
from dubito.moments.normal_functions import (
    SIGMOID_SCALES,
    SIGMOID_WEIGHTS,
    cdf_variance,
    density_and_cdf,
    hermite,
    normal_cdf,
    safe_sd,
    side_of,
    upper_tail,
)
from dubito.moments.quadrature_moments import delta_moments, gauss_hermite, quadrature_moments

Rule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
EXACT: dict[str, tuple[Callable[[Tensor], Tensor], Rule]] = {
    "square": (torch.square, rules.square_moments),
    "cube": (lambda x: x**3, lambda m, v: rules.pow_moments(m, v, 3)),
    "sixth": (lambda x: x**6, lambda m, v: rules.pow_moments(m, v, 6)),
    "exp": (torch.exp, rules.exp_moments),
    "expm1": (torch.expm1, rules.expm1_moments),
    "sin": (torch.sin, rules.sin_moments),
    "cos": (torch.cos, rules.cos_moments),
    "erf": (torch.erf, rules.erf_moments),
    "normal cdf": (torch.special.ndtr, rules.normal_cdf_moments),
}
# Relative errors of mean and variance at a coefficient of variation of 0.1, as documented.
POSITIVE: dict[str, tuple[Callable[[Tensor], Tensor], Rule, float, float]] = {
    "reciprocal": (torch.reciprocal, rules.reciprocal_moments, 4e-4, 7e-2),
    "rsqrt": (torch.rsqrt, rules.rsqrt_moments, 2e-4, 5e-2),
    "sqrt": (torch.sqrt, rules.sqrt_moments, 3e-5, 2e-2),
    "log": (torch.log, rules.log_moments, 5e-4, 4e-2),
    "log1p": (lambda x: torch.log1p(x - 1.0), lambda m, v: rules.log1p_moments(m - 1.0, v), 5e-4, 4e-2),
    "power 3/2": (lambda x: x**1.5, lambda m, v: rules.pow_moments(m, v, 1.5), 3e-5, 2e-2),
}
MEANS = torch.linspace(-3.0, 3.0, 25, dtype=torch.float64)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("sd", [1e-3, 0.1, 1.0])
def test_exact_rules_equal_quadrature(name: str, sd: float) -> None:
    function, rule = EXACT[name]
    variance = torch.full_like(MEANS, sd**2)
    mean, spread = reference_moments(function, MEANS, variance)
    for dtype, rtol in ((torch.float64, 1e-6), (torch.float32, 1e-4)):
        out = rule(MEANS.to(dtype), variance.to(dtype))
        torch.testing.assert_close(out[0].double(), mean, rtol=rtol, atol=1e-6)
        torch.testing.assert_close(out[1].double(), spread, rtol=rtol, atol=1e-9 * sd**2)


@pytest.mark.parametrize("name", [*EXACT, *POSITIVE])
def test_no_variance_and_gradients(name: str) -> None:
    function, rule = (EXACT | {k: v[:2] for k, v in POSITIVE.items()})[name]
    mean = torch.tensor([1.2, 2.0, 3.1], dtype=torch.float64, requires_grad=True)
    variance = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    out = rule(mean, variance)
    torch.testing.assert_close(out[0], function(mean))
    assert (out[1] == 0).all()
    (out[0].sum() + out[1].sum()).backward()  # type: ignore[no-untyped-call]
    assert mean.grad is not None
    assert variance.grad is not None
    assert torch.isfinite(mean.grad).all()
    assert torch.isfinite(variance.grad).all()
    some = torch.tensor([0.1, 0.3, 0.2], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rule, (mean, some))


@pytest.mark.parametrize("name", POSITIVE)
def test_powers_and_logarithms_keep_to_the_error_they_state(name: str) -> None:
    function, rule, mean_error, spread_error = POSITIVE[name]
    for variation, grown in ((1e-3, 1e-3), (0.05, 0.5), (0.1, 1.0)):
        at = torch.tensor([0.5, 1.7, 40.0], dtype=torch.float64)
        variance = (variation * at).square()
        # ten standard deviations would reach zero: the reference's own range is cut at the function's
        mean, spread = reference_moments(lambda x: function(x.clamp_min(5e-4)), at[1:2], variance[1:2])
        out = rule(at, variance)
        scale = max(mean.abs().item(), 0.1)
        assert (out[0][1] - mean).abs() <= mean_error * grown * scale + 1e-9
        if variation < 0.1:  # the reciprocal's second moment is dominated by the cut beyond
            assert ((out[1][1] - spread) / spread).abs() <= spread_error * grown
        assert (out[1] > 0).all()


def test_signs_and_whole_and_negative_powers() -> None:
    mean, variance = torch.tensor([-2.0, 2.0]), torch.tensor([0.01, 0.01])
    out = rules.reciprocal_moments(mean, variance)
    torch.testing.assert_close(out[0][0], -out[0][1])
    torch.testing.assert_close(out[1][0], out[1][1])
    torch.testing.assert_close(rules.pow_moments(mean, variance, 1), (mean, variance))
    one = rules.pow_moments(mean, variance, 0.0)
    torch.testing.assert_close(one, (torch.ones(2), torch.zeros(2)))
    torch.testing.assert_close(rules.pow_moments(mean, variance, 2.0), rules.square_moments(mean, variance))


# -------------------------------------------------------------------------------------------------- quadrature


def test_quadrature_is_exact_for_polynomials_and_at_no_variance() -> None:
    variance = torch.full_like(MEANS, 0.7)
    expected = rules.pow_moments(MEANS, variance, 4)
    out = quadrature_moments(lambda x: x**4, MEANS, variance)
    torch.testing.assert_close(out, expected)
    certain = quadrature_moments(torch.tanh, MEANS, torch.zeros(()).double())
    assert torch.equal(certain[0], torch.tanh(MEANS))
    assert (certain[1] == 0).all()


@pytest.mark.parametrize("function", [torch.sigmoid, torch.sin, F.mish])
def test_quadrature_of_smooth_functions(function: Callable[[Tensor], Tensor]) -> None:
    for sd, nodes, error in ((1e-3, 5, 1e-6), (0.3, 5, 1e-3), (1.0, 5, 0.1), (1.0, 9, 5e-3)):
        variance = torch.full_like(MEANS, sd**2)
        mean, spread = reference_moments(function, MEANS, variance)
        out = quadrature_moments(function, MEANS, variance, nodes)
        assert (out[0] - mean).abs().max() < error
        assert ((out[1] - spread) / spread).abs().max() < error
    small = torch.full_like(MEANS, 1e-6)
    single = quadrature_moments(function, MEANS.float(), small.float())[1].double()
    torch.testing.assert_close(single, quadrature_moments(function, MEANS, small)[1], rtol=5e-2, atol=1e-9)


def test_first_order_is_the_derivative() -> None:
    variance = torch.full_like(MEANS, 0.3)
    mean, spread = delta_moments(torch.tanh, MEANS, variance)
    torch.testing.assert_close(mean, torch.tanh(MEANS))
    torch.testing.assert_close(spread, (1.0 - torch.tanh(MEANS) ** 2) ** 2 * variance)
    x = [MEANS[:5].clone().requires_grad_(), variance[:5].clone().requires_grad_()]
    assert torch.autograd.gradcheck(lambda m, v: delta_moments(F.gelu, m, v), x)


def test_too_few_nodes() -> None:
    with pytest.raises(ValueError, match="nodes=1"):
        quadrature_moments(torch.tanh, MEANS, MEANS, nodes=1)
    assert sum(w for _, w in gauss_hermite(7)) == pytest.approx(1.0)


# ------------------------------------------------------------------------------------------------ the normal law


def test_tails_against_scipy() -> None:
    from scipy.special import ndtr

    x = torch.linspace(-12.0, 12.0, 97, dtype=torch.float64)
    torch.testing.assert_close(normal_cdf(x), torch.from_numpy(ndtr(x.numpy())), rtol=1e-12, atol=0)
    torch.testing.assert_close(upper_tail(x), torch.from_numpy(ndtr(-x.numpy())), rtol=1e-12, atol=0)
    density, cdf = density_and_cdf(x)
    torch.testing.assert_close(cdf, normal_cdf(x))
    torch.testing.assert_close(density, torch.exp(-0.5 * x**2) / math.sqrt(2 * math.pi))


def test_recorded_tails_are_the_eager_ones() -> None:
    """Compiled kernels take a rational form of the tail in single precision."""
    x = torch.linspace(-9.0, 9.0, 145)
    eager = side_of(x), density_and_cdf(x)
    recorded = torch.func.vmap(side_of)(x), torch.func.vmap(density_and_cdf)(x)
    torch.testing.assert_close(recorded[0].tail, eager[0].tail, rtol=5e-6, atol=0)
    torch.testing.assert_close(recorded[1][1], eager[1][1], rtol=5e-6, atol=0)
    assert not torch.equal(recorded[0].tail, eager[0].tail), "the rational form was not taken"


def test_the_variance_of_phi() -> None:
    variance = torch.tensor([1e-6, 0.3, 4.0], dtype=torch.float64)[:, None]
    expected = reference_moments(torch.special.ndtr, MEANS.expand(3, -1), variance.expand(-1, 25))[1]
    torch.testing.assert_close(cdf_variance(MEANS, variance), expected, rtol=1e-6, atol=0)


def test_hermite_polynomials_and_the_mixture() -> None:
    x = torch.linspace(-3, 3, 13, dtype=torch.float64)
    he = hermite(x, 4)
    torch.testing.assert_close(he[3], x**3 - 3 * x)
    torch.testing.assert_close(he[4], x**4 - 6 * x**2 + 3)
    assert len(hermite(x, 0)) == 1
    assert sum(SIGMOID_WEIGHTS) == pytest.approx(1.0, abs=1e-7)
    line = torch.linspace(-30, 30, 6001, dtype=torch.float64)
    mixture = sum(w * normal_cdf(line / s) for w, s in zip(SIGMOID_WEIGHTS, SIGMOID_SCALES, strict=True))
    assert (mixture - torch.sigmoid(line)).abs().max() < 6.2e-6


def test_safe_root() -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([0.0, 1e-12, 4.0], dtype=dtype, requires_grad=True)
        root = safe_sd(x)
        torch.testing.assert_close(root, torch.tensor([0.0, 1e-6, 2.0], dtype=dtype), rtol=1e-6, atol=1e-12)
        (100.0 / root).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()
        assert x.grad[0] == 0.0
