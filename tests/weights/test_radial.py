"""Radial weights: the exact entropy, the closed-form KL, and what a draw looks like."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Laplace, MixtureSameFamily, Normal

import dubito
from dubito import CapabilityError, Radial
from dubito.weights.radial import RadialPosterior, gaussian_excess, standard_entropy


def posterior(shape: tuple[int, ...], prior: object = None, scale: float = 0.3) -> RadialPosterior:
    torch.manual_seed(0)
    module = nn.Module()
    module.weight = nn.Parameter(0.2 * torch.randn(shape, dtype=torch.float64))
    bayes = dubito.bayesianize(module, Radial(prior=prior, scale=scale))  # type: ignore[arg-type]
    (made,) = bayes.posteriors()
    assert isinstance(made, RadialPosterior)
    with torch.no_grad():
        made.spread.add_(0.3 * torch.randn_like(made.spread))
    return made


@pytest.mark.parametrize("size", [2, 3])
def test_entropy_constant_by_nearest_neighbours(size: int) -> None:
    """The estimator of Kozachenko and Leonenko knows no density: distances to the third neighbour among draws."""
    generator = torch.Generator().manual_seed(size)
    draws, neighbour = 6000, 3
    eps = torch.randn(draws, size, generator=generator, dtype=torch.float64)
    x = eps / eps.norm(dim=1, keepdim=True) * torch.randn(draws, 1, generator=generator, dtype=torch.float64)
    distances = torch.cdist(x, x).topk(neighbour + 1, largest=False).values[:, -1]
    log_ball = 0.5 * size * math.log(math.pi) - math.lgamma(0.5 * size + 1.0)
    digamma = torch.digamma(torch.tensor([draws, neighbour], dtype=torch.float64))
    estimate = digamma[0] - digamma[1] + log_ball + size * distances.log().mean()
    assert float(estimate) == pytest.approx(standard_entropy(size), abs=0.1)  # three of its sds
    assert (
        abs(size * float(Normal(0.0, 1.0).entropy()) - standard_entropy(size)) > 0.2
    )  # and not the Gaussian's


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_entropy_is_minus_the_mean_log_density(size: int) -> None:
    q = posterior((size,))
    with torch.no_grad():
        draws = q.draw((4000,), torch.Generator().manual_seed(1))
        log_q = q.log_prob(draws)
    assert float(q.entropy().detach()) == pytest.approx(
        -float(log_q.mean()), abs=5 * float(log_q.std()) / 4000**0.5
    )


def test_in_one_dimension_it_is_the_gaussian() -> None:
    assert standard_entropy(1) == pytest.approx(float(Normal(0.0, 1.0).entropy()), rel=1e-6)
    assert gaussian_excess(1) == pytest.approx(0.0, abs=1e-12)
    q = posterior((1,))
    w = torch.tensor([0.7], dtype=torch.float64)
    assert torch.allclose(q.log_prob({"weight": w}), Normal(q.slot.parameter, q.sd()).log_prob(w).sum())


def test_a_gaussian_has_the_most_entropy_at_given_moments() -> None:
    excesses = [gaussian_excess(size) for size in (1, 2, 3, 10, 100, 10_000)]
    assert all(b > a for a, b in itertools.pairwise(excesses))


@pytest.mark.parametrize("size", [2, 12])
def test_closed_kl_is_the_mean_of_log_q_minus_log_p(size: int) -> None:
    prior = Normal(torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.6, dtype=torch.float64))
    q = posterior((size,), prior)
    with torch.no_grad():
        draws = q.draw((4000,), torch.Generator().manual_seed(3))["weight"]
        terms = q.log_prob({"weight": draws}) - prior.log_prob(draws).sum(-1)
    error = 5 * float(terms.std()) / 4000**0.5
    assert float(q.kl()["weight"].detach()) == pytest.approx(float(terms.mean()), abs=error)
    # Monte Carlo of the cross-entropy alone, and of everything
    generator = torch.Generator().manual_seed(4)
    for method in ("monte_carlo", "stick_the_landing"):
        value = q.kl(method, samples=1500, generator=generator)["weight"].detach()  # type: ignore[arg-type]
        assert float(value) == pytest.approx(float(terms.mean()), abs=5 * float(terms.std()) / 1500**0.5)


def test_kl_gradient_is_that_of_the_gaussian_at_the_same_moments() -> None:
    """The paper's -sum log σ + E[-log p]: the constant has no gradient."""
    q = posterior((3, 4), Normal(0.0, 0.5))
    q.kl()["weight"].backward()
    sd, mean = q.sd().detach(), q.slot.parameter
    assert mean.grad is not None
    assert torch.allclose(mean.grad, mean.detach() / 0.25)
    assert q.spread.grad is not None
    assert torch.allclose(q.spread.grad, sd.square() / 0.25 - 1.0)


