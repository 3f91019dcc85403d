import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dubito
from dubito.posthoc.temperature import TemperatureScaling, Tempered


class Scaled(nn.Module):
    """Logits that are calibrated, times a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def calibrated(n: int = 20_000, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Logits, and labels drawn from their softmax."""
    generator = torch.Generator().manual_seed(0)
    logits = 2.0 * torch.randn(n, classes, generator=generator)
    return logits, torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def batches(x: Tensor, y: Tensor, size: int = 1000) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def bayesian(seed: int = 0) -> tuple[dubito.BayesianModule, Tensor, Tensor]:
    """A network with dropout whose draws differ, and data."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
    x = torch.randn(300, 5)
    y = torch.multinomial((x @ torch.randn(5, 3)).softmax(-1), 1)[:, 0]
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(net(x[:100]), y[:100]).backward()
        optimizer.step()
    net.zero_grad(set_to_none=True)
    families = {"3": dubito.LowRankCovariance(4, scale=2.0)}
    return dubito.bayesianize(net, families, likelihood=dubito.Categorical()), x, y


def test_recovers_the_temperature_that_spoilt_the_logits() -> None:
    x, y = calibrated()
    network = Scaled(2.5).eval()
    scaling = TemperatureScaling.fit(network, batches(x, y), likelihood=dubito.Categorical())
    assert scaling.temperature == pytest.approx(2.5, rel=0.03)
    assert scaling.nll_after < scaling.nll_before
    assert not scaling.at_bound
    predictive = scaling.predict(x[:7])
    torch.testing.assert_close(predictive.probs, (2.5 * x[:7] / scaling.temperature).softmax(-1))
    assert not network.training
    assert scaling.predict(batches(x, y)).probs.shape == x.shape


def test_binary_and_dense_classification_too() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 2.0 * torch.randn(20_000, 1, generator=generator)
    y = torch.bernoulli(logits.sigmoid(), generator=generator)
    scaling = TemperatureScaling.fit(Scaled(2.5), batches(logits, y), likelihood=dubito.Bernoulli())
    assert scaling.temperature == pytest.approx(2.5, rel=0.05)
    x, labels = calibrated()
    images, targets = x.reshape(200, 10, 10, 4).movedim(-1, 1), labels.reshape(200, 10, 10)
    dense = TemperatureScaling.fit(Scaled(2.5), [(images, targets)], likelihood=dubito.Categorical(dim=-3))
    assert dense.temperature == pytest.approx(2.5, rel=0.03)


def averaged_nll(logits: Tensor, y: Tensor, temperature: float) -> float:
    log_probs = (logits.double() / temperature).log_softmax(-1)
    return float(F.nll_loss(log_probs.logsumexp(0) - math.log(len(logits)), y))


def test_calibrates_the_averaged_predictive_under_fixed_draws_and_scales_every_draw() -> None:
    bayes, x, y = bayesian()
    scaling = TemperatureScaling.fit(
        bayes, batches(x, y, 100), samples=16, generator=torch.Generator().manual_seed(3)
    )
    draws = bayes.draw(16, torch.Generator().manual_seed(3))
    bayes.module.eval()
    logits = bayes.outputs(x, draws=draws).detach()
    grid = torch.linspace(math.log(0.3), math.log(5.0), 600).exp().tolist()
    best = min(grid, key=lambda t: averaged_nll(logits, y, t))
    assert scaling.temperature == pytest.approx(best, rel=0.01)
    assert scaling.nll_before == pytest.approx(averaged_nll(logits, y, 1.0), rel=1e-6)
    assert scaling.nll_after == pytest.approx(averaged_nll(logits, y, scaling.temperature), rel=1e-6)
    single = min(grid, key=lambda t: sum(averaged_nll(one[None], y, t) for one in logits))
    assert abs(math.log(single / best)) > 0.1  # what calibrating single draws would have found
    predictive = scaling.predict(x, draws=draws)
    expected = (logits / scaling.temperature).softmax(-1)
    torch.testing.assert_close(predictive.draws, expected)
    torch.testing.assert_close(predictive.probs, expected.mean(0))


def test_the_network_its_flags_and_the_global_state_stay_as_they_are() -> None:
    bayes, x, y = bayesian()
    bayes.train()
    bayes.module[0].eval()
    flags = [m.training for m in bayes.modules()]
    before, likelihood = copy.deepcopy(bayes.state_dict()), bayes.likelihood
    state = torch.get_rng_state()
    scaling = TemperatureScaling.fit(bayes, batches(x, y), generator=torch.Generator().manual_seed(0))
    scaling.predict(x, generator=torch.Generator().manual_seed(0))
    assert torch.equal(state, torch.get_rng_state())
    assert [m.training for m in bayes.modules()] == flags
    assert bayes.likelihood is likelihood
    assert all(torch.equal(before[n], t) for n, t in bayes.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in bayes.parameters())
    with pytest.raises(RuntimeError):
        scaling.predict(torch.randn(3, 99))
    assert bayes.likelihood is likelihood


def test_never_worse_than_no_scaling_and_bounded_on_separable_data() -> None:
    x, y = calibrated(500)
    for factor in (0.2, 1.0, 30.0):
        scaling = TemperatureScaling.fit(Scaled(factor), batches(x, y, 100), likelihood=dubito.Categorical())
        assert scaling.nll_after <= scaling.nll_before
    separable = TemperatureScaling.fit(Scaled(1.0), [(x, x.argmax(-1))], likelihood=dubito.Categorical())
    assert separable.temperature == pytest.approx(0.05, rel=1e-3)
    assert separable.at_bound
    for seed in range(3):
        bayes, inputs, labels = bayesian(seed)
        scaling = TemperatureScaling.fit(bayes, [(inputs, labels)], samples=4)
        assert scaling.nll_after <= scaling.nll_before


def test_the_tempered_likelihood_can_become_the_network_s_own_and_be_fitted_again() -> None:
    bayes, x, y = bayesian()
    generator = torch.Generator().manual_seed(3)
    scaling = TemperatureScaling.fit(bayes, [(x, y)], generator=generator.manual_seed(3))
    expected = scaling.predict(x, generator=generator.manual_seed(1)).probs
    bayes.likelihood = scaling.likelihood
    torch.testing.assert_close(bayes.predict(x, generator=generator.manual_seed(1)).probs, expected)
    again = TemperatureScaling.fit(bayes, [(x, y)], generator=generator.manual_seed(3))
    assert again.temperature == pytest.approx(scaling.temperature)
    assert again.nll_before == pytest.approx(scaling.nll_before)


def test_copies_pickles_and_loads() -> None:
    bayes, x, y = bayesian()
    scaling = TemperatureScaling.fit(bayes, [(x, y)])
    for twin in (copy.deepcopy(scaling), pickle.loads(pickle.dumps(scaling))):
        assert twin.temperature == scaling.temperature
    fresh = Tempered(dubito.Categorical())
    fresh.load_state_dict(scaling.likelihood.state_dict())
    assert fresh.temperature == scaling.temperature


def test_bad_input_is_refused() -> None:
    x, y = calibrated(100)
    likelihood = dubito.Categorical()
    with pytest.raises(ValueError, match=r"probabilities already.*softmax"):
        TemperatureScaling.fit(nn.Softmax(-1), [(x, y)], likelihood=likelihood)
    with pytest.raises(ValueError, match=r"probabilities already.*sigmoid"):
        TemperatureScaling.fit(
            nn.Sigmoid(), [(x[:, :1], (y > 1).float()[:, None])], likelihood=dubito.Bernoulli()
        )
    TemperatureScaling.fit(nn.LogSoftmax(-1), [(x, y)], likelihood=likelihood)  # logits of a kind
    with pytest.raises(ValueError, match="no likelihood"):
        TemperatureScaling.fit(Scaled(1.0), [(x, y)])
    with pytest.raises(TypeError, match="Gaussian has none of"):
        TemperatureScaling.fit(Scaled(1.0), [(x, x)], likelihood=dubito.Gaussian())
    with pytest.raises(ValueError, match="loader is empty"):
        TemperatureScaling.fit(Scaled(1.0), [], likelihood=likelihood)
    with pytest.raises(ValueError, match="must hold 1"):
        TemperatureScaling.fit(Scaled(1.0), [(x, y)], likelihood=likelihood, bounds=(2.0, 3.0))
    with pytest.raises(ValueError, match="label"):
        TemperatureScaling.fit(Scaled(1.0), [(x, y + 4)], likelihood=likelihood)
    with pytest.raises(ValueError, match="NaN"):
        TemperatureScaling.fit(Scaled(float("inf")), [(torch.zeros(3, 4), y[:3])], likelihood=likelihood)
    with pytest.raises(TypeError, match=r"\(inputs, target\)"):
        TemperatureScaling.fit(Scaled(1.0), [x], likelihood=likelihood)
