"""Activations against dense quadrature: exact rules to rounding, approximate ones within what they state."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from gaussian_expectation import reference_moments
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dubito.moments import activation_moments as rules

SLOPE, LAMBD, ALPHA = 0.1, 0.7, 0.6
Rule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
EXACT: dict[str, tuple[Callable[[Tensor], Tensor], Rule, tuple[float, ...]]] = {
    "relu": (F.relu, rules.relu_moments, (0.0,)),
    "leaky": (lambda x: F.leaky_relu(x, SLOPE), lambda m, v: rules.leaky_relu_moments(m, v, SLOPE), (0.0,)),
    "relu6": (F.relu6, rules.relu6_moments, (0.0, 6.0)),
    "hardtanh": (
        lambda x: F.hardtanh(x, -2.0, 0.5),
        lambda m, v: rules.hardtanh_moments(m, v, -2.0, 0.5),
        (-2, 0.5),
    ),
    "hardsigmoid": (F.hardsigmoid, rules.hardsigmoid_moments, (-3.0, 3.0)),
    "softshrink": (
        lambda x: F.softshrink(x, LAMBD),
        lambda m, v: rules.softshrink_moments(m, v, LAMBD),
        (-LAMBD, LAMBD),
    ),
    "abs": (torch.abs, rules.abs_moments, (0.0,)),
    "elu": (F.elu, rules.elu_moments, (0.0,)),
    "elu alpha": (lambda x: F.elu(x, ALPHA), lambda m, v: rules.elu_moments(m, v, ALPHA), (0.0,)),
    "selu": (F.selu, rules.selu_moments, (0.0,)),
    "celu": (lambda x: F.celu(x, ALPHA), lambda m, v: rules.celu_moments(m, v, ALPHA), (0.0,)),
}
# name: function, rule, error of the mean, {largest sd: error of the variance relative to v}, as documented
APPROXIMATE: dict[str, tuple[Callable[[Tensor], Tensor], Rule, float, dict[float, float]]] = {
    "gelu": (F.gelu, rules.gelu_moments, 1e-6, {0.5: 3e-6, 0.7: 4e-5, 1.0: 4e-4, 6.0: 4e-3}),
    "gelu tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda m, v: rules.gelu_moments(m, v, "tanh"),
        5e-4,
        {1.0: 2e-3, 6.0: 4e-3},
    ),
    "sigmoid": (torch.sigmoid, rules.sigmoid_moments, 7e-6, {6.0: 8e-6}),
    "tanh": (torch.tanh, rules.tanh_moments, 1.3e-5, {6.0: 1.3e-4}),
    "silu": (F.silu, rules.silu_moments, 5e-5, {6.0: 2e-4}),
    "softplus": (F.softplus, rules.softplus_moments, 3e-5, {1.0: 2e-5, 2.0: 8e-5, 3.0: 4e-4, 6.0: 1.4e-3}),
    "softplus beta": (
        lambda x: F.softplus(x, beta=2.0),
        lambda m, v: rules.softplus_moments(m, v, 2.0),
        3e-5,
        {0.5: 3e-5, 1.0: 1e-4, 3.0: 1.5e-3},
    ),
}
MEANS = torch.linspace(-8.0, 8.0, 33, dtype=torch.float64)
SDS = (1e-3, 0.05, 0.3, 0.5, 0.7, 1.0, 2.0, 3.0, 6.0)
EVERY = {**{k: v[:2] for k, v in EXACT.items()}, **{k: v[:2] for k, v in APPROXIMATE.items()}}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("sd", SDS)
def test_exact_rules_equal_quadrature(name: str, sd: float) -> None:
    function, rule, kinks = EXACT[name]
    variance = torch.full_like(MEANS, sd**2)
    mean, spread = reference_moments(function, MEANS, variance, kinks)
    out = rule(MEANS, variance)
    torch.testing.assert_close(out[0], mean, rtol=1e-9, atol=1e-9 * sd + 1e-14)
    torch.testing.assert_close(out[1], spread, rtol=1e-6, atol=1e-12 * sd**2)
    single = rule(MEANS.float(), variance.float())
    torch.testing.assert_close(single[0].double(), mean, rtol=1e-6, atol=1e-6)
    # Four decimals down to a millionth of the input's variance: the dead tail beyond holds nothing.
    torch.testing.assert_close(single[1].double(), spread, rtol=1e-4, atol=5e-7 * sd**2)


@pytest.mark.parametrize("name", APPROXIMATE)
@pytest.mark.parametrize("sd", SDS)
def test_approximate_rules_keep_to_the_error_they_state(name: str, sd: float) -> None:
    function, rule, mean_error, spread_errors = APPROXIMATE[name]
    stated = [error for largest, error in spread_errors.items() if sd <= largest]
    if not stated:
        pytest.skip("nothing is said of so large a deviation")
    variance = torch.full_like(MEANS, sd**2)
    mean, spread = reference_moments(function, MEANS, variance)
    for dtype in (torch.float64, torch.float32):
        out = rule(MEANS.to(dtype), variance.to(dtype))
        assert (out[0].double() - mean).abs().max() <= mean_error
        assert ((out[1].double() - spread).abs() / sd**2).max() <= stated[0] + 5e-7


@pytest.mark.parametrize("name", ["gelu", "sigmoid", "silu", "softplus"])
def test_variances_are_relatively_right_at_small_noise_in_single_precision(name: str) -> None:
    function, rule, *_ = APPROXIMATE[name]
    mean = torch.linspace(-3.0, 3.0, 61, dtype=torch.float64)
    variance = torch.full_like(mean, 1e-6)
    _, spread = reference_moments(function, mean, variance)
    out = rule(mean.float(), variance.float())[1].double()
    # The mixture moves the point at which SiLU's slope is zero.
    tolerance, floor = (1e-4, 1e-9) if name == "gelu" else (2e-3, 1e-4)
    torch.testing.assert_close(out, spread, rtol=tolerance, atol=floor * variance[0].item())


def test_more_terms_of_gelu_are_closer_and_never_too_large() -> None:
    variance = torch.ones_like(MEANS)
    _, spread = reference_moments(F.gelu, MEANS, variance)
    series = [rules.gelu_moments(MEANS, variance, terms=terms)[1] for terms in (1, 2, 4, 6, 10, 30)]
    errors = [(spread - s).max().item() for s in series]
    assert errors == sorted(errors, reverse=True)
    assert all((s <= spread + 1e-12).all() for s in series)
    assert errors[-1] < 1e-9


@pytest.mark.parametrize("name", EVERY)
def test_no_variance_gives_the_function_itself(name: str) -> None:
    function, rule = EVERY[name]
    mean = torch.tensor([-50.0, -3.0, -0.5, 0.0, 0.25, 2.0, 50.0], requires_grad=True)
    variance = torch.zeros(7, requires_grad=True)
    out, spread = rule(mean, variance)
    tolerance = APPROXIMATE[name][2] if name in APPROXIMATE else 1e-6
    torch.testing.assert_close(out, function(mean), rtol=1e-6, atol=tolerance)
    assert (spread == 0).all()
    (out.sum() + spread.sum()).backward()  # type: ignore[no-untyped-call]
    assert mean.grad is not None
    assert variance.grad is not None
    assert torch.isfinite(mean.grad).all()
    assert torch.isfinite(variance.grad).all()


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_saturation_gives_numbers(name: str, dtype: torch.dtype) -> None:
    mean = torch.tensor([-1e4, -300.0, -30.0, 0.0, 30.0, 300.0, 1e4], dtype=dtype)[:, None]
    variance = torch.tensor([0.0, 1e-30, 1e-6, 1.0, 1e3], dtype=dtype)
    out, spread = EVERY[name][1](mean, variance)
    assert out.shape == spread.shape == (7, 5)
    assert out.dtype == spread.dtype == dtype
    assert torch.isfinite(out).all()
    assert torch.isfinite(spread).all()
    assert (spread >= 0).all()


@pytest.mark.parametrize("name", EVERY)
def test_gradients(name: str) -> None:
    mean = torch.tensor([-2.3, -0.4, 0.0, 0.3, 1.9], dtype=torch.float64, requires_grad=True)
    variance = torch.tensor([0.4, 0.09, 0.5, 1.7, 0.2], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(EVERY[name][1], (mean, variance))


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(sorted(EXACT)), st.floats(-5, 5), st.floats(-6, 1))
def test_exact_rules_anywhere(name: str, mean: float, log_sd: float) -> None:
    function, rule, kinks = EXACT[name]
    at, variance = (
        torch.tensor([mean], dtype=torch.float64),
        torch.tensor([10.0 ** (2 * log_sd)], dtype=torch.float64),
    )
    expected = reference_moments(function, at, variance, kinks)
    out = rule(at, variance)
    torch.testing.assert_close(out[0], expected[0], rtol=1e-9, atol=1e-9)
    if log_sd > -4.0:  # below, the reference itself loses digits
        torch.testing.assert_close(out[1], expected[1], rtol=1e-6, atol=1e-10 * variance.item())


def test_prelu_takes_a_slope_a_channel() -> None:
    mean, variance = torch.randn(2, 3, 4), torch.rand(2, 3, 4)
    slopes = torch.tensor([0.1, 0.2, 0.3])[None, :, None]
    out = rules.leaky_relu_moments(mean, variance, slopes)
    for c, slope in enumerate((0.1, 0.2, 0.3)):
        one = rules.leaky_relu_moments(mean[:, c], variance[:, c], slope)
        torch.testing.assert_close(out[0][:, c], one[0])
        torch.testing.assert_close(out[1][:, c], one[1])


def test_bad_options_are_named() -> None:
    x = torch.zeros(1)
    with pytest.raises(ValueError, match="approximate='erf'"):
        rules.gelu_moments(x, x, "erf")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="terms=0"):
        rules.gelu_moments(x, x, terms=0)
    with pytest.raises(ValueError, match=r"beta=0\.0"):
        rules.softplus_moments(x, x, beta=0.0)