def test_mixture_bound_is_above_the_sampled_kl_and_the_default() -> None:
    mixtures = (
        dubito.ScaleMixture(0.5, 1.0, 0.05),
        MixtureSameFamily(
            Categorical(torch.tensor([0.5, 0.5])), Normal(torch.zeros(2), torch.tensor([1.0, 0.05]))
        ),
    )
    for mixture in mixtures:
        q = posterior((8,), mixture)
        bound = float(q.kl()["weight"].detach())
        sampled = float(q.kl("monte_carlo", 800, torch.Generator().manual_seed(5))["weight"].detach())
        assert sampled - 0.05 < bound < sampled + 8 * 0.8  # loose: the radial law has much mass in the spike
        assert bound == float(q.kl("bound")["weight"].detach())


def test_a_prior_without_moment_form_is_sampled_not_taken_for_gaussian() -> None:
    """KL(Normal || Laplace) has a closed form; the radial law is no Normal."""
    prior = Laplace(0.0, 0.3)
    q = posterior((6,), prior)
    with torch.no_grad():
        draws = q.draw((4000,), torch.Generator().manual_seed(6))["weight"]
        terms = -prior.log_prob(draws).sum(-1) - q.entropy()
        value = q.kl(samples=1500, generator=torch.Generator().manual_seed(7))["weight"]
    assert float(value) == pytest.approx(float(terms.mean()), abs=5 * float(terms.std()) / 4000**0.5)
    for method in ("closed", "bound"):
        with pytest.raises(CapabilityError, match="monte_carlo"):
            q.kl(method)  # type: ignore[arg-type]


def test_draws_have_the_stated_moments_and_a_half_normal_radius() -> None:
    q = posterior((5, 4))
    with torch.no_grad():
        draws = q.draw((8000,), torch.Generator().manual_seed(8))["weight"]
        mean, variance = q.mean()["weight"], q.variance()["weight"]
        assert torch.allclose(draws.mean(0), mean, atol=6 * float(variance.max().sqrt()) / 8000**0.5)
        assert torch.allclose(draws.var(0), variance, rtol=0.15)
        assert torch.allclose(variance, q.sigma().square() / 20)  # not σ²
        radius = ((draws - mean) / q.sigma()).reshape(-1, 20).norm(dim=1)
    assert float(radius.mean()) == pytest.approx(math.sqrt(2 / math.pi), abs=0.03)
    assert float((radius < 0.5).double().mean()) == pytest.approx(math.erf(0.5 / math.sqrt(2)), abs=0.03)


def test_avoids_the_soap_bubble() -> None:
    """A Gaussian of many entries is never near its mean; a radial draw often is, whatever their number."""
    q = posterior((4000,))
    with torch.no_grad():
        draws = q.draw((400,), torch.Generator().manual_seed(9))["weight"]
        share = ((draws - q.slot.parameter) / q.sd()).square().mean(1).sqrt() < 0.5
        bubble = (
            torch.randn(400, 4000, generator=torch.Generator().manual_seed(9)).square().mean(1).sqrt() < 0.5
        )
    assert float(share.double().mean()) == pytest.approx(0.383, abs=0.08)
    assert not bool(bubble.any())


def test_starts_with_the_perturbation_of_mean_field() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 5))
    radial = dubito.bayesianize(net, Radial(scale=0.2))
    mean_field = dubito.bayesianize(net, dubito.MeanField(scale=0.2))
    for a, b in zip(radial.posteriors(), mean_field.posteriors(), strict=True):
        for name, variance in a.variance().items():
            assert torch.allclose(variance, b.variance()[name])


def test_one_radius_for_each_parameter() -> None:
    torch.manual_seed(0)
    bayes = dubito.bayesianize(nn.Linear(6, 5), Radial(scale=0.5))
    weight, bias = bayes.posteriors()
    with torch.no_grad():
        w = torch.stack([weight.noise()["eps"].norm() for _ in range(3000)])
        b = torch.stack([bias.noise()["eps"].norm() for _ in range(3000)])
    assert abs(float(torch.corrcoef(torch.stack((w, b)))[0, 1])) < 0.08


@pytest.mark.parametrize("bad", [{"scale": 0.0}, {"scale": math.nan}, {"kl_samples": 0}])
def test_bad_input(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Radial(**bad)  # type: ignore[arg-type]


def test_no_wasserstein() -> None:
    q = posterior((3,))
    with pytest.raises(CapabilityError, match="MeanField"):
        q.wasserstein(q)
