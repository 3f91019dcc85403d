import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal

import dubito
from dubito.certificates import RefusedError, pac_bayes, rank_sweep


def network(rank, sizes=(6, 10, 3)):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(sizes[0], sizes[1], bias=False), nn.ReLU(), nn.Linear(sizes[1], sizes[2]))
    factors = dubito.LowRankFactors(rank, init="random", prior=Normal(0.0, 0.5))
    families = {
        "0.weight": factors,
        "2.weight": dubito.LowRankFactors(min(rank, 3), "random", Normal(0.0, 0.5)),
    }
    families["2.bias"] = dubito.MeanField()
    return dubito.bayesianize(net, families, likelihood=dubito.Categorical())


pytestmark = pytest.mark.filterwarnings("ignore::dubito.DubitoWarning")  # ranks above break-even


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 6, generator=generator)
    return x, x[:, :3].argmax(1)


def seeded():
    return torch.Generator().manual_seed(1)


def test_one_network_is_extrapolated_by_coordinates():
    bayes = network(2)
    sweep = rank_sweep(bayes, data(), samples=16, generator=seeded())
    own = pac_bayes(bayes, data(), samples=16, generator=seeded())
    assert sweep.extrapolated
    assert [p.rank for p in sweep.points] == [1, 2, 3, 4, 5, 6]
    assert [p.rank for p in sweep.points if p.certified] == [2]
    at = {p.rank: p for p in sweep.points}
    assert at[2].kl == pytest.approx(own.kl)
    assert at[2].kl_form == pytest.approx(own.kl_form)
    first, second = own.kl_by_parameter["0.weight"], own.kl_by_parameter["2.weight"]
    bias = own.kl_by_parameter["2.bias"]
    assert at[1].kl == pytest.approx(bias + first / 2 + second / 2)
    assert at[5].kl == pytest.approx(bias + first * 5 / 2 + second * 3 / 2)  # the last layer's min(m, n) is 3
    assert sweep.dense.kl == pytest.approx(bias + first * 60 / 32 + second * 30 / 26)
    assert sweep.certificates == {2: own}
    assert sweep.best is at[2]


def test_bounds_rise_with_rank_and_the_first_vacuous_rank_is_found():
    sweep = rank_sweep(network(2), data(), samples=64)
    forms = [p.kl_form for p in sweep.points]
    assert forms == sorted(forms)
    vacuous = [p.rank for p in sweep.points if p.kl_form >= sweep.trivial]
    assert sweep.trivial == pytest.approx(2 / 3)
    assert sweep.vacuous_from == (vacuous[0] if vacuous else None)
    assert "forecast" in str(sweep)


def test_layers_of_different_ranks_keep_the_networks_own_point():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
    families = {
        "0.weight": dubito.LowRankFactors(4, init="random"),
        "2.weight": dubito.LowRankFactors(1, init="random"),
        "*.bias": dubito.MeanField(),
    }
    bayes = dubito.bayesianize(net, families, likelihood=dubito.Categorical())
    sweep = rank_sweep(bayes, data(), [1, 2], samples=16, generator=seeded())
    assert [p.rank for p in sweep.points] == [1, 2, 4]
    own = pac_bayes(bayes, data(), samples=16, generator=seeded())
    assert sweep.points[-1].kl_form == own.kl_form
    assert sweep.points[-1].certified


def test_retrained_networks_are_all_certified_and_share_delta():
    networks = {4: network(4), 1: network(1), 2: network(2)}
    sweep = rank_sweep(networks, data(), delta=0.3, samples=16, generator=seeded())
    assert [p.rank for p in sweep.points] == [1, 2, 4]
    assert all(p.certified for p in sweep.points)
    assert not sweep.extrapolated
    alone = pac_bayes(networks[1], data(), delta=0.1, samples=16, generator=seeded())
    assert sweep.points[0].kl_form == pytest.approx(alone.kl_form)
    assert all(c.choices == 3 for c in sweep.certificates.values())
    assert sweep.best.kl_form == min(p.kl_form for p in sweep.points)


def test_many_ranks_are_thinned():
    from dubito.certificates.rank_sweep import _default_ranks

    ranks = _default_ranks(512)
    assert (ranks[0], ranks[-1]) == (1, 512)
    assert len(ranks) <= 24
    assert ranks == sorted(set(ranks))
    assert math.isclose(ranks[-1] / ranks[-2], ranks[-2] / ranks[-3], rel_tol=0.02)


def test_bad_requests_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        rank_sweep({}, data())
    with pytest.raises(ValueError, match="no ranks"):
        rank_sweep({1: network(1)}, data(), [1])
    dense = dubito.bayesianize(nn.Linear(6, 3), dubito.MeanField(), likelihood=dubito.Categorical())
    with pytest.raises(RefusedError, match="no rank to vary"):
        rank_sweep(dense, data())
    with pytest.raises(ValueError, match="ranks"):
        rank_sweep(network(1), data(), [0], samples=4)
