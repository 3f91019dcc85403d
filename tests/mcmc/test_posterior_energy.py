"""What chains move on: energies against their definition, whitening, what is sampled, and what is refused."""

import copy
import warnings
from typing import Any

import pytest
import torch
from conjugate import everything_of, regression
from torch import Tensor, nn
from torch.distributions import Laplace, Normal
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito.mcmc import HMCConfig, hmc
from dubito.mcmc.potential import Potential
from dubito.priors import WeightPrior

QUICK: dict[str, Any] = {"samples": 8, "warmup": 6, "chains": 2, "leapfrog_steps": 3}


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """So few draws have not mixed, and it is said every time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="R-hat of the log density", category=dubito.DubitoWarning)
        yield


class Correlated(WeightPrior):
    """A Gaussian over all weights of a linear model, with a dense covariance; one draw at a time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.register_buffer("mean", torch.randn(3, dtype=torch.float64))
        self.register_buffer("factor", torch.randn(3, 3, dtype=torch.float64).tril() + 2 * torch.eye(3))

    def log_prob(self, weights: dict[str, Tensor]) -> Tensor:
        flat = torch.cat([weights["weight"].reshape(2), weights["bias"].reshape(1)])
        return torch.distributions.MultivariateNormal(self.mean, scale_tril=self.factor).log_prob(flat)

    def whiten(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        flat = torch.cat([weights["weight"].reshape(2), weights["bias"].reshape(1)])
        z = torch.linalg.solve_triangular(self.factor, (flat - self.mean).unsqueeze(-1), upper=False)
        return {"weight": z[:2].reshape(1, 2), "bias": z[2]}

    def unwhiten(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        flat = torch.cat([weights["weight"].reshape(2), weights["bias"].reshape(1)])
        w = self.mean + self.factor @ flat
        return {"weight": w[:2].reshape(1, 2), "bias": w[2:]}


class OnlyDensity(WeightPrior):
    """A joint prior that cannot whiten."""

    def log_prob(self, weights: dict[str, Tensor]) -> Tensor:
        return -sum((w.square().sum() ** 2 for w in weights.values()), torch.zeros(()))


def no_data() -> tuple[Tensor, Tensor]:
    return torch.zeros(0, 2), torch.zeros(0, 1)


# ------------------------------------------------------------------------------------------------------ energies


class Tied(nn.Module):
    """One weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x).tanh())
        return result


class Recurrent(nn.Module):
    """An LSTM, which has no batching rule."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(1, 2, batch_first=True), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.rnn(x.unsqueeze(-1))[0][:, -1])
        return result


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.BatchNorm1d(3), nn.Linear(3, 2)).eval(),
        Tied,
        Recurrent,
    ],
    ids=["batch norm", "tied", "recurrent"],
)
@pytest.mark.parametrize("prior", ["fan_in", Laplace(0.0, 0.7)], ids=["whitened", "as it is"])
def test_energy_is_its_definition_for_one_chain_and_for_many(make: Any, prior: Any) -> None:
    torch.manual_seed(0)
    net, x, y = make(), torch.randn(7, 2), torch.randint(0, 2, (7,))
    potential = Potential(net, prior, x, y, dubito.Categorical(), HMCConfig())
    z = torch.randn(3, potential.coordinates.size, dtype=torch.float64)
    energy, gradient = potential.energy_and_gradient(z)
    weights = potential.coordinates.weights(z)
    plain = copy.deepcopy(net).double()
    for chain in range(3):
        own = {name: w[chain] for name, w in weights.items()}
        outputs = torch.func.functional_call(plain, own, (x.double(),), tie_weights=True)
        nll = torch.nn.functional.cross_entropy(outputs, y, reduction="sum")
        base = Normal(0.0, 1.0) if prior == "fan_in" else prior
        expected = nll - base.log_prob(z[chain]).sum()
        torch.testing.assert_close(energy[chain], expected, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(potential.energy(z[chain]), energy[chain])
        step = 1e-5 * torch.randn(z.shape[1], dtype=torch.float64)
        ahead, behind = potential.energy(z[chain] + step), potential.energy(z[chain] - step)
        torch.testing.assert_close((ahead - behind) / 2, gradient[chain] @ step, rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(potential.coordinates.of_weights(weights), z)


def test_whitened_and_plain_energies_differ_by_a_constant() -> None:
    net, x, y = regression()
    for prior in (Normal(0.5, 2.0), Correlated()):
        white = Potential(net, prior, x, y, dubito.Gaussian(), HMCConfig(whiten=True))
        plain = Potential(net, prior, x, y, dubito.Gaussian(), HMCConfig(whiten=False))
        weights = plain.coordinates.weights(torch.randn(4, 3, dtype=torch.float64))
        gap = white.energy(white.coordinates.of_weights(weights)) - plain.energy(
            plain.coordinates.of_weights(weights)
        )
        torch.testing.assert_close(gap, gap[:1].expand(4))


def test_convolutions_and_single_precision() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2))
    x, y = torch.randn(5, 1, 6), torch.randint(0, 2, (5,))
    found = [
        hmc(net, "fan_in", x, y, dubito.Categorical(), dtype=dtype, init="module", step_size=0.1, warmup=0,
            samples=4, chains=2, leapfrog_steps=3, generator=torch.Generator().manual_seed(0))
        for dtype in (torch.float32, torch.float64)
    ]  # fmt: skip
    assert [r.draws["0.weight"].dtype for r in found] == [torch.float32, torch.float64]
    assert bool(found[0].log_density.isfinite().all())
    assert float(found[1].acceptance.min()) > 0.9


