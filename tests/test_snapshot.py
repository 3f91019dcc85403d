import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import dubito
from dubito import CapabilityError

FAMILIES = [
    dubito.LowRankCovariance(2),
    dubito.MeanField(),
    dubito.DiagonalCovariance(),
    dubito.KroneckerCovariance(2, 2),
]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_distance_from_a_snapshot_grows_with_what_training_moves(family: dubito.Family) -> None:
    bayes = dubito.bayesianize(network(), {"2": family})
    prior = bayes.snapshot()
    assert float(bayes.wasserstein(prior).detach()) < 1e-12
    with torch.no_grad():
        bayes.module[0].weight.add_(1.0)  # not random: no part of the distance
        bayes.module[2].weight.add_(0.5)
    assert float(bayes.wasserstein(prior).detach()) == pytest.approx(0.25 * 18)
    bayes.wasserstein(prior).backward()
    torch.testing.assert_close(bayes.module[2].weight.grad, torch.full((3, 6), 1.0).double())
    bayes.rescale_spread_(0.0)
    variance = sum(float(v.detach().sum()) for p in prior.posteriors() for v in p.variance().values())
    assert float(bayes.wasserstein(prior).detach()) == pytest.approx(0.25 * 18 + variance)
    assert all(not p.requires_grad for p in prior.parameters())


def test_it_holds_the_random_weights_only_and_nothing_is_kept_without_it() -> None:
    bayes = dubito.bayesianize(network(), {"2": dubito.LowRankCovariance(2)})
    before = sum(t.numel() for t in bayes.state_dict().values())
    snapshot = bayes.snapshot()
    assert sum(p.numel() for p in snapshot.parameters()) == 21 * 3
    assert sum(t.numel() for t in bayes.state_dict().values()) == before
    gone = weakref.ref(snapshot)
    del snapshot
    gc.collect()
    assert gone() is None


def test_copies_pickles_and_moves() -> None:
    bayes = dubito.bayesianize(network(), dubito.LowRankCovariance(2))
    prior = bayes.snapshot()
    with torch.no_grad():
        for p in bayes.parameters():
            p.mul_(1.5)
    expected = bayes.wasserstein(prior)
    for twin in (copy.deepcopy(prior), pickle.loads(pickle.dumps(prior))):
        torch.testing.assert_close(bayes.wasserstein(twin), expected)
    torch.testing.assert_close(
        bayes.float().wasserstein(prior.float()), expected.float(), rtol=1e-5, atol=1e-6
    )
    other = dubito.bayesianize(network().float(), dubito.LowRankCovariance(2)).snapshot()
    other.load_state_dict(prior.state_dict())
    torch.testing.assert_close(bayes.wasserstein(other), bayes.wasserstein(prior))


def test_a_snapshot_of_something_else_is_refused() -> None:
    bayes = dubito.bayesianize(network(), {"2": dubito.LowRankCovariance(2)})
    with pytest.raises(ValueError, match=r"another network.*0\.weight"):
        bayes.wasserstein(dubito.bayesianize(network(), dubito.LowRankCovariance(2)).snapshot())
    with pytest.raises(CapabilityError, match="no closed form between"):
        bayes.wasserstein(dubito.bayesianize(network(), {"2": dubito.KroneckerCovariance(1, 1)}).snapshot())
    factored = dubito.bayesianize(network(), {"2.weight": dubito.LowRankFactors(1, init="svd")})
    with pytest.raises(CapabilityError, match="2-Wasserstein"):
        factored.wasserstein(factored.snapshot())
    plain = dubito.bayesianize(network(), dubito.Point())
    with pytest.raises(ValueError, match="no random weight"):
        plain.wasserstein(plain.snapshot())
