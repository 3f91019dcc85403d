"""Mixtures of Gaussians against torch.distributions, closed forms and Monte Carlo."""

import math
from statistics import NormalDist

import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, Normal

from dubito.gaussian_mixtures import (
    _expected_surprise,
    _marked_nodes,
    log_mean_exp,
    mixture_entropy,
    mixture_quantile,
)


def mixture(means, sds):
    count = means.shape[0]
    weights = torch.ones(*means.shape[1:], count, dtype=means.dtype)
    return MixtureSameFamily(Categorical(weights), Normal(means.movedim(0, -1), sds.movedim(0, -1)))


@pytest.fixture
def components():
    generator = torch.Generator().manual_seed(3)
    means = 2.0 * torch.randn(7, 5, 2, generator=generator, dtype=torch.float64)
    return means, 0.05 + torch.rand(7, 5, 2, generator=generator, dtype=torch.float64)


def test_log_mean_exp_of_one_is_exact_and_of_minus_infinity_is_itself():
    one = torch.randn(1, 9)
    assert torch.equal(log_mean_exp(one), one[0])
    assert log_mean_exp(torch.full((4,), -math.inf)) == -math.inf
    assert log_mean_exp(torch.tensor([0.0, -math.inf])).item() == pytest.approx(-math.log(2))


@pytest.mark.parametrize("q", [1e-6, 0.025, 0.5, 0.9, 1 - 1e-6])
def test_quantile_inverts_the_distribution_function(components, q):
    means, sds = components
    x = mixture_quantile(means, sds, q)
    assert torch.allclose(mixture(means, sds).cdf(x), torch.full_like(x, q), atol=1e-12, rtol=1e-9)


def test_upper_tail_is_the_mirror_of_the_lower(components):
    means, sds = (t.float() for t in components)
    q = 2.0**-20  # 1 - q is exact
    lower, upper = mixture_quantile(-means, sds, q), mixture_quantile(means, sds, 1 - q)
    assert torch.allclose(upper, -lower, atol=1e-6)


def test_quantile_of_one_component_is_exact_and_of_point_masses_a_step():
    found = mixture_quantile(torch.tensor([[2.0]]), torch.tensor([[3.0]]), 0.9)
    assert found.item() == pytest.approx(2 + 3 * NormalDist().inv_cdf(0.9), rel=1e-6)
    points = torch.tensor([[0.0], [1.0], [2.0], [3.0]], dtype=torch.float64)
    assert mixture_quantile(points, torch.zeros_like(points), 0.6).item() == pytest.approx(2.0)


@pytest.mark.parametrize("q", [0.0, 1.0, -0.1, math.nan])
def test_quantile_outside_the_open_interval_is_an_error(components, q):
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        mixture_quantile(*components, q)


def test_entropy_agrees_with_fine_quadrature(components):
    means, sds = components
    x = torch.linspace(-14, 14, 400_001, dtype=torch.float64)
    for i in range(3):
        log_density = mixture(means[:, i, 0], sds[:, i, 0]).log_prob(x)
        expected = -(log_density.exp() * log_density).sum() * (x[1] - x[0])
        assert mixture_entropy(means[:, i, 0], sds[:, i, 0]).item() == pytest.approx(
            expected.item(), abs=1e-8
        )
    whole = mixture_entropy(means, sds)  # elements of unequal need are put back in order
    assert torch.allclose(whole[1, 1], mixture_entropy(means[:, 1, 1], sds[:, 1, 1]), atol=1e-10)


def test_entropy_closed_forms():
    gaussian = 0.5 * math.log(2 * math.pi * math.e)
    alike = torch.full((6, 3), 0.7)
    assert torch.allclose(
        mixture_entropy(alike, torch.full((6, 3), 2.0)), torch.tensor(gaussian + math.log(2))
    )
    apart = torch.tensor([0.0, 100.0, 300.0, 700.0], dtype=torch.float64)  # no overlap: entropies add up
    found = mixture_entropy(apart, torch.ones(4, dtype=torch.float64))
    assert found.item() == pytest.approx(gaussian + math.log(4), abs=1e-10)
    assert mixture_entropy(torch.zeros(4, 0), torch.ones(4, 0)).shape == (0,)


def test_entropy_has_a_gradient():
    means = torch.tensor([[-1.0], [1.5]], dtype=torch.float64, requires_grad=True)
    sds = torch.tensor([[0.5], [0.8]], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda m: mixture_entropy(m, sds), (means,), atol=1e-5)


def test_entropy_of_narrow_components_within_wide_ones():
    means = torch.tensor([0.0, 0.1, -3.0, 0.1], dtype=torch.float64)
    sds = torch.tensor([5.0, 1e-4, 2.0, 0.5], dtype=torch.float64)
    oracle = mixture(means, sds)
    x = torch.cat(  # fine about the spike, coarse elsewhere
        [
            torch.linspace(a, b, 200_001, dtype=torch.float64)
            for a, b in ((-50, 0.09), (0.09, 0.11), (0.11, 50))
        ]
    )
    log_density = oracle.log_prob(x)
    expected = torch.trapezoid(-log_density.exp() * log_density, x)
    assert mixture_entropy(means, sds).item() == pytest.approx(expected.item(), abs=1e-6)


def test_entropy_at_any_ratio_of_spread_to_noise():
    gaussian = 0.5 * math.log(2 * math.pi * math.e)
    means = torch.tensor([[0.0, 0.0], [1e6, 30.0]], dtype=torch.float64)
    found = mixture_entropy(means, torch.tensor([[1e-3], [1e-3]], dtype=torch.float64))
    assert torch.allclose(found, torch.tensor(gaussian + math.log(1e-3) + math.log(2), dtype=torch.float64))


def test_the_two_rules_agree(components):
    means, sds = (t.flatten(1) for t in components)
    marked = _expected_surprise(means, sds, *_marked_nodes(means, sds))
    assert torch.allclose(marked, mixture_entropy(means, sds), atol=1e-7)
