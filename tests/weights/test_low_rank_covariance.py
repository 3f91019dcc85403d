"""Low-rank covariance: initialisation at the prior, one z a module, what it does not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dubito
from dubito import LowRankCovariance
from dubito.weights.low_rank_covariance import LowRankCovariancePosterior

D = torch.float64


def posteriors(bayes: dubito.BayesianModule) -> list[LowRankCovariancePosterior]:
    return [p for p in bayes.posteriors() if isinstance(p, LowRankCovariancePosterior)]


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).to(D)


@pytest.mark.parametrize("rank", [1, 4, 64])
def test_starts_at_the_prior_whatever_the_rank(rank: int) -> None:
    """The marginal variance of a draw's deviation is the mean's initial variance."""
    torch.manual_seed(0)
    module = nn.Linear(300, 200)
    variance = float(module.weight.var())
    (posterior,) = posteriors(dubito.bayesianize(module, LowRankCovariance(rank)))
    assert float(posterior.variance()["weight"].mean()) == pytest.approx(variance, rel=0.05)
    entries = posterior.factor("weight")
    assert entries.shape == (rank, 200, 300)
    assert float(entries.std()) == pytest.approx((variance / rank) ** 0.5, rel=0.05)
    smaller = dubito.bayesianize(nn.Linear(300, 200), LowRankCovariance(rank, scale=0.1))
    assert float(posteriors(smaller)[0].variance()["weight"].mean()) == pytest.approx(
        0.01 * variance, rel=0.1
    )


def test_a_parameter_that_does_not_vary_takes_its_fan_in_scale() -> None:
    module = nn.Linear(100, 5000)
    nn.init.zeros_(module.bias)
    (posterior,) = posteriors(dubito.bayesianize(module, LowRankCovariance(4)))
    assert float(posterior.variance()["bias"].mean()) == pytest.approx(0.01, rel=0.1)


def test_joint_over_a_module_and_independent_between_modules() -> None:
    bayes = dubito.bayesianize(two_layers(), LowRankCovariance(2))
    first, second = posteriors(bayes)
    assert [s.name for s in first.slots] == ["0.weight", "0.bias"]
    draws = bayes.draw(20_000)
    flat: list[torch.Tensor] = []
    for posterior, parts in zip((first, second), draws.components(bayes), strict=True):
        drawn = posterior.realize(parts)
        flat += [drawn[s.name].detach().reshape(20_000, -1) for s in posterior.slots]
    covariance = torch.cov(torch.cat(flat, 1).T)
    factor = torch.cat([first.factor(s.name).reshape(2, -1) for s in first.slots], 1).detach()
    torch.testing.assert_close(covariance[:15, :15], factor.T @ factor, rtol=0.1, atol=0.03)
    assert float((factor.T @ factor)[:12, 12:].abs().max()) > 0.05, "weight and bias are correlated"
    correlation = torch.corrcoef(torch.cat(flat, 1).T)
    assert float(correlation[:15, 15:].abs().max()) < 5 / 20_000**0.5
    assert torch.linalg.matrix_rank(torch.cat(flat[:2], 1)[:50] - torch.cat(flat[:2], 1)[:1]) == 2


def test_spread_is_kept_out_of_weight_decay() -> None:
    bayes = dubito.bayesianize(two_layers(), LowRankCovariance(2))
    groups = {g["name"]: g for g in dubito.parameter_groups(bayes, lr=0.1, weight_decay=0.1)}
    factors = {id(p) for q in posteriors(bayes) for p in q.factors.values()}
    assert {id(p) for p in groups["spread"]["params"]} == factors
    assert groups["spread"]["weight_decay"] == 0.0


def test_no_kl_and_no_density_and_what_to_do_instead() -> None:
    bayes = dubito.bayesianize(two_layers(), LowRankCovariance(2))
    with pytest.raises(dubito.CapabilityError, match=r"no finite KL.*rank 2.*expected loss.*wasserstein"):
        bayes.kl()
    with pytest.raises(dubito.CapabilityError, match=r"no density.*singular.*wasserstein"):
        posteriors(bayes)[0].log_prob({})


def test_wasserstein_against_the_dense_formula() -> None:
    (one, _), (other, _) = (
        posteriors(dubito.bayesianize(two_layers(), LowRankCovariance(r))) for r in (2, 3)
    )
    with torch.no_grad():
        other.slots[0].parameter.add_(0.3)
    value = float(one.wasserstein(other))

    def dense(p: LowRankCovariancePosterior) -> tuple[torch.Tensor, torch.Tensor]:
        mean = torch.cat([s.parameter.detach().reshape(-1) for s in p.slots])
        factor = torch.cat([p.factor(s.name).detach().reshape(p.rank, -1) for s in p.slots], 1)
        return mean, factor.T @ factor

    def root(matrix: torch.Tensor) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        return vectors * values.clamp_min(0).sqrt() @ vectors.T

    (m1, c1), (m2, c2) = dense(one), dense(other)
    cross = root(root(c1) @ c2 @ root(c1))
    expected = (m1 - m2).square().sum() + torch.trace(c1) + torch.trace(c2) - 2 * torch.trace(cross)
    assert value == pytest.approx(float(expected), rel=1e-6)
    with pytest.raises(
        dubito.CapabilityError, match="no closed form between LowRankCovariance and MeanField"
    ):
        one.wasserstein(next(iter(dubito.bayesianize(two_layers(), dubito.MeanField()).posteriors())))


BAD: list[dict[str, Any]] = [
    *({"rank": rank} for rank in (0, -2, 2.0, True)),
    *({"rank": 2, "scale": scale} for scale in (0.0, float("nan"))),
]


@pytest.mark.parametrize("options", BAD, ids=str)
def test_bad_arguments(options: dict[str, Any]) -> None:
    name = list(options)[-1]
    with pytest.raises(ValueError, match=rf"{name}=.* must be"):
        LowRankCovariance(**options)


def test_a_rank_above_the_parameter_count_is_an_error_alone_and_clipped_among_many() -> None:
    module = two_layers()
    before = [id(p) for p in module.parameters()]
    with pytest.raises(
        ValueError, match=r"rank=9 is above the number of parameters it covers \(8: 2\.weight, 2\.bias\)"
    ):
        dubito.bayesianize(module, {"2": LowRankCovariance(9)})
    assert [id(p) for p in module.parameters()] == before, "nothing changed"
    with pytest.warns(dubito.DubitoWarning, match=r"2\.weight, 2\.bias: rank 9 clipped .* 8"):
        bayes = dubito.bayesianize(two_layers(), LowRankCovariance(9))
    assert [len(p.factor(p.slots[0].name)) for p in bayes.posteriors()] == [9, 8]  # type: ignore[attr-defined]
    dubito.bayesianize(module, {"0": LowRankCovariance(15), "2": LowRankCovariance(8)})
