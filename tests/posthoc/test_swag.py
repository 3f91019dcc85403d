"""SWAG: its moments are those of the iterates, its draws have the covariance of the paper."""

import copy

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito.posthoc.swag import SWAG


def collected(count: int = 9, rank: int = 4) -> tuple[SWAG, Tensor]:
    """SWAG over iterates far from zero, where a difference of squares would lose digits, and those iterates."""
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    swag = SWAG(net, rank=rank, likelihood=dubito.Categorical())
    iterates = []
    for _ in range(count):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(100.0 + 0.01 * torch.randn_like(parameter))
        swag.collect()
        iterates.append(torch.cat([p.detach().reshape(-1) for p in net.parameters()]))
    return swag, torch.stack(iterates)


def test_moments_equal_a_direct_computation_over_the_iterates() -> None:
    swag, iterates = collected()
    exact = iterates.double()
    assert torch.allclose(swag.mean.double(), exact.mean(0), atol=2e-5)
    assert torch.allclose(swag.variance.double(), exact.var(0, correction=0), rtol=1e-2)
    running = torch.stack([exact[: i + 1].mean(0) for i in range(len(exact))])
    assert torch.allclose(swag.deviations.double(), (exact - running)[-4:], atol=5e-5)


def test_draws_have_half_the_diagonal_and_half_the_low_rank_covariance() -> None:
    swag, _ = collected(count=6, rank=5)
    generator = torch.Generator().manual_seed(1)
    draws = torch.stack([swag.draw(generator=generator) for _ in range(6_000)]).double()
    deviations = swag.deviations.double()
    expected = 0.5 * swag.variance.double().diag() + 0.5 * deviations.mT @ deviations / (5 - 1)
    assert torch.allclose(draws.T.cov(), expected, atol=0.08 * float(expected.diagonal().max()))
    assert torch.allclose(draws.mean(0), swag.mean.double(), atol=1e-3)
    assert torch.equal(swag.draw(0.0), swag.mean)


def test_the_network_is_left_as_it_was_and_a_sample_is_a_plain_copy() -> None:
    swag, _ = collected()
    before = copy.deepcopy(swag.module.state_dict())
    sample = swag.sample(generator=torch.Generator().manual_seed(0))
    swag.predict(torch.randn(4, 3), samples=3)
    assert all(torch.equal(before[k], v) for k, v in swag.module.state_dict().items())
    assert isinstance(sample, nn.Linear)
    assert not torch.equal(sample.weight, swag.module.weight)


def test_the_predictive_averages_the_sampled_networks() -> None:
    swag, _ = collected()
    x = torch.randn(6, 3)
    generator = torch.Generator().manual_seed(3)
    networks = [swag.sample(generator=generator) for _ in range(5)]
    expected = torch.stack([net(x).softmax(-1) for net in networks]).mean(0)
    found = swag.predict(x, samples=5, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(found.probs, expected, atol=1e-6)


def test_batch_normalisation_is_measured_anew_for_every_draw() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    swag = SWAG(net, rank=2, likelihood=dubito.Categorical())
    for _ in range(3):
        with torch.no_grad():
            net[0].weight.add_(torch.randn_like(net[0].weight))
        swag.collect()
    with pytest.raises(ValueError, match="refresh="):
        swag.sample()
    x = torch.randn(40, 3)
    sample = swag.sample(refresh=[(x, torch.zeros(40))], generator=torch.Generator().manual_seed(0))
    assert torch.allclose(sample[1].running_mean, sample[0](x).mean(0), atol=1e-5)
    assert torch.allclose(sample[1].running_var, sample[0](x).var(0), atol=1e-4)
    assert sample[1].momentum == 0.1
    assert torch.equal(net[1].running_mean, torch.zeros(4))


def test_wrong_uses_are_explained() -> None:
    with pytest.raises(ValueError, match="rank=1"):
        SWAG(nn.Linear(2, 2), rank=1)
    with pytest.raises(ValueError, match="no trainable parameter"):
        SWAG(nn.ReLU())
    swag = SWAG(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="call collect"):
        swag.draw()
    with pytest.raises(ValueError, match="no likelihood"):
        swag.predict(torch.zeros(1, 2))
    with torch.no_grad():
        swag.module.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="diverged"):
        swag.collect()
