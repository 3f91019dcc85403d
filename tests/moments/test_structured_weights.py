"""Families propagate by their own structure: exact against Monte Carlo where marginal variances are not."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dubito
from dubito.moments import Context, Moments, gaussian_weights, propagated, rule_set
from dubito.weights.gaussian_weights import CorrelatedMoments, FactoredMoments, KroneckerMoments

DRAWS = 4000
FAMILIES: dict[str, dubito.Family] = {
    "mean_field": dubito.MeanField(scale=0.3),
    "low_rank_covariance": dubito.LowRankCovariance(rank=3, scale=0.3),
    "full_covariance_unit": dubito.FullCovariance("unit", scale=0.3),
    "full_covariance": dubito.FullCovariance("layer", scale=0.3),
    "kronecker": dubito.KroneckerCovariance(rank_in=2, rank_out=2, scale=0.3),
    "diagonal_covariance": dubito.DiagonalCovariance(scale=0.3),
    "radial": dubito.Radial(scale=0.3),
    "factors": dubito.LowRankFactors(rank=2, init="random", scale=0.3),
}
LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(5, 4), (3, 5)),
    "convolution": (nn.Conv2d(3, 4, 3, padding=1), (2, 3, 5, 5)),
    "sequence": (nn.Conv1d(3, 4, 3, stride=2), (2, 3, 7)),
    "transposed": (nn.ConvTranspose2d(3, 4, 3, stride=2), (2, 3, 4, 4)),
    "grouped": (nn.Conv2d(4, 4, 3, groups=2), (2, 4, 5, 5)),
}


def correlate_(bayes: dubito.BayesianModule) -> None:
    """Give full covariances something off the diagonal."""
    for posterior in bayes.posteriors():
        for name, parameter in posterior.named_parameters():
            if name.startswith("lowers"):
                nn.init.normal_(parameter, std=0.5)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_layer_at_a_known_input(family: str, layer: str) -> None:
    if layer == "transposed" and family in ("factors", "kronecker"):
        pytest.skip("by marginal variances")
    if layer == "grouped" and family in ("factors", "kronecker", "low_rank_covariance", "full_covariance"):
        pytest.skip("covered by the others")
    torch.manual_seed(0)
    module, shape = LAYERS[layer]
    bayes = dubito.bayesianize(nn.Sequential(copy.deepcopy(module)), FAMILIES[family])
    correlate_(bayes)
    x = torch.randn(shape)
    moments = propagated(bayes, x)
    draws = bayes.outputs(x, draws=bayes.draw(DRAWS, torch.Generator().manual_seed(1)), chunk_size=DRAWS)
    error = (moments.mean - draws.mean(0)).abs() / (draws.std(0) + 1e-12)
    assert float(error.max()) < 5.5 / DRAWS**0.5
    ratio = moments.variance / draws.var(0)
    assert abs(float(ratio.mean()) - 1) < 0.05
    if family != "radial":  # whose entries share one radius: no marginal form
        assert float((ratio - 1).abs().max()) < 0.25


@torch.no_grad()
def test_structures_that_are_handed_out() -> None:
    def of(family: dubito.Family) -> Moments:
        bayes = dubito.bayesianize(nn.Sequential(nn.Linear(5, 4)), family)
        return gaussian_weights(bayes)["0.weight"]

    assert type(of(FAMILIES["mean_field"])) is Moments
    assert isinstance(of(FAMILIES["low_rank_covariance"]), CorrelatedMoments)
    assert isinstance(of(FAMILIES["full_covariance_unit"]), CorrelatedMoments)
    assert isinstance(of(FAMILIES["kronecker"]), KroneckerMoments)
    assert isinstance(of(FAMILIES["factors"]), FactoredMoments)


@pytest.mark.parametrize("family", ["low_rank_covariance", "full_covariance_unit", "kronecker", "factors"])
@torch.no_grad()
def test_marginals_are_the_posterior_own(family: str) -> None:
    torch.manual_seed(0)
    bayes = dubito.bayesianize(nn.Sequential(nn.Linear(5, 4)), FAMILIES[family])
    correlate_(bayes)
    for posterior in bayes.posteriors():
        mean, variance = posterior.mean(), posterior.variance()
        for name, moments in posterior.gaussian_weights().items():
            torch.testing.assert_close(moments.mean, mean[name])
            torch.testing.assert_close(moments.variance, variance[name])


@torch.no_grad()
def test_marginal_variances_alone_would_be_wrong() -> None:
    """What the structure is for: a rank-one covariance at an input along its factor."""
    torch.manual_seed(0)
    bayes = dubito.bayesianize(nn.Sequential(nn.Linear(6, 1, bias=False)), dubito.LowRankCovariance(rank=1))
    factor = bayes.posterior["0/weight"].factor("0.weight")
    factor.fill_(0.5)
    moments = propagated(bayes, torch.ones(1, 6))
    assert float(moments.variance) == pytest.approx(9.0)  # (6 · 0.5)², where the marginals say 6 · 0.25


@pytest.mark.parametrize("family", ["low_rank_covariance", "factors", "full_covariance_unit"])
@torch.no_grad()
def test_structure_survives_chunks_transposes_and_look_ups(family: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.both = nn.Embedding(7, 5), nn.Linear(5, 8, bias=False)

        def forward(self, tokens: Tensor) -> Tensor:
            first, second = self.both.weight.chunk(2, dim=0)
            fixed = torch.linspace(-1.0, 1.0, 5)
            return torch.cat((F.linear(fixed, first), fixed @ second.t(), self.table(tokens)[0]))

    torch.manual_seed(0)
    bayes = dubito.bayesianize(Odd(), FAMILIES[family])
    tokens = torch.tensor([3, 3, 1])
    moments = propagated(bayes, tokens)
    draws = bayes.outputs(tokens, draws=bayes.draw(DRAWS, torch.Generator().manual_seed(1)), chunk_size=DRAWS)
    assert float((moments.variance / draws.var(0) - 1).abs().max()) < 0.25


@torch.no_grad()
def test_two_layers_of_factors() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    bayes = dubito.bayesianize(network, dubito.LowRankFactors(rank=3, init="svd", scale=0.1))
    x = torch.randn(8, 6)
    moments = propagated(bayes, x)
    draws = bayes.outputs(x, draws=bayes.draw(DRAWS, torch.Generator().manual_seed(1)), chunk_size=DRAWS)
    assert float((moments.variance / draws.var(0)).median()) == pytest.approx(1.0, abs=0.25)


def test_gradients_reach_the_factors() -> None:
    bayes = dubito.bayesianize(nn.Sequential(nn.Linear(5, 4)), FAMILIES["low_rank_covariance"])
    propagated(bayes, torch.randn(3, 5)).variance.sum().backward()
    assert float(bayes.posterior["0/weight"].factor("0.weight").grad.abs().sum()) > 0


@pytest.mark.parametrize("layer", ["linear", "convolution", "transposed", "grouped"])
@torch.no_grad()
def test_rank_one_variances_are_exact_where_they_are_of_rank_one(layer: str) -> None:
    torch.manual_seed(0)
    module, shape = LAYERS[layer]
    bayes = dubito.bayesianize(nn.Sequential(copy.deepcopy(module), nn.ReLU()), dubito.MeanField(scale=0.3))
    x = torch.randn(shape)
    rank_one = Context(rule_set("cvp", weights="rank-one"))
    full, condensed = propagated(bayes, x), propagated(bayes, x, rank_one)
    torch.testing.assert_close(condensed.mean, full.mean, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(condensed.variance, full.variance, atol=1e-6, rtol=1e-4)


@torch.no_grad()
def test_rank_one_variances_keep_sums_over_rows_and_columns() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    bayes = dubito.bayesianize(network, dubito.MeanField())
    for posterior in bayes.posteriors():
        posterior.log_sigma.add_(0.25 * torch.randn_like(posterior.log_sigma))
    x = torch.randn(16, 32)
    full = propagated(bayes, x)
    condensed = propagated(bayes, x, Context(rule_set("cvp", weights="rank-one")))
    assert float((condensed.variance / full.variance).log().square().mean().sqrt()) < 0.1
    torch.testing.assert_close(condensed.mean, full.mean, atol=2e-3, rtol=0.0)
