"""Local reparametrisation and flipout: same law, less variance, and what happens where they have no rule."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dubito
from dubito import DubitoWarning, LowRankFactors, MeanField
from dubito.weights.drawn_gaussian import FlipoutWeight, LocalWeight, signs

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "conv1d": (lambda: nn.Conv1d(2, 4, 3, groups=2), (2, 6)),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3, padding=1, stride=2), (2, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2), (1, 3, 3, 3)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(2, 3, 2, stride=2), (2, 3, 3)),
}


def layer(name: str, estimator: str) -> tuple[dubito.BayesianModule, Tensor]:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    bayes = dubito.bayesianize(make(), MeanField(scale=0.5, estimator=estimator))  # type: ignore[arg-type]
    return bayes, torch.randn(2, *shape)


@pytest.mark.parametrize("estimator", ["local", "flipout"])
@pytest.mark.parametrize("name", list(LAYERS))
def test_t14_outputs_have_the_moments_of_drawn_weights(name: str, estimator: str) -> None:
    """For each output alone: mean f(x; m), variance f(x²; s²); pre-activations, not inputs, are drawn."""
    bayes, x = layer(name, estimator)
    module = bayes.module
    with torch.no_grad():
        y = bayes.outputs(x, samples=6000)
        variances = {n: v for q in bayes.posteriors() for n, v in q.variance().items()}
        expected = torch.func.functional_call(module, variances, (x.square(),))
        spread = expected.sqrt()
        assert bool(((y.mean(0) - module(x)).abs() < 5.5 * spread / 6000**0.5 + 1e-6).all())
        assert torch.allclose(y.var(0), expected, rtol=0.15)


@pytest.mark.parametrize("estimator", ["local", "flipout", "weights"])
def test_t16_examples_share_a_draw_under_weights_only(estimator: str) -> None:
    """Function draws correlate equal inputs fully; the estimators do not, and say so: `consistent` is False."""
    torch.manual_seed(0)
    family = MeanField(scale=0.5, estimator=estimator)  # type: ignore[arg-type]
    bayes = dubito.bayesianize(nn.Linear(4, 2), family, likelihood=dubito.Gaussian())
    x = torch.randn(1, 4).expand(2, 4)
    with torch.no_grad():
        y = bayes.outputs(x, samples=2000)[:, :, 0]
    correlation = float(torch.corrcoef(y.T)[0, 1])
    assert correlation == pytest.approx(1.0, abs=1e-5) if estimator == "weights" else abs(correlation) < 0.1
    assert bayes.predict(x, samples=4).consistent
    assert bayes.predict(x, samples=4, estimator=estimator).consistent == (estimator == "weights")
    with torch.no_grad():
        draw = bayes.sample()(x)
    assert torch.equal(draw[0], draw[1])


def test_t15_no_floor_under_a_tiny_variance_and_no_infinite_gradient_at_none() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    for log_sd in (-16.0, -60.0):
        bayes = dubito.bayesianize(nn.Linear(8, 4), MeanField(estimator="local"))
        with torch.no_grad():
            for q in bayes.posteriors():
                q.spread.fill_(log_sd)  # type: ignore[operator, union-attr]
        y = bayes(x)
        away = (y - bayes.module(x)).abs().max()
        assert float(away.detach()) < 1e-5  # sqrt(var + 1e-8) would make it 1e-4
        y.square().sum().backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in bayes.parameters())
    sd = torch.zeros(2, 3, requires_grad=True)
    F.linear(torch.zeros(1, 3), LocalWeight.of(torch.zeros(2, 3), sd)).sum().backward()
    assert sd.grad is not None
    assert bool(sd.grad.isfinite().all())


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("estimator", ["weights", "local", "flipout"])
def test_mixed_precision_is_finite_wherever_float32_is(half: torch.dtype, estimator: str) -> None:
    """Inputs of 500 square to 2.5e5, beyond float16; standard deviations of 4e-5 square to 2e-9, below it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    bayes = dubito.bayesianize(net, MeanField(scale=1e-4, estimator=estimator))  # type: ignore[arg-type]
    x = 500 * torch.randn(4, 6)
    with torch.autocast("cpu", dtype=half):
        y = bayes(x)
        kl = bayes.kl()
        nll = 1e-3 * y.float().square().mean()  # a loss scale that keeps gradients inside float16
    assert kl.dtype == torch.float32
    assert bool(y.isfinite().all())
    of_data = torch.autograd.grad(nll, list(bayes.parameters()), retain_graph=True)
    assert all(
        bool(g.isfinite().all()) and float(g.abs().max()) > 0 for g in of_data
    )  # nor has any underflowed
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(kl, list(bayes.parameters())))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_the_variance_path_is_computed_in_float32(half: torch.dtype) -> None:
    """In half-precision modules and under autocast alike: the drawn deviation is right to half precision."""
    torch.manual_seed(0)
    x = 300 * torch.ones(2000, 16)
    module = nn.Linear(16, 1)
    exact = 300 * 0.001 * 4.0
    for converted in (False, True):
        bayes = dubito.bayesianize(copy.deepcopy(module), {"weight": MeanField(estimator="local")})
        with torch.no_grad():
            bayes.module.weight.zero_()
            next(iter(bayes.posteriors())).spread.fill_(-6.907755)  # type: ignore[operator, union-attr]
            if converted:
                y = bayes.to(half)(x.to(half))
            else:
                with torch.autocast("cpu", dtype=half):
                    y = bayes(x)
        assert y.dtype == half
        assert float(y.float().std()) == pytest.approx(exact, rel=0.08)


