"""Low-rank factors: exact moments, two-stage local reparametrisation, initialisation, ranks, KL."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Laplace, Normal, kl_divergence

import dubito
from dubito import LowRankFactors
from dubito.weights.low_rank_factors import LowRankFactorsPosterior

D = torch.float64


def bayes_of(module: nn.Module, family: LowRankFactors, seed: int = 1) -> dubito.BayesianModule:
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dubito.DubitoWarning)
        bayes = dubito.bayesianize(module.to(D), family)
    with torch.no_grad():
        for posterior in bayes.posteriors():
            for parameter in posterior.spread_parameters():
                parameter.add_(0.4 * torch.randn_like(parameter))
    return bayes


def only(bayes: dubito.BayesianModule) -> LowRankFactorsPosterior:
    (posterior,) = [p for p in bayes.posteriors() if isinstance(p, LowRankFactorsPosterior)]
    return posterior


def factor_moments(posterior: LowRankFactorsPosterior) -> tuple[Tensor, ...]:
    """Means and variances of A and B."""
    left, right = posterior.factor("left"), posterior.factor("right")
    return left[0].detach(), (2 * left[1]).exp().detach(), right[0].detach(), (2 * right[1]).exp().detach()


def linear(m: int = 3, n: int = 4, **options: Any) -> dubito.BayesianModule:
    torch.manual_seed(0)
    options = {"rank": 2, "init": "svd", "scale": 0.5, **options}
    return bayes_of(nn.Linear(n, m, bias=False), LowRankFactors(**options))


def limit(entries: int) -> float:
    """Two-sided bound on a standard normal at level 1e-4, corrected for the number of entries."""
    return float(Normal(0.0, 1.0).icdf(torch.tensor(1 - 0.5e-4 / entries, dtype=D)))


# ------------------------------------------------------------------------------------------------- moments


def test_exact_moments_of_the_product_match_draws_covariance_included() -> None:
    """Cov(W_ij, W_pq) in closed form; entries sharing neither row nor column are uncorrelated."""
    bayes = linear()
    posterior = only(bayes)
    ma, va, mb, vb = factor_moments(posterior)
    mean, variance = posterior.mean()["weight"], posterior.variance()["weight"]
    torch.testing.assert_close(mean, ma @ mb.T)
    same_row, same_column = torch.eye(3, dtype=D), torch.eye(4, dtype=D)
    covariance = (
        torch.einsum("ip,ik,jk,qk->ijpq", same_row, va, mb, mb)
        + torch.einsum("jq,jk,ik,pk->ijpq", same_column, vb, ma, ma)
        + torch.einsum("ip,jq,ik,jk->ijpq", same_row, same_column, va, vb)
    )
    torch.testing.assert_close(variance, torch.einsum("ijij->ij", covariance))
    assert covariance[0, 0, 1, 1] == 0
    count = 200_000
    generator = torch.Generator().manual_seed(2)
    a = ma + va.sqrt() * torch.randn(count, *ma.shape, dtype=D, generator=generator)
    b = mb + vb.sqrt() * torch.randn(count, *mb.shape, dtype=D, generator=generator)
    drawn = a @ b.mT
    deviation = drawn - mean
    products = torch.einsum("sij,spq->sijpq", deviation[:50_000], deviation[:50_000])
    error = products.std(0) / math.sqrt(50_000)
    assert ((products.mean(0) - covariance) / error).abs().max() < limit(144)
    assert (deviation.mean(0) / (variance / count).sqrt()).abs().max() < limit(12)


def test_draws_of_the_posterior_have_that_covariance() -> None:
    posterior = only(linear())
    draws = torch.vmap(
        lambda _: posterior.dense(posterior.realize(posterior.components(posterior.noise())))["weight"],
        randomness="different",
    )(torch.arange(40_000)).detach()
    correlation = torch.corrcoef(draws.reshape(-1, 12).T).reshape(3, 4, 3, 4)
    for i, j, p, q in ((0, 0, 1, 1), (2, 3, 0, 1), (1, 2, 2, 0)):
        assert abs(float(correlation[i, j, p, q])) < 4.5 / math.sqrt(40_000)
    assert abs(float(correlation[0, 0, 0, 1])) > 0.02 or abs(float(correlation[0, 0, 1, 0])) > 0.02
    assert float(torch.linalg.svdvals(draws[:100])[:, 2].max()) < 1e-12, "rank 2, always"


@pytest.mark.parametrize("estimator", ["weights", "local"])
def test_output_moments_are_exact_under_weight_draws_and_two_stages(estimator: Any) -> None:
    """E y, Cov y and the kurtosis (beyond Gaussian) of x B Aᵀ; the same by drawing weights and by two stages."""
    bayes = linear(estimator=estimator)
    ma, va, mb, vb = factor_moments(only(bayes))
    x = torch.tensor([0.7, -1.2, 0.4, 1.5], dtype=D)
    hm, hv = x @ mb, x.square() @ vb
    mean = ma @ hm
    covariance = ma @ torch.diag(hv) @ ma.T + torch.diag(va @ (hm.square() + hv))
    count = 40_000
    torch.manual_seed(3)
    with torch.no_grad():
        if estimator == "local":
            y = bayes(x.expand(count, 4))  # examples are independent
        else:
            y = bayes.outputs(x.expand(1, 4), samples=count, chunk_size=10_000)[:, 0]
    deviation = y - mean
    products = torch.einsum("si,sj->sij", deviation, deviation)
    assert (deviation.mean(0) / (covariance.diagonal() / count).sqrt()).abs().max() < limit(3)
    assert ((products.mean(0) - covariance) / (products.std(0) / math.sqrt(count))).abs().max() < limit(9)
    # E (y - E y)^4 = 3 E var(y|h)^2 + ... by conditioning on h, Gaussian given h: by quadrature over h
    nodes, weights = hermite(12)
    grid = torch.cartesian_prod(nodes, nodes)
    mass = torch.cartesian_prod(weights, weights).prod(1)
    h = hm + hv.sqrt() * grid
    shift, spread = h @ ma.T - mean, h.square() @ va.T
    fourth = (mass[:, None] * (shift**4 + 6 * shift**2 * spread + 3 * spread**2)).sum(0)
    quartic = deviation**4
    assert ((quartic.mean(0) - fourth) / (quartic.std(0) / math.sqrt(count))).abs().max() < limit(3)
    kurtosis = fourth / covariance.diagonal().square()
    assert float(kurtosis.max()) > 3.1, "the law is not Gaussian, so agreement says something"


def hermite(points: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights for expectations under a standard normal."""
    import numpy as np

    nodes, weights = np.polynomial.hermite_e.hermegauss(points)
    return torch.from_numpy(nodes), torch.from_numpy(weights / weights.sum())


