"""Gaussian entries: the fused draw-and-KL against plain autograd, ranges, and the life of a pending KL."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Laplace, Normal, kl_divergence

import dubito
from dubito.priors import ParameterPrior
from dubito.weights.gaussian_entries import (
    draw_with_kl,
    entries_kl,
    log_sd_of,
    sd_of,
    spread_of_sd,
)

PRIORS: dict[str, Any] = {
    "standard": Normal(0.0, 1.0),
    "shifted": Normal(0.3, 0.5),
    "scale for each entry": Normal(0.0, torch.linspace(0.2, 2.0, 12).double().reshape(3, 4)),
    "both for each entry": Normal(torch.arange(12.0).double().reshape(3, 4) / 6, torch.full((3, 4), 0.7).double()),
}  # fmt: skip


def parameters(dtype: torch.dtype = torch.float64) -> tuple[nn.Parameter, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    spread = torch.randn(3, 4, generator=generator, dtype=torch.float64) - 1.0
    return nn.Parameter(mean.to(dtype)), nn.Parameter(spread.to(dtype))


def loss_of(weight: Tensor) -> Tensor:
    return (weight.sin() * torch.arange(12.0, dtype=weight.dtype).reshape(3, 4)).sum()


def plain(
    mean: Tensor, spread: Tensor, prior: Normal, seed: int, nll: float, kl: float
) -> tuple[Tensor, ...]:
    """The same draw and KL by ordinary autograd and `torch.distributions`."""
    torch.manual_seed(seed)
    eps = torch.randn_like(mean)
    total = (
        nll * loss_of(mean + spread.exp() * eps) + kl * kl_divergence(Normal(mean, spread.exp()), prior).sum()
    )
    return torch.autograd.grad(total, (mean, spread))


def fused(mean: nn.Parameter, spread: nn.Parameter, prior: Normal, seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    made = draw_with_kl(mean, spread, ParameterPrior(prior))
    assert made is not None
    return made[0], made[1].kl


@pytest.mark.parametrize("name", PRIORS)
@pytest.mark.parametrize(("nll", "kl"), [(1.0, 0.0), (0.0, 1.0), (1.0, 0.37)])
def test_gradients_of_the_fused_draw_and_kl_equal_plain_autograd(name: str, nll: float, kl: float) -> None:
    mean, spread = parameters()
    weight, value = fused(mean, spread, PRIORS[name], 3)
    parts = ([nll * loss_of(weight)] if nll else []) + ([kl * value] if kl else [])
    grads = torch.autograd.grad(sum(parts[1:], parts[0]), (mean, spread))
    for got, expected in zip(grads, plain(mean, spread, PRIORS[name], 3, nll, kl), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", PRIORS)
def test_two_backward_passes_accumulate_the_whole_gradient(name: str) -> None:
    mean, spread = parameters()
    weight, kl = fused(mean, spread, PRIORS[name], 4)
    loss_of(weight).backward()
    (0.5 * kl).backward()
    expected = plain(mean, spread, PRIORS[name], 4, 1.0, 0.5)
    assert mean.grad is not None
    assert spread.grad is not None
    torch.testing.assert_close(mean.grad, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(spread.grad, expected[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", PRIORS)
def test_gradcheck(name: str) -> None:
    mean, spread = parameters()

    def both(m: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return fused(m, s, PRIORS[name], 5)  # type: ignore[arg-type]

    assert torch.autograd.gradcheck(both, (mean, spread))
    prior = ParameterPrior(PRIORS[name])
    assert torch.autograd.gradcheck(lambda m, s: entries_kl(m, s, "log", prior), (mean, spread))


@pytest.mark.parametrize("name", PRIORS)
@pytest.mark.parametrize("parametrization", ["log", "softplus"])
def test_t01_kl_is_the_sum_of_torch_distributions_values(name: str, parametrization: Any) -> None:
    mean, spread = parameters()
    prior = PRIORS[name]
    q = Normal(mean, sd_of(spread, parametrization))
    expected = kl_divergence(q, prior).sum()
    value = entries_kl(mean, spread, parametrization, ParameterPrior(prior))
    assert float(value) == pytest.approx(float(expected), abs=1e-6, rel=1e-12)
    with torch.no_grad():
        assert float(entries_kl(mean, spread, parametrization, ParameterPrior(prior))) == pytest.approx(
            float(expected), rel=1e-12
        )
    if parametrization == "log":
        assert float(fused(mean, spread, prior, 0)[1]) == pytest.approx(float(expected), rel=1e-12)


def test_t01_the_kl_is_positive_and_least_at_the_prior() -> None:
    prior = ParameterPrior(Normal(0.0, 1.0))
    sd = torch.linspace(-6.0, 2.0, 81).double()
    values = torch.stack([entries_kl(torch.zeros(1).double(), s.reshape(1), "log", prior) for s in sd])
    assert bool((values > -1e-12).all())
    assert float(sd[values.argmin()]) == pytest.approx(0.0, abs=1e-6)
    # the value of which the flipped sign makes -3.499
    assert float(
        entries_kl(torch.zeros(1).double(), torch.full((1,), -3.0).double(), "log", prior)
    ) == pytest.approx(2.501, abs=1e-3)


def test_the_kl_to_a_prior_that_is_not_gaussian() -> None:
    mean, spread = parameters()
    prior = ParameterPrior(Laplace(0.0, 0.8))
    generator = torch.Generator().manual_seed(0)
    value = entries_kl(mean, spread, "log", prior)
    drawn = entries_kl(mean, spread, "log", prior, method="monte_carlo", samples=20_000, generator=generator)
    grid = torch.linspace(-40, 40, 160_001, dtype=torch.float64)
    q = Normal(mean.detach().reshape(-1, 1), spread.detach().exp().reshape(-1, 1))
    p = Laplace(torch.tensor(0.0).double(), torch.tensor(0.8).double())
    expected = (q.log_prob(grid).exp() * (q.log_prob(grid) - p.log_prob(grid))).sum() * (grid[1] - grid[0])
    assert float(value) == pytest.approx(float(expected), abs=1e-3)
    assert float(drawn) == pytest.approx(float(expected), abs=0.15)
    with pytest.raises(NotImplementedError, match="no closed form"):
        entries_kl(mean, spread, "log", ParameterPrior(dubito.ScaleMixture(0.5, 1.0, 0.1)), method="closed")


# --------------------------------------------------------------------------------------------------- ranges


def test_t18_extreme_log_sd_stays_finite_and_finds_its_way_back() -> None:
    for extreme in (-1e4, -100.0, 80.0, 1e4):
        mean = nn.Parameter(torch.zeros(3))
        spread = nn.Parameter(torch.full((3,), extreme))
        weight, kl = fused(mean, spread, Normal(0.0, 1.0), 0)
        assert weight.isfinite().all()
        assert kl.isfinite()
        kl.backward()
        assert spread.grad is not None
        assert spread.grad.isfinite().all()
        assert bool((spread.grad.sign() == math.copysign(1.0, extreme)).all()), "decreasing the KL leads back"


def test_t28_softplus_extremes_are_finite_and_right() -> None:
    rho = torch.tensor([-120.0, -60.0, -20.5, -19.5, -1.0, 0.0, 30.0, 100.0])
    sd, log_sd = sd_of(rho, "softplus"), log_sd_of(rho, "softplus")
    exact = torch.nn.functional.softplus(rho.double(), threshold=1000.0)
    torch.testing.assert_close(sd[1:], exact[1:].float(), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(log_sd[1:], exact[1:].log().float(), rtol=1e-6, atol=1e-6)
    assert log_sd[0] == -120.0
    rho.requires_grad_()
    kl = entries_kl(torch.zeros(8), rho, "softplus", ParameterPrior(Normal(0.0, 1.0)))
    assert kl.isfinite()
    kl.backward()
    assert rho.grad is not None
    assert rho.grad.isfinite().all()


@pytest.mark.parametrize("parametrization", ["log", "softplus"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_spread_of_sd_inverts_sd_of(parametrization: Any, dtype: torch.dtype) -> None:
    sd = torch.logspace(-12, 3, 61, dtype=dtype)
    torch.testing.assert_close(
        sd_of(spread_of_sd(sd, parametrization), parametrization), sd, rtol=2e-5, atol=0.0
    )
    assert spread_of_sd(torch.zeros(1, dtype=dtype), parametrization).isfinite().all()
    assert float(sd_of(spread_of_sd(torch.zeros(1, dtype=dtype), parametrization), parametrization)) < 1e-29


# -------------------------------------------------------------------------------------------- the pending KL


def network() -> tuple[dubito.BayesianModule, Tensor]:
    torch.manual_seed(0)
    bayes = dubito.bayesianize(nn.Linear(3, 2), dubito.MeanField(prior=Normal(0.0, 1.0)))
    return bayes, torch.randn(4, 3)


def exact_kl(bayes: dubito.BayesianModule) -> float:
    total = 0.0
    for posterior in bayes.posteriors():
        mean, sd = posterior.slot.parameter, posterior.sd()
        total += float(kl_divergence(Normal(mean.double(), sd.double()), Normal(0.0, 1.0)).sum())
    return total


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_pending_kl_does_not_outlive_an_optimiser_step(options: dict[str, bool]) -> None:
    """Fused optimisers change parameters without raising their version."""
    bayes, x = network()
    optimizer = torch.optim.Adam(bayes.parameters(), lr=0.5, **options)
    bayes(x).square().sum().backward()  # a KL is pending, and nobody asks for it
    optimizer.step()
    assert float(bayes.kl()) == pytest.approx(exact_kl(bayes), rel=1e-5)


def test_a_pending_kl_is_used_once_and_not_without_gradient() -> None:
    bayes, x = network()
    bayes(x)
    with torch.no_grad():
        assert not bayes.kl().requires_grad
    bayes(x)
    first = bayes.kl()
    first.backward()
    second = bayes.kl()  # a graph of its own: the first one is gone
    second.backward()
    assert float(first) == pytest.approx(float(second))
    assert float(second) == pytest.approx(exact_kl(bayes), rel=1e-5)


def test_a_pending_kl_does_not_outlive_a_conversion_or_a_load() -> None:
    bayes, x = network()
    bayes(x)
    bayes.double()
    kl = bayes.kl()
    assert kl.dtype == torch.float64
    kl.backward()
    bayes, x = network()
    other = dubito.bayesianize(nn.Linear(3, 2), dubito.MeanField(prior=Normal(0.0, 1.0), scale=0.5))
    bayes(x)
    bayes.load_state_dict(other.state_dict())
    assert float(bayes.kl()) == pytest.approx(exact_kl(other), rel=1e-5)


def test_backward_after_a_change_of_the_parameters_raises() -> None:
    bayes, x = network()
    loss = bayes(x).square().sum()
    with torch.no_grad():
        next(iter(bayes.posteriors())).spread.add_(1.0)
    with pytest.raises(
        RuntimeError, match=r"changed in place between the forward pass and backward.*draw again"
    ):
        loss.backward()
    kl = bayes.kl()
    with torch.no_grad():
        bayes.module.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        kl.backward()


def test_t24_two_forwards_and_one_backward_keep_their_own_noise() -> None:
    bayes, x = network()
    (posterior,) = [p for p in bayes.posteriors() if p.slot.name == "weight"]
    torch.manual_seed(1)
    total = bayes(x).square().sum() + bayes(x).sin().sum()
    total.backward()
    torch.manual_seed(1)
    mean = bayes.module.weight.detach().clone().requires_grad_()
    spread = posterior.spread.detach().clone().requires_grad_()
    bias, bias_sd = bayes.module.bias.detach(), list(bayes.posteriors())[1].sd().detach()
    expected = torch.zeros(())
    for function in (torch.square, torch.sin):
        weight = mean + spread.exp() * torch.randn_like(mean)
        shift = bias + bias_sd * torch.randn_like(bias)
        expected = expected + function(x @ weight.mT + shift).sum()
    expected.backward()
    torch.testing.assert_close(bayes.module.weight.grad, mean.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(posterior.spread.grad, spread.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loc", [1.0, 10.0, 100.0])
def test_kl_in_float32_to_a_narrow_prior_far_from_zero(loc: float) -> None:
    prior = Normal(loc, 1e-4 * loc)
    mean, spread = parameters(torch.float32)
    with torch.no_grad():
        mean.mul_(1e-3).add_(loc)
        spread.sub_(6.0)
    wide = Normal(mean.detach().double(), spread.detach().double().exp())
    exact = kl_divergence(wide, Normal(prior.loc.double(), prior.scale.double())).sum()
    made = draw_with_kl(mean, spread, ParameterPrior(prior))
    assert made is not None
    for value in (made[1].kl, entries_kl(mean, spread, "log", ParameterPrior(prior))):
        assert value.item() == pytest.approx(exact.item(), rel=1e-5)
