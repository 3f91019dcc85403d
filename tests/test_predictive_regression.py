"""Predictives of a regression against mixtures of torch.distributions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical, MixtureSameFamily, Normal

from dubito.predictive import NotAvailableError, Predictive

draws_and_batch = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(2, 5), st.integers(0, 10_000))
few = settings(max_examples=30, deadline=None)


def logits_of(shape, seed=0, scale=3.0, dtype=torch.float64):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def regression(seed=0, shape=(8, 5, 2), **kwargs):
    noise = 0.2 + logits_of(shape, seed + 1, 1.0).square()
    return Predictive.from_draws("regression", logits_of(shape, seed), aleatoric=noise, **kwargs)


@few
@given(draws_and_batch)
def test_regression_identities(sizes):
    s, b, d, seed = sizes
    p = regression(seed, (s, b, d))
    assert torch.allclose(p.variance, p.aleatoric + p.epistemic)
    assert torch.allclose(p.std.square(), p.variance)
    assert (p.mutual_information >= 0).all()
    bound = 0.5 * torch.log(2 * math.pi * math.e * p.variance)
    assert (p.entropy <= bound + 1e-9).all()


@pytest.mark.parametrize("shared", [True, False])
def test_regression_against_mixture_same_family(shared):
    means = logits_of((6, 4), scale=1.0)
    noise = torch.tensor(0.3, dtype=torch.float64) if shared else logits_of((6, 4), 5, 1.0).square() + 0.1
    p = Predictive.from_draws("regression", means, aleatoric=noise)
    weights = Categorical(torch.ones(4, 6, dtype=torch.float64))
    oracle = MixtureSameFamily(weights, Normal(means.T, noise.sqrt().expand_as(means).T))
    y = logits_of((4,), 9)
    assert torch.allclose(p.mean, oracle.mean)
    assert torch.allclose(p.variance, oracle.variance)
    assert torch.allclose(p.log_prob(y), oracle.log_prob(y))
    assert torch.allclose(oracle.cdf(p.quantile(0.1)), torch.full((4,), 0.1, dtype=torch.float64))
    low, high = p.interval(0.8)
    assert torch.equal(low, p.quantile(0.5 - 0.4))
    assert torch.allclose(oracle.cdf(high) - oracle.cdf(low), torch.full((4,), 0.8, dtype=torch.float64))
    x = oracle.sample((20_000,))
    monte_carlo = -oracle.log_prob(x)
    assert ((monte_carlo.mean(0) - p.entropy).abs() < 5 * monte_carlo.std(0) / 20_000**0.5).all()


def test_several_outcomes_of_a_datum_share_the_draw():
    means = logits_of((6, 4, 3), scale=1.0)
    p = Predictive.from_draws("regression", means, aleatoric=0.5)
    y = logits_of((4, 3), 2)
    per_draw = Normal(means, 0.5**0.5).log_prob(y).sum(-1)
    assert torch.allclose(p.log_prob(y), per_draw.logsumexp(0) - math.log(6))
    assert torch.allclose(p.log_prob(y, joint=True), per_draw.sum(1).logsumexp(0) - math.log(6))


def test_t10_total_variance_has_the_noise_in_it():
    means = torch.tensor([[0.0], [2.0]])
    p = Predictive.from_draws("regression", means, aleatoric=torch.tensor([[1.0], [3.0]]))
    assert (p.epistemic.item(), p.aleatoric.item(), p.variance.item()) == (1.0, 2.0, 3.0)
    samples = p.sample(40_000, torch.Generator().manual_seed(0))
    assert samples.var().item() == pytest.approx(3.0, rel=0.05)
    with pytest.raises(ValueError, match="needs aleatoric, the noise variance of the likelihood"):
        Predictive.from_draws("regression", means)


def test_reduced_regression_is_the_gaussian_of_the_same_moments():
    p, full = regression(keep_draws=False), regression()
    assert p.draws is None
    assert p.samples == 8
    oracle = Normal(full.mean, full.variance.sqrt())
    y = logits_of((5, 2), 3)
    assert torch.allclose(p.log_prob(y), oracle.log_prob(y).sum(-1))
    assert torch.allclose(p.quantile(0.9), oracle.icdf(torch.tensor(0.9, dtype=torch.float64)))
    assert torch.allclose(p.entropy, oracle.entropy())
    assert torch.allclose(p.expected_entropy, full.expected_entropy)
    assert (p.mutual_information >= full.mutual_information - 1e-9).all()


@pytest.mark.parametrize(
    ("shift", "scale"), [(3.0, 4.0), (torch.tensor([1.0, -2.0]), torch.tensor([0.5, 10.0]))]
)
@pytest.mark.parametrize("keep", [True, False])
def test_affine_undoes_a_standardisation(shift, scale, keep):
    p = regression(keep_draws=keep)
    q = p.affine(shift, scale)
    s = torch.as_tensor(scale, dtype=torch.float64)
    z = logits_of((5, 2), 4)
    assert torch.allclose(q.mean, shift + scale * p.mean)
    assert torch.allclose(q.aleatoric, s**2 * p.aleatoric)
    assert torch.allclose(q.epistemic, s**2 * p.epistemic)
    log_scale = s.log().expand(2).sum()
    assert torch.allclose(q.log_prob(shift + scale * z), p.log_prob(z) - log_scale)
    assert torch.allclose(q.quantile(0.2), shift + scale * p.quantile(0.2), atol=1e-9)
    assert torch.allclose(q.entropy, p.entropy + s.log(), atol=1e-8)
    assert torch.allclose(q.mutual_information, p.mutual_information, atol=1e-8)
    if keep:
        assert torch.allclose(q.draws, shift + scale * p.draws)


def test_affine_refuses_what_would_change_the_shape():
    with pytest.raises(ValueError, match="one number, or one a feature"):
        regression().affine(torch.zeros(5), 1.0)
    with pytest.raises(ValueError, match="scale is zero"):
        regression().affine(0.0, 0.0)


def test_sampled_numbers_have_the_predictive_moments():
    for p in (regression(), regression(keep_draws=False)):
        y = p.sample(40_000, torch.Generator().manual_seed(0))
        assert torch.allclose(y.mean(0), p.mean, atol=0.12)
        assert torch.allclose(y.var(0), p.variance, rtol=0.1)


@pytest.mark.parametrize("name", ["probs", "confidence"])
def test_a_regression_says_what_it_has(name):
    with pytest.raises(NotAvailableError, match=rf"regression predictive has no {name}. It has mean"):
        getattr(regression(), name)


def test_targets_of_a_regression_are_checked():
    p = Predictive.from_draws("regression", torch.zeros(3, 4, 1), aleatoric=1.0)
    with pytest.raises(ValueError, match=r"unsqueeze\(-1\).*not broadcast"):
        p.log_prob(torch.zeros(4))
    with pytest.raises(ValueError, match=r"y\[2, 0\] is nan"):
        p.log_prob(torch.tensor([[0.0], [0.0], [math.nan], [0.0]]))


def test_a_regression_without_noise_has_quantiles_but_no_density():
    p = Predictive.from_draws("regression", torch.tensor([[0.0], [1.0], [2.0]]), aleatoric=0.0)
    assert p.quantile(0.5).item() == pytest.approx(1.0)
    for name in ("entropy", "expected_entropy"):
        with pytest.raises(NotAvailableError, match="noise variance is zero"):
            getattr(p, name)
    with pytest.raises(NotAvailableError, match="noise variance is zero"):
        p.log_prob(torch.zeros(1))


def test_quantiles_of_several_probabilities_lead():
    p = regression()
    many = p.quantile([0.1, 0.5, 0.9])
    assert many.shape == (3, 5, 2)
    assert torch.equal(many[1], p.quantile(0.5))
    assert torch.equal(p.quantile(torch.tensor([0.5, 0.25]))[0], p.quantile(0.5))
    assert (many.diff(dim=0) > 0).all()
    with pytest.raises(ValueError, match="level is 95"):
        p.interval(95)
