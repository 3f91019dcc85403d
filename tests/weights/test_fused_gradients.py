"""The fused functions of Gaussian entries, once and twice differentiated; noise made in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito.weights.gaussian_entries import _GaussianKL, _MomentsAndKL, _SampleAndKL

D = torch.float64


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    mean, spread = torch.randn(3, 2, dtype=D), torch.randn(3, 2, dtype=D) - 1
    return mean.requires_grad_(), spread.requires_grad_(), torch.tensor(0.7, dtype=D, requires_grad=True)


def seeded(function: Any, loc: float) -> Any:
    def call(*tensors: Tensor) -> Any:
        torch.manual_seed(1)
        mean, spread, scale = tensors
        return function.apply(mean, spread, loc, scale)

    return call


@pytest.mark.parametrize("function", [_SampleAndKL, _GaussianKL, _MomentsAndKL])
@pytest.mark.parametrize("loc", [0.0, 0.4])
def test_first_and_second_derivatives(function: Any, loc: float) -> None:
    assert torch.autograd.gradcheck(seeded(function, loc), inputs())
    assert torch.autograd.gradgradcheck(seeded(function, loc), inputs())


@pytest.mark.parametrize("index", [0, 1, 2])
def test_moments_and_kl_give_each_output_its_own_gradient(index: int) -> None:
    mean, spread, scale = inputs()
    fused = _MomentsAndKL.apply(mean, spread, 0.4, scale)
    sd = spread.exp()
    kl = (torch.log(scale / sd) + (sd.square() + (mean - 0.4).square()) / (2 * scale.square()) - 0.5).sum()
    plain = (mean, sd.square(), kl)
    torch.testing.assert_close(fused[index], plain[index])
    tensors = (mean, spread, scale)
    got = torch.autograd.grad(fused[index].sin().sum(), tensors, allow_unused=True)
    expected = torch.autograd.grad(plain[index].sin().sum(), tensors, allow_unused=True)
    for one, other in zip(got, expected, strict=True):
        if other is None:
            assert one is None or not one.any()
        else:
            torch.testing.assert_close(one, other)


def test_local_kl_made_with_the_moments_is_the_closed_form() -> None:
    torch.manual_seed(0)
    bayes = dubito.bayesianize(nn.Linear(4, 3).double(), dubito.MeanField(estimator="local"))
    x = torch.randn(5, 4, dtype=D)
    parameters = list(bayes.parameters())
    pending = (bayes(x).mean() * 0 + bayes.kl()), bayes.kl()
    torch.testing.assert_close(pending[0], pending[1])
    for one, other in zip(*(torch.autograd.grad(k, parameters) for k in pending), strict=True):
        torch.testing.assert_close(one, other)


def test_t24_stacked_noise_is_the_noise_of_draws_one_by_one() -> None:
    torch.manual_seed(0)
    families = {
        "0": dubito.LowRankFactors(rank=2, init="random"),
        "1.weight": dubito.MeanField(),
        "1.bias": dubito.Radial(),
    }
    bayes = dubito.bayesianize(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)), families)
    posteriors = list(bayes.posteriors())
    generator = torch.Generator().manual_seed(1)
    draws = bayes.draw(5, generator)
    again = bayes.draw(5, generator)
    generator.manual_seed(1)
    singly = [[p.noise(generator) for p in posteriors] for _ in range(5)]
    for place, (key, noise) in enumerate(draws.noise.items()):
        for name, stacked in noise.items():
            assert all(torch.equal(stacked[s], singly[s][place][name]) for s in range(5))
            assert not torch.equal(stacked, again.noise[key][name])
            assert stacked.data_ptr() != again.noise[key][name].data_ptr()


def test_prediction_with_an_estimator_draws_no_weights_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    families = {"0": dubito.MeanField(), "1": dubito.LowRankCovariance(rank=2)}
    bayes = dubito.bayesianize(
        nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)), families, likelihood=dubito.Categorical()
    )
    x = torch.randn(4, 7)
    first = next(iter(bayes.posteriors()))
    expected = bayes.predict(x, samples=4000).probs

    def unwanted(*_: Any) -> Any:
        raise AssertionError("weights were made where outputs are drawn")

    monkeypatch.setattr(first, "components", unwanted)
    got = bayes.predict(x, samples=4000, estimator="local").probs
    torch.testing.assert_close(got, expected, atol=0.02, rtol=0)
    with pytest.raises(AssertionError, match="weights were made"):
        bayes.predict(x, samples=2)
