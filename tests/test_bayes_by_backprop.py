"""Bayes by Backprop as a whole: exact posteriors where they are known, and the traps of its many retellings."""

import copy
import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Laplace, MultivariateNormal, Normal

import dubito
from dubito import FullCovariance, MeanField, Radial
from dubito.objectives import KLWarmup

NOISE, PRIOR = 0.5, 1.3
F64 = torch.float64


class Regression:
    """Conjugate linear regression whose columns are nearly the same: posterior and evidence by their formulas."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shared = torch.randn(60, 1, generator=generator, dtype=F64)
        self.x = shared + 0.15 * torch.randn(60, 5, generator=generator, dtype=F64)
        truth = torch.randn(5, generator=generator, dtype=F64)
        self.y = self.x @ truth + NOISE * torch.randn(60, generator=generator, dtype=F64)
        self.precision = self.x.mT @ self.x / NOISE**2 + torch.eye(5, dtype=F64) / PRIOR**2
        self.covariance = torch.linalg.inv(self.precision)
        self.mean = self.covariance @ self.x.mT @ self.y / NOISE**2
        marginal = self.x @ self.x.mT * PRIOR**2 + NOISE**2 * torch.eye(60, dtype=F64)
        self.evidence = float(MultivariateNormal(torch.zeros(60, dtype=F64), marginal).log_prob(self.y))

    def fit(self, family: dubito.Family) -> tuple[Tensor, Tensor, float]:
        """(mean, covariance, ELBO in nats) at the maximum of the exact ELBO."""
        module = nn.Linear(5, 1, bias=False).double()
        prior = Normal(*torch.tensor([0.0, PRIOR], dtype=F64))
        bayes = dubito.bayesianize(module, family, prior=prior)
        (q,) = bayes.posteriors()

        def covariance() -> Tensor:
            joint = getattr(q, "covariance", None)
            return joint() if joint is not None else q.variance()["weight"].reshape(-1).diag()

        def loss() -> Tensor:
            residual = (self.y - self.x @ module.weight.reshape(-1)).square().sum()
            spread = torch.trace(self.x @ covariance() @ self.x.mT)
            constant = 30 * math.log(2 * math.pi * NOISE**2)
            return (residual + spread) / (2 * NOISE**2) + constant + bayes.kl()

        optimizer = torch.optim.LBFGS(
            bayes.parameters(),
            max_iter=400,
            history_size=30,
            tolerance_change=1e-13,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            value = loss()
            value.backward()
            return value

        optimizer.step(closure)  # type: ignore[arg-type]
        return module.weight.detach().reshape(-1), covariance().detach(), -float(loss().detach())


@pytest.mark.parametrize("group", ["unit", "layer", "network"])
def test_full_covariance_is_the_exact_posterior_and_attains_the_evidence(group: str) -> None:
    problem = Regression()
    mean, covariance, elbo = problem.fit(FullCovariance(group))  # type: ignore[arg-type]
    assert torch.allclose(mean, problem.mean, atol=1e-5)
    assert torch.allclose(covariance, problem.covariance, atol=1e-5)
    assert elbo == pytest.approx(problem.evidence, abs=1e-5)


@pytest.mark.parametrize("family", [MeanField(), MeanField(parametrization="softplus"), Radial()])
def test_mean_field_is_one_over_the_diagonal_of_the_precision(family: dubito.Family) -> None:
    """The variance of an entry given the others, far below its marginal one; the mean is exact."""
    problem = Regression()
    mean, covariance, elbo = problem.fit(family)
    assert torch.allclose(mean, problem.mean, atol=1e-5)
    assert torch.allclose(covariance.diag() * problem.precision.diag(), torch.ones(5, dtype=F64), atol=1e-5)
    assert float((problem.covariance.diag() / covariance.diag()).min()) > 10
    assert elbo < problem.evidence - 1


def test_training_with_draws_finds_the_exact_posterior_too() -> None:
    problem = Regression()
    torch.manual_seed(1)
    module = nn.Linear(5, 1, bias=False).double()
    with torch.no_grad():
        module.weight.copy_(problem.mean)
    bayes = dubito.bayesianize(
        module, FullCovariance(scale=0.5), likelihood=dubito.Gaussian(NOISE), prior=Normal(0.0, PRIOR)
    )
    optimizer = torch.optim.Adam(bayes.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, 500)
    for _ in range(500):
        nll = bayes.nll(bayes.outputs(problem.x, samples=16), problem.y.unsqueeze(1))
        optimizer.zero_grad()
        dubito.negative_elbo(nll, bayes.kl(), n_data=60).loss.backward()
        optimizer.step()
        schedule.step()
    (q,) = bayes.posteriors()
    ratio = q.variance()["weight"].detach().reshape(-1) / problem.covariance.diag()
    assert bool(((ratio > 0.7) & (ratio < 1.4)).all())


# ------------------------------------------------------------------------------------------------------- traps


def small(family: dubito.Family | None = None, **options: object) -> dubito.BayesianModule:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    return dubito.bayesianize(net, family or MeanField(), likelihood=dubito.Categorical(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "family", [MeanField(scale=0.5), Radial(scale=0.5), FullCovariance("layer", scale=0.5)]
)
def test_t06_the_gradient_over_several_draws_is_their_mean(family: dubito.Family) -> None:
    bayes = small(family)
    x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
    draws = bayes.draw(4)
    parameters = [p for n, p in bayes.named_parameters()]
    together = torch.autograd.grad(bayes.nll(bayes.outputs(x, draws=draws), y), parameters)
    apart = [
        torch.autograd.grad(bayes.nll(bayes.outputs(x, draws=draws[s]), y), parameters) for s in range(4)
    ]
    for index, gradient in enumerate(together):
        mean = torch.stack([one[index] for one in apart]).mean(0)
        assert torch.allclose(gradient, mean, atol=1e-6)
        assert not torch.allclose(gradient, 4 * mean, atol=1e-6) or float(mean.abs().max()) < 1e-6


@pytest.mark.parametrize("family", [MeanField, Radial, functools.partial(FullCovariance, "unit")])
def test_t11_t12_the_signal_exceeds_the_noise_at_the_start(family: Callable[..., dubito.Family]) -> None:
    """A standard deviation is a tenth of the fan-in scale, not exp(-6 / 2) = 0.05 whatever the width."""
    torch.manual_seed(0)
    bayes = dubito.bayesianize(nn.Linear(784, 8), family())
    for q in bayes.posteriors():
        if "weight" in q.variance():
            sd = q.variance()["weight"].detach().sqrt()
            assert torch.allclose(sd, torch.full_like(sd, 0.1 / 28.0))
            assert float((bayes.module.weight.abs() / sd).median()) > 4  # type: ignore[operator, union-attr]


def test_t21_the_papers_own_form() -> None:
    """Scale mixture, softplus(rho), and log q(w) - log p(w) at one draw: what Blundell et al. (2015) minimise."""
    prior = dubito.ScaleMixture(0.5, 1.0, math.exp(-6))
    bayes = small(MeanField(prior=prior, parametrization="softplus"))
    with torch.no_grad():
        one = bayes.kl("monte_carlo", samples=1, generator=torch.Generator().manual_seed(3))
        expected = torch.zeros(())
        generator = torch.Generator().manual_seed(3)
        for q in bayes.posteriors():
            mean, sd = q.slots[0].parameter, torch.nn.functional.softplus(q.spread)  # type: ignore[arg-type]
            w = mean + sd * torch.randn((1, *mean.shape), generator=generator)[0]
            expected = expected + (Normal(mean, sd).log_prob(w) - prior.log_prob(w)).sum()
    assert torch.allclose(one, expected)


def test_t25_every_parameter_is_there_once_and_the_mean_is_the_modules_own() -> None:
    for family in (MeanField(), Radial(), FullCovariance("unit")):
        bayes = small(family)
        assert next(iter(bayes.posteriors())).mean()["0.weight"] is bayes.module[0].weight  # type: ignore[index]
        pointers = [p.data_ptr() for p in bayes.parameters() if p.numel()]
        assert len(pointers) == len(set(pointers))
        moved = copy.deepcopy(bayes).double()
        with torch.no_grad():
            moved.module[0].weight.fill_(7.0)  # type: ignore[index]
        assert bool((moved.merge()[0].weight == 7.0).all())  # type: ignore[index]


def test_t31_the_kl_of_a_recurrent_network_is_counted_once_however_long_the_sequence() -> None:
    bayes = dubito.bayesianize(nn.LSTM(3, 4), MeanField())
    values = []
    for length in (1, 7):
        bayes(torch.randn(length, 2, 3))
        values.append(float(bayes.kl().detach()))
    assert values[0] == pytest.approx(values[1])
    assert float(sum(bayes.kl_by_parameter().values()).detach()) == pytest.approx(values[0])  # type: ignore[union-attr]
    assert len(bayes.kl_by_parameter()) == 4


@pytest.mark.parametrize(
    "family", [MeanField(), Radial(), FullCovariance("network"), MeanField(estimator="local")]
)
def test_t33_a_call_leaves_nothing_behind_that_cannot_be_copied(family: dubito.Family) -> None:
    bayes = small(family)
    loss = bayes(torch.randn(2, 4)).sum() + bayes.kl()
    again = copy.deepcopy(bayes)
    averaged = torch.optim.swa_utils.AveragedModel(bayes)
    averaged.update_parameters(bayes)
    loss.backward()
    assert torch.equal(again.module[0].weight, bayes.module[0].weight)  # type: ignore[index]


def test_t34_modes_decide_whether_a_call_is_random() -> None:
    for family in (MeanField(scale=0.5), Radial(scale=0.5), FullCovariance("unit", scale=0.5)):
        bayes, x = small(family), torch.randn(2, 4)
        assert not torch.equal(bayes.train()(x), bayes(x))
        assert torch.equal(bayes.eval()(x), bayes(x))
        assert torch.equal(bayes(x), bayes.merge()(x))


def test_t37_the_users_layers_keep_all_their_options() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular", dilation=1)
    x = torch.randn(1, 2, 5, 5)
    expected = layer(x)
    for estimator in ("weights", "local", "flipout"):
        bayes = dubito.bayesianize(copy.deepcopy(layer), MeanField(estimator=estimator))  # type: ignore[arg-type]
        bayes.rescale_spread_(0.0)
        assert torch.allclose(bayes(x), expected, atol=1e-6)


# ------------------------------------------------------------------------------------------- the objective's parts


@pytest.mark.parametrize("family", [MeanField(scale=0.5), MeanField(scale=0.5, parametrization="softplus")])
def test_stick_the_landing_leaves_out_the_score_and_nothing_else(family: MeanField) -> None:
    bayes = small(family, prior=Normal(0.0, 0.4))
    parameters = list(bayes.parameters())
    values, gradients = [], []
    for method in ("monte_carlo", "stick_the_landing"):
        kl = bayes.kl(method, samples=3, generator=torch.Generator().manual_seed(1))  # type: ignore[arg-type]
        values.append(kl.detach())
        gradients.append(torch.autograd.grad(kl, parameters))
    generator, score = torch.Generator().manual_seed(1), torch.zeros(())
    for q in bayes.posteriors():
        eps = torch.randn((3, *q.slots[0].shape), generator=generator)
        w = (q.slots[0].parameter + q.sd() * eps).detach()  # type: ignore[operator]
        score = score + q.log_prob({q.slots[0].name: w}).mean()
    assert torch.allclose(*values)
    for usual, landed, left_out in zip(*gradients, torch.autograd.grad(score, parameters), strict=True):
        assert torch.allclose(usual, landed + left_out, rtol=1e-3, atol=1e-3)


def test_stick_the_landing_has_no_variance_where_q_is_the_prior() -> None:
    bayes = small(MeanField(scale=1.0))
    with torch.no_grad():
        for parameter in bayes.module.parameters():
            parameter.zero_()
    landed = torch.autograd.grad(bayes.kl("stick_the_landing"), list(bayes.parameters()))
    assert all(float(g.abs().max()) < 1e-5 for g in landed)
    usual = torch.autograd.grad(bayes.kl("monte_carlo"), list(bayes.parameters()))
    assert max(float(g.abs().max()) for g in usual) > 1.0


def test_a_laplace_prior_has_the_closed_kl_and_monte_carlo_agrees() -> None:
    bayes = small(MeanField(scale=0.5), prior=Laplace(0.0, 0.4))
    with torch.no_grad():
        closed = float(bayes.kl("closed"))
        assert closed == float(bayes.kl())
        sampled = bayes.kl("monte_carlo", samples=4000, generator=torch.Generator().manual_seed(1))
    assert float(sampled) == pytest.approx(closed, rel=0.02)


@pytest.mark.parametrize(
    "family", [MeanField(), Radial(), FullCovariance("layer"), FullCovariance("network")]
)
def test_the_kl_is_the_sum_of_its_parameters_shares(family: dubito.Family) -> None:
    bayes = small(family)
    shares = bayes.kl_by_parameter()
    assert list(shares) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert torch.allclose(sum(shares.values()), bayes.kl())  # type: ignore[arg-type]


def test_warm_up_and_a_cold_posterior_weigh_the_kl() -> None:
    bayes = small()
    x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
    nll, kl = bayes.nll(bayes(x), y), bayes.kl()
    warmup = KLWarmup(steps=10)
    for step, beta in ((0, 0.0), (5, 0.5), (10, 1.0), (99, 1.0)):
        elbo = dubito.negative_elbo(nll, kl, n_data=100, beta=warmup(step))
        assert torch.allclose(elbo.loss, nll + beta * kl / 100)
    cold = dubito.negative_elbo(nll, kl, n_data=100, temperature=0.1)
    assert torch.allclose(cold.loss, nll + 0.1 * kl / 100)
    with pytest.raises(ValueError, match="beta"):
        dubito.negative_elbo(nll, kl, n_data=100, beta=-0.1)
    with pytest.raises(TypeError, match="n_data"):
        dubito.negative_elbo(nll, kl)  # type: ignore[call-arg]


def test_a_joint_prior_over_full_covariance_weights_goes_by_monte_carlo() -> None:
    class Ridge(dubito.WeightPrior):
        def log_prob(self, weights: dict[str, Tensor]) -> Tensor:
            return sum((Normal(0.0, 0.5).log_prob(w).sum() for w in weights.values()), torch.zeros(()))

    for family in (FullCovariance("layer", scale=0.5), Radial(scale=0.5)):
        torch.manual_seed(0)
        joint = dubito.bayesianize(nn.Linear(4, 3), family, prior=Ridge())
        single = dubito.bayesianize(copy.deepcopy(joint.module), family, prior=Normal(0.0, 0.5))
        with torch.no_grad():
            for q in single.posteriors():  # the same q, whose start depends on its own prior
                (twin,) = (p for p in joint.posteriors() if p.slots[0].name == q.slots[0].name)
                factor = float(
                    (twin.variance()[q.slots[0].name] / q.variance()[q.slots[0].name]).mean().sqrt()
                )
                q.rescale_spread_(factor)
            value = joint.kl(samples=600, generator=torch.Generator().manual_seed(1))
        assert float(value) == pytest.approx(float(single.kl().detach()), rel=0.05)
