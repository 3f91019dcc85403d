"""Pruning by signal-to-noise: exact numbers of exact zeros, in a plain network, and its curve."""

import io
import math

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito import LowRankFactors, MeanField, Point, prune, pruning_curve, signal_to_noise, sparse_state_dict
from dubito.pruning import load_sparse_state_dict


def bayesian(families: object = None) -> dubito.BayesianModule:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 4))
    bayes = dubito.bayesianize(net, families or MeanField(), likelihood=dubito.Categorical())  # type: ignore[arg-type]
    with torch.no_grad():
        for posterior in bayes.posteriors():
            for parameter in posterior.parameters():
                parameter.add_(0.5 * torch.randn_like(parameter))
    return bayes


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


@pytest.mark.parametrize("keep", [1.0, 0.5, 0.05, 1e-9])
def test_the_largest_ratios_stay_and_the_rest_is_exactly_zero(keep: float) -> None:
    bayes = bayesian()
    means = flat(bayes.module)
    ratios = torch.cat([r.reshape(-1) for r in signal_to_noise(bayes).values()])
    pruned = prune(bayes, keep)
    assert type(pruned) is nn.Sequential
    values = flat(pruned)
    count = max(1, round(keep * len(means)))
    kept = values != 0
    assert int(kept.sum()) == count
    assert torch.equal(values[kept], means[kept])
    if count < len(means):
        assert float(ratios[kept].min()) >= float(ratios[~kept].max())
    assert torch.equal(flat(bayes.module), means)  # the Bayesian module is as it was


def test_the_ratio_is_the_mean_over_the_standard_deviation() -> None:
    bayes = bayesian()
    ratio = signal_to_noise(bayes)["0.weight"]
    first = next(iter(bayes.posteriors()))
    assert torch.allclose(ratio, bayes.module[0].weight.abs() / first.sd())  # type: ignore[operator, index]


def test_ties_and_certain_weights() -> None:
    bayes = dubito.bayesianize(nn.Linear(10, 10), MeanField())
    with torch.no_grad():
        bayes.module.weight.fill_(0.5)
        bayes.module.bias.zero_()
    assert int((flat(prune(bayes, 0.31)) != 0).sum()) == round(0.31 * 110)
    bayes.rescale_spread_(0.0)
    ratios = signal_to_noise(bayes)
    assert bool((ratios["bias"] == 0).all())
    assert not bool(ratios["weight"].isnan().any())


def test_what_is_not_random_stays() -> None:
    bayes = bayesian({"0": MeanField(), "2": Point()})
    pruned = prune(bayes, 0.1)
    assert torch.equal(pruned[2].weight, bayes.module[2].weight)  # type: ignore[index]
    assert int((pruned[0].weight != 0).sum() + (pruned[0].bias != 0).sum()) == 63  # type: ignore[index]


def test_only_some_parameters() -> None:
    bayes = bayesian()
    pruned = prune(bayes, 0.25, only="*.weight")
    assert torch.equal(pruned[0].bias, bayes.module[0].bias)  # type: ignore[index]
    assert int((pruned[0].weight != 0).sum() + (pruned[2].weight != 0).sum()) == 180  # type: ignore[index]
    assert int((prune(bayes, 0.5, only=["0.weight", "2.bias"])[0].weight != 0).sum()) <= 302  # type: ignore[index]
    with pytest.raises(ValueError, match="nearest names"):
        prune(bayes, 0.5, only="9.weight")


def test_factored_weights_are_ranked_by_their_exact_moments() -> None:
    bayes = bayesian({"*.weight": LowRankFactors(rank=2, init="svd"), "*.bias": Point()})
    for only in (None, nn.Linear):
        pruned = prune(bayes, 0.1, only=only)
        weights = torch.cat([pruned[0].weight.reshape(-1), pruned[2].weight.reshape(-1)])  # type: ignore[index]
        assert int((weights != 0).sum()) == 72


