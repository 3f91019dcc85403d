"""Theorems 1 and 2 of implicit-bias variational inference, with the library's own posterior, draws and losses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito import last_layer, theory
from dubito.bayesian import BayesianModule
from dubito.snapshot import Snapshot
from dubito.theory import LinearGaussian, implicit_bias_limit, linear_gaussian, max_margin_limit

N, P = 4, 12
Optimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


def inputs(seed: int = 0, n: int = N, p: int = P) -> Tensor:
    """Full row rank and well conditioned, so that few steps suffice."""
    generator = torch.Generator().manual_seed(seed)
    u, _, vh = torch.linalg.svd(
        torch.randn(n, p, generator=generator, dtype=torch.float64), full_matrices=False
    )
    return u @ torch.diag(torch.linspace(1.0, 1.4, n, dtype=torch.float64)) @ vh


def targets(seed: int = 1, n: int = N) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear(rank: int, bias: bool = False, seed: int = 2, p: int = P) -> BayesianModule:
    torch.manual_seed(seed)
    layer = nn.Linear(p, 1, bias=bias, dtype=torch.float64)
    bayes = dubito.bayesianize(layer, dubito.LowRankCovariance(rank, scale=2.0), likelihood=dubito.Gaussian())
    return bayes


def expected(bayes: BayesianModule, X: Tensor, y: Tensor) -> Tensor:
    """The expected squared error, in closed form."""
    return last_layer.squared_error(last_layer.output_moments(bayes, "", X), y)


def descend(
    bayes: BayesianModule, X: Tensor, y: Tensor, optimizer: torch.optim.Optimizer, steps: int
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        expected(bayes, X, y).backward()
        optimizer.step()


def gap(bayes: BayesianModule, limit: LinearGaussian) -> float:
    now = linear_gaussian(bayes)
    return float(torch.maximum((now.mean - limit.mean).abs().max(), (now.factor - limit.factor).abs().max()))


def outside(X: Tensor) -> Tensor:
    """The projector off the row space."""
    return torch.eye(X.shape[1], dtype=X.dtype) - torch.linalg.pinv(X) @ X


# ---- theorem 1 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("rank", [1, 3, P])
def test_gradient_descent_ends_at_the_closed_form(rank: int, momentum: float) -> None:
    X, y, bayes = inputs(), targets(), linear(rank)
    limit = implicit_bias_limit(X, y, bayes)
    descend(bayes, X, y, torch.optim.SGD(bayes.parameters(), lr=0.5, momentum=momentum), 500)
    assert gap(bayes, limit) < 1e-8
    mean, variance = limit.predictive(X)
    torch.testing.assert_close(mean, y)
    assert float(variance.max()) < 1e-20


@pytest.mark.parametrize(("rank", "tolerance"), [(1, 1e-8), (3, 1e-8), (P, 1e-6)])
def test_sgd_with_one_draw_and_minibatches_ends_there_too(rank: int, tolerance: float) -> None:
    X, y, bayes = inputs(), targets(), linear(rank)
    limit, projector = implicit_bias_limit(X, y, bayes), outside(X)
    start = linear_gaussian(bayes)
    optimizer = torch.optim.SGD(bayes.parameters(), lr=(1.2 if rank <= 3 else 0.7) / (rank + 2))
    generator = torch.Generator().manual_seed(3)
    bayes.train()
    for step in range(700 + 300 * min(rank, 6)):
        batch = torch.randperm(N, generator=generator)[: N // 2]
        optimizer.zero_grad()
        (bayes(X[batch])[:, 0] - y[batch]).square().mean().backward()
        optimizer.step()
        if step % 50 == 0 or step < 20:  # the null-space part never moves, at the first step or the last
            now = linear_gaussian(bayes)
            assert float((projector @ (now.mean - start.mean)).abs().max()) < 1e-12
            assert float((projector @ (now.factor - start.factor)).abs().max()) < 1e-12
    assert gap(bayes, limit) < tolerance


def test_the_limit_is_the_feasible_point_nearest_to_the_prior() -> None:
    X, y, bayes = inputs(), targets(), linear(3)
    prior, limit, projector = linear_gaussian(bayes), implicit_bias_limit(X, y, bayes), outside(X)
    best = float(limit.wasserstein(prior))
    pinv = torch.linalg.pinv(X)
    direct = (pinv @ (y - X @ prior.mean)).square().sum() + (pinv @ X @ prior.factor).square().sum()
    assert best == pytest.approx(float(direct), rel=1e-10)
    generator = torch.Generator().manual_seed(0)
    for size in (0.01, 0.1, 1.0):
        for _ in range(100):
            a = torch.randn(P, generator=generator, dtype=torch.float64) * size
            B = torch.randn(P, 3, generator=generator, dtype=torch.float64) * size
            near = LinearGaussian(limit.mean + projector @ a, limit.factor + projector @ B)
            fresh = LinearGaussian(near.mean, projector @ B)
            for other in (near, fresh):
                torch.testing.assert_close(X @ other.mean, y)
                assert float((X @ other.factor).abs().max()) < 1e-12
                assert float(other.wasserstein(prior)) > best


def test_the_limit_is_the_distribution_of_an_ensemble_started_from_the_prior() -> None:
    X, y, bayes = inputs(), targets(), linear(3)
    limit = implicit_bias_limit(X, y, bayes)
    members = 10_000
    w = bayes.posterior["weight"].draw((members,), torch.Generator().manual_seed(0))["weight"][:, 0].detach()
    for _ in range(150):
        w = w - 0.45 * (w @ X.mT - y) @ X
    assert float((w @ X.mT - y).abs().max()) < 1e-9
    scale = float(limit.factor.square().sum(1).max().sqrt())
    torch.testing.assert_close(w.mean(0), limit.mean, atol=5 * scale / members**0.5, rtol=0)
    torch.testing.assert_close(w.mT.cov(), limit.covariance, atol=8 * scale**2 / members**0.5, rtol=0)


def test_learning_rate_groups_give_the_weighted_limit() -> None:
    X, y, bayes = inputs(), targets(), linear(3, bias=True)
    limits = {}
    for ratio in (1.0, 8.0):
        rates = torch.ones(P + 1, dtype=torch.float64)
        rates[-1] = ratio
        limits[ratio] = implicit_bias_limit(X, y, bayes, learning_rates=rates)
    posterior = bayes.posterior["weight"]
    lr = 0.04
    groups = [
        {"params": [bayes.module.weight], "lr": lr},
        {"params": [bayes.module.bias], "lr": 8 * lr},
        {
            "params": [posterior.factors["weight"]],
            "lr": lr / 3,
        },  # S at a multiple of the mean's rate: no difference
        {"params": [posterior.factors["bias"]], "lr": 8 * lr / 3},
    ]
    descend(bayes, X, y, torch.optim.SGD(groups, momentum=0.9), 1200)
    assert gap(bayes, limits[8.0]) < 1e-8
    assert gap(bayes, limits[1.0]) > 1e-2


def test_groups_of_the_maximal_update_parametrisation_give_their_own_weighted_limit() -> None:
    X, y, bayes = inputs(), targets(), linear(3, bias=True)
    roles = dubito.mup.roles(bayes, patterns={"*": "output"})
    groups = dubito.mup.parameter_groups(bayes, lr=0.4, roles=roles)
    rate = {id(p): g["lr"] for g in groups for p in g["params"]}
    weight, bias = bayes.module.weight, bayes.module.bias
    rates = torch.tensor([rate[id(weight)]] * P + [rate[id(bias)]], dtype=torch.float64)
    assert float(rates[-1] / rates[0]) == P
    limit = implicit_bias_limit(X, y, bayes, learning_rates=rates)
    descend(bayes, X, y, torch.optim.SGD(groups, momentum=0.9), 1200)
    assert gap(bayes, limit) < 1e-8


def test_adam_ends_elsewhere() -> None:
    """The documented counter-example: a minimiser, but not the nearest to the prior."""
    X, y, bayes = inputs(), targets(), linear(3)
    prior, limit = linear_gaussian(bayes), implicit_bias_limit(X, y, bayes)
    optimizer = torch.optim.Adam(bayes.parameters(), lr=1e-2)
    descend(bayes, X, y, optimizer, 2000)
    assert float(expected(bayes, X, y).detach()) < 1e-8
    assert gap(bayes, limit) > 0.1
    assert float(linear_gaussian(bayes).wasserstein(prior)) > 1.05 * float(limit.wasserstein(prior))


def test_weight_decay_ends_elsewhere() -> None:
    """The documented counter-example: uncertainty away from the data decays with the number of steps."""
    X, y, bayes = inputs(), targets(), linear(3)
    limit, projector = implicit_bias_limit(X, y, bayes), outside(X)
    optimizer = torch.optim.SGD(bayes.parameters(), lr=0.5, weight_decay=5e-3)
    descend(bayes, X, y, optimizer, 1500)
    kept = (projector @ linear_gaussian(bayes).factor).norm() / limit.factor.norm()
    assert float(kept) == pytest.approx((1 - 0.5 * 5e-3) ** 1500, rel=1e-6)
    assert float(kept) < 0.05


def test_a_diagonal_covariance_collapses_to_a_point() -> None:
    X, y = inputs(), targets()
    torch.manual_seed(0)
    layer = nn.Linear(P, 1, bias=False, dtype=torch.float64)
    bayes = dubito.bayesianize(layer, dubito.DiagonalCovariance())
    before = bayes.posterior["weight"].variance()["weight"].sum()
    descend(bayes, X, y, torch.optim.SGD(bayes.parameters(), lr=0.5), 1500)
    after = bayes.posterior["weight"].variance()["weight"].sum()
    assert float(after.detach() / before.detach()) < 1e-3
    projected = outside(X).diagonal().sum() * before.detach() / P
    assert float(projected / before.detach()) > 0.5  # what the theorem's family would have kept


@pytest.mark.parametrize(("balance", "most"), [(1.0, 0.95), (0.1, 0.2)])
def test_a_kronecker_factored_covariance_loses_the_null_space(balance: float, most: float) -> None:
    """One and the same prior loses a tenth of its unseen variance, or nearly all: the factors' balance decides."""
    X = inputs()
    torch.manual_seed(0)
    layer = nn.Linear(P, 1, bias=False, dtype=torch.float64)
    bayes = dubito.bayesianize(layer, dubito.KroneckerCovariance(rank_in=3, rank_out=1))
    projector, posterior = outside(X), bayes.posterior["weight"]
    left, right = posterior.outputs["weight"], posterior.inputs["weight"]
    with torch.no_grad():
        left.mul_(balance)
        right.div_(balance)

    def unseen() -> float:
        return float((projector @ right.detach()).square().sum() * left.detach().square().sum())

    before = unseen()
    optimizer = torch.optim.SGD([left, right], lr=0.05)
    for _ in range(1500):
        optimizer.zero_grad()
        ((X @ right).square().sum(1) * left.square().sum()).mean().backward()
        optimizer.step()
    assert unseen() / before < most


