"""R-hat and effective sample sizes: known autocorrelations, shifted chains, and independent implementations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dubito.mcmc import Convergence, effective_sample_size, r_hat
from dubito.mcmc import diagnostics as ours


def autoregressive(phi: float, chains: int, draws: int, quantities: int = 1, seed: int = 0) -> Tensor:
    """Stationary AR(1) chains of unit variance: ESS of the mean is chains · draws (1 - phi) / (1 + phi)."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(chains, draws, quantities, generator=generator, dtype=torch.float64)
    values = torch.empty_like(noise)
    values[:, 0] = noise[:, 0]
    for t in range(1, draws):
        values[:, t] = phi * values[:, t - 1] + (1 - phi**2) ** 0.5 * noise[:, t]
    return values


@pytest.mark.parametrize("phi", [0.9, 0.5, 0.0, -0.4])
@pytest.mark.parametrize("kind", ["mean", "bulk"])
def test_effective_sample_size_of_autoregressive_chains(phi: float, kind: ours.EssKind) -> None:
    found = effective_sample_size(autoregressive(phi, 4, 2000, quantities=20), kind)
    expected = 8000 * (1 - phi) / (1 + phi)
    # the mean of 20 estimates, and each within the usual spread
    assert float(found.mean()) == pytest.approx(expected, rel=0.07)
    assert bool(((found / expected - 1).abs() < 0.35).all())


def test_tails_of_independent_draws_are_worth_their_number_and_of_slow_ones_less() -> None:
    independent = effective_sample_size(autoregressive(0.0, 4, 1000, 10), "tail")
    assert float(independent.mean()) == pytest.approx(4000, rel=0.1)
    slow = effective_sample_size(autoregressive(0.9, 4, 1000, 10), "tail")
    assert float(slow.mean()) < 1000


def test_r_hat_is_one_where_chains_agree_and_large_where_they_do_not() -> None:
    agreed = autoregressive(0.3, 4, 1000, 20)
    assert bool((r_hat(agreed) < 1.01).all())
    shifted = agreed + torch.tensor([0.0, 0.0, 0.0, 1.5]).reshape(4, 1, 1)
    assert bool((r_hat(shifted) > 1.1).all())
    wider = agreed * torch.tensor([1.0, 1.0, 1.0, 3.0]).reshape(4, 1, 1)  # same centre: folding finds it
    assert bool((r_hat(wider) > 1.05).all())
    drift = agreed[:1] + torch.linspace(0, 2, 1000).reshape(1, -1, 1)  # one chain: its halves differ
    assert bool((r_hat(drift) > 1.1).all())


def test_heavy_tails_do_not_hide_a_shift() -> None:
    """Of Cauchy values no variance exists; ranks see the shift that the plain R-hat does not (their figure 2)."""
    torch.manual_seed(0)
    values = torch.distributions.Cauchy(0.0, 1.0).sample((4, 1000)).double()
    values[3] += 3.0
    assert float(r_hat(values)) > 1.05
    assert float(ours._plain_r_hat(ours._split(values))) < 1.05


def test_chains_that_stand_still() -> None:
    apart = torch.tensor([[1.0], [2.0]], dtype=torch.float64).expand(2, 10)
    assert float(r_hat(apart)) == float("inf")
    together = torch.ones(2, 10)
    assert bool(r_hat(together).isnan())
    assert bool(effective_sample_size(together).isnan())


def test_ranks_are_those_of_scipy_with_ties() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = torch.randint(0, 6, (3, 20), generator=torch.Generator().manual_seed(1)).double()
    ranks = stats.rankdata(values.numpy().ravel(), method="average")
    expected = torch.as_tensor(stats.norm.ppf((ranks - 0.375) / 60.25)).reshape(3, 20)
    torch.testing.assert_close(ours._normal_scores(values), expected)


def test_without_ranks_they_are_pyros() -> None:
    stats = pytest.importorskip("pyro.ops.stats")
    values = autoregressive(0.6, 4, 400, 5)
    expected = stats.split_gelman_rubin(values, chain_dim=0, sample_dim=1)
    torch.testing.assert_close(ours._plain_r_hat(ours._split(values)), expected)
    # Pyro does not split, and stops at the first pair in another way: near, not equal
    expected = stats.effective_sample_size(values, chain_dim=0, sample_dim=1)
    torch.testing.assert_close(effective_sample_size(values, "mean"), expected, rtol=0.1, atol=0)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(4, 40))
def test_monotone_maps_change_nothing_and_trailing_dimensions_stand_alone(
    seed: int, chains: int, draws: int
) -> None:
    values = torch.randn(
        chains, draws, 2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    found = effective_sample_size(values, "bulk")
    torch.testing.assert_close(effective_sample_size(values.exp(), "bulk"), found, equal_nan=True)
    alone = torch.stack([r_hat(values[:, :, i, j]) for i in range(2) for j in range(3)]).reshape(2, 3)
    torch.testing.assert_close(r_hat(values), alone, equal_nan=True)
    assert Convergence.of(values).ess_tail.shape == (2, 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(10), "at least 4 draws"),
        (torch.zeros(2, 3), "at least 4 draws"),
        (torch.full((2, 5), torch.nan), "10 NaN"),
    ],
)
def test_what_cannot_be_judged(values: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        r_hat(values)
    with pytest.raises(ValueError, match=message):
        effective_sample_size(values)
