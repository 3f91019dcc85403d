import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

import dubito
from dubito import CapabilityError, DiagonalCovariance


def bayesian() -> dubito.BayesianModule:
    torch.manual_seed(0)
    return dubito.bayesianize(nn.Linear(6, 4).double(), DiagonalCovariance(), prior=Normal(0.0, 0.7))


def test_starts_exactly_at_the_prior_s_variance() -> None:
    bayes = bayesian()
    for posterior in bayes.posteriors():
        (slot,) = posterior.slots
        expected = slot.parameter.var(unbiased=False).expand(slot.shape)
        torch.testing.assert_close(posterior.variance()[slot.name], expected)


def test_the_sign_of_a_factor_means_nothing() -> None:
    bayes, other = bayesian(), bayesian()
    with torch.no_grad():
        for posterior in other.posteriors():
            posterior.factor.neg_()
    torch.testing.assert_close(bayes.kl(), other.kl())
    assert float(bayes.wasserstein(other).detach()) == 0.0
    draw = {s.name: torch.randn(s.shape, dtype=torch.float64) for p in bayes.posteriors() for s in p.slots}
    for one, two in zip(bayes.posteriors(), other.posteriors(), strict=True):
        torch.testing.assert_close(one.log_prob(draw), two.log_prob(draw))


def test_kl_and_log_prob_are_those_of_torch() -> None:
    bayes = bayesian()
    expected = torch.zeros((), dtype=torch.float64)
    for posterior in bayes.posteriors():
        (slot,) = posterior.slots
        q = Normal(slot.parameter, posterior.variance()[slot.name].sqrt())
        prior = Normal(torch.tensor(0.0, dtype=torch.float64), 0.7)
        expected = expected + kl_divergence(q, prior).sum()
        w = torch.randn(3, *slot.shape, dtype=torch.float64)
        torch.testing.assert_close(posterior.log_prob({slot.name: w}), q.log_prob(w).flatten(1).sum(1))
    torch.testing.assert_close(bayes.kl(), expected)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="scale=-1"):
        DiagonalCovariance(scale=-1)
    (weight, _) = bayesian().posteriors()
    other = dubito.bayesianize(nn.Linear(6, 4).double(), dubito.MeanField())
    with pytest.raises(CapabilityError, match="no closed form between DiagonalCovariance and MeanField"):
        weight.wasserstein(next(iter(other.posteriors())))