def test_priors_by_pattern_and_frozen_parameters() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    net[0].bias.requires_grad_(False)
    x, y = torch.randn(5, 2), torch.randn(5, 1)
    prior = {"0": Laplace(0.0, 1.0), "rest": Normal(1.0, 0.1)}
    result = hmc(net, prior, x, y, dubito.Gaussian(), **QUICK)
    assert list(result.draws) == ["0.weight", "2.weight", "2.bias"]
    bayes = result.bayesian()
    torch.testing.assert_close(bayes.module[0].bias, net[0].bias)
    names = [name for name, _ in net.named_parameters()]
    with pytest.raises(ValueError, match=r"none for '2\.weight', '2\.bias'.*rest"):
        hmc(net, {"0": "fan_in"}, x, y, dubito.Gaussian(), **QUICK)
    with pytest.raises(ValueError, match="two patterns"):
        hmc(net, {"0": "fan_in", "*.weight": "fan_in", "rest": "fan_in"}, x, y, dubito.Gaussian(), **QUICK)
    assert names == [name for name, _ in net.named_parameters()]


# ------------------------------------------------------------------------------------------------------- whitening


def test_whitening_is_an_invariance() -> None:
    """Without data, chains under a correlated prior are those under a standard one, mapped: the same random numbers."""
    net, _, _ = regression()
    x, y = no_data()
    options: dict[str, Any] = {"samples": 20, "warmup": 5, "chains": 3, "leapfrog_steps": 3}
    prior = Correlated()
    found, standard = (
        hmc(net, p, x, y, dubito.Gaussian(), generator=torch.Generator().manual_seed(2), **options)
        for p in (prior, Normal(0.0, 1.0))
    )
    for chain in range(3):
        for draw in range(20):
            white = prior.whiten({name: value[chain, draw] for name, value in found.draws.items()})
            for name, value in standard.draws.items():
                torch.testing.assert_close(white[name], value[chain, draw], rtol=0, atol=1e-9)


