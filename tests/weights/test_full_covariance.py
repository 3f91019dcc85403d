"""Full covariance over units, layers and the network: layouts, KL, draws, densities and limits."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Laplace, MultivariateNormal, Normal, kl_divergence

import dubito
from dubito import CapabilityError, FullCovariance
from dubito.weights.full_covariance import FullCovariancePosterior

GROUPS = ("unit", "layer", "network")


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()


def shaken(
    family: FullCovariance, net: nn.Module | None = None, prior: object = None
) -> dubito.BayesianModule:
    """A Bayesian module whose factors are nothing special."""
    bayes = dubito.bayesianize(small_net() if net is None else net, family, prior=prior)  # type: ignore[arg-type]
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in bayes.named_parameters():
            if "posterior" in name:
                parameter.add_(0.4 * torch.randn_like(parameter))
    return bayes


def posteriors(bayes: dubito.BayesianModule) -> list[FullCovariancePosterior]:
    found = list(bayes.posteriors())
    assert all(isinstance(p, FullCovariancePosterior) for p in found)
    return found  # type: ignore[return-value]


def flat(values: dict[str, Tensor]) -> Tensor:
    return torch.cat([v.reshape(-1) for v in values.values()])


@pytest.mark.parametrize("group", GROUPS)
def test_kl_is_that_of_the_multivariate_normal(group: str) -> None:
    prior = Normal(*torch.tensor([0.3, 0.8], dtype=torch.float64))
    bayes = shaken(FullCovariance(group, prior=prior))  # type: ignore[arg-type]
    expected = 0.0
    for q in posteriors(bayes):
        mean, covariance = flat(q.mean()).detach(), q.covariance().detach()
        p = MultivariateNormal(torch.full_like(mean, 0.3), 0.64 * torch.eye(len(mean)).double())
        expected += float(kl_divergence(MultivariateNormal(mean, covariance), p))
    assert float(bayes.kl().detach()) == pytest.approx(expected, rel=1e-10)
    shares = bayes.kl_by_parameter()
    assert list(shares) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all(float(share.detach()) > 0 for share in shares.values())


@pytest.mark.parametrize("group", GROUPS)
def test_draws_have_the_stated_covariance(group: str) -> None:
    bayes = shaken(FullCovariance(group))  # type: ignore[arg-type]
    for q in posteriors(bayes):
        with torch.no_grad():
            draws = q.draw((10_000,), torch.Generator().manual_seed(2))
            rows = torch.cat([draws[s.name].reshape(10_000, -1) for s in q.slots], dim=1)
            covariance = q.covariance()
            scale = covariance.diag().sqrt()
            correlation = torch.cov(rows.T) / scale.outer(scale)
            assert torch.allclose(correlation, covariance / scale.outer(scale), atol=0.06)
            assert torch.allclose(covariance.diag(), flat(q.variance()))


def test_units_are_independent_and_hold_their_bias() -> None:
    bayes = shaken(FullCovariance("unit"))
    covariance = posteriors(bayes)[0].covariance().detach()  # weight (2, 3), then bias (2,)
    unit = torch.tensor([0, 0, 0, 1, 1, 1, 0, 1])
    same = unit.unsqueeze(0) == unit.unsqueeze(1)
    assert bool((covariance[~same] == 0).all())
    assert bool((covariance[same] != 0).all())


def test_the_network_is_one_group_and_correlates_layers() -> None:
    (q,) = posteriors(shaken(FullCovariance("network")))
    covariance = q.covariance().detach()
    assert covariance.shape == (11, 11)
    assert bool((covariance[:8, 8:].abs() > 0).all())


@pytest.mark.parametrize(
    ("module", "units"),
    [
        (nn.Conv2d(4, 6, (3, 2), groups=2), {"weight": 6, "bias": 6}),
        (nn.ConvTranspose2d(4, 6, (3, 2), groups=2), {"weight": 6, "bias": 6}),
        (nn.Embedding(7, 3), {"weight": 7}),
        (nn.LSTM(3, 2), {"weight_ih_l0": 8, "weight_hh_l0": 8, "bias_ih_l0": 8, "bias_hh_l0": 8}),
    ],
)
def test_unit_layout(module: nn.Module, units: dict[str, int]) -> None:
    """One entry moves one unit: perturbing a unit's row leaves all other outputs as they are."""
    bayes = dubito.bayesianize(module, FullCovariance("unit"))
    (q,) = posteriors(bayes)
    (block,) = q.blocks
    assert {s.name: block.units for s in q.slots} == units
    values = {s.name: torch.randn(2, *s.shape) for s in q.slots}
    back = block.split(block.rows(values))
    assert all(torch.equal(back[name], values[name]) for name in values)
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        x = torch.randn(1, 4, 5, 5)
        before = module(x).detach()
        for unit in range(block.units):
            rows = torch.zeros(block.units, block.width)
            rows[unit] = 1.0
            moved = {
                n: p.detach() + d
                for (n, p), d in zip(q.mean().items(), block.split(rows).values(), strict=True)
            }
            changed = (torch.func.functional_call(module, moved, (x,)) - before).abs().amax(
                dim=(0, 2, 3)
            ) > 1e-6
            assert changed.nonzero().reshape(-1).tolist() == [unit]


