"""Rank-one multiplicative weights: moments against draws, structured against dense, what is frozen, what is refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Laplace, Normal, kl_divergence

import dubito
from dubito import CapabilityError, RankOne, WeightPrior
from dubito.weights.drawn_rank_one import RankOneWeight
from dubito.weights.rank_one import RankOnePosterior


def posterior_of(bayes: dubito.BayesianModule) -> RankOnePosterior:
    made = next(iter(bayes.posteriors()))
    assert isinstance(made, RankOnePosterior)
    return made


def moved(module: nn.Module, **options: object) -> dubito.BayesianModule:
    """A Bayesian module whose multipliers have left their start."""
    torch.manual_seed(0)
    bayes = dubito.bayesianize(module.double(), RankOne(scale=0.4, **options))  # type: ignore[arg-type]
    with torch.no_grad():
        for p in bayes.posteriors():
            for parameter in p.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return bayes


@pytest.mark.parametrize("module", [nn.Linear(3, 4), nn.Conv2d(2, 3, 2)], ids=["linear", "conv2d"])
def test_moments_are_those_of_the_products(module: nn.Module) -> None:
    q = posterior_of(moved(copy.deepcopy(module)))
    name = q.slot.name
    with torch.no_grad():
        draws = q.draw((20_000,), torch.Generator().manual_seed(1))[name]
        mean, variance = q.mean()[name], q.variance()[name]
    error = (variance / len(draws)).sqrt()
    assert ((draws.mean(0) - mean) / error).abs().max() < 4.5
    torch.testing.assert_close(draws.var(0), variance, rtol=0.1, atol=0.0)


def test_a_draw_is_a_multiple_of_each_row_and_column() -> None:
    bayes = moved(nn.Linear(5, 4))
    q = posterior_of(bayes)
    ratio = q.draw()[q.slot.name] / q.slot.parameter
    assert torch.linalg.matrix_rank(ratio.detach(), rtol=1e-9) == 1


def test_operators_use_the_structure() -> None:
    torch.manual_seed(0)
    matrix, r, s = torch.randn(6, 4).double(), torch.randn(6).double(), torch.randn(4).double()
    weight, dense = RankOneWeight.of(matrix, r, s), matrix * r[:, None] * s
    x, wide, bias = torch.randn(3, 4).double(), torch.randn(3, 6).double(), torch.randn(6).double()
    tokens = torch.tensor([[0, 5, 2], [5, 5, 1]])
    pairs = {
        "linear": (F.linear(x, weight, bias), F.linear(x, dense, bias)),
        "matmul": (wide @ weight, wide @ dense),
        "transposed": (x @ weight.t(), x @ dense.t()),
        "transpose": (x @ weight.transpose(0, 1), x @ dense.mT),
        "addmm": (torch.addmm(bias, x, weight.T), torch.addmm(bias, x, dense.T)),
        "embedding": (F.embedding(tokens, weight), F.embedding(tokens, dense)),
        "slice": (F.linear(x, weight[1:3]), F.linear(x, dense[1:3])),
        "chunk": (F.linear(x, weight.chunk(3)[1]), F.linear(x, dense.chunk(3)[1])),
        "split": (F.linear(x, weight.split([1, 5])[1]), F.linear(x, dense[1:])),
    }
    assert not weight._memo  # nothing formed the dense draw
    for name, (structured, expected) in pairs.items():
        torch.testing.assert_close(structured, expected, msg=name)
    torch.testing.assert_close(weight + 1, dense + 1)  # any other operator gets the dense draw


@pytest.mark.parametrize("train", [False, True])
def test_a_sparse_embedding_is_trained(train: bool) -> None:
    torch.manual_seed(0)
    tokens = torch.tensor([[1, 4, 4]])
    bayes = dubito.bayesianize(nn.Embedding(9, 4, sparse=True), RankOne(train_weight=train))
    bayes(tokens).sum().backward()
    q = posterior_of(bayes)
    for side in ("left", "right"):
        assert q.multiplier(side)[0].grad is not None
    gradient = q.slot.parameter.grad
    assert (gradient is not None) == train
    if gradient is not None:
        assert gradient.is_sparse, "of W0 the rows looked up alone"
        assert sorted(gradient.coalesce().indices().flatten().tolist()) == [1, 4]


def test_kl_is_that_of_the_multipliers_alone() -> None:
    bayes = moved(nn.Linear(3, 4), prior=Normal(1.0, 0.2))
    q = posterior_of(bayes)
    expected = sum(
        kl_divergence(Normal(mean, spread.exp()), Normal(1.0, 0.2)).sum()
        for mean, spread in map(q.multiplier, ("left", "right"))
    )
    torch.testing.assert_close(bayes.kl(), expected)
    with torch.no_grad():
        q.slot.parameter.mul_(7.0)
    torch.testing.assert_close(bayes.kl(), expected)


def test_the_default_prior_is_centred_on_one() -> None:
    module = nn.Linear(3, 4, bias=False)
    for prior in (None, "fan_in"):
        q = posterior_of(dubito.bayesianize(copy.deepcopy(module), RankOne(), prior=prior))
        assert q.multiplier_prior("left").gaussian() == pytest.approx((1.0, 0.1))
        assert float(sum(q.kl().values()).detach()) == pytest.approx(
            0.0, abs=1e-5
        )  # scale 0.1: it starts at the prior
    q = posterior_of(dubito.bayesianize(module, RankOne(prior=Laplace(1.0, 0.1))))
    assert q.kl(samples=4)["weight"].isfinite()


@pytest.mark.parametrize("train", [True, False])
def test_the_weight_is_frozen_unless_asked(train: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    bayes = dubito.bayesianize(module, RankOne(train_weight=train), likelihood=dubito.Categorical())
    assert module[0].weight.requires_grad == train
    assert module[0].bias.requires_grad  # no matrix: an ordinary parameter
    before = module[0].weight.detach().clone()
    optimizer = torch.optim.SGD(dubito.parameter_groups(bayes, lr=0.1, weight_decay=0.1))
    x, y = torch.randn(32, 3), torch.randint(2, (32,))
    for _ in range(3):
        optimizer.zero_grad()
        (F.cross_entropy(bayes(x), y) + bayes.kl() / 32).backward()
        optimizer.step()
    assert torch.equal(before, module[0].weight) != train
    q = posterior_of(bayes)
    assert not torch.equal(q.left_mean, torch.ones(8))
    assert bayes.merge()[0].weight.requires_grad  # type: ignore[index]
    assert bayes.predict(x, samples=4).probs.shape == (32, 2)


def test_a_frozen_backbone_still_has_random_multipliers() -> None:
    module = nn.Linear(3, 2).requires_grad_(False)
    bayes = dubito.bayesianize(module, {"weight": RankOne()})
    names = {n for n, p in bayes.named_parameters() if p.requires_grad}
    assert names == {f"posterior.weight.{s}_{k}" for s in ("left", "right") for k in ("mean", "spread")}


def test_bad_input_leaves_the_module_trainable() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    class Joint(WeightPrior):
        def log_prob(self, weights: dict[str, Tensor]) -> Tensor:
            return torch.zeros(())

    with pytest.raises(ValueError, match="takes a prior on them"):
        dubito.bayesianize(
            module, {"0.weight": RankOne(prior=Normal(1.0, 1.0)), "1.weight": RankOne()}, prior=Joint()
        )
    assert all(p.requires_grad for p in module.parameters())
    with pytest.raises(ValueError, match="WeightPrior"):
        RankOne(prior=Joint())
    with pytest.raises(ValueError, match="scale"):
        RankOne(scale=0.0)


def test_what_does_not_exist_is_refused() -> None:
    q = posterior_of(dubito.bayesianize(nn.Linear(3, 4), RankOne()))
    with pytest.raises(CapabilityError, match="no density"):
        q.log_prob({"weight": torch.zeros(4, 3)})
    with pytest.raises(CapabilityError, match="2-Wasserstein"):
        q.wasserstein(q)
