"""Natural parameters against brute-force Gaussian conditioning, `torch.distributions` and Monte Carlo."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import MultivariateNormal

from dubito.gaussian_conditionals import (
    LayerGaussian,
    PrecisionError,
    as_one_block,
    data_term,
    from_natural,
)


def some_gaussian(blocks: int, size: int, seed: int) -> LayerGaussian:
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(blocks, size, size, generator=generator, dtype=torch.float64)
    precision = root @ root.mT + torch.eye(size, dtype=torch.float64)
    mean = torch.randn(blocks, size, generator=generator, dtype=torch.float64)
    return from_natural(precision, (precision @ mean.unsqueeze(-1)).squeeze(-1), "a layer")


@settings(deadline=None, max_examples=15)
@given(points=st.integers(0, 7), units=st.integers(1, 4), width=st.integers(1, 5), seed=st.integers(0, 99))
def test_the_precision_form_is_brute_force_conditioning_of_the_stacked_outputs(
    points: int, units: int, width: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    prior = some_gaussian(units, width, seed)
    features = torch.randn(1, 1, points, width, generator=generator, dtype=torch.float64)
    targets = torch.randn(1, points, units, generator=generator, dtype=torch.float64)
    precisions = torch.rand(1, points, units, generator=generator, dtype=torch.float64) * 10 + 0.1
    more = data_term(features, targets, precisions)
    posterior = from_natural(prior.precision + more[0], prior.shift + more[1], "a layer")
    phi = features[0, 0]
    for unit in range(units):
        covariance = torch.linalg.inv(prior.precision[unit])
        joint = phi @ covariance @ phi.mT + torch.diag(1 / precisions[0, :, unit])
        gain = covariance @ phi.mT @ torch.linalg.inv(joint)
        mean = prior.mean[unit] + gain @ (targets[0, :, unit] - phi @ prior.mean[unit])
        expected = covariance - gain @ phi @ covariance
        torch.testing.assert_close(posterior.mean[0, 0, unit], mean, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(
            torch.linalg.inv(posterior.precision[0, 0, unit]), expected, atol=1e-10, rtol=1e-10
        )


def test_density_and_divergence_are_those_of_torch() -> None:
    q, p = some_gaussian(3, 4, 1), some_gaussian(3, 4, 2)
    theirs_q, theirs_p = (MultivariateNormal(g.mean, precision_matrix=g.precision) for g in (q, p))
    weights = torch.randn(5, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(q.log_prob(weights), theirs_q.log_prob(weights).sum(-1))
    torch.testing.assert_close(q.kl(p), torch.distributions.kl_divergence(theirs_q, theirs_p).sum())


def test_divergence_is_the_mean_log_ratio_of_draws() -> None:
    q, p = some_gaussian(2, 3, 3), some_gaussian(2, 3, 4)
    noise = torch.randn(40_000, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    draws = q.draw(noise)
    ratio = q.log_prob(draws) - p.log_prob(draws)
    assert abs(float(ratio.mean() - q.kl(p))) < 4 * float(ratio.std()) / 200
    torch.testing.assert_close(draws.mean(0), q.mean, atol=0.02, rtol=0)
    covariance = torch.stack([torch.cov(draws[:, b].mT) for b in range(2)])
    torch.testing.assert_close(covariance, torch.linalg.inv(q.precision), atol=0.03, rtol=0.05)


def test_both_ways_of_summing_give_the_same_terms() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, 3, 6, 4, generator=generator, dtype=torch.float64)
    for units in (2, 9):
        targets, precisions = (
            torch.rand(3, 6, units, generator=generator, dtype=torch.float64) for _ in "ab"
        )
        precision, shift = data_term(features, targets, precisions)
        expected = torch.einsum("sbni,bnu,sbnj->sbuij", features, precisions, features)
        torch.testing.assert_close(precision, expected)
        torch.testing.assert_close(shift, torch.einsum("sbni,bnu,bnu->sbui", features, precisions, targets))


def test_one_block_holds_the_units_side_by_side() -> None:
    precision = torch.arange(2 * 3 * 3, dtype=torch.float64).reshape(1, 1, 2, 3, 3)
    shift = torch.arange(6, dtype=torch.float64).reshape(1, 1, 2, 3)
    dense, flat = as_one_block(precision, shift)
    torch.testing.assert_close(dense[0, 0, 0], torch.block_diag(*precision[0, 0]))
    torch.testing.assert_close(flat.flatten(), shift.flatten())


@pytest.mark.parametrize(("entry", "said"), [(-1.0, "not positive definite"), (float("nan"), "NaN")])
def test_a_precision_that_is_none_is_refused_by_the_layers_name(entry: float, said: str) -> None:
    with pytest.raises(PrecisionError, match=f"layer 3 .*{said}|layer 3.*{said}"):
        from_natural(torch.full((1, 1, 1), entry, dtype=torch.float64), torch.zeros(1, 1).double(), "layer 3")
