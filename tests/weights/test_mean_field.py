"""Mean field: scales, priors, KL, draws, capabilities."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import HalfNormal, Laplace, Normal, kl_divergence

import dubito
from dubito import MeanField
from dubito.weights.mean_field import MeanFieldPosterior

D = torch.float64


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).to(D)


def posteriors(bayes: dubito.BayesianModule) -> dict[str, MeanFieldPosterior]:
    return {p.slot.name: p for p in bayes.posteriors() if isinstance(p, MeanFieldPosterior)}


@pytest.mark.parametrize("parametrization", ["log", "softplus"])
def test_t12_t17_every_posterior_starts_at_one_fraction_of_the_fan_in_scale(parametrization: Any) -> None:
    for estimator in ("weights", "local", "flipout"):
        family = MeanField(scale=0.05, estimator=estimator, parametrization=parametrization)  # type: ignore[arg-type]
        for name, posterior in posteriors(dubito.bayesianize(net(), family)).items():
            expected = 0.05 * (4 if name.startswith("0") else 5) ** -0.5
            torch.testing.assert_close(posterior.sd(), torch.full_like(posterior.sd(), expected))
            assert float(posterior.sd().mean()) < 0.2 * float(posterior.slot.parameter.abs().max())


def test_means_are_the_networks_own_parameters() -> None:
    module = net()
    own = dict(module.named_parameters())
    bayes = dubito.bayesianize(module, MeanField())
    for name, posterior in posteriors(bayes).items():
        assert posterior.mean()[name] is own[name]
    assert bayes.module is module
    assert all(type(m) is t for m, t in zip(module, (nn.Linear, nn.ReLU, nn.Linear), strict=True))
    x = torch.randn(2, 4, dtype=D)
    assert torch.equal(bayes.eval()(x), module(x)), "the plain network stays callable"


@pytest.mark.parametrize("parametrization", ["log", "softplus"])
def test_t02_t03_kl_counts_every_weight_against_its_own_prior(parametrization: Any) -> None:
    prior = {"0": Normal(0.0, 0.3), "2": Normal(0.5, 2.0)}
    bayes = dubito.bayesianize(
        net(), {k: MeanField(prior=p, parametrization=parametrization) for k, p in prior.items()}
    )
    by_name = bayes.kl_by_parameter()
    assert set(by_name) == {n for n, _ in bayes.module.named_parameters()}
    for name, posterior in posteriors(bayes).items():
        q = Normal(posterior.slot.parameter, posterior.sd())
        expected = float(kl_divergence(q, prior[name[0]]).sum())
        assert float(by_name[name]) == pytest.approx(expected, abs=1e-6)
        assert expected > 0
    assert float(bayes.kl()) == pytest.approx(sum(map(float, by_name.values())))


def test_t26_kl_is_a_sum_over_weights() -> None:
    values = []
    for width in (10, 20):
        module = nn.Linear(width, 50, bias=False).to(D)
        nn.init.zeros_(module.weight)
        family = MeanField(prior=Normal(0.0, 1.0), scale=0.1 * width**0.5)
        values.append(float(dubito.bayesianize(module, family).kl()))
    assert values[1] == pytest.approx(2 * values[0])
    assert values[0] == pytest.approx(500 * (math.log(10) + 0.005 - 0.5))


def test_t27_a_prior_scale_is_a_standard_deviation() -> None:
    module = nn.Linear(3, 2, bias=False).to(D)
    nn.init.zeros_(module.weight)
    bayes = dubito.bayesianize(module, MeanField(prior=Normal(0.0, 0.25), scale=0.25 * 3**0.5))
    assert float(bayes.kl()) == pytest.approx(0.0, abs=1e-9)
    assert float(posteriors(bayes)["weight"].variance()["weight"][0, 0]) == pytest.approx(0.0625)


def test_t13_the_default_prior_scales_with_fan_in() -> None:
    torch.manual_seed(0)
    wide = [nn.Linear(784, 256), nn.Linear(784, 256)]
    fan_in = dubito.bayesianize(wide[0], MeanField())
    standard = dubito.bayesianize(wide[1], MeanField(prior=Normal(0.0, 1.0)))
    assert float(standard.kl()) > 2.5 * float(fan_in.kl())
    (posterior, _) = posteriors(fan_in).values()
    _, scale = posterior.prior_of(posterior.slot).gaussian() or (0.0, 0.0)
    assert float(scale) == pytest.approx(784**-0.5)


def test_a_familys_prior_wins_over_bayesianizes() -> None:
    families = {"0": MeanField(prior=Normal(0.0, 3.0)), "2": MeanField()}
    bayes = dubito.bayesianize(net(), families, prior=Normal(1.0, 2.0))
    found = {n: p.prior_of(p.slot).gaussian() for n, p in posteriors(bayes).items()}
    assert found["0.weight"] == (0.0, 3.0)
    assert found["2.bias"] == (1.0, 2.0)


def test_t19_whole_numbers_as_prior_parameters_and_no_change_of_the_generator() -> None:
    prior = Normal(torch.tensor(0), torch.tensor(1), validate_args=False)
    state = torch.get_rng_state()
    bayes = dubito.bayesianize(net(), MeanField(prior=prior))
    value = bayes.kl()
    assert torch.equal(torch.get_rng_state(), state)
    expected = dubito.bayesianize(net(), MeanField(prior=Normal(0.0, 1.0))).kl()
    assert float(value) == pytest.approx(float(expected))


@pytest.mark.parametrize("prior", [dubito.ScaleMixture(0.5, 1.0, math.exp(-6)), Laplace(0.0, 0.5)], ids=str)
def test_priors_that_are_not_gaussian(prior: Any) -> None:
    bayes = dubito.bayesianize(net(), MeanField(prior=prior, scale=0.3))
    generator = torch.Generator().manual_seed(0)
    drawn = bayes.kl_by_parameter(method="monte_carlo", samples=20_000, generator=generator)
    for name, posterior in posteriors(bayes).items():
        mean, sd = posterior.slot.parameter.detach().reshape(-1, 1), posterior.sd().detach().reshape(-1, 1)
        eps = torch.randn(len(mean), 20_000, dtype=D)
        w = mean + sd * eps
        estimate = Normal(mean, sd).log_prob(w) - prior.log_prob(w)
        error = float((estimate.var(1) / 20_000).sum().sqrt())
        assert float(drawn[name]) == pytest.approx(float(estimate.mean(1).sum()), abs=6 * error)
        if isinstance(prior, dubito.ScaleMixture):
            assert float(bayes.kl_by_parameter()[name]) >= float(drawn[name]) - 4 * error, "auto is the bound"
    bayes.kl().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in bayes.parameters())
    if isinstance(prior, dubito.ScaleMixture):
        assert float(bayes.kl(method="bound")) == pytest.approx(float(bayes.kl()))
        with pytest.raises(NotImplementedError, match="no closed form"):
            bayes.kl(method="closed")


def test_t08_monte_carlo_kl_has_the_direct_part_of_the_gradient_too() -> None:
    """Against central differences of the same draws: leaving out the dependence on theta would show."""
    bayes = dubito.bayesianize(net(), MeanField(prior=Laplace(0.0, 0.5), scale=0.3))

    def value() -> Tensor:
        return bayes.kl(method="monte_carlo", samples=3, generator=torch.Generator().manual_seed(1))

    value().backward()
    spread = posteriors(bayes)["0.weight"].spread
    assert spread.grad is not None
    with torch.no_grad():
        spread[0, 0] += 1e-6
        upper = float(value())
        spread[0, 0] -= 2e-6
        lower = float(value())
    assert float(spread.grad[0, 0]) == pytest.approx((upper - lower) / 2e-6, rel=1e-4)


def test_t29_the_mixture_prior_pulls_a_weight_far_out() -> None:
    module = nn.Linear(1, 1, bias=False).to(D)
    nn.init.constant_(module.weight, 8.0)
    prior = dubito.ScaleMixture(0.5, 1.0, math.exp(-6))
    bayes = dubito.bayesianize(module, MeanField(prior=prior, scale=1e-3))
    bayes.kl().backward()
    assert float(module.weight.grad) == pytest.approx(8.0, rel=1e-3)


def test_t23_kl_is_that_of_the_parameters_however_many_draws_were_made() -> None:
    bayes = dubito.bayesianize(net(), MeanField())
    before = float(bayes.kl())
    bayes.outputs(torch.ones(1, 4, dtype=D), samples=5)
    bayes(torch.ones(1, 4, dtype=D))
    bayes(torch.ones(1, 4, dtype=D))
    assert float(bayes.kl()) == pytest.approx(before, rel=1e-12)


def test_t18_log_sigma_is_kept_out_of_weight_decay() -> None:
    bayes = dubito.bayesianize(net(), MeanField())
    groups = {g["name"]: g for g in dubito.parameter_groups(bayes, lr=0.1, weight_decay=0.3)}
    assert {id(p) for p in groups["spread"]["params"]} == {id(q.spread) for q in posteriors(bayes).values()}
    assert groups["spread"]["weight_decay"] == 0.0
    before = {n: q.spread.detach().clone() for n, q in posteriors(bayes).items()}
    optimizer = torch.optim.AdamW(list(groups.values()))
    for p in bayes.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(torch.equal(q.spread, before[n]) for n, q in posteriors(bayes).items())


def test_log_prob_and_wasserstein() -> None:
    bayes, other = (
        dubito.bayesianize(net(), MeanField(scale=0.2)),
        dubito.bayesianize(net(), MeanField(scale=0.5)),
    )
    with torch.no_grad():
        other.module[0].weight.add_(1.0)
    mine, theirs = posteriors(bayes)["0.weight"], posteriors(other)["0.weight"]
    drawn = mine.draw((4, 2), torch.Generator().manual_seed(0))
    expected = Normal(mine.slot.parameter, mine.sd()).log_prob(drawn["0.weight"]).sum((-1, -2))
    torch.testing.assert_close(mine.log_prob(drawn), expected)
    assert mine.log_prob(drawn).shape == (4, 2)
    distance = 20 * (1.0 + (0.3 * 4**-0.5) ** 2)
    assert float(mine.wasserstein(theirs)) == pytest.approx(distance)
    covariance = dubito.bayesianize(net(), dubito.LowRankCovariance(2))
    with pytest.raises(
        dubito.CapabilityError, match="no closed form between MeanField and LowRankCovariance"
    ):
        mine.wasserstein(next(iter(covariance.posteriors())))


def test_draws_take_any_leading_shape_and_a_generator() -> None:
    (posterior, *_) = posteriors(dubito.bayesianize(net(), MeanField())).values()
    drawn = [posterior.draw((2, 3), torch.Generator().manual_seed(s))["0.weight"] for s in (0, 0, 1)]
    assert drawn[0].shape == (2, 3, 5, 4)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert posterior.draw()["0.weight"].shape == (5, 4)


BAD: list[dict[str, Any]] = [
    *({"scale": scale} for scale in (0.0, -1.0, math.inf, math.nan)),
    {"estimator": "mc"},
    {"parametrization": "exp"},
    {"kl_samples": 0},
]


@pytest.mark.parametrize("options", BAD, ids=str)
def test_bad_arguments(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=rf"{name}=.* must be"):
        MeanField(**options)


def test_a_prior_on_the_wrong_support_changes_nothing() -> None:
    module = net()
    before = [id(p) for p in module.parameters()]
    with pytest.raises(ValueError, match=r"wrong support: HalfNormal.*Use Normal"):
        dubito.bayesianize(module, MeanField(prior=HalfNormal(1.0)))
    with pytest.raises(ValueError, match=r"does not broadcast"):
        dubito.bayesianize(module, {"0.weight": MeanField(prior=Normal(torch.zeros(7), torch.ones(7)))})
    with pytest.raises(TypeError, match=r"class Normal: give an instance"):
        dubito.bayesianize(module, MeanField(prior=Normal))  # type: ignore[arg-type]
    assert [id(p) for p in module.parameters()] == before


def test_a_state_of_one_parametrisation_does_not_load_into_the_other() -> None:
    made = dubito.bayesianize(nn.Linear(3, 2), MeanField()).state_dict()
    other = dubito.bayesianize(nn.Linear(3, 2), MeanField(parametrization="softplus"))
    with pytest.raises(RuntimeError, match=r"Missing key.*rho"):
        other.load_state_dict(made)
