"""Balancing factors: the same weights, a smaller KL, and no smaller one to be had."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Laplace, Normal

import dubito
from dubito import LowRankFactors
from dubito.weights.factor_balance import balance_
from dubito.weights.low_rank_factors import LowRankFactorsPosterior

PRIORS = {
    "rank-aware": None,
    "normal": Normal(0.0, 0.7),
    "off centre": Normal(0.3, 0.7),
    "mixture": dubito.ScaleMixture(0.5, 1.0, math.exp(-6)),
    "laplace": Laplace(0.0, 0.5),
}


def skewed(module: nn.Module, **options: Any) -> tuple[dubito.BayesianModule, LowRankFactorsPosterior]:
    """Factors whose columns have scales of their own, far from even."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dubito.DubitoWarning)
        family = LowRankFactors(**{"rank": 2, "init": "random", "scale": 0.3, **options})
        bayes = dubito.bayesianize(module.double(), family)
    posterior = next(p for p in bayes.posteriors() if isinstance(p, LowRankFactorsPosterior))
    with torch.no_grad():
        for p in (posterior.left_spread, posterior.right_spread):
            p.add_(0.3 * torch.randn_like(p))
        posterior.left_mean.mul_(3.0)
        posterior.left_mean[:, 0].mul_(4.0)
        posterior.left_spread.add_(0.8)
    return bayes, posterior


@pytest.mark.parametrize("name", PRIORS)
@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_the_weights_stay_and_the_kl_falls(name: str, law: Any) -> None:
    bayes, q = skewed(nn.Linear(7, 4, bias=False), prior=PRIORS[name], distribution=law, kl_samples=200)
    noise = q.noise(torch.Generator().manual_seed(1))
    source = torch.Generator()

    def kl() -> float:
        return float(bayes.kl(generator=source.manual_seed(0)).detach())

    before = kl()
    draw, mean, variance = (
        v["weight"].detach() for v in (q.dense(q.realize(q.components(noise))), q.mean(), q.variance())
    )
    saved = balance_(bayes)
    assert saved > 1.0
    assert kl() == pytest.approx(before - saved, abs=1e-6 if (law, name) != ("gaussian", "laplace") else 2.0)
    for got, want in zip(
        (q.dense(q.realize(q.components(noise))), q.mean(), q.variance()), (draw, mean, variance), strict=True
    ):
        torch.testing.assert_close(got["weight"].detach(), want)
    assert balance_(bayes) == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("name", ["rank-aware", "normal", "mixture"])
def test_no_other_scale_has_a_smaller_kl(name: str) -> None:
    """Against a fine grid of scales of one component, tried by hand."""
    bayes, q = skewed(nn.Linear(7, 4, bias=False), prior=PRIORS[name])
    q.balance_()
    least = float(bayes.kl().detach())
    for shift in torch.linspace(-2.0, 2.0, 81).tolist():
        tried = copy.deepcopy(bayes)
        other = next(iter(tried.posteriors()))
        assert isinstance(other, LowRankFactorsPosterior)
        with torch.no_grad():
            for sign, (mean, spread) in ((1, other.factor("left")), (-1, other.factor("right"))):
                mean[:, 1].mul_(math.exp(sign * shift))
                spread[:, 1].add_(sign * shift)
        assert float(tried.kl().detach()) >= least - 1e-6


def test_the_closed_form_agrees_with_the_search() -> None:
    from dubito.weights import factor_balance

    _, q = skewed(nn.Linear(7, 4, bias=False), prior=Normal(0.0, 0.7))
    closed = factor_balance._closed_form(q)
    assert closed is not None
    torch.testing.assert_close(
        closed.detach(), factor_balance._searched(q, torch.zeros_like(closed)).detach(), atol=1e-5, rtol=0.0
    )


def test_the_gauge_of_the_reference() -> None:
    """(c A, B / c) on 44 × 128, r = 15: the KL goes through a minimum between c = 1 and 10 as measured there."""
    torch.manual_seed(0)
    bayes = dubito.bayesianize(
        nn.Linear(44, 128, bias=False), LowRankFactors(15, init="random", prior=Normal(0.0, 1.0))
    )
    q = next(iter(bayes.posteriors()))
    assert isinstance(q, LowRankFactorsPosterior)
    kls = {}
    for c in (0.1, 1.0, 2.0, 10.0):
        with torch.no_grad():
            for sign, (mean, spread) in ((1, q.factor("left")), (-1, q.factor("right"))):
                mean.mul_(c**sign)
                spread.add_(sign * math.log(c))
            kls[c] = float(bayes.kl())
            for sign, (mean, spread) in ((-1, q.factor("left")), (1, q.factor("right"))):
                mean.mul_(c**sign)
                spread.add_(sign * math.log(c))
    assert kls[2.0] < kls[1.0] < kls[0.1]
    assert kls[2.0] < kls[10.0]
    q.balance_()
    assert float(bayes.kl().detach()) <= min(kls.values())


def test_blocks_and_padding_are_balanced_each_for_itself() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    bayes, q = skewed(attention, blocks="heads")
    assert q.blocks == 6
    before, mean = float(bayes.kl().detach()), q.mean()[q.slot.name].detach()
    saved = balance_(bayes)
    assert float(bayes.kl().detach()) == pytest.approx(before - saved, abs=1e-6)
    torch.testing.assert_close(q.mean()[q.slot.name].detach(), mean)
    bayes, q = skewed(nn.Embedding(20, 4, padding_idx=3))
    before = float(bayes.kl().detach())
    saved = balance_(bayes)
    assert saved > 0
    assert float(bayes.kl().detach()) == pytest.approx(before - saved, abs=1e-6)


def test_what_cannot_be_balanced_is_said() -> None:
    with pytest.raises(ValueError, match="nothing to balance"):
        balance_(dubito.bayesianize(nn.Linear(2, 2), dubito.MeanField()))
    with pytest.raises(TypeError, match="BayesianModule or a posterior"):
        balance_(nn.Linear(2, 2))  # type: ignore[arg-type]
