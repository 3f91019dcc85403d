from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito.objectives import KLWarmup
from dubito.training import FitConfig, fit


@pytest.fixture
def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 4, generator=generator)
    return TensorDataset(x, (x[:, 0] + x[:, 1] > 0).long())


def network(seed: int = 0, outputs: int = 2) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, outputs))


def bayesian(family: Any = None, seed: int = 0) -> dubito.BayesianModule:
    return dubito.bayesianize(network(seed), family or dubito.MeanField(), likelihood=dubito.Categorical())


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for (name, value), expected in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name


# ---- what is minimised ---------------------------------------------------------------------------------------


def test_fit_is_the_loop_one_would_write(data: TensorDataset) -> None:
    bayes, own = bayesian(), bayesian()
    fit(bayes, DataLoader(data, 16, shuffle=True), epochs=3, lr=0.01, seed=5, diagnostics=False)
    torch.manual_seed(5)
    optimizer = torch.optim.Adam(dubito.parameter_groups(own, lr=0.01))
    for _ in range(3):
        for x, y in DataLoader(data, 16, shuffle=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(own(x), y) + own.kl() / 50
            loss.backward()
            optimizer.step()
    for (name, value), expected in zip(bayes.state_dict().items(), own.state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6, msg=name)


def test_the_expected_loss_is_trained_by_sgd_without_a_kl(data: TensorDataset) -> None:
    family = dubito.LowRankCovariance(rank=3)
    bayes, own = bayesian(family), bayesian(family)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = fit(
            bayes, DataLoader(data, 16), epochs=2, lr=0.05, objective="expected_loss", seed=5, samples=3
        )
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.05, momentum=0.9)
    for _ in range(2):
        for x, y in DataLoader(data, 16):
            optimizer.zero_grad()
            outputs = own.outputs(x, samples=3)
            torch.stack([F.cross_entropy(draw, y) for draw in outputs]).mean().backward()
            optimizer.step()
    for value, expected in zip(bayes.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)
    assert result.column("kl") == [0.0, 0.0]


def test_t05_the_kl_is_divided_by_the_number_of_examples(data: TensorDataset) -> None:
    bayes = bayesian()
    result = fit(bayes, DataLoader(data, 16), epochs=1, lr=1e-9)
    (record,) = result.history
    kl = float(bayes.kl().detach())
    assert result.n_data == 50
    assert record.kl == pytest.approx(kl, rel=1e-4)
    assert record.loss == pytest.approx(record.nll + kl / 50, rel=1e-4)


def test_t05_an_uneven_last_batch_weighs_by_its_size(data: TensorDataset) -> None:
    x, y = data.tensors
    for size in (50, 16, 7):
        net = network().eval()
        net[2] = nn.Identity()
        expected = float(F.cross_entropy(net(x), y).detach())
        result = fit(net, DataLoader(data, size), likelihood=dubito.Categorical(), epochs=1, lr=1e-9)
        assert result.history[0].nll == pytest.approx(expected, rel=1e-5)


def test_t06_several_draws_are_averaged_not_summed(data: TensorDataset) -> None:
    moved = []
    for samples in (1, 64):
        bayes = bayesian(dubito.MeanField(scale=1e-6))
        start = bayes.module[0].weight.detach().clone()
        bayes.module[2].p = 0.0
        fit(
            bayes, DataLoader(data, 50), epochs=1, samples=samples, beta=0.0, diagnostics=False,
            optimizer=lambda groups: torch.optim.SGD(groups, lr=1.0),
        )  # fmt: skip
        moved.append(bayes.module[0].weight.detach() - start)
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-3, atol=1e-5)
    assert float(moved[0].abs().max()) > 1e-3


def test_accumulated_batches_are_one_large_batch(data: TensorDataset) -> None:
    large, small = network().double(), network().double()
    loader = TensorDataset(data.tensors[0].double(), data.tensors[1])
    for net, size, accumulation in ((large, 50, 1), (small, 20, 3)):
        net[2].p = 0.0
        fit(
            net, DataLoader(loader, size), likelihood=dubito.Categorical(), epochs=4, accumulation=accumulation,
            optimizer=lambda groups: torch.optim.SGD(groups, lr=0.5),
        )  # fmt: skip
    for a, b in zip(large.parameters(), small.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_conjugate_linear_regression_is_recovered() -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 3, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64) + 0.5 * torch.randn(
        60, 1, dtype=torch.float64
    )
    net = nn.Linear(3, 1, bias=False).double()
    prior = torch.distributions.Normal(0.0, 1.0)
    bayes = dubito.bayesianize(net, dubito.MeanField(prior=prior), likelihood=dubito.Gaussian(0.5))
    schedule = torch.optim.lr_scheduler.ExponentialLR
    fit(
        bayes, [(x, y)], epochs=600, lr=0.05, samples=8, seed=1, scheduler=lambda o: schedule(o, 0.993),
        progress=False,
    )  # fmt: skip
    precision = x.mT @ x / 0.25 + torch.eye(3, dtype=torch.float64)
    mean = torch.linalg.solve(precision, x.mT @ y / 0.25).squeeze()
    torch.testing.assert_close(net.weight.detach().squeeze(), mean, rtol=0, atol=0.01)
    variance = next(iter(bayes.posteriors())).variance()["weight"].detach().squeeze()
    torch.testing.assert_close(variance, 1 / precision.diagonal(), rtol=0.05, atol=0)


