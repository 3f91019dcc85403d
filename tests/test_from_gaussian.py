"""From variances found elsewhere, IVON's or anybody's, to a mean-field posterior."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal

import dubito
from dubito import IVON, from_ivon, from_variances


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def trained(net: nn.Module, optimizer: IVON, steps: int = 3) -> IVON:
    x, y = torch.randn(24, 4), torch.randint(3, (24,))
    for _ in range(steps):
        optimizer.zero_grad()
        with optimizer.sampled_params():
            F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return optimizer


def sds(bayes: dubito.BayesianModule) -> dict[str, Tensor]:
    return {name: v.sqrt() for p in bayes.posteriors() for name, v in p.variance().items()}


# ---------------------------------------------------------------------------------------------------- from_ivon


def test_from_ivon_has_its_moments_and_its_prior() -> None:
    net = network()
    groups = [
        {"params": list(net[0].parameters())},
        {"params": list(net[2].parameters()), "weight_decay": 0.5, "ess": 48.0},
    ]
    optimizer = trained(net, IVON(groups, lr=0.1, ess=24, betas=(0.9, 0.9), weight_decay=0.1, seed=0))
    bayes = from_ivon(net, optimizer, likelihood=dubito.Categorical())
    assert bayes.module is net
    expected = 0.0
    for name, sd in sds(bayes).items():
        p = net.get_parameter(name)
        ess, delta = (24.0, 0.1) if name.startswith("0") else (48.0, 0.5)
        exact = (ess * (optimizer.state[p]["hessian"] + delta)).rsqrt()
        torch.testing.assert_close(sd.detach(), exact)
        prior = Normal(0.0, (ess * delta) ** -0.5)
        expected += float(torch.distributions.kl_divergence(Normal(p.detach(), exact), prior).sum())
    assert set(sds(bayes)) == {name for name, _ in net.named_parameters()}
    assert math.isclose(float(bayes.kl().detach()), expected, rel_tol=1e-5)
    assert bayes.predict(torch.randn(5, 4), samples=4).probs.shape == (5, 3)


def test_parameters_that_are_not_the_optimizers_stay_ordinary() -> None:
    net = network()
    net[2].bias.requires_grad_(False)
    optimizer = trained(net, IVON([*net[0].parameters(), net[2].bias], lr=0.1, ess=24, seed=0))
    assert set(sds(from_ivon(net, optimizer))) == {"0.weight", "0.bias"}


def test_tied_parameters_become_one() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    net[2].weight = net[0].weight
    optimizer = trained(net, IVON(net.parameters(), lr=0.1, ess=24, seed=0))
    assert set(sds(from_ivon(net, optimizer))) == {"0.weight"}


def test_half_precision() -> None:
    net = network().bfloat16()
    optimizer = IVON(net.parameters(), lr=0.1, ess=24, seed=0)
    for _ in range(2):
        optimizer.zero_grad()
        with optimizer.sampled_params():
            net(torch.ones(2, 4, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()
    assert {sd.dtype for sd in sds(from_ivon(net, optimizer)).values()} == {torch.bfloat16}


def test_what_from_ivon_refuses() -> None:
    net = network()
    optimizer = IVON(net.parameters(), lr=0.1, ess=24, weight_decay=0.0, seed=0)
    with pytest.raises(RuntimeError, match="no step"):
        from_ivon(net, optimizer)
    trained(net, optimizer)
    with pytest.raises(ValueError, match="weight_decay is 0"):
        from_ivon(net, optimizer)
    with pytest.raises(ValueError, match="share no parameter"):
        from_ivon(copy.deepcopy(net), optimizer)
    with pytest.raises(ValueError, match="2 parameters that are neither"):
        from_ivon(net[0], optimizer, prior="fan_in")
    with pytest.raises(TypeError, match="from_variances"):
        from_ivon(net, torch.optim.Adam(net.parameters()))  # type: ignore[arg-type]
    bayes = from_ivon(net, optimizer, prior=Normal(0.0, 1.0))
    assert float(bayes.kl().detach()) > 0
    with pytest.raises(TypeError, match=r"bayes\.module"):
        from_ivon(bayes, optimizer)


def test_the_likelihoods_own_parameters_may_be_the_optimizers() -> None:
    net, likelihood = network(), dubito.Gaussian()
    optimizer = trained(net, IVON([*net.parameters(), *likelihood.parameters()], lr=0.1, ess=24, seed=0))
    assert len(sds(from_ivon(net, optimizer, likelihood=likelihood))) == 4


# ------------------------------------------------------------------------------------------------ from_variances


def test_variances_by_name_glob_and_class() -> None:
    net = network()
    exact = torch.rand(8, 4) + 0.1
    found = sds(from_variances(net, {"0.weight": exact, "*.bias": 0.25}, dubito.Categorical()))
    assert set(found) == {"0.weight", "0.bias", "2.bias"}
    torch.testing.assert_close(found["0.weight"].detach(), exact.sqrt())
    torch.testing.assert_close(found["2.bias"].detach(), torch.full((3,), 0.5))
    assert set(sds(from_variances(network(), {nn.Linear: 0.1}))) == set(dict(net.named_parameters()))


def test_a_flat_tensor_as_swag_gives_it() -> None:
    from dubito.posthoc.swag import SWAG

    net = network()
    swag = SWAG(net)
    for _ in range(3):
        with torch.no_grad():
            for p in net.parameters():
                p.add_(torch.randn_like(p))
        swag.collect()
    torch.nn.utils.vector_to_parameters(swag.mean, net.parameters())
    bayes = from_variances(net, swag.variance, prior=Normal(0.0, 1.0))
    flat = torch.cat([sd.reshape(-1) for sd in sds(bayes).values()])
    torch.testing.assert_close(flat.detach().square(), swag.variance)
    draws = torch.stack(
        [torch.nn.utils.parameters_to_vector(bayes.sample().parameters()) for _ in range(400)]
    )
    torch.testing.assert_close(draws.mean(0), swag.mean, atol=0.5, rtol=0)


def test_zero_variance_is_no_random_weight() -> None:
    net = network()
    bayes = from_variances(net, {"0": 0.0, "2.weight": 0.1})
    assert set(sds(bayes)) == {"2.weight"}
    some = torch.zeros(3)
    some[1] = 1.0
    found = sds(from_variances(network(), {"2.bias": some}))["2.bias"]
    torch.testing.assert_close(found.detach(), some)


@pytest.mark.parametrize(
    ("variances", "message"),
    [
        ({"0.weigth": 0.1}, "nearest names: '0.weight'"),
        ({"0.weight": 0.1, "0": 0.1}, "matched by two patterns, '0.weight' and '0'"),
        ({"0.weight": torch.ones(4, 8)}, r"shape \(4, 8\), but parameter '0.weight' is \(8, 4\)"),
        ({"0.bias": torch.tensor([1.0, -1.0] * 4)}, "4 negative, NaN or infinite of 8"),
        ({"0.bias": float("nan")}, "1 negative, NaN or infinite"),
        ({}, "empty"),
        (torch.ones(5), "67 trainable weights"),
        ([0.1], "mapping from parameter names"),
    ],
)
def test_bad_variances_are_named(variances: object, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        from_variances(network(), variances)  # type: ignore[arg-type]