def test_a_correlated_prior_is_sampled_where_there_are_no_data() -> None:
    net, _, _ = regression()
    prior = Correlated()
    result = hmc(
        net, prior, *no_data(), dubito.Gaussian(), samples=100, warmup=30, chains=10, leapfrog_steps=3,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    flat = torch.cat([result.draws["weight"].flatten(2), result.draws["bias"]], -1).flatten(0, 1)
    deviation = torch.linalg.solve_triangular(prior.factor, (flat - prior.mean).mT, upper=False)
    assert float(deviation.mean(1).abs().max()) < 0.15
    torch.testing.assert_close(torch.cov(deviation), torch.eye(3).double(), atol=0.2, rtol=0)


def test_a_learned_prior_brings_its_likelihood_and_is_whitened() -> None:
    torch.manual_seed(0)
    process = dubito.BNNProcess(1, 1, (3,), likelihood=dubito.Gaussian(0.2))
    prior, net = process.weight_prior(), process.network()
    x = torch.linspace(-1, 1, 6).unsqueeze(-1)
    result = hmc(net, prior, x, x.sin(), **QUICK)
    assert set(result.draws) == {name for name, _ in net.named_parameters()}
    assert float(result.bayesian().likelihood.noise) == pytest.approx(0.2)  # type: ignore[union-attr, arg-type]
    potential = Potential(net, prior, x, x.sin(), None, HMCConfig())
    z = torch.randn(4, potential.coordinates.size, dtype=torch.float64)
    weights = potential.coordinates.weights(z)
    torch.testing.assert_close(
        prior.whiten(weights)["layers.1.weight"], potential.coordinates.split(z)["layers.1.weight"]
    )
    nll = [
        -Normal(
            torch.func.functional_call(net.double(), {n: w[s] for n, w in weights.items()}, (x.double(),)),
            0.2,
        )
        .log_prob(x.double().sin())
        .sum()
        for s in range(4)
    ]
    expected = torch.stack(nll) - Normal(0.0, 1.0).log_prob(z).sum(-1)
    torch.testing.assert_close(potential.energy(z), expected, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------- the user's things


def test_the_module_is_left_exactly_as_it_was() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    x, y = torch.randn(6, 2), torch.randn(6, 1)
    net(x).sum().backward()
    net[0].weight.requires_grad_(False)
    net.eval()
    net[3].register_forward_hook(lambda *_: None)
    likelihood = dubito.Gaussian(0.5, learned=True)
    before, given = everything_of(net), (x.clone(), y.clone())
    with pytest.warns(dubito.DubitoWarning, match="Gaussian would learn have no prior"):
        result = hmc(net, "fan_in", x, y, likelihood, **QUICK)
    bayes = result.bayesian()
    bayes.predict(x, samples=3)
    bayes.rescale_spread_(0.0)
    assert everything_of(net) == before
    assert torch.equal(x, given[0])
    assert torch.equal(y, given[1])
    assert likelihood.log_noise.requires_grad
    assert likelihood.log_noise.grad is None
    everywhere = [list(p.shape) for p in net.parameters()]
    assert everywhere == [[3, 2], [3], [3], [3], [1, 3], [1]]


def test_the_posterior_predicts_the_average_over_the_draws() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    x, y = torch.randn(6, 2), torch.randint(0, 2, (6,))
    result = hmc(net, "fan_in", x, y, dubito.Categorical(), **QUICK)
    new = torch.randn(4, 2)
    outputs = torch.stack(
        [
            torch.func.functional_call(net, {n: w[c, s].float() for n, w in result.draws.items()}, (new,))
            for c in range(2)
            for s in range(8)
        ]
    ).detach()
    torch.testing.assert_close(result.outputs(new), outputs.unflatten(0, (2, 8)))
    expected = outputs.softmax(-1).mean(0)
    torch.testing.assert_close(result.predict(new).probs, expected)
    bayes = result.bayesian()
    assert next(bayes.parameters()).dtype == torch.float32
    torch.testing.assert_close(bayes.predict(new, samples=16).probs, expected)
    batches = DataLoader(TensorDataset(new, torch.zeros(4)), batch_size=3)
    torch.testing.assert_close(result.predict(batches, chunk_size=5).probs, expected)
    first = bayes.draw(16)[0:2]
    torch.testing.assert_close(bayes.outputs(new, draws=first), outputs[[0, 8]])  # one of each chain


# --------------------------------------------------------------------------------------------------------- refusals


def refused(error: type[Exception], message: str, **changed: Any) -> None:
    net, x, y = regression()
    given: dict[str, Any] = {
        "module": net,
        "prior": "fan_in",
        "x": x,
        "y": y,
        "likelihood": dubito.Gaussian(),
    }
    with pytest.raises(error, match=message):
        hmc(**(given | QUICK | changed))


def test_data_that_do_not_do() -> None:
    _, x, y = regression()
    bad = x.clone()
    bad[3, 1] = torch.nan
    refused(ValueError, "x holds 1 NaN or infinite of 60", x=bad)
    refused(ValueError, "y", y=y * torch.nan)
    refused(ValueError, "shape", y=y[:10])
    refused(TypeError, "Minibatches are not offered", x=DataLoader(TensorDataset(x, y)))
    refused(TypeError, "Minibatches are not offered", batch_size=10)
    refused(ValueError, "no likelihood", likelihood=None)


def test_numbers_that_do_not_do() -> None:
    refused(ValueError, "samples must be at least 4", samples=0)
    refused(ValueError, "chains must be at least 1", chains=0)
    refused(ValueError, "warmup", warmup=-1)
    refused(ValueError, "leapfrog_steps", leapfrog_steps=0)
    refused(ValueError, "step_size must be given", adapt=False)
    refused(ValueError, "target_accept", target_accept=1.2)
    refused(ValueError, "step_size must be a positive", step_size=-0.1)
    refused(ValueError, "jitter=1.0 must be below 1", jitter=1.0)
    refused(ValueError, "float16", dtype=torch.float16)
    refused(TypeError, "generator must be a torch.Generator", generator=3)
    refused(TypeError, "no argument 'leapfrog'; there are leapfrog_steps", leapfrog=3)


def test_priors_that_cannot_whiten() -> None:
    refused(ValueError, "whiten=True, but the prior Laplace", prior=Laplace(0.0, 1.0), whiten=True)
    refused(ValueError, "OnlyDensity is not known to be Gaussian", prior=OnlyDensity(), whiten=True)
    refused(ValueError, 'init="prior" cannot draw from OnlyDensity', prior=OnlyDensity())
    net, x, y = regression()
    result = hmc(net, OnlyDensity(), x, y, dubito.Gaussian(), init="module", **QUICK)
    assert bool(result.log_density.isfinite().all())


def test_networks_without_a_density() -> None:
    norm = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    refused(ValueError, r"'1' normalises by the batch.*module\.eval\(\)", module=norm)
    norm = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1, track_running_stats=False)).eval()
    refused(ValueError, "keeps no running statistics", module=norm)
    refused(ValueError, "active dropout", module=nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.1)))
    refused(ValueError, "no parameter to sample", module=nn.Linear(2, 1).requires_grad_(False))
    refused(TypeError, "must be an nn.Module", module=torch.relu)
    refused(TypeError, "merge", module=dubito.bayesianize(nn.Linear(2, 1), dubito.MeanField()))


def test_starts_that_do_not_do() -> None:
    refused(ValueError, "init='zero' must be \"prior\"", init="zero")
    refused(ValueError, "init has no weights for 'bias'", init={"weight": torch.zeros(1, 2)})
    refused(
        ValueError,
        r"init\['bias'\] has shape \(3,\)",
        init={"weight": torch.zeros(1, 2), "bias": torch.zeros(3)},
    )
    net, x, y = regression()
    refused(ValueError, r"not finite where chains \[0, 1\] start", x=1e200 * x.double(), y=y.double())
    start = {"weight": torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), "bias": torch.zeros(1)}
    with pytest.warns(dubito.DubitoWarning, match="diverged"):
        result = hmc(
            net,
            "fan_in",
            x,
            y,
            dubito.Gaussian(1e-3),
            init=start,
            samples=4,
            warmup=0,
            chains=2,
            step_size=1e6,
        )  # every proposal is rejected
    assert torch.equal(result.draws["weight"][:, -1].float(), start["weight"])


def test_a_learned_prior_of_another_network() -> None:
    process = dubito.BNNProcess(2, 1, (3,), likelihood=dubito.Gaussian(0.2))
    refused(ValueError, r"does not fit.*process\.network\(\)", prior=process.weight_prior())