class Bilinear(nn.Module):
    """A linear layer, and an operator that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Bilinear(3, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        output: Tensor = self.second(hidden, hidden)
        return output


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_an_operator_without_a_rule_is_named_once(estimator: str) -> None:
    torch.manual_seed(0)
    bayes = dubito.bayesianize(Bilinear(), MeanField(scale=0.5, estimator=estimator))  # type: ignore[arg-type]
    x = torch.randn(1, 4).expand(2, 4)
    with pytest.warns(DubitoWarning) as record:
        bayes(x).sum().backward()
    said = [str(w.message) for w in record if issubclass(w.category, DubitoWarning)]
    assert len(said) == 1
    assert f'estimator="{estimator}"' in said[0]
    assert "bilinear" in said[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bayes(x)
        bayes.outputs(x, samples=3)
    other = dubito.bayesianize(Bilinear(), MeanField(estimator=estimator))  # type: ignore[arg-type]
    with pytest.warns(DubitoWarning, match="bilinear"):  # another network is told again
        other(x)


def test_the_fallback_is_one_draw_shared_by_the_batch() -> None:
    torch.manual_seed(0)
    bayes = dubito.bayesianize(nn.Bilinear(3, 3, 2), MeanField(scale=0.5, estimator="local"))
    x = torch.randn(1, 3).expand(2, 3)
    with pytest.warns(DubitoWarning, match="bilinear"):
        y = bayes(x, x)
    assert torch.equal(y[0], y[1])


def test_a_recurrent_layer_is_named_and_takes_weights() -> None:
    bayes = dubito.bayesianize(nn.LSTM(3, 4), MeanField(estimator="local"))
    with pytest.warns(DubitoWarning, match="LSTM") as record:
        bayes(torch.randn(5, 2, 3))
    assert len(record) == 1


def test_operators_with_rules_say_nothing() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, 2, bias=False)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for estimator in ("local", "flipout"):
            for family in (
                MeanField(estimator=estimator),
                LowRankFactors(rank=1, init="svd", estimator=estimator),
            ):  # type: ignore[arg-type]
                bayes = dubito.bayesianize(copy.deepcopy(net), family)
                bayes(torch.randn(2, 1, 4, 4))
                bayes.outputs(torch.randn(2, 1, 4, 4), samples=3)
        plain = dubito.bayesianize(copy.deepcopy(net), LowRankFactors(rank=1, init="svd"))
        plain(torch.randn(2, 1, 4, 4))
        _ = dubito.bayesianize(Bilinear(), MeanField())(torch.randn(2, 4))  # "weights" has nothing to lose


def test_factors_name_the_operator_that_has_no_rule_for_them() -> None:
    bayes = dubito.bayesianize(
        nn.Bilinear(4, 4, 3), {"weight": LowRankFactors(rank=1, init="svd", estimator="local")}
    )
    with pytest.warns(DubitoWarning, match="bilinear") as record:
        bayes(torch.randn(2, 4), torch.randn(2, 4))
    assert len(record) == 1


def test_local_is_refused_on_tied_and_on_reused_weights() -> None:
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="tied"):
        dubito.bayesianize(tied, MeanField(estimator="local"))
    shared = nn.Linear(3, 3)
    reused = dubito.bayesianize(nn.Sequential(shared, nn.ReLU(), shared), MeanField(estimator="local"))
    with pytest.raises(RuntimeError, match='estimator="weights"'):
        reused(torch.randn(2, 3))


def test_t30_flipout_perturbs_by_the_deviation_alone() -> None:
    """Flipping the signs of the whole weight would give outputs of the weight's own size."""
    torch.manual_seed(0)
    bayes = dubito.bayesianize(nn.Linear(20, 10), MeanField(scale=0.01, estimator="flipout"))
    x = torch.randn(50, 20)
    with torch.no_grad():
        y, mean = bayes.outputs(x, samples=200), bayes.module(x)
        sd = {n: v for q in bayes.posteriors() for n, v in q.variance().items()}
        expected = torch.func.functional_call(bayes.module, sd, (x.square(),)).sqrt()
    assert torch.allclose((y - mean).square().mean((0, 1)).sqrt(), expected.square().mean(0).sqrt(), rtol=0.1)


