import copy

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito import CapabilityError, DubitoWarning, KroneckerCovariance
from dubito.divergences import wasserstein2_gaussian_factors
from dubito.weights.kronecker import KroneckerCovariancePosterior


def only(bayes: dubito.BayesianModule) -> KroneckerCovariancePosterior:
    (posterior,) = bayes.posteriors()
    assert isinstance(posterior, KroneckerCovariancePosterior)
    return posterior


def draws_of(posterior: KroneckerCovariancePosterior, count: int) -> dict[str, Tensor]:
    """Many draws at once: leading dimensions of the noise are kept."""
    generator = torch.Generator().manual_seed(1)
    noise = {
        key: torch.randn(count, *z.shape, generator=generator, dtype=z.dtype)
        for key, z in posterior.noise().items()
    }
    with torch.no_grad():
        return posterior.realize(posterior.components(noise))


def stacked(bayes: dubito.BayesianModule) -> tuple[Tensor, Tensor]:
    """Mean and factor of vec [W, b] of a linear layer, formed."""
    posterior, layer = only(bayes), bayes.module
    mean = torch.cat([layer.weight, layer.bias[:, None]], 1).reshape(-1)
    (key,) = posterior.inputs
    return mean, torch.kron(posterior.outputs[key], posterior.inputs[key])


def test_covariance_of_draws_is_the_kronecker_product_over_weight_and_bias() -> None:
    torch.manual_seed(0)
    bayes = dubito.bayesianize(nn.Linear(3, 2).double(), KroneckerCovariance(rank_in=2, rank_out=2))
    draws = draws_of(only(bayes), 40_000)
    joined = torch.cat([draws["weight"], draws["bias"][..., None]], -1).detach().reshape(40_000, -1)
    mean, factor = stacked(bayes)
    covariance = (factor @ factor.mT).detach()
    scale = float(covariance.diagonal().max())
    torch.testing.assert_close(joined.mean(0), mean.detach(), atol=5 * (scale / 40_000) ** 0.5, rtol=0)
    # products of two Gaussians have heavier tails, so more than 3/sqrt(S) per unit of variance
    torch.testing.assert_close(joined.mT.cov(), covariance, atol=0.05 * scale, rtol=0)


@pytest.mark.parametrize(
    ("layer", "columns"),
    [
        (nn.Conv2d(4, 6, 3, groups=2), 2 * 9 + 1),
        (nn.ConvTranspose2d(4, 6, 3), 4 * 9 + 1),
        (nn.Embedding(7, 3), 7),
        (nn.LSTM(3, 4), 4),
        (nn.LayerNorm(5), 1),
    ],
)
def test_variance_matches_draws_in_every_layout(layer: nn.Module, columns: int) -> None:
    torch.manual_seed(0)
    bayes = dubito.bayesianize(copy.deepcopy(layer), KroneckerCovariance(rank_in=1, rank_out=3))
    posterior = only(bayes)
    assert next(iter(posterior.inputs.values())).shape[0] == columns
    draws = draws_of(posterior, 20_000)
    for name, variance in posterior.variance().items():
        assert variance.shape == dict(layer.named_parameters())[name].shape
        torch.testing.assert_close(draws[name].detach().var(0), variance.detach(), rtol=0.15, atol=1e-8)


def test_starts_at_the_prior() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(200, 100)
    bayes = dubito.bayesianize(layer, KroneckerCovariance(rank_in=150, rank_out=90))
    variance = only(bayes).variance()
    for name, p in layer.named_parameters():
        assert float(variance[name].mean().detach()) == pytest.approx(
            float(p.var().detach()), rel=0.1 if name == "weight" else 0.4
        )


def test_wasserstein_equals_the_distance_of_the_formed_factors() -> None:
    torch.manual_seed(0)
    one, two = (
        dubito.bayesianize(nn.Linear(4, 3).double(), KroneckerCovariance(*ranks))
        for ranks in ((2, 2), (3, 1))
    )
    expected = wasserstein2_gaussian_factors(*stacked(one), *stacked(two))
    torch.testing.assert_close(one.wasserstein(two), expected)
    assert float(one.wasserstein(one.snapshot()).detach()) < 1e-20


def test_has_no_kl_and_no_density_and_says_what_to_use() -> None:
    bayes = dubito.bayesianize(nn.Linear(3, 2), KroneckerCovariance(1, 1))
    with pytest.raises(CapabilityError, match="use MeanField for an ELBO"):
        bayes.kl()
    with pytest.raises(CapabilityError, match="no density"):
        only(bayes).log_prob({})
    with pytest.raises(CapabilityError, match="no closed form between"):
        only(bayes).wasserstein(
            next(iter(dubito.bayesianize(nn.Linear(3, 2), dubito.LowRankCovariance(1)).posteriors()))
        )


def test_ranks_are_checked() -> None:
    with pytest.raises(ValueError, match="rank_in=0 must be"):
        KroneckerCovariance(0, 1)
    with pytest.raises(ValueError, match="scale"):
        KroneckerCovariance(1, 1, scale=0.0)
    with pytest.raises(ValueError, match="rank_out=3 is above the 2"):
        dubito.bayesianize(nn.Linear(3, 2), {"weight": KroneckerCovariance(1, 3)})
    with pytest.warns(DubitoWarning, match="rank_out 3 clipped to 2"):
        dubito.bayesianize(nn.Linear(3, 2), KroneckerCovariance(1, 3))
