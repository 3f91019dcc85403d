"""A covariance of the logits learned beforehand: what it measures, and what a prediction makes of it."""

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito.moments import calibrate, propagated
from dubito.moments.logit_covariance import LogitCovariance, _measured, _shrunk, _summaries
from dubito.moments.moments import Moments


def made(head: bool = True) -> dubito.BayesianModule:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)
    )
    family = dubito.MeanField(scale=0.5)
    families = family if head else {"0.*": family}
    return dubito.bayesianize(network, families, likelihood=dubito.Categorical())


def data(n: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 1, 5, 5, generator=generator)
    return x, torch.randint(4, (n,), generator=generator)


def test_correlation_and_gain_are_recovered_from_draws_of_a_known_law() -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.tensor([[1.0, 0.0, 0.0], [0.8, 0.6, 0.0], [0.0, 0.5, 0.75**0.5]], dtype=torch.float64)
    mean = torch.randn(300, 3, generator=generator, dtype=torch.float64)
    variance = torch.rand(300, 1, generator=generator, dtype=torch.float64).expand(300, 3) + 0.1
    gain = torch.tensor([0.4, 0.5, 0.0, -0.3], dtype=torch.float64)
    sd = (variance * (_summaries(Moments(mean, variance)) @ gain).exp().unsqueeze(-1)).sqrt()
    noise = torch.randn(4000, 300, 3, generator=generator, dtype=torch.float64) @ root.mT
    correlation, found = _measured(mean, variance, mean + sd * noise)
    torch.testing.assert_close(correlation, root @ root.mT, atol=0.01, rtol=0)
    predicted = _summaries(Moments(mean, variance)) @ found
    wanted = _summaries(Moments(mean, variance)) @ gain
    assert float((predicted - wanted).abs().max()) < 0.1


def test_it_comes_nearer_to_the_draws_covariance_than_the_diagonal_does() -> None:
    bayes, (x, _) = made(head=False), data()  # the filters' noise reaches every logit
    found = LogitCovariance.fit(bayes, [(x,)], with_labels=False, generator=torch.Generator().manual_seed(0))
    fresh = torch.randn(40, 1, 5, 5, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        draws = bayes.outputs(fresh, draws=bayes.draw(1000, torch.Generator().manual_seed(5)))
        moments = propagated(bayes, fresh)
    deviations = draws - draws.mean(0)
    truth = torch.einsum("snc,snd->ncd", deviations, deviations) / 999
    _, covariance = found.of(moments)
    plain = moments.variance.diag_embed()
    assert float((covariance - truth).norm()) < 0.6 * float((plain - truth).norm())
    assert float(torch.linalg.eigvalsh(covariance).min()) > -1e-6


def test_correlations_that_are_noise_are_not_believed() -> None:
    generator = torch.Generator().manual_seed(0)
    unit = torch.randn(30, 1, 5, generator=generator, dtype=torch.float64).expand(30, 50, 5)
    raw = torch.corrcoef(unit[:, 0].mT)
    found = _shrunk(torch.einsum("snc,snd->scd", unit, unit) / 50)
    torch.testing.assert_close(found.diagonal(), torch.ones(5, dtype=torch.float64))
    assert float((found - torch.eye(5)).norm()) < 0.5 * float((raw - torch.eye(5)).norm())


def test_labels_lower_the_loss_and_the_predictive_carries_the_moments() -> None:
    bayes, (x, y) = made(), data()
    calibration = calibrate(bayes, (x, y), "matched", draws=10)
    plain = LogitCovariance.fit(bayes, (x, y), calibration, draws=20, with_labels=False)
    fitted = LogitCovariance.fit(bayes, (x, y), calibration, draws=20)
    losses = [
        -bayes.propagate(x, calibration=calibration, covariance=c).log_prob(y).mean() for c in (plain, fitted)
    ]
    assert float(losses[1]) <= float(losses[0]) + 1e-3
    predictive = bayes.propagate(x, calibration=calibration, covariance=fitted)
    assert predictive.logits_variance is not None
    assert bool((predictive.mutual_information >= 0).all())


def test_it_belongs_to_its_network_and_rules() -> None:
    bayes, (x, y) = made(), data(20)
    found = LogitCovariance.fit(bayes, (x, y), draws=5, with_labels=False)
    other = dubito.bayesianize(
        nn.Sequential(nn.Flatten(), nn.Linear(25, 4)), dubito.MeanField(), likelihood=dubito.Categorical()
    )
    with pytest.raises(ValueError, match="another network"):
        other.propagate(x, covariance=found)
    with pytest.raises(ValueError, match="rules='cvp'"):
        bayes.propagate(x, covariance=found, rules="streamlining")
    calibration = calibrate(bayes, (x, y), "matched", draws=5)
    with pytest.raises(ValueError, match="calibration"):
        bayes.propagate(x, covariance=found, calibration=calibration)
    regression = dubito.bayesianize(nn.Linear(2, 1), dubito.MeanField(), likelihood=dubito.Gaussian())
    with pytest.raises(dubito.CapabilityError, match="Categorical"):
        LogitCovariance.fit(regression, (torch.zeros(2, 2), torch.zeros(2, 1)))
    with pytest.raises(ValueError, match="no targets"):
        LogitCovariance.fit(bayes, [(x,)])
