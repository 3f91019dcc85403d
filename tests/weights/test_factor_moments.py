"""Closed-form covariance of the entries of W and of W x, against draws."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito import LowRankFactors
from dubito.weights.factor_moments import entry_covariance, output_moments, weight_covariance
from dubito.weights.low_rank_factors import LowRankFactorsPosterior

D = torch.float64
CASES: dict[str, dict[str, Any]] = {
    "gaussian": {},
    "laplace": {"distribution": "laplace"},
    "blocks": {"blocks": 2},
}


def factors(module: nn.Module, **options: Any) -> LowRankFactorsPosterior:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dubito.DubitoWarning)
        family = LowRankFactors(**{"rank": 2, "init": "random", "scale": 0.5, **options})
        bayes = dubito.bayesianize(module.to(D), family)
    found = next(p for p in bayes.posteriors() if isinstance(p, LowRankFactorsPosterior))
    with torch.no_grad():
        for p in (found.left_spread, found.right_spread):
            p.add_(0.3 * torch.randn_like(p))
    return found


def drawn(q: LowRankFactorsPosterior, count: int) -> Tensor:
    """(count, m, n)."""

    def one(_: Tensor) -> Tensor:
        return q.dense(q.realize(q.components(q.noise())))[q.slot.name].flatten(1)

    with torch.no_grad():
        result: Tensor = torch.vmap(one, randomness="different")(torch.arange(count))
    return result


def deviations(products: Tensor, expected: Tensor) -> Tensor:
    """In standard errors; 0 where both are exactly 0."""
    error = products.std(0) / math.sqrt(len(products))
    return (products.mean(0) - expected) / error.clamp_min(1e-12)


@pytest.mark.parametrize("name", CASES)
def test_covariance_of_all_entries(name: str) -> None:
    q = factors(nn.Linear(3, 4, bias=False), **CASES[name])
    covariance = weight_covariance(q)
    assert covariance.shape == (12, 12)
    torch.testing.assert_close(covariance, covariance.T)
    torch.testing.assert_close(covariance.diagonal().reshape(4, 3), q.variance()["weight"].detach())
    weights = drawn(q, 60_000).flatten(1) - q.mean()["weight"].detach().flatten()
    products = weights.unsqueeze(2) * weights.unsqueeze(1)
    assert deviations(products, covariance).abs().max() < 5.0
    single = torch.tensor(
        [[entry_covariance(q, divmod(a, 3), divmod(b, 3)) for b in range(12)] for a in range(12)], dtype=D
    )
    torch.testing.assert_close(single, covariance)
    assert entry_covariance(q, (-1, -1), (3, 2)) == pytest.approx(float(covariance[11, 11]))


def test_entries_that_share_neither_row_nor_column_are_exactly_uncorrelated() -> None:
    """Not the block correlation that the paper's figure shows."""
    covariance = weight_covariance(factors(nn.Linear(3, 4, bias=False))).reshape(4, 3, 4, 3)
    for i, j, p, r in torch.cartesian_prod(*map(torch.arange, covariance.shape)).tolist():
        assert (float(covariance[i, j, p, r]) == 0.0) == (i != p and j != r)


@pytest.mark.parametrize("name", CASES)
def test_moments_of_outputs(name: str) -> None:
    q = factors(nn.Linear(3, 4, bias=False), **CASES[name])
    x = torch.randn(2, 3, dtype=D)
    mean, covariance = output_moments(q, x)
    torch.testing.assert_close(mean, x @ q.mean()["weight"].T)
    from_entries = torch.einsum(
        "bj,ijpq,bq->bip", x, weight_covariance(q).reshape(4, 3, 4, 3), x
    )  # linear in the entries
    torch.testing.assert_close(covariance.detach(), from_entries)
    outputs = torch.einsum("smn,bn->sbm", drawn(q, 60_000), x) - mean.detach()
    products = outputs.unsqueeze(3) * outputs.unsqueeze(2)
    assert deviations(products, covariance.detach()).abs().max() < 5.0
    covariance.sum().backward()
    assert q.right_spread.grad is not None


def test_a_kernel_counts_as_its_matrix() -> None:
    q = factors(nn.Conv2d(2, 3, 2, bias=False))
    covariance = weight_covariance(q)
    assert covariance.shape == (24, 24)
    torch.testing.assert_close(covariance.diagonal(), q.variance()["weight"].detach().flatten())
    assert output_moments(q, torch.ones(1, 8))[1].shape == (1, 3, 3)


def test_half_precision_is_computed_in_single() -> None:
    q = factors(nn.Linear(3, 4, bias=False)).to(torch.bfloat16)
    mean, covariance = output_moments(q, torch.ones(1, 3, dtype=torch.bfloat16))
    assert weight_covariance(q).dtype == mean.dtype == covariance.dtype == torch.float32


def test_what_does_not_fit_is_refused() -> None:
    q = factors(nn.Linear(3, 4, bias=False))
    with pytest.raises(ValueError, match=r"x must be of shape \(batch, 3\)"):
        output_moments(q, torch.ones(2, 4))
    with pytest.raises(IndexError, match=r"first=\(4, 0\)"):
        entry_covariance(q, (4, 0), (0, 0))
    with pytest.raises(ValueError, match="entry_covariance"):
        weight_covariance(factors(nn.Linear(100, 100, bias=False)))
    other = next(iter(dubito.bayesianize(nn.Linear(2, 2), dubito.MeanField()).posteriors()))
    with pytest.raises(TypeError, match="LowRankFactors"):
        weight_covariance(other)