def test_kurtosis_of_an_entry_of_zero_mean_factors() -> None:
    """3 + 6/r for equal scales."""
    posterior = only(linear(rank=2, init="random"))
    with torch.no_grad():
        posterior.left_mean.zero_()
        posterior.right_mean.zero_()
        posterior.left_spread.zero_()
        posterior.right_spread.zero_()
    torch.manual_seed(0)
    draws = torch.vmap(
        lambda _: posterior.dense(posterior.realize(posterior.components(posterior.noise())))["weight"],
        randomness="different",
    )(torch.arange(60_000)).detach()
    pooled = draws.reshape(-1)
    assert float((pooled**4).mean() / (pooled**2).mean() ** 2) == pytest.approx(6.0, rel=0.06)


CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1), (3, 5)),
    "conv1d groups": (lambda: nn.Conv1d(6, 4, 3, groups=2), (6, 4)),
    "conv2d same": (lambda: nn.Conv2d(2, 4, (3, 2), padding="same"), (2, 3, 3)),
    "conv3d": (lambda: nn.Conv3d(2, 4, (2, 1, 3)), (2, 3, 2, 4)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(3, 4, 3), (3, 6)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(3, 4, (2, 3), stride=2), (3, 2, 3)),
}


@pytest.mark.parametrize("estimator", ["local", "flipout"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_outputs_have_the_marginal_moments_that_drawn_factors_give(name: str, estimator: Any) -> None:
    """Against the covariance of W pushed through the layer, which is linear in W."""
    make, shape = CONVOLUTIONS[name]
    torch.manual_seed(0)
    bayes = bayes_of(make(), LowRankFactors(rank=2, init="svd", scale=0.5, estimator=estimator))
    x = 1.0 + 0.3 * torch.randn(
        1, *shape, dtype=D
    )  # places agree, so noise they share would show if it were not
    posterior = only(bayes)
    ma, va, mb, vb = factor_moments(posterior)
    plain = bayes.merge()
    mean = plain(x).detach()
    size = posterior.slot.shape.numel()
    bias = torch.zeros_like(plain.bias)
    basis = torch.eye(size, dtype=D).reshape(size, *posterior.slot.shape)
    response = torch.stack(
        [torch.func.functional_call(plain, {"weight": w, "bias": bias}, (x,)).detach() for w in basis]
    ).reshape(*(len(ma), len(mb)), -1)  # (m, n, outputs)
    variance = (
        torch.einsum("ik,jk,qk,ijo,iqo->o", va, mb, mb, response, response)
        + torch.einsum("jk,ik,pk,ijo,pjo->o", vb, ma, ma, response, response)
        + torch.einsum("ik,jk,ijo,ijo->o", va, vb, response, response)
    ).reshape(mean.shape)
    for other in bayes.posteriors():  # the bias, mean field
        if other is not posterior:
            variance = variance + other.variance()["bias"].detach().reshape(-1, *[1] * (len(shape) - 1))
    torch.manual_seed(5)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", dubito.DubitoWarning)
        draws = bayes.outputs(x, samples=3_000)
    bound = limit(2 * mean.numel())
    assert ((draws.mean(0) - mean) / (variance / 3_000).sqrt()).abs().max() < bound
    squares = (draws - mean).square()
    error = ((squares.square().mean(0) - variance**2).clamp_min(variance**2) / 3_000).sqrt()
    assert ((squares.mean(0) - variance) / error).abs().max() < bound


# ---------------------------------------------------------------------------------------------- initialisation


def test_random_init_has_the_glorot_variance() -> None:
    torch.manual_seed(0)
    bayes = dubito.bayesianize(nn.Linear(300, 200), LowRankFactors(rank=8, init="random"))
    mean = only(bayes).mean()["weight"]
    assert float(mean.var()) == pytest.approx(2 / 500, rel=0.1)
    # posterior: 2 eta² + eta⁴ of it, at eta = 0.1
    assert float(only(bayes).variance()["weight"].mean()) == pytest.approx(0.0201 * 2 / 500, rel=0.1)


def test_svd_init_is_the_best_approximation_of_that_rank() -> None:
    torch.manual_seed(0)
    module = nn.Linear(12, 9, bias=False).to(D)
    given = module.weight.detach().clone()
    u, s, vh = torch.linalg.svd(given, full_matrices=False)
    posterior = only(dubito.bayesianize(module, LowRankFactors(rank=3, init="svd")))
    torch.testing.assert_close(posterior.mean()["weight"], u[:, :3] * s[:3] @ vh[:3])
    kernel = nn.Conv2d(3, 8, (3, 2)).to(D)
    given = kernel.weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dubito.DubitoWarning)
        whole = only(dubito.bayesianize(kernel, LowRankFactors(rank=8, init="svd")))
    torch.testing.assert_close(whole.mean()["weight"], given)


def test_the_dense_weight_leaves_storage_and_merge_gives_it_back() -> None:
    torch.manual_seed(0)
    m, n, r = 40, 50, 3
    module = nn.Linear(n, m, bias=False)
    bayes = dubito.bayesianize(module, LowRankFactors(rank=r, init="svd"))
    assert module.weight is None
    assert sum(p.numel() for p in bayes.parameters()) == 2 * r * (m + n)
    assert not any(t.shape == (m, n) for t in bayes.state_dict().values())
    with pytest.raises(Exception, match="weight"):  # never a silent answer from a placeholder
        module(torch.ones(1, n))
    merged = bayes.merge()
    assert type(merged) is nn.Linear
    assert isinstance(merged.weight, nn.Parameter)
    torch.testing.assert_close(merged(torch.ones(1, n)), bayes.eval()(torch.ones(1, n)), rtol=1e-5, atol=1e-6)


def test_f_linear_never_forms_the_dense_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    from dubito.weights.drawn_factors import FactoredWeight

    def fail(_: FactoredWeight) -> Tensor:
        raise AssertionError("the dense weight was formed")

    monkeypatch.setattr(FactoredWeight, "draw_dense", fail)
    torch.manual_seed(0)
    for estimator in ("weights", "local", "flipout"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dubito.DubitoWarning)
            bayes = dubito.bayesianize(
                nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)),
                LowRankFactors(rank=2, init="random", estimator=estimator),  # type: ignore[arg-type]
                likelihood=dubito.Categorical(),
            )
        bayes(torch.randn(3, 6)).sum().backward()
        bayes.predict(torch.randn(3, 6), samples=2)
        bayes.eval()(torch.randn(3, 6))