# ---- settings ------------------------------------------------------------------------------------------------


def test_no_gradient_is_left_for_a_loop_that_follows(data: TensorDataset) -> None:
    bayes = dubito.bayesianize(network(), dubito.MeanField(), likelihood=dubito.Categorical())
    fit(bayes, DataLoader(data, 8), epochs=1)
    assert all(p.grad is None for p in bayes.parameters())


def test_options_win_over_the_config(data: TensorDataset) -> None:
    result = fit(bayesian(), DataLoader(data, 25), config=FitConfig(epochs=5, beta=0.1), epochs=2)
    assert len(result.history) == 2
    assert result.history[0].beta == 0.1
    with pytest.raises(TypeError, match="did you mean epochs"):
        fit(bayesian(), DataLoader(data, 25), epoch=2)  # type: ignore[call-arg]


def test_warm_up_is_by_optimizer_step(data: TensorDataset) -> None:
    result = fit(bayesian(), DataLoader(data, 10), epochs=3, beta=KLWarmup(10))
    assert result.column("beta") == pytest.approx([0.4, 0.9, 1.0])  # at steps 4, 9 and 14


def test_clipping_bounds_the_step(data: TensorDataset) -> None:
    net = network()
    before = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    fit(
        net, DataLoader(data, 50), loss=lambda o, y: 1e3 * F.cross_entropy(o, y), epochs=1, clip_norm=0.25,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=1.0),
    )  # fmt: skip
    after = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    assert float((after - before).norm()) == pytest.approx(0.25, rel=1e-4)


@pytest.mark.parametrize(("interval", "steps"), [("step", 10), ("epoch", 2)])
def test_the_scheduler_steps_when_told(data: TensorDataset, interval: Any, steps: int) -> None:
    result = fit(
        bayesian(), DataLoader(data, 10), epochs=2, lr=0.1, scheduler_interval=interval,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    )  # fmt: skip
    expected = 0.1 * 0.9 ** (
        steps if interval == "step" else steps - 1
    )  # recorded before the epoch's own step
    assert result.history[-1].lr == pytest.approx(expected)


def test_a_second_fit_may_have_another_precision(data: TensorDataset) -> None:
    dtypes = set()

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        dtypes.add(outputs.dtype)
        return F.cross_entropy(outputs.float(), y)

    for precision in ("no", "bf16", "no"):
        bayes = bayesian()
        fit(bayes, DataLoader(data, 25), loss=loss, epochs=1, precision=precision)  # type: ignore[arg-type]
        assert all(p.dtype == torch.float32 for p in bayes.parameters())
    assert dtypes == {torch.float32, torch.bfloat16}


def test_batches_of_hugging_face_s_form(data: TensorDataset) -> None:
    class Output(dict[str, Tensor]):
        logits: Tensor

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, input_values: Tensor) -> Output:
            output = Output(logits=self.net(input_values))
            output.logits = output["logits"]
            return output

    batches = [{"input_values": x, "labels": y} for x, y in DataLoader(data, 25)]
    for samples in (1, 2):
        bayes = dubito.bayesianize(Model(), dubito.MeanField(), likelihood=dubito.Categorical())
        result = fit(bayes, batches, batches, epochs=30, lr=0.03, samples=samples, beta=0.01, seed=0)
        assert result.n_data == 50
        assert result.best_validation_nll is not None
        assert result.best_validation_nll < 0.3
    plain = fit(Model(), batches, likelihood=dubito.Categorical(), epochs=30, lr=0.03)
    assert plain.history[-1].nll < 0.3
    assert plain.summary is None


def test_learned_noise_outside_the_model_is_trained_too(data: TensorDataset) -> None:
    x = data.tensors[0]
    likelihood = dubito.Gaussian(1.0, learned=True)
    torch.manual_seed(0)
    y = x[:, :1] + 0.1 * torch.randn(50, 1)
    fit(nn.Linear(4, 1), DataLoader(TensorDataset(x, y), 25), likelihood=likelihood, epochs=150, lr=0.03)
    assert float(likelihood.noise.detach()) == pytest.approx(0.1, rel=0.3)


