import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal

import dubito
from dubito.certificates import complexity_bound, complexity_estimate, gaussian_complexity


def inputs(n=60, d=8, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_supremum_over_factors_is_the_sum_of_singular_values():
    """For fixed noise: attained by singular vectors, and passed by no other factors of spectral norm 1."""
    x, generator = inputs(), torch.Generator().manual_seed(1)
    g = torch.randn(60, 5, generator=generator, dtype=torch.float64)
    m = g.T @ x
    u, s, vh = torch.linalg.svd(m, full_matrices=False)

    def correlation(a, b):
        return float((g * (x @ b @ a.T)).sum())

    assert correlation(u[:, :2], vh[:2].T) == pytest.approx(float(s[:2].sum()))
    for _ in range(200):
        a = torch.linalg.qr(torch.randn(5, 2, generator=generator, dtype=torch.float64)).Q
        b = torch.linalg.qr(torch.randn(8, 2, generator=generator, dtype=torch.float64)).Q
        assert correlation(a, b) < float(s[:2].sum())


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_the_estimate_is_the_mean_of_that_supremum_and_below_the_bound(rank):
    x, generator = inputs(), torch.Generator().manual_seed(2)
    values = []
    for _ in range(400):
        g = torch.randn(60, 5, generator=generator, dtype=torch.float64)
        values.append(3.0 * torch.linalg.svdvals(g.T @ x)[:rank].sum() / 60)
    brute = torch.stack(values)
    estimate, error = complexity_estimate(
        x, rank, 5, 3.0, draws=400, generator=torch.Generator().manual_seed(3)
    )
    assert estimate == pytest.approx(float(brute.mean()), abs=5 * math.hypot(error, float(brute.std()) / 20))
    bound = complexity_bound(x, rank, 5, 3.0)
    assert bound == pytest.approx(3.0 * math.sqrt(rank * 5) * float(x.norm()) / 60)
    assert 0.3 * bound < estimate < bound


def test_the_bound_is_nearly_attained_by_one_output():
    """h = r = 1: sup is ‖Xᵀ g‖, whose mean is at most ‖X‖_F, and close to it in many dimensions."""
    x = inputs(100, 100)
    estimate, _ = complexity_estimate(x, 1, 1, 1.0, draws=100, generator=torch.Generator().manual_seed(0))
    assert estimate == pytest.approx(complexity_bound(x, 1, 1, 1.0), rel=0.03)


def layer(rank=2):
    torch.manual_seed(0)
    net = nn.Linear(8, 5, bias=False)
    bayes = dubito.bayesianize(net, dubito.LowRankFactors(rank, init="svd", prior=Normal(0.0, 1.0)))
    return bayes, next(iter(bayes.posteriors()))


def test_the_risk_bound_adds_its_three_terms():
    _, posterior = layer()
    x = inputs(500)
    found = gaussian_complexity(posterior, x, 0.2, lipschitz=0.5, norm=2.0, delta=0.1)
    complexity = complexity_bound(x, 2, 5, 2.0)
    expected = 0.2 + math.sqrt(2 * math.pi) * 0.5 * complexity + 3 * math.sqrt(math.log(2 / 0.1) / (2 * 500))
    assert found.bound == pytest.approx(expected)
    assert found.predictor == "posterior mean"
    assert found.vacuous == (expected >= 1.0)
    assert "fixed before the data" in str(found)


def test_a_rescaled_loss_rescales_the_complexity_term():
    _, posterior = layer()
    one, two = (gaussian_complexity(posterior, inputs(), 0.0, lipschitz=s, norm=2.0) for s in (0.1, 0.4))
    assert two.measured["complexity term"] == pytest.approx(4 * one.measured["complexity term"])


def test_it_covers_the_true_risk_of_a_layer_fitted_to_its_data():
    """Ridge regression on noise: the empirical risk is far too low, the bound is not."""
    generator = torch.Generator().manual_seed(0)

    def loss(z, y):
        return (z - y).norm(dim=1).clamp(max=8.0) / 8.0

    fails = 0
    for _ in range(20):
        x = torch.randn(200, 20, generator=generator)
        y = torch.randn(200, 3, generator=generator)
        weight = torch.linalg.solve(x.T @ x + 5 * torch.eye(20), x.T @ y).T
        fresh, target = torch.randn(4000, 20, generator=generator), torch.randn(4000, 3, generator=generator)
        risk, truth = float(loss(x @ weight.T, y).mean()), float(loss(fresh @ weight.T, target).mean())
        found = gaussian_complexity(weight, x, risk, lipschitz=1 / 8)
        assert risk < truth
        fails += truth > found.bound
        assert found.predictor == "plain network"
        assert not found.vacuous
    assert fails == 0


def test_a_norm_taken_after_training_is_paid_for():
    _, posterior = layer()
    own = float(torch.linalg.matrix_norm(next(iter(posterior.mean().values())).detach(), 2))
    found = gaussian_complexity(posterior, inputs(), 0.1, lipschitz=0.1)
    assert own <= found.norm < 2 * own
    fixed = gaussian_complexity(posterior, inputs(), 0.1, lipschitz=0.1, norm=found.norm)
    assert found.bound >= fixed.bound
    shares = []
    for k in range(-40, 41):
        weight = torch.eye(3, dtype=torch.float64) * 2.0**k
        got = gaussian_complexity(weight, inputs(d=3), 0.0, lipschitz=1.0)
        assert got.norm == 2.0**k
        shares.append(2 * math.exp(-2 * 60 * (got.measured["deviation term"] / 3) ** 2) / 0.05)
    assert 0.95 < sum(shares) < 1.0  # of δ, over the list


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"norm": 1e-3}, "not in the class"),
        ({"empirical_risk": 1.2}, "clip"),
        ({"rank": 1}, "rank above"),
        ({"inputs": torch.ones(3, 7)}, "features"),
        ({"inputs": torch.full((3, 8), math.nan)}, "NaN"),
        ({"lipschitz": 0.0}, "positive"),
        ({"delta": 1.0}, "delta"),
    ],
)
def test_bad_arguments_are_refused(options, says):
    _, posterior = layer()
    given = {"inputs": inputs(), "empirical_risk": 0.1, "lipschitz": 1.0, **options}
    with pytest.raises(ValueError, match=says):
        gaussian_complexity(posterior, **given)
