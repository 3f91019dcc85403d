"""Empirical Bayes: the learned scale maximises the evidence, and reaches everything a parameter must reach."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Laplace, MultivariateNormal, Normal

import dubito
from dubito import EmpiricalBayes, FullCovariance, LowRankFactors, MeanField, Radial


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def gains(bayes: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in bayes.named_parameters() if "gain" in name}


def test_the_learned_scale_maximises_the_exact_evidence() -> None:
    """Conjugate regression on a strongly correlated design; the evidence by its own formula on a fine grid."""
    generator = torch.Generator().manual_seed(1)
    shared = torch.randn(60, 1, generator=generator, dtype=torch.float64)
    x = shared + 0.15 * torch.randn(60, 5, generator=generator, dtype=torch.float64)
    y = x @ torch.randn(5, generator=generator, dtype=torch.float64) + 0.5 * torch.randn(
        60, generator=generator, dtype=torch.float64
    )
    module = nn.Linear(5, 1, bias=False).double()
    bayes = dubito.bayesianize(module, FullCovariance(), prior=EmpiricalBayes(Normal(0.0, 1.0)))
    (q,) = bayes.posteriors()
    optimizer = torch.optim.LBFGS(bayes.parameters(), max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        residual = (y - x @ module.weight.reshape(-1)).square().sum()
        spread = torch.trace(x @ q.covariance() @ x.mT)  # type: ignore[operator]
        loss = (residual + spread) / (2 * 0.25) + bayes.kl()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    (learned,) = gains(bayes).values()
    grid = torch.linspace(-2, 2, 801, dtype=torch.float64).exp()
    noise = 0.25 * torch.eye(60, dtype=torch.float64)
    evidence = [
        MultivariateNormal(torch.zeros(60).double(), x @ x.mT * s**2 + noise).log_prob(y) for s in grid
    ]
    best = float(grid[torch.stack(evidence).argmax()])
    assert float(learned.detach().exp()) == pytest.approx(best, rel=0.02)


@pytest.mark.parametrize(
    "family", [MeanField(), FullCovariance("layer"), Radial(), MeanField(parametrization="softplus")]
)
def test_kl_and_its_gradient_are_those_of_the_formula(family: dubito.Family) -> None:
    """At gain g: the KL to Normal(0, g·fan_in^-1/2), and its derivative in log g by finite differences."""
    bayes = dubito.bayesianize(net().double(), family, prior=EmpiricalBayes(gain=1.7))
    fixed = dubito.bayesianize(net().double(), family, prior=dubito.FanIn(gain=1.7))
    assert torch.allclose(bayes.kl(), fixed.kl())
    bayes.kl().backward()
    for name, gain in gains(bayes).items():
        assert gain.grad is not None, name
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                gain.add_(step)
                values.append(float(bayes.kl()))
                gain.sub_(step)
        assert float(gain.grad) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5)


def test_the_kl_made_with_a_draw_carries_the_same_gradient() -> None:
    for base in (None, Normal(0.3, 0.8), "pretrained"):
        bayes = dubito.bayesianize(net(), MeanField(), prior=EmpiricalBayes(base))  # type: ignore[arg-type]
        parameters = list(bayes.parameters())
        alone = torch.autograd.grad(bayes.kl(), parameters)
        output = bayes(torch.randn(2, 4))
        assert [p for p in bayes.posteriors() if p._pending is None] == []  # type: ignore[attr-defined]
        with_draw = torch.autograd.grad(bayes.kl() + 0.0 * output.sum(), parameters)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(alone, with_draw, strict=True))


def test_a_kl_made_before_the_gain_changed_is_not_used() -> None:
    bayes = dubito.bayesianize(net(), MeanField(), prior=EmpiricalBayes())
    bayes(torch.randn(2, 4))
    with torch.no_grad():
        for gain in gains(bayes).values():
            gain.add_(1.0)
    expected = dubito.bayesianize(net(), MeanField(), prior=dubito.FanIn(gain=math.e)).kl()
    assert torch.allclose(bayes.kl(), expected)


@pytest.mark.parametrize(("share", "number"), [("parameter", 4), ("module", 2), ("all", 1)])
def test_sharing_and_the_optimiser(share: str, number: int) -> None:
    rule = EmpiricalBayes(share=share)  # type: ignore[arg-type]
    bayes = dubito.bayesianize(net(), MeanField(), prior=rule)
    found = list(gains(bayes).values())
    assert len(found) == number
    groups = dubito.parameter_groups(bayes, lr=0.1, weight_decay=0.1)
    members = [id(p) for group in groups for p in group["params"]]
    decayed = {id(p) for group in groups if group["weight_decay"] > 0 for p in group["params"]}
    for gain in found:
        assert members.count(id(gain)) == 1
        assert id(gain) not in decayed
    other = dubito.bayesianize(net(), MeanField(), prior=rule)  # a second network has gains of its own
    assert not {id(p) for p in gains(other).values()} & {id(p) for p in found}


def test_factors_learn_one_gain_each_and_do_not_decay_it() -> None:
    bayes = dubito.bayesianize(
        net(), {"*.weight": LowRankFactors(rank=1, init="svd", prior=EmpiricalBayes())}
    )
    found = list(gains(bayes).values())
    assert len(found) == 4
    bayes.kl().backward()
    assert all(p.grad is not None and float(p.grad.abs()) > 0 for p in found)
    groups = dubito.parameter_groups(bayes, lr=0.1, weight_decay=0.1)
    assert {id(p) for p in found} <= {id(p) for g in groups if g["weight_decay"] == 0 for p in g["params"]}


def test_copies_and_files_keep_the_gain() -> None:
    bayes = dubito.bayesianize(net(), MeanField(), prior=EmpiricalBayes(share="module"))
    with torch.no_grad():
        for index, gain in enumerate(gains(bayes).values()):
            gain.fill_(0.1 * (index + 1))
    other = dubito.bayesianize(net(), MeanField(), prior=EmpiricalBayes(share="module"))
    other.load_state_dict(bayes.state_dict())
    double = copy.deepcopy(bayes).double()
    assert len(gains(double)) == 2
    for made in (other, double):
        assert float(made.kl().detach()) == pytest.approx(float(bayes.kl().detach()), rel=1e-6)


def test_training_finds_the_scale_of_the_weights() -> None:
    """With q narrow about weights of sd 0.5 the best prior has that scale, for each layer its own."""
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(40, 50, bias=False), nn.Linear(50, 30, bias=False))
    nn.init.normal_(module[0].weight, std=0.5)  # type: ignore[arg-type]
    nn.init.normal_(module[1].weight, std=0.05)  # type: ignore[arg-type]
    bayes = dubito.bayesianize(module, MeanField(scale=0.01), prior=EmpiricalBayes())
    optimizer = torch.optim.Adam(gains(bayes).values(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        (bayes.kl() / 3500).backward()
        optimizer.step()
    for posterior, expected in zip(bayes.posteriors(), (0.5, 0.05), strict=True):
        moments = posterior.prior_of(posterior.slots[0]).gaussian()
        assert moments is not None
        assert float(moments[1]) == pytest.approx(expected, rel=0.05)


def test_the_base_may_be_pretrained() -> None:
    module = net()
    centre = module[0].weight.detach().clone()  # type: ignore[union-attr, operator]
    bayes = dubito.bayesianize(module, MeanField(), prior=EmpiricalBayes("pretrained", gain=0.5))
    first = next(iter(bayes.posteriors()))
    moments = first.prior_of(first.slots[0]).gaussian()
    assert moments is not None
    assert torch.equal(torch.as_tensor(moments[0]), centre)
    assert float(moments[1]) == pytest.approx(0.5 * 4**-0.5)
    assert float(bayes.kl("monte_carlo", samples=300).detach()) == pytest.approx(
        float(bayes.kl().detach()), rel=0.1
    )


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="gain"):
        EmpiricalBayes(gain=0.0)
    with pytest.raises(ValueError, match="share"):
        EmpiricalBayes(share="layer")  # type: ignore[arg-type]
    module = net()
    with pytest.raises(ValueError, match="Gaussian prior, and its base is Laplace"):
        dubito.bayesianize(module, MeanField(), prior=EmpiricalBayes(Laplace(0.0, 1.0)))


def test_what_it_prints() -> None:
    bayes = dubito.bayesianize(nn.Linear(4, 1), MeanField(), prior=EmpiricalBayes(gain=2.0))
    assert "gain=2 (learned)" in repr(bayes)
    assert repr(EmpiricalBayes(share="all")) == "EmpiricalBayes('fan_in', gain=1, share='all')"