def test_a_tied_weight_counts_once() -> None:
    net = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False))
    net[1].weight = net[0].weight
    pruned = prune(dubito.bayesianize(net, MeanField()), 0.2)
    assert pruned[0].weight is pruned[1].weight  # type: ignore[index]
    assert int((pruned[0].weight != 0).sum()) == 5  # type: ignore[index]


def test_a_pruned_network_takes_less_room_and_comes_back_equal() -> None:
    pruned = prune(bayesian(), 0.05)
    state = sparse_state_dict(pruned)
    assert state["0.weight"].is_sparse
    file, dense = io.BytesIO(), io.BytesIO()
    torch.save(state, file)
    torch.save(pruned.state_dict(), dense)
    fresh = bayesian().merge()
    file.seek(0)
    load_sparse_state_dict(fresh, torch.load(file, weights_only=True))
    x = torch.randn(3, 20)
    assert torch.equal(fresh(x), pruned(x))
    stored = sum(
        t.values().numel() * 4 + t.indices().numel() * 8 if t.is_sparse else t.numel() * 4
        for t in state.values()
    )
    assert stored < 0.4 * flat(pruned).numel() * 4
    whole = sparse_state_dict(bayesian().module)
    assert not any(t.is_sparse for t in whole.values())  # sparse storage would be larger


def test_pruning_curve_of_a_network_with_few_weights_that_matter() -> None:
    """Labels depend on one input; the posterior is certain of the weights on it. Accuracy falls only at the end."""
    torch.manual_seed(1)
    x = torch.randn(400, 20)
    y = (x[:, 0] > 0).long()
    net = nn.Linear(20, 2, bias=False)
    bayes = dubito.bayesianize(net, MeanField(), likelihood=dubito.Categorical())
    with torch.no_grad():
        net.weight.mul_(0.01)
        net.weight[:, 0] = torch.tensor([-2.0, 2.0])
    modes = []

    def accuracy(module: nn.Module) -> float:
        modes.append(module.training)
        return float((module(x).argmax(1) == y).double().mean())

    points = pruning_curve(bayes, accuracy, keeps=(1.0, 0.5, 0.05))
    assert [p.keep for p in points] == [1.0, 0.5, 0.05]
    assert [p.weights for p in points] == [40, 20, 2]
    assert points[-1].value == 1.0  # two weights of forty say all
    assert points[0].threshold <= points[1].threshold <= points[2].threshold
    assert modes == [False] * 3
    for point in points:
        assert point.value == accuracy(prune(bayes, point.keep))


@pytest.mark.parametrize("keep", [0.0, -0.1, 1.0001, math.nan, math.inf, True])
def test_keep_outside_its_range(keep: float) -> None:
    with pytest.raises(ValueError, match=r"\(0, 1\]"):
        prune(bayesian(), keep)
    with pytest.raises(ValueError, match=r"\(0, 1\]"):
        pruning_curve(bayesian(), lambda _: 0.0, keeps=(0.5, keep))


def test_arguments_of_a_pruning_curve_the_wrong_way_round() -> None:
    bayes = dubito.bayesianize(nn.Linear(3, 2), MeanField())
    with pytest.raises(TypeError, match=r"got list: write pruning_curve\(bayes, evaluate, keeps\)"):
        pruning_curve(bayes, [0.5], lambda net: 0.0)  # type: ignore[arg-type]


def test_nothing_to_prune() -> None:
    with pytest.raises(ValueError, match="no random weight"):
        prune(bayesian(Point()), 0.5)
    with pytest.raises(ValueError, match="empty"):
        pruning_curve(bayesian(), lambda _: 0.0, keeps=())


def test_a_posterior_with_nan_is_named() -> None:
    bayes = bayesian()
    with torch.no_grad():
        next(iter(bayes.posteriors())).spread[0, 0] = math.nan  # type: ignore[operator, index]
    with pytest.raises(ValueError, match=r"'0\.weight' contains NaN"):
        prune(bayes, 0.5)
