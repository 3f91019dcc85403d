"""Priors of a layer: four shapes, against `torch.distributions`; and what is held still stays still."""

import pytest
import torch
from torch.distributions import MultivariateNormal

from dubito.amortised.layer_priors import PriorKind, layer_prior

KINDS: list[PriorKind] = ["unit", "diagonal", "low-rank", "layer"]


def shaken(kind: PriorKind, units: int = 3, width: int = 4):  # type: ignore[no-untyped-def]
    prior = layer_prior(kind, units, width, rank=2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in prior.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
    return prior


@pytest.mark.parametrize("kind", KINDS)
def test_precision_density_and_draws_are_those_of_the_covariance(kind: PriorKind) -> None:
    prior = shaken(kind)
    gaussian, covariance = prior.gaussian(), prior.covariance()
    torch.testing.assert_close(
        gaussian.precision @ covariance, torch.eye(covariance.shape[-1]).double().expand_as(covariance)
    )
    torch.testing.assert_close(gaussian.factor @ gaussian.factor.mT, gaussian.precision)
    weights = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    theirs = MultivariateNormal(gaussian.mean, covariance)
    expected = theirs.log_prob(weights.reshape(5, *prior.blocks)).sum(-1)
    torch.testing.assert_close(prior.log_prob(weights), expected)
    noise = torch.randn(
        40_000, prior.blocks[0], prior.noise_width, generator=torch.Generator().manual_seed(2)
    )
    draws = prior.draw(noise.double())
    torch.testing.assert_close(draws.mean(0), gaussian.mean, atol=0.03, rtol=0.02)
    sampled = torch.stack([torch.cov(draws[:, b].mT) for b in range(prior.blocks[0])])
    torch.testing.assert_close(sampled, covariance, atol=0.06, rtol=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_it_starts_independent_at_the_fan_in_scale(kind: PriorKind) -> None:
    torch.manual_seed(0)
    prior = layer_prior(kind, 3, 4, rank=2)
    covariance = prior.covariance()
    expected = torch.eye(covariance.shape[-1]).double().expand_as(covariance) / 4
    torch.testing.assert_close(covariance, expected, atol=0.02 if kind == "low-rank" else 1e-7, rtol=0)
    assert not bool(prior.gaussian().mean.any())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_held_stays_still_under_weight_decay_and_is_independent(kind: PriorKind) -> None:
    torch.manual_seed(0)
    prior = layer_prior(kind, 3, 4, rank=2)
    mask = torch.rand(3, 4, generator=torch.Generator().manual_seed(3)) < 0.5
    prior.set_trainable(mask)
    mean, covariance = prior.gaussian().mean.detach(), prior.covariance().detach()
    optimizer = torch.optim.AdamW(prior.parameters(), lr=0.1, weight_decay=0.5)
    weights = torch.randn(3, 4, dtype=torch.float64) * 3
    for _ in range(5):
        optimizer.zero_grad()
        (-prior.log_prob(weights)).backward()
        optimizer.step()
    held = ~mask.reshape(prior.blocks)
    torch.testing.assert_close(prior.gaussian().mean[held], mean[held])
    now = prior.covariance()
    torch.testing.assert_close(
        now.diagonal(dim1=-2, dim2=-1)[held], covariance.diagonal(dim1=-2, dim2=-1)[held]
    )
    off = held.unsqueeze(-1) & ~torch.eye(held.shape[-1], dtype=torch.bool)
    assert float(now.detach()[off].abs().max()) == 0.0
    assert not torch.equal(prior.gaussian().mean, mean)  # the rest has learned


def test_what_is_held_is_saved_and_loaded() -> None:
    prior = shaken("unit")
    prior.set_trainable(torch.tensor([[True] * 4, [False] * 4, [True] * 4]))
    other = layer_prior("unit", 3, 4)
    other.load_state_dict(prior.state_dict())
    torch.testing.assert_close(other.covariance(), prior.covariance())
    assert torch.equal(other.trainable, prior.trainable)
    free = layer_prior("unit", 3, 4)
    other.load_state_dict(free.state_dict())
    assert other.mean.held is None


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="'unit', 'diagonal', 'low-rank', 'layer'"):
        layer_prior("full", 2, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prior_rank=0"):
        layer_prior("low-rank", 2, 2, rank=0)
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(2, 2\)"):
        layer_prior("unit", 2, 2).set_trainable(torch.ones(2, 3, dtype=torch.bool))