# -------------------------------------------------------------------------------------------------------- ranks


def test_t35_a_rank_at_or_above_break_even_warns() -> None:
    """256 × 15: break-even 14.2, and a rank of 14 is still below it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dubito.bayesianize(nn.Linear(15, 256, bias=False), LowRankFactors(rank=14, init="random"))
    with pytest.warns(
        dubito.DubitoWarning, match=r"weight: rank 15 is at or above the break-even rank 14\.2 of a 256"
    ):
        dubito.bayesianize(nn.Linear(15, 256, bias=False), LowRankFactors(rank=15, init="random"))


def test_rank_above_the_parameter_is_an_error_alone_and_clipped_among_many() -> None:
    net = nn.Sequential(nn.Linear(20, 10), nn.Linear(10, 3))
    before = {n: p.clone() for n, p in net.named_parameters()}
    identity = [id(p) for p in net.parameters()]
    with pytest.raises(ValueError, match=r"rank=4 is above min\(m, n\) = 3 of '1\.weight' \(3 × 10"):
        dubito.bayesianize(net, {"0": LowRankFactors(2, init="svd"), "1": LowRankFactors(4, init="svd")})
    assert [id(p) for p in net.parameters()] == identity, "nothing changed"
    assert all(torch.equal(p, before[n]) for n, p in net.named_parameters())
    with pytest.warns(dubito.DubitoWarning, match=r"1\.weight: rank 4 clipped to min\(m, n\) = 3"):
        bayes = dubito.bayesianize(net, LowRankFactors(4, init="svd"))
    ranks = {p.slot.name: p.rank for p in bayes.posteriors() if isinstance(p, LowRankFactorsPosterior)}
    assert ranks == {"0.weight": 4, "1.weight": 3}


@pytest.mark.parametrize(
    ("family", "taken"),
    [
        (LowRankFactors(2, init="svd"), "MeanField takes it"),
        (LowRankFactors(2, init="svd", fallback=dubito.Point()), "Point takes it"),
        (dubito.RankOne(), "Point takes it"),
    ],
    ids=["factors", "own fallback", "rank one"],
)
def test_a_vector_named_alone_takes_the_fallback_and_that_is_said(family: Any, taken: str) -> None:
    with pytest.warns(dubito.DubitoWarning, match=rf"^0\.bias: {type(family).__name__} is for .* {taken}"):
        dubito.bayesianize(nn.Sequential(nn.Linear(9, 8)), {"0.bias": family})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dubito.bayesianize(nn.Sequential(nn.Linear(9, 8)), family)


def test_an_empty_parameter_takes_the_fallback() -> None:
    bayes = dubito.bayesianize(nn.Sequential(nn.Linear(3, 0), nn.Linear(0, 2)), LowRankFactors(1, init="svd"))
    assert not any(isinstance(p, LowRankFactorsPosterior) for p in bayes.posteriors())
    assert bayes(torch.randn(4, 3)).shape == (4, 2)


@pytest.mark.parametrize("rank", [0, -1, 1.5, True, "2"])
def test_bad_ranks(rank: Any) -> None:
    with pytest.raises(ValueError, match=r"rank=.* must be a whole number of at least 1"):
        LowRankFactors(rank, init="svd")


def test_other_bad_arguments() -> None:
    with pytest.raises(ValueError, match="it has no default"):
        LowRankFactors(2)
    with pytest.raises(ValueError, match=r"init='zeros'.*\"random\".*thrown away.*\"svd\""):
        LowRankFactors(2, init="zeros")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"scale=-1.* must be a positive"):
        LowRankFactors(2, init="svd", scale=-1.0)
    with pytest.raises(ValueError, match=r"scale=nan"):
        LowRankFactors(2, init="svd", scale=math.nan)
    with pytest.raises(ValueError, match=r"estimator='mc' must be"):
        LowRankFactors(2, init="svd", estimator="mc")  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------- KL


def test_kl_is_the_sum_over_both_factors() -> None:
    for prior in (Normal(0.0, 1.0), Normal(0.2, 0.4)):
        bayes = linear(prior=prior)
        posterior = only(bayes)
        expected = 0.0
        for side in ("left", "right"):
            mean, spread = posterior.factor(side)
            expected += float(kl_divergence(Normal(mean, spread.exp()), prior).sum())
        assert float(bayes.kl()) == pytest.approx(expected, abs=1e-6)
        bayes(torch.randn(2, 4, dtype=D))
        assert float(bayes.kl()) == pytest.approx(expected, abs=1e-6), "the one made with the draw"


def test_embedding_kl_counts_all_rows_whatever_was_looked_up() -> None:
    bayes = bayes_of(nn.Embedding(30, 4), LowRankFactors(rank=2, init="svd", prior=Normal(0.0, 1.0)))
    posterior = only(bayes)
    expected = sum(
        float(kl_divergence(Normal(m, s.exp()), Normal(0.0, 1.0)).sum())
        for m, s in (posterior.factor("left"), posterior.factor("right"))
    )
    bayes(torch.tensor([1, 1, 2]))
    assert float(bayes.kl()) == pytest.approx(expected, rel=1e-9)


def test_default_prior_is_rank_aware() -> None:
    """A dense entry under the prior has the variance the network was initialised for: r s0⁴ = s_W²."""
    for rank in (1, 4, 16):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dubito.DubitoWarning)
            bayes = dubito.bayesianize(nn.Linear(64, 32, bias=False), LowRankFactors(rank, init="random"))
        _, scale = only(bayes).factor_prior("left").gaussian() or (0.0, 0.0)
        assert rank * float(scale) ** 4 == pytest.approx(2 / 96, rel=1e-6)


def test_priors_without_closed_form() -> None:
    mixture = linear(prior=dubito.ScaleMixture(0.5, 1.0, math.exp(-6)))
    bound = float(mixture.kl())
    drawn = float(mixture.kl(method="monte_carlo", samples=4000))
    assert bound >= drawn - 0.5
    laplace = linear(prior=Laplace(0.0, 1.0))
    assert laplace.kl().isfinite()
    laplace.kl().backward()
    assert all(p.grad is not None for p in laplace.parameters())


def test_capabilities_that_do_not_exist_name_the_remedy() -> None:
    posterior = only(linear())
    with pytest.raises(dubito.CapabilityError, match=r"no density.*rank at most 2.*bayes\.kl\(\)"):
        posterior.log_prob({"weight": torch.zeros(3, 4)})
    with pytest.raises(dubito.CapabilityError, match=r"no closed-form 2-Wasserstein.*MeanField"):
        posterior.wasserstein(posterior)


def test_t12_t17_posteriors_start_at_a_fraction_of_the_factor_scale() -> None:
    for estimator in ("weights", "local", "flipout"):
        torch.manual_seed(0)
        bayes = dubito.bayesianize(
            nn.Linear(100, 100, bias=False),
            LowRankFactors(4, init="random", scale=0.05, estimator=estimator),  # type: ignore[arg-type]
        )
        posterior = only(bayes)
        for mean, spread in (posterior.factor("left"), posterior.factor("right")):
            assert float(spread.exp().mean() / mean.std()) == pytest.approx(0.05, rel=0.15)


def test_frozen_weights_keep_their_means_frozen() -> None:
    module = nn.Linear(6, 5)
    module.weight.requires_grad_(False)
    bayes = dubito.bayesianize(module, {"weight": LowRankFactors(2, init="svd")})
    trainable = {n.rsplit(".", 1)[-1] for n, p in bayes.named_parameters() if p.requires_grad}
    assert trainable == {"left_spread", "right_spread", "bias"}
    assert not bayes.merge().weight.requires_grad
