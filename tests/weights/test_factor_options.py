"""Options of low-rank factors: ranks by energy and by fraction, Laplace entries, He and damping, blocks, padding."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Laplace, Normal, kl_divergence

import dubito
from dubito import LowRankFactors
from dubito.weights.drawn_block_factors import BlockFactoredWeight
from dubito.weights.drawn_factors import FactoredWeight
from dubito.weights.low_rank_factors import LowRankFactorsPosterior

D = torch.float64


def made(
    module: nn.Module, prior: Any = None, **options: Any
) -> tuple[dubito.BayesianModule, LowRankFactorsPosterior]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dubito.DubitoWarning)
        bayes = dubito.bayesianize(
            module.to(D),
            LowRankFactors(**{"rank": 2, "init": "random", "scale": 0.3, "prior": prior, **options}),
        )
    return bayes, next(p for p in bayes.posteriors() if isinstance(p, LowRankFactorsPosterior))


def draws_of(q: LowRankFactorsPosterior, count: int) -> Tensor:
    """Dense draws, (count, *shape)."""

    def one(_: Tensor) -> Tensor:
        return q.dense(q.realize(q.components(q.noise())))[q.slot.name]

    with torch.no_grad():
        result: Tensor = torch.vmap(one, randomness="different")(torch.arange(count))
    return result


# ------------------------------------------------------------------------------------------------------- ranks


def spectrum_module(*values: float) -> nn.Linear:
    """A linear layer with these singular values."""
    torch.manual_seed(0)
    module = nn.Linear(12, 8, bias=False).to(D)
    u, v = torch.linalg.qr(torch.randn(8, 8, dtype=D))[0], torch.linalg.qr(torch.randn(12, 8, dtype=D))[0]
    spectrum = torch.tensor([*values, *[0.0] * (8 - len(values))], dtype=D)
    with torch.no_grad():
        module.weight.copy_(u * spectrum @ v.T)
    return module


def test_auto_rank_keeps_the_share_of_energy_asked() -> None:
    squares = torch.tensor([9.0, 4.0, 1.0, 0.5])
    for energy, expected in ((0.6, 1), (0.89, 2), (0.9, 3), (0.97, 4)):
        module = spectrum_module(*squares.sqrt().tolist())
        _, q = made(module, rank="auto", init="svd", energy=energy)
        assert q.rank == expected
        kept = q.mean()["weight"].square().sum() / squares.sum()
        assert float(kept.detach()) >= energy - 1e-9


def test_a_fraction_of_break_even_saves_that_much() -> None:
    net = nn.Sequential(nn.Linear(44, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    with pytest.warns(
        dubito.DubitoWarning, match=r"4\.weight: rank 1 is at or above the break-even rank 1\.0"
    ):
        bayes = dubito.bayesianize(net, LowRankFactors(0.46, init="random"))
    ranks = {p.slot.name: p.rank for p in bayes.posteriors() if isinstance(p, LowRankFactorsPosterior)}
    assert ranks == {"0.weight": 15, "2.weight": 29, "4.weight": 1}
    held = sum(q.left_mean.numel() + q.right_mean.numel() for q in [next(iter(bayes.posteriors()))])  # type: ignore[union-attr]
    assert held <= 0.46 * 44 * 128


def test_ranks_by_pattern() -> None:
    net = nn.Sequential(nn.Linear(44, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    families = {
        "0.weight": LowRankFactors(15, init="random"),
        "2.weight": LowRankFactors(0.5, init="random"),
        "4.weight": LowRankFactors(1, init="random"),
        "*.bias": dubito.MeanField(),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dubito.DubitoWarning)
        bayes = dubito.bayesianize(net, families)
    ranks = {p.slot.name: p.rank for p in bayes.posteriors() if isinstance(p, LowRankFactorsPosterior)}
    assert ranks == {"0.weight": 15, "2.weight": 32, "4.weight": 1}


def test_parameter_count_of_the_papers_network() -> None:
    """44-128-128-1 at ranks 15, 15, 1 with random biases: 13,612."""
    net = nn.Sequential(nn.Linear(44, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dubito.DubitoWarning)
        bayes = dubito.bayesianize(
            net, {"4": LowRankFactors(1, init="random"), "rest": LowRankFactors(15, init="random")}
        )
    assert sum(p.numel() for p in bayes.parameters()) == 13_612


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": "auto"}, 'needs|only init="svd" keeps'),
        ({"rank": 0.0}, "fraction of the break-even"),
        ({"rank": float("nan")}, "fraction of the break-even"),
        ({"rank": "auto", "init": "svd", "energy": 0.0}, "energy=0.0"),
        ({"distribution": "cauchy"}, "distribution='cauchy'"),
        ({"distribution": "laplace", "estimator": "local"}, "sum of Laplace variables is not"),
        ({"damping": 0.0}, "damping=0.0"),
        ({"damping": 0.5, "init": "svd"}, "keeps the given weights"),
        ({"blocks": 0}, "blocks=0"),
        ({"blocks": 1.5}, "blocks=1.5"),
    ],
)
def test_bad_options_name_themselves(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LowRankFactors(**{"rank": 2, "init": "random", **options})


# --------------------------------------------------------------------------------------------- initialisation


def test_he_and_damping() -> None:
    for options, expected in (({"init": "he"}, 2 / 300), ({"damping": 0.8}, 0.8**4 * 2 / 500)):
        _, q = made(nn.Linear(300, 200, bias=False), rank=16, **options)
        assert float(q.mean()["weight"].var().detach()) == pytest.approx(expected, rel=0.1)
    _, damped = made(nn.Linear(30, 20), damping=0.5)
    _, plain = made(nn.Linear(30, 20))
    assert torch.equal(damped.left_spread, plain.left_spread), (
        "the spread keeps its fraction of the undamped scale"
    )


def test_mean_field_keeps_the_modules_own_initialisation() -> None:
    """The full-rank baseline starts fairly: at the means the network was made with, whatever they are."""
    torch.manual_seed(0)
    module = nn.Linear(256, 256)
    nn.init.xavier_normal_(module.weight)
    given = module.weight.detach().clone()
    bayes = dubito.bayesianize(module, dubito.MeanField())
    assert torch.equal(bayes.module.weight, given)
    assert float(module.weight.std().detach()) == pytest.approx((2 / 512) ** 0.5, rel=0.02)


# ------------------------------------------------------------------------------------------------------ Laplace


def test_laplace_draws_have_the_moments_stated() -> None:
    _, q = made(nn.Linear(3, 2, bias=False), distribution="laplace", scale=0.6)
    factor = q.components({s: q.noise(torch.Generator().manual_seed(1))[s] for s in ("left", "right")})
    assert factor["left"].shape == (2, 2)
    torch.manual_seed(1)
    noise = torch.stack([q.noise()["left"] for _ in range(10_000)]).reshape(-1)
    assert float(noise.var()) == pytest.approx(2.0, rel=0.05)
    assert float((noise**4).mean() / noise.var() ** 2) == pytest.approx(6.0, rel=0.15)
    draws = draws_of(q, 40_000)
    variance = q.variance()["weight"].detach()
    torch.testing.assert_close(draws.var(0), variance, rtol=0.08, atol=0.0)
    torch.testing.assert_close(q.moments("left")[1], 2 * q.left_spread.exp().square())
    assert ((draws.mean(0) - q.mean()["weight"].detach()) / (variance / 40_000).sqrt()).abs().max() < 4.5


def test_laplace_factors_start_with_the_gaussian_factors_variance() -> None:
    _, laplace = made(nn.Linear(5, 4, bias=False), distribution="laplace")
    _, gaussian = made(nn.Linear(5, 4, bias=False))
    torch.testing.assert_close(laplace.variance()["weight"], gaussian.variance()["weight"])


@pytest.mark.parametrize("prior", [Normal(0.1, 0.7), Laplace(0.0, 0.5)], ids=["normal", "laplace"])
def test_laplace_kl_in_closed_form(prior: Any) -> None:
    bayes, q = made(nn.Linear(4, 3, bias=False), distribution="laplace", prior=prior)
    expected = sum(
        float(kl_divergence(Laplace(m.detach(), s.detach().exp()), prior).sum())
        for m, s in (q.factor("left"), q.factor("right"))
    )
    assert float(bayes.kl(method="closed").detach()) == pytest.approx(expected)
    sampled = bayes.kl(method="monte_carlo", samples=3000, generator=torch.Generator().manual_seed(0))
    assert float(sampled.detach()) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_the_papers_mixture_prior_is_bounded(law: Any) -> None:
    """Standard deviations 1 and e⁻⁶: the bound is above Monte Carlo, and close."""
    prior = dubito.ScaleMixture(0.5, 1.0, math.exp(-6))
    bayes, _ = made(nn.Linear(8, 6, bias=False), prior=prior, distribution=law)
    assert prior.s2 == pytest.approx(0.00248, rel=1e-3)
    bound = float(bayes.kl(method="bound").detach())
    sampled = float(
        bayes.kl(method="monte_carlo", samples=4000, generator=torch.Generator().manual_seed(0)).detach()
    )
    assert float(bayes.kl().detach()) == pytest.approx(bound)
    assert sampled - 1.0 < bound < sampled + 0.75 * 28
    with pytest.raises(NotImplementedError):
        bayes.kl(method="closed")


def test_density_of_the_factors() -> None:
    for law, kind in (("gaussian", Normal), ("laplace", Laplace)):
        _, q = made(nn.Linear(4, 3, bias=False), distribution=law)
        drawn = q.components(q.noise())
        expected = sum(
            kind(*(t.detach() for t in (m, s.exp()))).log_prob(drawn[side].detach()).sum()
            for side, (m, s) in (("left", q.factor("left")), ("right", q.factor("right")))
        )
        torch.testing.assert_close(q.factor_log_prob(drawn).detach(), expected)


# ----------------------------------------------------------------------------------------- independent heads


def blocked(m: int = 6, n: int = 5, blocks: int = 3, rank: int = 2) -> tuple[BlockFactoredWeight, Tensor]:
    torch.manual_seed(0)
    left, right = torch.randn(m, rank, dtype=D), torch.randn(n, blocks * rank, dtype=D)
    rows = [
        a @ b.T for a, b in zip(left.chunk(blocks, 0), right.chunk(blocks, 1), strict=True)
    ]  # independently
    return BlockFactoredWeight.of(left, right, (m, n)), torch.cat(rows)


def test_operators_on_blocks_use_the_structure() -> None:
    weight, dense = blocked()
    x, bias = torch.randn(2, 4, 5, dtype=D), torch.randn(6, dtype=D)
    pairs = {
        "linear": (F.linear(x, weight, bias), F.linear(x, dense, bias)),
        "vector": (F.linear(x[0, 0], weight), F.linear(x[0, 0], dense)),
        "one block": (F.linear(x, weight[2:4]), F.linear(x, dense[2:4])),
        "two blocks": (F.linear(x, weight[2:]), F.linear(x, dense[2:])),
        "chunk": (F.linear(x, weight.chunk(3)[2]), F.linear(x, dense.chunk(3)[2])),
        "split": (F.linear(x, weight.split([4, 2])[0]), F.linear(x, dense[:4])),
    }
    assert not weight._memo
    for name, (got, want) in pairs.items():
        torch.testing.assert_close(got, want, msg=name)
    torch.testing.assert_close(weight[1:3] * 1.0, dense[1:3])  # across blocks: from the dense draw
    torch.testing.assert_close(x @ weight.T, x @ dense.T)
    assert isinstance(weight.chunk(3)[0], FactoredWeight)


@pytest.mark.parametrize("estimator", ["weights", "local", "flipout"])
def test_heads_of_packed_attention_are_independent(estimator: Any) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True, bias=False)
    bayes, q = made(attention, blocks="heads", estimator=estimator)
    assert (q.blocks, q.rank, tuple(q.right_mean.shape)) == (6, 2, (8, 12))
    assert q.left_mean.numel() + q.right_mean.numel() == 2 * (24 + 6 * 8)
    x = torch.randn(3, 5, 8, dtype=D)
    bayes(x, x, x, need_weights=False)[0].square().sum().backward()
    grads = [p.grad for p in (q.left_mean, q.right_mean, q.left_spread, q.right_spread)]
    assert all(g is not None and bool(g.ne(0).all()) for g in grads)
    draws = draws_of(q, 20_000)
    correlation = torch.corrcoef(
        draws[:, 2:6, 1].T
    )  # rows 2 and 3 of one head, 4 and 5 of the next; one column
    assert abs(float(correlation[0, 1])) > 0.1
    assert abs(float(correlation[1, 2])) < 4.5 / math.sqrt(20_000)
    assert int(torch.linalg.matrix_rank(draws[0, :4], rtol=1e-9)) == 2
    assert int(torch.linalg.matrix_rank(draws[0], rtol=1e-9)) > 2


def test_separate_projections_have_their_heads_too() -> None:
    attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dubito.DubitoWarning)
        bayes = dubito.bayesianize(attention, LowRankFactors(2, init="svd", blocks="heads"))
    blocks = {p.slot.name: p.blocks for p in bayes.posteriors() if isinstance(p, LowRankFactorsPosterior)}
    assert blocks == {"q_proj_weight": 2, "k_proj_weight": 2, "v_proj_weight": 2, "out_proj.weight": 1}


def test_svd_of_blocks_is_each_blocks_best() -> None:
    module = nn.Linear(6, 8, bias=False).to(D)
    given = module.weight.detach().clone()
    _, q = made(module, init="svd", blocks=2)
    for block, rows in zip(q.mean()["weight"].detach().chunk(2), given.chunk(2), strict=True):
        u, s, vh = torch.linalg.svd(rows, full_matrices=False)
        torch.testing.assert_close(block, u[:, :2] * s[:2] @ vh[:2])


def test_blocks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="does not divide the 7 rows of 'weight'"):
        dubito.bayesianize(nn.Linear(4, 7), LowRankFactors(1, init="random", blocks=2))
    with pytest.raises(ValueError, match="are not outputs"):
        dubito.bayesianize(nn.Embedding(8, 4), LowRankFactors(1, init="random", blocks=2))
    with pytest.warns(dubito.DubitoWarning, match="knows the heads of nn.MultiheadAttention alone"):
        dubito.bayesianize(nn.Linear(4, 8), {"weight": LowRankFactors(1, init="random", blocks="heads")})
    with pytest.raises(ValueError, match="of one block"):
        dubito.bayesianize(nn.Linear(4, 8), {"weight": LowRankFactors(3, init="random", blocks=4)})


# ------------------------------------------------------------------------------------- embeddings and recurrence


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_a_padding_row_is_neither_drawn_nor_counted(law: Any) -> None:
    bayes, q = made(nn.Embedding(9, 4, padding_idx=2), prior=Normal(0.0, 1.0), distribution=law)
    tokens = torch.tensor([[2, 1, 1], [5, 2, 2]])
    for output in (bayes(tokens), bayes.outputs(tokens, samples=3)[1], bayes.sample()(tokens)):
        assert bool((output[tokens == 2] == 0).all())
        assert bool((output[tokens != 2] != 0).all())
    assert bool((q.variance()["weight"][2] == 0).all())
    before = bayes.kl().detach()
    bayes.kl().backward()
    assert q.left_mean.grad is not None
    assert bool((q.left_mean.grad[2] == 0).all())
    with torch.no_grad():
        q.left_spread[2] += 3.0
    torch.testing.assert_close(bayes.kl().detach(), before)
    other = copy.deepcopy(bayes)
    with torch.no_grad():
        next(p for p in other.posteriors() if isinstance(p, LowRankFactorsPosterior)).left_spread[3] += 3.0
    assert float(other.kl().detach()) > float(before) + 1.0


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
def test_recurrent_layers_use_one_draw_for_all_steps(cell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bayes, q = made(cell(3, 4, batch_first=True), scale=0.5)
    drawn = []
    original = LowRankFactorsPosterior._drawn

    def counted(self: LowRankFactorsPosterior, side: str) -> Tensor:
        drawn.append((self.slot.name, side))
        return original(self, side)

    monkeypatch.setattr(LowRankFactorsPosterior, "_drawn", counted)
    step, warm = torch.randn(2, 1, 3, dtype=D), torch.zeros(2, 6, 3, dtype=D)
    constant = step.expand(2, 40, 3)
    with torch.no_grad():
        output = bayes(constant)[0]
    assert sorted(drawn) == sorted({(n, s) for n, s in drawn}), "each factor once, not once a step"
    assert len(drawn) == 4
    # under one draw and a constant input the state settles; under a draw a step it would keep moving
    assert float((output[:, -1] - output[:, -2]).abs().max()) < 1e-6
    bayes.zero_grad()
    bayes(warm + 1)[0].square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in bayes.parameters())
    assert float(q.left_spread.grad.abs().sum()) > 0  # type: ignore[union-attr]
