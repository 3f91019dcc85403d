"""Global inducing points: exact where regression is, a density that can be checked, and layers tied to each other."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributions import Laplace, MultivariateNormal, Normal

import dubito
from dubito.weights import GlobalInducingWeights
from dubito.weights.global_inducing import GlobalInducingPosterior


def perceptron(*widths: int, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    modules: list[nn.Module] = []
    for before, after in pairwise(widths):
        modules += [nn.Linear(before, after, bias=bias), nn.Tanh()]
    return nn.Sequential(*modules[:-1]).double()


def made(
    network: nn.Module, points: int = 6, **options: object
) -> tuple[dubito.BayesianModule, GlobalInducingPosterior]:
    generator = torch.Generator().manual_seed(1)
    inputs = network[0].in_features  # type: ignore[index]
    z = torch.randn(points, inputs, generator=generator, dtype=torch.float64)
    options = {"activation": "tanh", **options}
    bayes = dubito.bayesianize(network, GlobalInducingWeights(z, **options), likelihood=dubito.Gaussian(0.3))  # type: ignore[arg-type]
    (posterior,) = bayes.posteriors()
    assert isinstance(posterior, GlobalInducingPosterior)
    with torch.no_grad():
        for layer in posterior.layers:
            layer.values.copy_(torch.randn(layer.values.shape, generator=generator, dtype=torch.float64))
    return bayes, posterior


@pytest.mark.parametrize("bias", [True, False])
def test_with_the_data_as_inducing_points_one_layer_is_exact_regression(bias: bool) -> None:
    bayes, posterior = made(perceptron(2, 1, bias=bias))
    x = posterior.inducing.detach()
    y = (x @ torch.tensor([[1.0], [-1.0]], dtype=torch.float64)) + 0.2
    with torch.no_grad():
        posterior.layers[0].values.copy_(y)
        posterior.layers[0].log_precision.fill_(-2 * math.log(0.3))
    phi = torch.cat((x, torch.ones(6, 1)), dim=1) if bias else x
    width = phi.shape[1]
    fan = 0.5  # both of the layer's parameters have two inputs
    joint = phi @ phi.mT * fan + 0.09 * torch.eye(6, dtype=torch.float64)
    evidence = MultivariateNormal(torch.zeros(6, dtype=torch.float64), joint).log_prob(y[:, 0])
    draws = bayes.draw(4000, torch.Generator().manual_seed(0))
    fit = dubito.Gaussian(0.3).double().log_prob(bayes.outputs(x, draws=draws), y).sum(-1)
    bound = fit.mean() - bayes.kl()
    assert width == 2 + bias
    assert float(bound.detach()) == pytest.approx(float(evidence), abs=5 * float(fit.detach().std()) / 63)


def test_the_kl_is_the_mean_log_ratio_and_log_prob_that_of_the_draws() -> None:
    bayes, posterior = made(perceptron(2, 4, 3, 1))
    weights = posterior.draw((3000,), torch.Generator().manual_seed(0))
    log_p = sum(
        Normal(0.0, slot.shape[-1] ** -0.5 if len(slot.shape) == 2 else _fan(bayes, slot.name) ** -0.5)
        .log_prob(weights[slot.name])
        .flatten(1)
        .sum(1)
        for slot in posterior.slots
    )
    ratio = (posterior.log_prob(weights) - log_p).detach()
    assert ratio.shape == (3000,)
    closed = torch.stack([bayes.kl(samples=50).detach() for _ in range(8)])
    error = math.hypot(float(ratio.std()) / math.sqrt(3000), float(closed.std()) / math.sqrt(8))
    assert abs(float(ratio.mean() - closed.mean())) < 4 * error


def _fan(bayes: dubito.BayesianModule, name: str) -> int:
    owner = bayes.module.get_submodule(name.rpartition(".")[0])
    return int(owner.in_features)  # type: ignore[arg-type]


def test_layers_are_tied_and_many_draws_are_single_draws() -> None:
    _, posterior = made(perceptron(1, 3, 1))
    noises = [posterior.noise(torch.Generator().manual_seed(i)) for i in range(4)]
    together = posterior.components({k: torch.stack([n[k] for n in noises]) for k in noises[0]})
    for index, noise in enumerate(noises):
        alone = posterior.components(noise)
        for key, value in alone.items():
            torch.testing.assert_close(together[key][index], value)
    weights = posterior.draw((20_000,), torch.Generator().manual_seed(0))
    first, last = weights["0.weight"][:, 0, 0], weights["2.weight"][:, 0, 0]
    correlation = torch.corrcoef(torch.stack((first.detach(), last.detach())))[0, 1]
    assert abs(float(correlation)) > 0.05  # 7 standard errors: a product of layers would have none


def test_training_calls_keep_their_kl_and_everything_learns() -> None:
    x = torch.linspace(-2, 2, 30, dtype=torch.float64).unsqueeze(-1)
    y = torch.sin(2 * x)
    family = GlobalInducingWeights(x[::4], activation="tanh")
    bayes = dubito.bayesianize(perceptron(1, 8, 1), family, likelihood=dubito.Gaussian(0.3))
    (posterior,) = bayes.posteriors()
    assert isinstance(posterior, GlobalInducingPosterior)
    optimizer = torch.optim.Adam(bayes.parameters(), lr=0.1)
    losses = []
    bayes.train()
    for _ in range(120):
        loss = bayes.nll(bayes(x), y) + bayes.kl() / 30
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in posterior.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-20:]) < 0.6 * sum(losses[:20])
    predictive = bayes.predict(x, samples=20)
    assert float((predictive.mean - y).square().mean()) < 0.25  # half of what predicting zero costs
    torch.manual_seed(3)
    bayes(x)
    torch.manual_seed(4)
    kept = bayes.kl()
    torch.manual_seed(3)
    noise = posterior.noise()
    _, along = posterior._drawn(noise, with_kl=True)
    torch.testing.assert_close(kept, sum(along))


def test_state_and_copies() -> None:
    bayes, posterior = made(perceptron(1, 3, 1))
    other, _ = made(perceptron(1, 3, 1), precision=7.0)
    other.load_state_dict(bayes.state_dict())
    draws = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    x = torch.randn(4, 1, dtype=torch.float64)
    torch.testing.assert_close(bayes.sample(draws[0])(x), other.sample(draws[1])(x))
    assert list(bayes.module.parameters()) == []
    assert posterior.inducing.requires_grad


def test_what_has_no_closed_form_says_so() -> None:
    bayes, posterior = made(perceptron(1, 3, 1))
    for ask in (
        bayes.merge,
        posterior.variance,
        lambda: bayes.kl("closed"),
        lambda: bayes.rescale_spread_(0.5),
    ):
        with pytest.raises(dubito.CapabilityError):
            ask()
    bayes.eval()
    with pytest.raises(dubito.CapabilityError, match=r"bayes\.sample"):
        bayes(torch.zeros(1, 1).double())


@pytest.mark.parametrize(
    ("network", "options", "said"),
    [
        (nn.Sequential(nn.Conv1d(1, 2, 1)), {}, "chains of nn.Linear"),
        (nn.Sequential(nn.Linear(2, 3), nn.Linear(4, 1)), {}, "takes 4 inputs, but 3 come out"),
        (nn.Sequential(nn.Linear(5, 1)), {}, "takes 5 inputs, but 2 come from inducing"),
        (nn.Sequential(nn.Linear(2, 1)), {"activation": None}, "activation"),
        (nn.Sequential(nn.Linear(2, 1)), {"prior": Laplace(0.0, 1.0)}, "not Gaussian"),
    ],
)
def test_networks_and_priors_that_do_not_fit_are_refused(
    network: nn.Module, options: dict[str, object], said: str
) -> None:
    family = GlobalInducingWeights(torch.zeros(3, 2), **{"activation": "tanh", **options})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=said):
        dubito.bayesianize(network, family)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"inducing": torch.zeros(3)}, "matrix"),
        ({"inducing": torch.full((1, 1), float("nan"))}, "NaN"),
        ({"inducing": torch.zeros(1, 1), "activation": "sine"}, "activation='sine'"),
        ({"inducing": torch.zeros(1, 1), "precision": 0.0}, "precision"),
    ],
)
def test_settings_are_checked(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        GlobalInducingWeights(**options)  # type: ignore[arg-type]


def test_a_learned_prior_brings_its_activation_and_covariances() -> None:
    from dubito.amortised import BNNProcess

    torch.manual_seed(0)
    process = BNNProcess(1, 1, (4, 4), likelihood=dubito.Gaussian(0.2), activation="relu", residual=True)
    with torch.no_grad():
        for layer in process.layers:
            for parameter in layer.prior.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    prior = process.weight_prior()
    bayes = dubito.bayesianize(
        process.network().double(), GlobalInducingWeights(torch.randn(5, 1)), prior=prior
    )
    (posterior,) = bayes.posteriors()
    assert isinstance(posterior, GlobalInducingPosterior)
    assert posterior.activation == "relu"
    assert posterior.residual
    weights = posterior.draw((2000,), torch.Generator().manual_seed(0))
    ratio = (posterior.log_prob(weights) - prior.log_prob(weights)).detach()
    closed = torch.stack([bayes.kl(samples=50).detach() for _ in range(8)])
    error = math.hypot(float(ratio.std()) / math.sqrt(2000), float(closed.std()) / math.sqrt(8))
    assert abs(float(ratio.mean() - closed.mean())) < 4 * error