def test_t32_flipout_keeps_the_correlation_over_pixels_and_local_does_not() -> None:
    """A shared kernel moves equal patches together; signs are for each example and channel, never each pixel."""
    torch.manual_seed(0)
    x = torch.ones(2, 1, 4, 4)
    correlations = {}
    for estimator in ("weights", "flipout", "local"):
        family = MeanField(scale=0.5, estimator=estimator)  # type: ignore[arg-type]
        bayes = dubito.bayesianize(nn.Conv2d(1, 1, 2), family)
        with torch.no_grad():
            y = bayes.outputs(x, samples=3000) - bayes.module(x)
        correlations[estimator] = float(
            torch.corrcoef(torch.stack((y[:, 0, 0, 0, 0], y[:, 0, 0, 2, 2])))[0, 1]
        )
    assert correlations["weights"] == pytest.approx(1.0, abs=1e-4)
    assert correlations["flipout"] == pytest.approx(1.0, abs=1e-4)
    assert abs(correlations["local"]) < 0.08


def test_t38_signs_are_fair_and_nothing_else() -> None:
    torch.manual_seed(0)
    drawn = signs((100, 100), torch.zeros(()))
    assert set(drawn.unique().tolist()) == {-1.0, 1.0}
    assert abs(float(drawn.mean())) < 0.04


def gradients(estimator: str, batch: int, draws: int) -> tuple[Tensor, Tensor]:
    """(mean, trace of the variance) of the gradient in log s, over draws, on a fixed batch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(50, 50), nn.ReLU())
    family = MeanField(scale=0.3, estimator=estimator)  # type: ignore[arg-type]
    bayes = dubito.bayesianize(net, {"0.weight": family})
    x = torch.randn(batch, 50).relu()
    y = (x @ torch.randn(50, 50)).argmax(
        1
    )  # examples that agree: flipout takes away what they have in common
    (posterior,) = bayes.posteriors()
    torch.manual_seed(1)
    made = []
    for _ in range(draws):
        loss = F.cross_entropy(bayes(x), y)
        made.append(torch.autograd.grad(loss, posterior.spread)[0].reshape(-1))  # type: ignore[arg-type]
    stacked = torch.stack(made)
    return stacked.mean(0), stacked.var(0).sum()


def test_gradient_variance_of_the_estimators_and_their_common_mean() -> None:
    """Reference layer, batch 128: local ≥ 15 times less in the spread's gradient, flipout in between."""
    means, variances = {}, {}
    for estimator in ("weights", "flipout", "local"):
        means[estimator], variances[estimator] = gradients(estimator, 128, 250)
    assert float(variances["weights"] / variances["local"]) > 15
    assert float(variances["weights"] / variances["flipout"]) > 1.5
    assert float(variances["flipout"] / variances["local"]) > 5
    for estimator in ("flipout", "local"):
        difference = (means[estimator] - means["weights"]).square().sum()
        expected = (variances[estimator] + variances["weights"]) / 250
        assert float(difference / expected) == pytest.approx(1.0, abs=0.3)


def test_drawn_weights_name_their_estimator() -> None:
    mean, sd = torch.zeros(2, 2), torch.ones(2, 2)
    assert LocalWeight.of(mean, sd).estimator == "local"
    assert FlipoutWeight.of(mean, sd).estimator == "flipout"


def factor_gradients(estimator: Any, draws: int) -> tuple[Tensor, Tensor]:
    """As `gradients`, in log s of both factors, batch 128."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(50, 50), nn.ReLU())
    family = dubito.LowRankFactors(5, init="random", scale=0.3, estimator=estimator)
    bayes = dubito.bayesianize(net, {"0.weight": family})
    x = torch.randn(128, 50).relu()
    y = (x @ torch.randn(50, 50)).argmax(1)
    (posterior,) = bayes.posteriors()
    spreads = list(posterior.spread_parameters())
    torch.manual_seed(1)
    made = [torch.autograd.grad(F.cross_entropy(bayes(x), y), spreads) for _ in range(draws)]
    stacked = torch.stack([torch.cat([part.reshape(-1) for part in parts]) for parts in made])
    return stacked.mean(0), stacked.var(0).sum()


def test_gradient_variance_of_two_stages_and_of_flipout_on_both_factors() -> None:
    """Two stages: the reference's factor 15, to within 30 %; flipout at least 70 % of its 2.2; one common mean."""
    found = {estimator: factor_gradients(estimator, 200) for estimator in ("weights", "flipout", "local")}
    mean, variance = found["weights"]
    assert float(variance / found["local"][1]) == pytest.approx(15.0, rel=0.3)
    assert float(variance / found["flipout"][1]) > 0.7 * 2.2
    for estimator in ("flipout", "local"):
        difference = (found[estimator][0] - mean).square().sum()
        assert float(difference / ((found[estimator][1] + variance) / 200)) == pytest.approx(1.0, abs=0.3)
