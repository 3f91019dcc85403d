"""The fast bound against the general one by distributions."""

import math

import pytest
import torch
from torch.distributions import Normal

from dubito.divergences import kl_divergence
from dubito.priors import ScaleMixture
from dubito.weights.scale_mixture_bound import scale_mixture_bound


@pytest.mark.parametrize(("pi", "s1", "s2"), [(0.5, 1.0, math.exp(-6)), (0.25, 0.1, 1.0), (0.75, 2.0, 0.05)])
@pytest.mark.parametrize("loc", [0.0, 0.3])
def test_value_and_gradient_equal_the_general_bound(pi: float, s1: float, s2: float, loc: float) -> None:
    torch.manual_seed(0)
    mean = torch.randn(40, dtype=torch.float64).mul(0.5).requires_grad_()
    log_sd = torch.randn(40, dtype=torch.float64).sub(3).requires_grad_()
    fast = scale_mixture_bound(mean, log_sd, log_sd.exp(), pi, s1, s2, loc)
    exact = (torch.tensor(number, dtype=torch.float64) for number in (pi, s1, s2, loc))
    general = kl_divergence(Normal(mean, log_sd.exp()), ScaleMixture(*exact), "bound").sum()
    torch.testing.assert_close(fast, general, rtol=1e-10, atol=0)
    ours = torch.autograd.grad(fast * 1.7, (mean, log_sd))
    theirs = torch.autograd.grad(general * 1.7, (mean, log_sd))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("log_sd", [-60.0, -20.0, 0.0, 10.0])
@pytest.mark.parametrize("mean", [0.0, 1e-4, 5.0, 1e3])
def test_finite_in_float32_extremes(mean: float, log_sd: float) -> None:
    m = torch.full((3,), mean, requires_grad=True)
    ls = torch.full((3,), log_sd, requires_grad=True)
    value = scale_mixture_bound(m, ls, ls.exp(), 0.5, 1.0, math.exp(-6))
    gradients = torch.autograd.grad(value, (m, ls))
    assert bool(torch.isfinite(value))
    assert all(bool(torch.isfinite(g).all()) for g in gradients)


def test_under_vmap() -> None:
    mean, log_sd = torch.randn(5, 7), torch.randn(5, 7) - 3
    batched = torch.vmap(lambda m, ls: scale_mixture_bound(m, ls, ls.exp(), 0.5, 1.0, 0.01))(mean, log_sd)
    single = torch.stack(
        [scale_mixture_bound(m, ls, ls.exp(), 0.5, 1.0, 0.01) for m, ls in zip(mean, log_sd, strict=True)]
    )
    torch.testing.assert_close(batched, single)