def test_the_elbo_keeps_variance_at_the_data_and_the_expected_loss_does_not() -> None:
    X, y = inputs(), targets()
    torch.manual_seed(0)
    layer = nn.Linear(P, 1, bias=False, dtype=torch.float64)
    bayes = dubito.bayesianize(layer, dubito.MeanField(scale=1.0))
    optimizer = torch.optim.SGD(bayes.parameters(), lr=0.1, momentum=0.9)
    for _ in range(600):
        optimizer.zero_grad()
        moments = last_layer.output_moments(bayes, "", X)
        (last_layer.gaussian_nll(moments, y) + bayes.kl() / N).backward()
        optimizer.step()
    elbo_variance = last_layer.output_moments(bayes, "", X).variance
    optimum = 1.0 / (P + X.square().sum(0))  # 1/diag(precision): prior precision fan_in, unit noise
    torch.testing.assert_close(bayes.posterior["weight"].variance()["weight"][0], optimum, rtol=1e-3, atol=0)
    assert float(elbo_variance.min()) > 0.05
    other = linear(3)
    descend(other, X, y, torch.optim.SGD(other.parameters(), lr=0.5), 500)
    assert float(last_layer.output_moments(other, "", X).variance.max()) < 1e-16


def test_generalised_variational_inference_reaches_the_limit_as_its_weight_vanishes() -> None:
    X, y, bayes = inputs(), targets(), linear(3)
    prior, limit = bayes.snapshot(), implicit_bias_limit(X, y, bayes)
    with torch.no_grad():  # start far from the prior: it is the divergence that finds it
        torch.manual_seed(9)
        for p in bayes.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
    gaps = []
    for weight in (1e-1, 1e-2, 1e-3, 1e-4):
        optimizer = torch.optim.LBFGS(
            bayes.parameters(), lr=1.0, max_iter=300, tolerance_grad=1e-12, tolerance_change=1e-15,
            line_search_fn="strong_wolfe",
        )  # fmt: skip

        def loss(weight: float = weight, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            nll, distance = expected(bayes, X, y), bayes.wasserstein(prior)
            objective = dubito.objectives.generalized_variational(nll, distance, weight).loss
            objective.backward()
            return objective

        optimizer.step(loss)  # type: ignore[arg-type]
        gaps.append(float(linear_gaussian(bayes).wasserstein(limit)) ** 0.5)
    assert gaps[-1] < 1e-3
    assert gaps[-1] < gaps[-2] / 5 < gaps[-3] / 25 < gaps[-4] / 50


# ---- theorem 2 -------------------------------------------------------------------------------------------------


def separable(n: int = 6, p: int = 20) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(n, p, generator=generator, dtype=torch.float64)
    y = torch.tensor([1.0, -1.0] * (n // 2), dtype=torch.float64)
    return X, y


def test_exponential_loss_ends_in_the_direction_of_the_maximum_margin() -> None:
    X, y = separable()
    bayes = linear(5, p=20)
    bayes.rescale_spread_(0.5)
    start, limit, projector = linear_gaussian(bayes), max_margin_limit(X, y, bayes), outside(X)
    margin = theory.max_margin_direction(X, y)
    optimizer = torch.optim.SGD(bayes.parameters(), lr=0.02)
    weight, factor = bayes.module.weight, bayes.posterior["weight"].factors["weight"]
    for step in range(10_000):
        optimizer.zero_grad()
        # log of sum_n E exp(-y_n f): its gradient is the loss's, normalised; logs do not overflow
        variance = (factor[:, 0] @ X.mT).square().sum(0)
        torch.logsumexp(-y * (X @ weight[0]) + 0.5 * variance, 0).backward()
        optimizer.step()
        if step % 1000 == 0 or step == 9999:
            now = linear_gaussian(bayes)
            size = float(now.mean.abs().max())  # it grows without bound, and rounding with it
            assert float((projector @ (now.mean - start.mean)).abs().max()) < 1e-12 * max(1.0, size)
            assert float((projector @ (now.factor - start.factor)).abs().max()) < 1e-11
    now = linear_gaussian(bayes)
    inside = now.mean - projector @ now.mean
    assert 1.0 - float(torch.cosine_similarity(inside, margin, dim=0)) < 1e-4
    assert float((X @ now.factor).abs().max()) < 1e-6
    torch.testing.assert_close(now.factor, limit.factor, atol=1e-6, rtol=0)
    torch.testing.assert_close(limit.mean - projector @ limit.mean, margin)


def test_the_variance_of_the_exponential_loss_is_that_of_the_library_s_moments() -> None:
    X, _ = separable()
    bayes = linear(5, p=20)
    factor = bayes.posterior["weight"].factors["weight"]
    by_hand = (factor[:, 0] @ X.mT).square().sum(0)
    torch.testing.assert_close(last_layer.output_moments(bayes, "", X).variance[:, 0], by_hand)


def test_max_margin_matches_a_quadratic_program() -> None:
    from scipy.optimize import minimize

    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        truth = torch.randn(3, generator=generator, dtype=torch.float64)
        X = torch.randn(25, 3, generator=generator, dtype=torch.float64)
        y = torch.where(X @ truth > 0, 1.0, -1.0).double()
        keep = (X @ truth).abs() > 0.3
        X, y = X[keep], y[keep]
        w = theory.max_margin_direction(X, y)
        Z = (y[:, None] * X).numpy()
        solved = minimize(
            lambda v: v @ v, truth.numpy() * 10, jac=lambda v: 2 * v, method="SLSQP",
            constraints={"type": "ineq", "fun": lambda v, Z=Z: Z @ v - 1, "jac": lambda v, Z=Z: Z},
            options={"maxiter": 500, "ftol": 1e-14},
        )  # fmt: skip
        torch.testing.assert_close(w, torch.from_numpy(solved.x), rtol=1e-5, atol=1e-6)
        assert float((y * (X @ w)).min()) == pytest.approx(1.0, abs=1e-8)
        zero_one = theory.max_margin_direction(X, (y > 0).long())
        torch.testing.assert_close(zero_one, w)


# ---- what may be given, and what is refused ----------------------------------------------------------------------


def test_a_snapshot_and_factors_give_the_same_prior() -> None:
    bayes = linear(2, bias=True)
    snapshot: Snapshot = bayes.snapshot()
    kept = copy.deepcopy(linear_gaussian(bayes))
    with torch.no_grad():
        for p in bayes.parameters():
            p.mul_(3.0)
    now = linear_gaussian(snapshot)
    assert now.bias
    assert torch.equal(now.mean, kept.mean)
    assert torch.equal(now.factor, kept.factor)
    X, y = inputs(), targets()
    ones = torch.cat([X, torch.ones(N, 1, dtype=X.dtype)], 1)
    by_hand = implicit_bias_limit(ones, y, (kept.mean, kept.factor))
    torch.testing.assert_close(implicit_bias_limit(X, y, snapshot).mean, by_hand.mean)


def test_bad_input_is_refused() -> None:
    X, y, bayes = inputs(), targets(), linear(2)
    with pytest.raises(ValueError, match=r"must have 12 columns.*\(4, 5\)"):
        implicit_bias_limit(X[:, :5], y, bayes)
    with pytest.raises(ValueError, match="one number for each of the 4 inputs"):
        implicit_bias_limit(X, y[:2], bayes)
    with pytest.raises(ValueError, match="positive numbers"):
        implicit_bias_limit(X, y, bayes, learning_rates=torch.zeros(P, dtype=torch.float64))
    with pytest.raises(ValueError, match="linear model of one output"):
        implicit_bias_limit(X, y, dubito.bayesianize(nn.Linear(P, 2), dubito.LowRankCovariance(2)))
    with pytest.raises(TypeError, match="not Linear"):
        implicit_bias_limit(X, y, nn.Linear(P, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"mean \(P,\) and a factor"):
        implicit_bias_limit(X, y, (y, X[:2]))
    with pytest.raises(ValueError, match="not linearly separable"):
        theory.max_margin_direction(torch.tensor([[1.0], [-1.0]]), torch.tensor([1.0, 1.0]))
    with pytest.raises(ValueError, match="labels -1 and 1, or 0 and 1"):
        theory.max_margin_direction(X, y)
