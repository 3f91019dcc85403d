import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dubito
from dubito.certificates import output_moments, stochastic_gap
from dubito.weights import factor_moments


def layer(family, seed=0, sizes=(6, 4)):
    torch.manual_seed(seed)
    bayes = dubito.bayesianize(nn.Linear(*sizes, bias=False), family)
    return bayes, next(iter(bayes.posteriors()))


FAMILIES = {
    "mean field": dubito.MeanField(scale=0.5),
    "factors": dubito.LowRankFactors(2, init="random", scale=0.6),
    "laplace": dubito.LowRankFactors(2, init="random", scale=0.6, distribution="laplace"),
    "blocks": dubito.LowRankFactors(1, init="random", scale=0.6, blocks=2),
}


@pytest.mark.parametrize("name", list(FAMILIES))
def test_output_moments_are_those_of_draws(name):
    bayes, posterior = layer(FAMILIES[name])
    x = torch.randn(5, 6)
    mean, spread = output_moments(posterior, x)
    with torch.no_grad():
        outputs = bayes.outputs(x, samples=8000, generator=torch.Generator().manual_seed(1)).double()
    assert torch.allclose(outputs.mean(0), mean, atol=0.08)
    assert torch.allclose(outputs.var(0).sum(-1), spread, rtol=0.1)
    if name != "mean field":
        full_mean, covariance = factor_moments.output_moments(posterior, x)
        assert torch.allclose(full_mean.double(), mean, atol=1e-5)
        trace = covariance.diagonal(dim1=1, dim2=2).sum(-1)
        assert torch.allclose(trace.double(), spread, rtol=1e-5)


@pytest.mark.parametrize("loss", ["cross_entropy", "mae", "half_squared"])
@pytest.mark.parametrize("pair", [("mean field", "factors"), ("factors", "laplace")])
def test_the_difference_of_expected_losses_is_bounded(loss, pair):
    (one, left), (other, right) = layer(FAMILIES[pair[0]]), layer(FAMILIES[pair[1]], seed=1)
    x, y = torch.randn(40, 6), torch.randint(4, (40,))
    target = F.one_hot(y, 4).float()
    losses = {
        "cross_entropy": lambda z: F.cross_entropy(
            z.flatten(0, 1), y.repeat(len(z)), reduction="none"
        ).reshape(len(z), -1),
        "mae": lambda z: (z - target).norm(dim=-1),
        "half_squared": lambda z: 0.5 * (z - target).square().sum(-1),
    }
    with torch.no_grad():
        expected = [losses[loss](b.outputs(x, samples=1500)).mean(0) for b in (one, other)]
    gap = stochastic_gap(left, right, x, loss=loss, output_bound=50.0 if loss == "half_squared" else None)
    assert float((expected[0] - expected[1]).abs().mean()) <= gap.bound <= gap.sum_form
    assert gap.means_apart < gap.bound
    assert gap.predictor == "Gibbs"


def test_the_curvature_term_is_attained_by_the_half_squared_loss():
    """Equal means: the expected losses differ by exactly half the difference of variances."""
    _, posterior = layer(FAMILIES["factors"])
    x = torch.randn(30, 6)
    _, spread = output_moments(posterior, x)
    mean = next(iter(posterior.mean().values())).detach()
    gap = stochastic_gap(posterior, mean, x, loss="half_squared", output_bound=1e6)
    assert gap.means_apart == pytest.approx(0.0, abs=1e-5)
    assert gap.bound == pytest.approx(0.5 * float(spread.mean()), rel=1e-6)


def test_a_loss_with_kinks_takes_the_standard_deviation():
    _, posterior = layer(FAMILIES["factors"])
    x = torch.randn(30, 6)
    mean, spread = output_moments(posterior, x)
    gap = stochastic_gap(posterior, torch.zeros(4, 6), x, loss="mae")
    assert gap.sum_form == math.inf
    assert gap.bound == pytest.approx(float((mean.norm(dim=1) + spread.sqrt()).mean()))


def test_what_has_no_closed_form_or_does_not_fit_is_refused():
    _, posterior = layer(FAMILIES["factors"])
    bayes = dubito.bayesianize(nn.Linear(6, 4, bias=False), dubito.FullCovariance())
    full = next(iter(bayes.posteriors()))
    with pytest.raises(dubito.CapabilityError, match="MeanField or LowRankFactors"):
        output_moments(full, torch.randn(3, 6))
    with pytest.raises(ValueError, match="shape"):
        output_moments(posterior, torch.randn(3, 5))
    with pytest.raises(ValueError, match="compared"):
        stochastic_gap(posterior, torch.zeros(5, 6), torch.randn(3, 6))