def test_a_likelihood_given_to_fit_is_kept_by_the_model(data: TensorDataset) -> None:
    bayes = dubito.bayesianize(network(), dubito.MeanField())
    fit(bayes, DataLoader(data, 25), likelihood=dubito.Categorical(), epochs=1)
    assert bayes.predict(data.tensors[0]).probs.shape == (50, 2)


def test_modes_come_back_and_global_randomness_is_left_alone_by_validation(data: TensorDataset) -> None:
    models = []
    for validation in (None, DataLoader(data, 10, shuffle=True)):
        bayes = bayesian().eval()
        bayes.module[2].train()
        fit(bayes, DataLoader(data, 10, shuffle=True), validation, epochs=2, seed=3, restore_best=False)
        assert [m.training for m in (bayes, bayes.module, bayes.module[2])] == [False, False, True]
        models.append(bayes)
    assert_same(*models)


# ---- validation ----------------------------------------------------------------------------------------------


def test_validation_is_the_nll_of_the_averaged_predictive(data: TensorDataset) -> None:
    bayes = bayesian(dubito.MeanField(scale=1.0))
    result = fit(bayes, DataLoader(data, 25), DataLoader(data, 20), epochs=1, validation_samples=16)
    x, y = data.tensors
    draws = bayes.draw(16, torch.Generator().manual_seed(20150705))
    expected = -bayes.predict(x, draws=draws).log_prob(y).mean()
    assert result.history[0].validation_nll == pytest.approx(float(expected), rel=1e-5)
    each = torch.stack([F.cross_entropy(o, y) for o in bayes.eval().outputs(x, draws=draws)]).mean()
    # Jensen: averaging probabilities is not averaging losses
    assert float(expected) < float(each.detach()) - 0.01


def test_validation_at_the_mean(data: TensorDataset) -> None:
    bayes = bayesian()
    result = fit(bayes, DataLoader(data, 25), DataLoader(data, 20), epochs=1, validation_samples=0)
    x, y = data.tensors
    expected = F.cross_entropy(bayes.eval()(x), y)
    assert result.history[0].validation_nll == pytest.approx(float(expected), rel=1e-5)


def test_early_stopping_ends_with_the_best_weights(data: TensorDataset) -> None:
    x, y = data.tensors
    train, other = TensorDataset(x[:10], 1 - y[:10]), TensorDataset(x, y)  # the more it learns, the worse
    models = {}
    for epochs in (1, 50):
        net = network()
        result = fit(
            net, DataLoader(train, 10), DataLoader(other, 50), likelihood=dubito.Categorical(),
            epochs=epochs, lr=0.05, patience=3,
            seed=0,
        )  # fmt: skip
        models[epochs] = net
    assert result.stopped_early
    assert result.best_epoch == 1
    assert len(result.history) == 4
    assert_same(models[50], models[1])


def test_improvements_below_min_delta_do_not_count(data: TensorDataset) -> None:
    result = fit(
        network(), DataLoader(data, 25), DataLoader(data, 25), likelihood=dubito.Categorical(), epochs=20, lr=1e-5,
        patience=2, min_delta=0.1,
    )  # fmt: skip
    assert len(result.history) == 3


# ---- standardised targets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", [dubito.Gaussian(0.1, learned=True), dubito.HeteroscedasticGaussian()])
def test_standardised_targets_are_undone_in_the_predictive(likelihood: dubito.Likelihood) -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 4)
    y = 1000.0 + 50.0 * x[:, :1] + 5.0 * torch.randn(200, 1)
    net = network(outputs=1 if isinstance(likelihood, dubito.Gaussian) else 2)
    bayes = dubito.bayesianize(net, dubito.MeanField(scale=0.01), likelihood=likelihood)
    data = DataLoader(TensorDataset(x, y), 50, shuffle=True)
    result = fit(bayes, data, data, epochs=60, lr=0.01, beta=0.1, standardize_targets=True, seed=0)
    predictive = bayes.predict(x)
    assert float((predictive.mean - y).square().mean().sqrt()) < 15
    assert result.target_scale is not None
    assert float(result.target_scale) == pytest.approx(float(y.std(unbiased=False)), rel=1e-5)
    # the NLL reported is that of the targets as given: that of the predictive, and no less than the noise's entropy
    nll = -float(bayes.predict(x, samples=256).log_prob(y).mean())
    assert result.best_validation_nll == pytest.approx(nll, abs=0.05)
    assert nll > 0.5 * math.log(2 * math.pi * math.e * 25) - 0.3


