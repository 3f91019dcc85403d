from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

import dubito
from dubito.diagnostics import WeightSpread, findings, prediction_spread, spread, summary


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.Dropout(0.5), nn.Linear(20, 3))


def of(sd: float, scale: float = 1.0, snr: float = 5.0) -> WeightSpread:
    return WeightSpread("w", "MeanField", 10, sd, scale, snr, True)


def test_spread_of_a_mean_field_is_its_own_sd_and_ratio() -> None:
    bayes = dubito.bayesianize(network(), {"0.weight": dubito.MeanField(scale=0.3)})
    found = spread(bayes)
    assert list(found) == ["0.weight"]
    weight = bayes.module[0].weight.detach()
    sd = 0.3 / math.sqrt(6)
    assert found["0.weight"].sd == pytest.approx(sd, rel=1e-5)
    assert found["0.weight"].scale == pytest.approx(float(weight.square().mean().sqrt()), rel=1e-5)
    assert found["0.weight"].snr == pytest.approx(float((weight.abs() / sd).median()), rel=1e-5)
    assert found["0.weight"].family == "MeanField"
    assert found["0.weight"].diagonal
    bayes.rescale_spread_(0.0)
    assert spread(bayes)["0.weight"].snr > 1e6


def test_spread_of_a_low_rank_covariance_matches_its_draws() -> None:
    bayes = dubito.bayesianize(network(), {"0": dubito.LowRankCovariance(rank=4)})
    (posterior,) = bayes.posteriors()
    with torch.no_grad():
        draws = posterior.draw((4000,), torch.Generator().manual_seed(1))
    for name, value in spread(bayes).items():
        expected = float(draws[name].var(0).mean().sqrt())
        assert value.sd == pytest.approx(expected, rel=0.05)
        assert not value.diagonal


def test_summary_counts_what_is_stored_and_sums_the_kl() -> None:
    bayes = dubito.bayesianize(
        network(),
        {
            "0.weight": dubito.MeanField(prior=Normal(0.0, 1.0)),
            "3.weight": dubito.LowRankFactors(rank=1, init="svd"),
            "3.bias": dubito.Point(),
        },
    )
    plain = sum(p.numel() for p in network().parameters())
    result = summary(bayes)
    assert result.parameters == plain
    assert plain + result.added == sum(p.numel() for p in bayes.parameters() if p.requires_grad)
    assert result.added_bytes == 4 * result.added
    assert result.deterministic == 20 + 40 + 3
    rows = {row.parameters[0]: row for row in result.rows}
    assert rows["0.weight"].added == 120
    assert rows["3.weight"].added == 2 * 1 * (20 + 3) - 60  # fewer than the dense ones: negative
    weight = bayes.module[0].weight.detach()
    kl = kl_divergence(Normal(weight, 0.1 / math.sqrt(6)), Normal(0.0, 1.0)).sum()
    assert rows["0.weight"].kl == pytest.approx(float(kl), rel=1e-5)
    assert result.kl == pytest.approx(float(bayes.kl().detach()), rel=1e-5)


def test_summary_prints_a_table_whose_columns_line_up() -> None:
    text = str(summary(dubito.bayesianize(network(), dubito.MeanField())))
    lines = text.splitlines()
    assert re.match(r"parameters +family +entries +added +bytes +KL", lines[0])
    assert any(line.startswith("0.weight") and "MeanField" in line and "+120" in line for line in lines)
    assert lines[-1].startswith("total")
    column = lines[0].index("entries") + len("entries")
    assert all(line[column - 1].isdigit() and line[column] == " " for line in lines[2:-2])


def test_summary_of_an_infinite_kl_says_none_and_touches_no_random_state() -> None:
    bayes = dubito.bayesianize(network(), {"0": dubito.LowRankCovariance(rank=2), "3": dubito.MeanField()})
    state = torch.get_rng_state()
    result = summary(bayes)
    assert result.kl is None
    assert [row.kl is None for row in result.rows] == [True, False, False]
    assert "none" in str(result)
    assert torch.equal(torch.get_rng_state(), state)


def test_summary_estimates_a_monte_carlo_kl_with_a_fixed_seed() -> None:
    family = dubito.MeanField(prior=torch.distributions.StudentT(4.0), kl_samples=4)
    bayes = dubito.bayesianize(network(), {"0.weight": family})
    state = torch.get_rng_state()
    first = summary(bayes).kl
    assert first == summary(bayes).kl
    assert torch.equal(torch.get_rng_state(), state)
    assert first is not None
    assert first == pytest.approx(float(bayes.kl(samples=400).detach()), rel=0.1)


def test_prediction_spread_of_a_linear_network_is_known() -> None:
    bayes = dubito.bayesianize(nn.Linear(1, 1), {"bias": dubito.MeanField()})
    bayes.rescale_spread_(0.5 / float(spread(bayes)["bias"].sd))
    with torch.no_grad():
        bayes.module.weight.zero_()
        bayes.module.bias.fill_(100.0)
    torch.manual_seed(0)
    assert prediction_spread(bayes, torch.randn(5, 1), samples=2000) == pytest.approx(0.005, rel=0.05)
    bayes.rescale_spread_(0.0)
    assert prediction_spread(bayes, torch.randn(5, 1)) < 1e-6


def test_prediction_spread_sees_no_dropout_and_puts_the_modes_back() -> None:
    bayes = dubito.bayesianize(network(), {"3.bias": dubito.MeanField()})
    bayes.rescale_spread_(0.0)
    statistics = bayes.module[1].running_mean.clone()
    assert prediction_spread(bayes, torch.randn(8, 6)) < 1e-6
    assert all(module.training for module in bayes.modules())
    assert torch.equal(bayes.module[1].running_mean, statistics)
    with pytest.raises(ValueError, match="samples must be at least 2"):
        prediction_spread(bayes, torch.randn(8, 6), samples=1)


def test_findings() -> None:
    assert findings({}) == []
    assert findings({"w": of(0.1)}, {"w": of(0.1)}, predictions=0.1) == []
    assert findings({"w": of(0.1, snr=0.2)}, {"w": of(0.1)}) == []
    (flat,) = findings({"w": of(1e-9), "v": of(0.1)})
    assert flat.startswith("no spread")
    assert " w;" in flat
    (fallen,) = findings({"w": of(1e-3), "v": of(0.1)}, {"w": of(0.1), "v": of(0.1)})
    assert fallen.startswith("collapsed spread: in w ")
    assert "to 0.01 of it" in fallen
    (identical,) = findings({"w": of(0.1)}, predictions=1e-7)
    assert identical.startswith("identical predictions")
    (noise,) = findings({"w": of(1.0, snr=0.01), "v": of(1.0, snr=0.02)})
    assert "at most 0.02" in noise


def test_a_network_without_random_weights_is_summed_up_too() -> None:
    bayes = dubito.bayesianize(network(), dubito.Point())
    result = summary(bayes)
    assert result.rows == ()
    assert result.added == 0
    assert result.kl == 0.0
    assert result.parameters == result.deterministic == sum(p.numel() for p in network().parameters())
    assert spread(bayes) == {}
    assert "total" in str(result)