def test_without_correlation_it_is_mean_field() -> None:
    net = small_net()
    full = dubito.bayesianize(net, FullCovariance("layer", scale=0.2))
    mean_field = dubito.bayesianize(net, dubito.MeanField(scale=0.2))
    assert torch.allclose(full.kl(), mean_field.kl())
    for name, variance in itertools.chain.from_iterable(q.variance().items() for q in full.posteriors()):
        (other,) = (q.variance()[name] for q in mean_field.posteriors() if name in q.variance())
        assert torch.allclose(variance, other)


@pytest.mark.parametrize("group", GROUPS)
def test_log_prob_is_that_of_the_multivariate_normal(group: str) -> None:
    for q in posteriors(shaken(FullCovariance(group))):  # type: ignore[arg-type]
        draws = q.draw((4, 2), torch.Generator().manual_seed(3))
        rows = torch.cat([draws[s.name].reshape(4, 2, -1) for s in q.slots], dim=-1)
        expected = MultivariateNormal(flat(q.mean()), q.covariance()).log_prob(rows)
        assert torch.allclose(q.log_prob(draws), expected)


def test_sampled_kl_is_unbiased() -> None:
    bayes = shaken(FullCovariance("layer", prior=Normal(0.0, 0.7), scale=0.7))
    with torch.no_grad():
        value = float(bayes.kl())
        for method in ("monte_carlo", "stick_the_landing"):
            kl = bayes.kl(method, samples=600, generator=torch.Generator().manual_seed(4))  # type: ignore[arg-type]
            assert float(kl) == pytest.approx(value, rel=0.06)


def test_stick_the_landing_leaves_out_the_score_and_nothing_else() -> None:
    bayes = shaken(FullCovariance("unit", prior=Normal(0.0, 0.7), scale=0.7))
    parameters = list(bayes.parameters())
    values, gradients = [], []
    for method in ("monte_carlo", "stick_the_landing"):
        kl = bayes.kl(method, generator=torch.Generator().manual_seed(4))  # type: ignore[arg-type]
        values.append(kl.detach())
        gradients.append(torch.autograd.grad(kl, parameters))
    generator, score = torch.Generator().manual_seed(4), torch.zeros((), dtype=torch.float64)
    for q in posteriors(bayes):
        draw = {n: w.detach() for n, w in q.realize(q.components(q.noise(generator))).items()}
        score = score + q.log_prob(draw)
    assert torch.allclose(*values)
    for usual, landed, left_out in zip(*gradients, torch.autograd.grad(score, parameters), strict=True):
        assert torch.allclose(usual, landed + left_out)
        assert float(left_out.abs().max()) > 0.01


def test_stick_the_landing_has_no_variance_at_the_prior() -> None:
    bayes = dubito.bayesianize(small_net(), FullCovariance("network", prior=Normal(0.0, 0.7), scale=1.0))
    with torch.no_grad():
        for parameter in bayes.module.parameters():
            parameter.zero_()
    parameters = list(bayes.parameters())
    landed = torch.autograd.grad(bayes.kl("stick_the_landing"), parameters)
    usual = torch.autograd.grad(bayes.kl("monte_carlo"), parameters)
    assert all(bool((g.abs() < 1e-12).all()) for g in landed)
    assert max(float(g.abs().max()) for g in usual) > 0.1


