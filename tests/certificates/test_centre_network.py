import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal

import dubito
from dubito.certificates import RefusedError, centre_check


def trained(scale=0.1, prior=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 12, bias=False), nn.ReLU(), nn.Linear(12, 3, bias=False))
    family = dubito.LowRankFactors(2, init="svd", scale=scale, prior=prior or Normal(0.0, 0.5))
    return dubito.bayesianize(net, family, likelihood=dubito.Categorical())


def data(n=100):
    torch.manual_seed(1)
    x = torch.randn(n, 5)
    return x / x.norm(dim=1, keepdim=True), torch.randint(3, (n,))


def test_at_learned_noise_it_fails_and_says_how_far_it_is():
    bayes, (x, y) = trained(), data()
    found = centre_check(bayes, x, y, margin=0.5)
    assert not found.holds
    assert found.condition > 1
    assert (found.bound, found.vacuous) == (math.inf, True)
    assert 0 < found.passes_at < 1
    just, over = (centre_check(bayes, x, y, margin=0.5, noise=found.passes_at * f) for f in (0.999, 1.001))
    assert just.holds
    assert not over.holds
    assert just.bound < math.inf
    assert found.predictor == "centre network"


def test_the_bound_is_margin_risk_and_complexity():
    bayes, (x, y) = trained(), data()
    noise = 0.5 * centre_check(bayes, x, y, margin=0.5).passes_at
    found = centre_check(bayes, x, y, margin=0.5, noise=noise, delta=0.1)
    outputs = bayes.merge()(x).detach()
    own = outputs.gather(1, y[:, None]).squeeze(1)
    rest = outputs.scatter(1, y[:, None], -math.inf).amax(1)
    risk = float((own <= rest + 0.5).double().mean())
    assert found.measured["margin risk"] == pytest.approx(risk)
    assert found.bound == pytest.approx(risk + 4 * math.sqrt((found.kl + math.log(600 / 0.1)) / 99))


def test_the_kl_is_that_of_balanced_isotropic_factors():
    bayes, (x, y) = trained(), data()
    found = centre_check(bayes, x, y, margin=0.5, noise=0.3)
    total = 0.0
    for posterior in bayes.posteriors():
        u, s, vh = torch.linalg.svd(
            next(iter(posterior.mean().values())).detach().double(), full_matrices=False
        )
        for side, mean in (("left", u[:, :2] * s[:2].sqrt()), ("right", vh[:2].T * s[:2].sqrt())):
            sd = 0.3 * float(posterior.moments(side)[1].detach().double().mean().sqrt())
            q = Normal(mean, torch.tensor(sd, dtype=torch.float64))
            total += float(torch.distributions.kl_divergence(q, Normal(0.0, 0.5)).sum())
    assert found.kl == pytest.approx(total, rel=1e-5)


def test_where_it_passes_half_of_the_draws_leave_the_outputs_within_a_quarter_margin():
    bayes, (x, y) = trained(), data()
    noise = 0.999 * centre_check(bayes, x, y, margin=0.5).passes_at
    assert centre_check(bayes, x, y, margin=0.5, noise=noise).holds
    centre = bayes.merge()(x).detach()
    bayes.rescale_spread_(noise)
    for (
        posterior
    ) in bayes.posteriors():  # the check's posterior is around balanced factors, as the SVD makes them
        left, right = posterior.left_mean, posterior.right_mean
        assert torch.allclose(left.T @ left, right.T @ right, atol=1e-5)
    with torch.no_grad():
        moved = (bayes.outputs(x, samples=200) - centre).norm(dim=-1).amax(1)
    assert float((moved < 0.5 / 4).double().mean()) >= 0.5


def test_networks_it_is_not_about_are_refused():
    x, y = data()
    factors = dubito.LowRankFactors(1, init="random")
    biased = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    smooth = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False))
    dense = nn.Sequential(nn.Linear(5, 3, bias=False))
    refused = [(biased, factors, "bias"), (smooth, factors, "ReLU"), (dense, dubito.MeanField(), "one block")]
    for net, family, says in refused:
        bayes = dubito.bayesianize(net, family)
        with pytest.raises(ValueError, match=says):
            centre_check(bayes, x, y, margin=0.5)
    with pytest.raises(RefusedError, match="Gaussian priors"):
        centre_check(trained(prior=dubito.ScaleMixture(0.5, 1.0, 0.1)), x, y, margin=0.5)
    with pytest.raises(ValueError, match="radius"):
        centre_check(trained(), x, y, margin=0.5, radius=0.1)
    with pytest.raises(ValueError, match="margin"):
        centre_check(trained(), x, y, margin=0.0)