def test_a_model_with_a_scale_is_trained_on_it() -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 4)
    data = [(x, 7.0 + 3.0 * x[:, :1])]
    bayes = dubito.bayesianize(nn.Linear(4, 1), dubito.MeanField(scale=0.01), likelihood=dubito.Gaussian(0.1))
    fit(bayes, data, epochs=1, standardize_targets=True)
    fit(bayes, data, epochs=300, lr=0.02)
    assert float((bayes.predict(x).mean - data[0][1]).abs().max()) < 0.5


@pytest.mark.parametrize("loss", [True, False])
def test_standardising_is_for_regression(data: TensorDataset, loss: bool) -> None:
    given: dict[str, Any] = {"loss": F.cross_entropy} if loss else {"likelihood": dubito.Categorical()}
    with pytest.raises(ValueError, match="standardize_targets is for Gaussian"):
        fit(network(), DataLoader(data, 10), standardize_targets=True, **given)


# ---- what is said --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "optimizer", "match"),
    [
        (dubito.MeanField(), None, "MeanField on .*collapses to a point"),
        (
            dubito.LowRankCovariance(rank=2),
            lambda groups: torch.optim.Adam(groups, lr=1e-3),
            "Adam rescales.*implicit bias is lost",
        ),
        (
            dubito.LowRankCovariance(rank=2),
            lambda groups: torch.optim.SGD(
                [p for g in groups for p in g["params"]], lr=1e-3, weight_decay=1e-2
            ),
            "weight decay on the variational parameters .*implicit bias is lost",
        ),
    ],
)
def test_what_loses_the_implicit_bias_is_said_once(
    data: TensorDataset, family: Any, optimizer: Any, match: str
) -> None:
    bayes = bayesian(family)
    with pytest.warns(dubito.DubitoWarning, match=match) as caught:
        fit(
            bayes, DataLoader(data, 10), epochs=2, objective="expected_loss", optimizer=optimizer, lr=1e-3,
            diagnostics=False,
        )  # fmt: skip
    assert len(caught) == 1


def test_parameters_that_never_reach_the_optimizer_are_named(data: TensorDataset) -> None:
    bayes = bayesian()
    optimizer = torch.optim.Adam(bayes.module.parameters())  # forgets the spread
    with pytest.warns(dubito.DubitoWarning, match="does not hold posterior"):
        fit(bayes, DataLoader(data, 10), epochs=1, optimizer=optimizer, diagnostics=False)


def test_a_collapse_is_diagnosed() -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 2)
    bayes = dubito.bayesianize(nn.Linear(2, 1), dubito.MeanField(), likelihood=dubito.Gaussian(0.1))
    with pytest.warns(dubito.DubitoWarning) as caught:
        result = fit(
            bayes, [(x, x[:, :1])], epochs=150, objective="expected_loss", samples=32,
            optimizer=lambda groups: torch.optim.Adam(groups, lr=0.1, betas=(0.9, 0.9)),
        )  # fmt: skip
    said = [str(warning.message) for warning in caught]
    assert len(said) == 2  # the combination at the beginning, what came of it at the end
    assert "collapsed spread: in weight, bias" in said[1]
    assert result.warnings == [said[1]]
    assert "collapsed spread" in str(result)


def test_a_healthy_run_says_nothing_and_sums_up(data: TensorDataset) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = fit(bayesian(), DataLoader(data, 10), epochs=5, lr=0.01, seed=0)
    assert result.warnings == []
    assert result.summary is not None
    assert result.summary.kl == pytest.approx(float(result.model.kl().detach()), rel=1e-5)
    assert "5 epochs, 25 steps" in str(result)


def test_progress_is_silent_where_nobody_looks_and_shows_the_parts_apart(
    data: TensorDataset, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(bayesian(), DataLoader(data, 10), epochs=1)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    fit(bayesian(), DataLoader(data, 10), epochs=1, progress=False)
    assert capfd.readouterr() == ("", "")
    fit(bayesian(), DataLoader(data, 10), epochs=1)
    shown = capfd.readouterr().err
    assert all(word in shown for word in ("epoch", "loss", "NLL", "KL"))


def test_warnings_point_at_the_caller(data: TensorDataset) -> None:
    bayes = bayesian()
    optimizer = torch.optim.Adam(bayes.module.parameters())
    with pytest.warns(dubito.DubitoWarning) as caught:
        fit(bayes, DataLoader(data, 10), epochs=1, objective="expected_loss", optimizer=optimizer)
    assert len(caught) == 2
    assert {warning.filename for warning in caught} == {__file__}