def test_other_priors_add_the_entries_kl_to_the_total_correlation() -> None:
    bayes = shaken(FullCovariance("layer"), prior=Laplace(0.0, 0.5))
    sampled = bayes.kl("monte_carlo", samples=1000, generator=torch.Generator().manual_seed(5))
    assert float(bayes.kl().detach()) == pytest.approx(
        float(sampled.detach()), rel=0.03
    )  # closed for entries
    mixture = shaken(FullCovariance("layer"), prior=dubito.ScaleMixture(0.5, 1.0, 0.1))
    bound = float(mixture.kl("bound").detach())
    assert bound == float(mixture.kl().detach())
    with torch.no_grad():
        assert bound > float(mixture.kl("monte_carlo", samples=300)) - 0.5


def test_wasserstein_of_gaussians_that_commute() -> None:
    a = posteriors(dubito.bayesianize(small_net(), FullCovariance("layer", scale=0.2)))[0]
    b = posteriors(dubito.bayesianize(small_net(), FullCovariance("layer", scale=0.5)))[0]
    expected = (flat(a.variance()).sqrt() - flat(b.variance()).sqrt()).square().sum()
    assert torch.allclose(a.wasserstein(b), expected)
    other = next(iter(dubito.bayesianize(small_net(), dubito.MeanField()).posteriors()))
    with pytest.raises(CapabilityError, match="MeanField"):
        a.wasserstein(other)


def test_spread_of_nothing_keeps_a_finite_kl() -> None:
    bayes = shaken(FullCovariance("network"), net=small_net().float())
    bayes.rescale_spread_(0.0)
    kl = bayes.kl()
    kl.backward()
    assert bool(kl.isfinite())
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in bayes.parameters())


def test_rescaling_multiplies_the_covariance() -> None:
    bayes = shaken(FullCovariance("layer"))
    before = posteriors(bayes)[0].covariance().detach()
    bayes.rescale_spread_(0.5)
    assert torch.allclose(posteriors(bayes)[0].covariance(), 0.25 * before)


def test_training_does_not_diverge_where_a_raw_factor_does() -> None:
    """The whole network's factor at a learning rate its means want: the loss ends far below where it began."""
    torch.manual_seed(3)
    x = torch.linspace(-2, 2, 12).unsqueeze(1)
    y = torch.sin(2 * x)
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    bayes = dubito.bayesianize(net, FullCovariance("network"), likelihood=dubito.Gaussian(0.2))
    optimizer = torch.optim.Adam(bayes.parameters(), lr=2e-2)
    losses = []
    for _ in range(250):
        loss = dubito.negative_elbo(bayes.nll(bayes.outputs(x, samples=4), y), bayes.kl(), 12).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-20:]) / 20 < 6.0 < 12.0 < losses[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_under_autocast_draws_stay_in_the_parameters_dtype(dtype: torch.dtype) -> None:
    bayes = shaken(FullCovariance("layer"), net=small_net().to(dtype))
    (q, *_) = posteriors(bayes)
    noise = q.noise(torch.Generator().manual_seed(0))
    plain = q.components(noise)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = q.components(noise)
        kl = bayes.kl()
    assert all(torch.equal(under[k], plain[k]) and under[k].dtype == dtype for k in plain)
    assert kl.dtype == torch.float32
    assert bool(kl.isfinite())


def test_too_large_a_factor_is_refused_with_its_size() -> None:
    net = nn.Sequential(nn.Linear(200, 100), nn.Linear(100, 10))
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(ValueError, match=r"445,632,100 entries \(1.78 GB.*21,110 parameters.*max_entries"):
        dubito.bayesianize(net, FullCovariance("network", max_entries=2**27))
    with pytest.raises(ValueError, match=r'group="unit" takes 16\.2 MB'):
        dubito.bayesianize(net, {"0": FullCovariance("layer")})
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    dubito.bayesianize(net, FullCovariance("unit"))
    dubito.bayesianize(net, {"1": FullCovariance("layer", max_entries=1010**2)})


@pytest.mark.parametrize(
    "bad", [{"group": "row"}, {"scale": -1.0}, {"scale": math.inf}, {"kl_samples": 0}, {"max_entries": 0}]
)
def test_bad_input(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        FullCovariance(**bad)  # type: ignore[arg-type]
