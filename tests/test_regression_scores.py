"""Regression scores against scoringrules, closed forms and hand values."""

import math

import numpy as np
import pytest
import scoringrules
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dubito import metrics as m
from dubito.predictive import Predictive


def normals(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_errors_agree_with_scikit_learn():
    mean, y = normals(50, 2), normals(50, 2, seed=1)
    rmse = math.sqrt(sklearn.metrics.mean_squared_error(y.numpy(), mean.numpy()))
    assert float(m.root_mean_squared_error(mean, y)) == pytest.approx(rmse)
    mae = sklearn.metrics.mean_absolute_error(y.numpy(), mean.numpy())
    assert float(m.mean_absolute_error(mean, y)) == pytest.approx(mae)


def test_column_against_vector_is_refused():
    for metric in (m.root_mean_squared_error, m.mean_absolute_error):
        with pytest.raises(ValueError, match="Shapes differ"):
            metric(normals(5, 1), normals(5))
    with pytest.raises(ValueError, match="Shapes differ"):
        m.crps_gaussian(normals(5, 1), 1.0, normals(5))


def test_interval_metrics_by_hand():
    lower, upper = torch.tensor([0.0, 0.0, 0.0, 0.0]), torch.tensor([1.0, 2.0, 1.0, 0.0])
    y = torch.tensor([1.0, -0.5, 1.5, 0.0])  # on the edge, below, above, a point on the point
    assert float(m.prediction_interval_coverage(lower, upper, y)) == 0.5
    assert float(m.mean_prediction_interval_width(lower, upper)) == 1.0
    each = m.interval_score(lower, upper, y, level=0.9, reduction="none")
    assert each.tolist() == pytest.approx([1.0, 2.0 + 20 * 0.5, 1.0 + 20 * 0.5, 0.0])


def test_interval_score_agrees_with_scoringrules():
    low, width, y = normals(100), normals(100, seed=1).abs(), normals(100, seed=2)
    expected = scoringrules.interval_score(
        y.numpy(), low.numpy(), (low + width).numpy(), 0.2, backend="numpy"
    )
    assert m.interval_score(low, low + width, y, level=0.8, reduction="none").numpy() == pytest.approx(
        expected
    )


def test_gaussian_intervals_cover_at_their_level():
    y = normals(20000)
    edge = torch.full_like(y, 1.959964)
    assert float(m.prediction_interval_coverage(-edge, edge, y)) == pytest.approx(0.95, abs=0.005)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_crps_gaussian_agrees_with_scoringrules(dtype):
    mean, sd, y = normals(200).to(dtype), normals(200, seed=1).exp().to(dtype), normals(200, seed=2).to(dtype)
    expected = scoringrules.crps_normal(*(t.double().numpy() for t in (y, mean, sd)), backend="numpy")
    assert m.crps_gaussian(mean, sd, y, reduction="none").numpy() == pytest.approx(expected, abs=1e-12)


def test_crps_gaussian_limits():
    y, mean = torch.tensor([0.0, 1.0, -2.0]), torch.tensor([0.0, 3.0, 0.0])
    assert m.crps_gaussian(mean, 0.0, y, reduction="none").tolist() == pytest.approx([0.0, 2.0, 2.0])
    at_mean = (math.sqrt(2) - 1) / math.sqrt(math.pi)
    assert float(m.crps_gaussian(y, 1.0, y)) == pytest.approx(at_mean)
    assert float(m.crps_gaussian(mean, torch.tensor(1e-200), y)) == pytest.approx(4 / 3)


def test_crps_gaussian_is_differentiable():
    mean, sd, y = normals(4).requires_grad_(), normals(4, seed=1).exp().requires_grad_(), normals(4, seed=2)
    assert torch.autograd.gradcheck(lambda a, b: m.crps_gaussian(a, b, y, reduction="none"), (mean, sd))


@pytest.mark.parametrize(("fair", "estimator"), [(False, "nrg"), (True, "fair")])
@pytest.mark.parametrize("draws", [2, 3, 40])
def test_crps_ensemble_agrees_with_scoringrules(fair, estimator, draws):
    x, y = normals(draws, 30, 2), normals(30, 2, seed=1)
    expected = scoringrules.crps_ensemble(
        y.numpy(), x.numpy(), m_axis=0, estimator=estimator, backend="numpy"
    )
    assert m.crps_ensemble(x, y, fair=fair, reduction="none").numpy() == pytest.approx(expected, abs=1e-12)


def test_fair_ensemble_estimates_the_gaussian_score_without_bias():
    x, y = normals(3, 200_000), torch.zeros(200_000, dtype=torch.float64)
    target = float(m.crps_gaussian(y[:1], 1.0, y[:1]))
    fair = m.crps_ensemble(x, y, fair=True, reduction="none")
    error = float(fair.std()) / math.sqrt(len(fair))
    assert abs(float(fair.mean()) - target) < 4 * error
    assert float(m.crps_ensemble(x, y)) - target > 20 * error  # E|X - X'| is counted (S - 1)/S times


def test_crps_ensemble_keeps_digits_far_from_zero():
    x, y = normals(8, 5), normals(5, seed=1)
    torch.testing.assert_close(m.crps_ensemble(x + 1e6, y + 1e6), m.crps_ensemble(x, y), atol=1e-9, rtol=0)
    one = m.crps_ensemble(x[:1], y)
    assert float(one) == pytest.approx(float((x[0] - y).abs().mean()))


@pytest.mark.parametrize("weighted", [False, True])
def test_crps_mixture_agrees_with_scoringrules(weighted):
    means, sd, y = normals(6, 25), normals(6, 25, seed=1).exp(), normals(25, seed=2)
    w = torch.tensor([0.1, 0.3, 0.2, 0.0, 0.25, 0.15]).double() if weighted else None
    expected = scoringrules.crps_mixnorm(
        y.numpy(),
        means.numpy(),
        sd.numpy(),
        None if w is None else np.repeat(w.numpy()[:, None], 25, 1),
        m_axis=0,
        backend="numpy",
    )
    ours = m.crps_gaussian_mixture(means, sd, y, weights=w, reduction="none")
    assert ours.numpy() == pytest.approx(expected, abs=1e-12)


def test_crps_mixture_has_both_others_as_limits():
    means, y = normals(7, 12), normals(12, seed=2)
    torch.testing.assert_close(m.crps_gaussian_mixture(means, 0.0, y), m.crps_ensemble(means, y))
    same = means[:1].expand(4, -1)
    torch.testing.assert_close(m.crps_gaussian_mixture(same, 0.7, y), m.crps_gaussian(means[0], 0.7, y))


@settings(deadline=None, max_examples=25)
@given(st.permutations(range(6)), st.permutations(range(9)))
def test_order_of_draws_and_data_never_matters(draws, data):
    x, y, sd = normals(6, 9).round(), normals(9, seed=1).round(), normals(6, 9, seed=2).exp()
    shuffled, target = x[draws][:, data], y[data]
    torch.testing.assert_close(m.crps_ensemble(shuffled, target), m.crps_ensemble(x, y))
    torch.testing.assert_close(
        m.crps_gaussian_mixture(shuffled, sd[draws][:, data], target), m.crps_gaussian_mixture(x, sd, y)
    )


def test_what_is_no_regression_is_refused():
    y = normals(4)
    with pytest.raises(ValueError, match="exceeds `upper` in 4 of 4"):
        m.interval_score(y + 1, y, y)
    with pytest.raises(ValueError, match="swapped"):
        m.prediction_interval_coverage(y + 1, y, y)
    with pytest.raises(ValueError, match=r"write 0\.95"):
        m.interval_score(y, y, y, level=95)
    with pytest.raises(ValueError, match="negative"):
        m.crps_gaussian(y, -torch.ones(4), y)
    with pytest.raises(ValueError, match="draws first"):
        m.crps_ensemble(normals(4, 7), y)
    with pytest.raises(ValueError, match="at least two draws"):
        m.crps_ensemble(normals(1, 4), y, fair=True)
    with pytest.raises(ValueError, match="sum to 1"):
        m.crps_gaussian_mixture(normals(2, 4), 1.0, y, weights=torch.tensor([1.0, 1.0]))
    with pytest.raises(ValueError, match="1 NaN of 4"):
        m.root_mean_squared_error(y, torch.tensor([0.0, math.nan, 0.0, 0.0]))
    with pytest.raises(ValueError, match="empty"):
        m.mean_absolute_error(y[:0], y[:0])
    with pytest.raises(TypeError, match="float"):
        m.crps_gaussian(1.0, 1.0, y)


@pytest.mark.parametrize("noise", ["per draw", "shared"])
def test_table_of_a_regression(noise):
    means, y = normals(5, 40, 1), normals(40, 1, seed=1)
    variance = normals(5, 40, 1, seed=2).exp() if noise == "per draw" else torch.full_like(means, 0.49)
    predictive = Predictive.from_draws(
        "regression", means, aleatoric=variance if noise == "per draw" else 0.49
    )
    table = m.regression_metrics(predictive, y, level=0.8)
    density = torch.distributions.Normal(means, variance.sqrt()).log_prob(y).exp().mean(0)
    assert table["nll"] == pytest.approx(-float(density.log().mean()))
    assert table["rmse"] == pytest.approx(float((means.mean(0) - y).square().mean().sqrt()))
    expected = scoringrules.crps_mixnorm(
        y.numpy(), means.numpy(), variance.sqrt().numpy(), m_axis=0, backend="numpy"
    )
    assert table["crps"] == pytest.approx(expected.mean())
    lower, upper = predictive.interval(0.8)
    assert table["mpiw"] == pytest.approx(float((upper - lower).mean()))
    assert table["picp"] == pytest.approx(float(((lower <= y) & (y <= upper)).double().mean()))
    assert table["interval_score"] == pytest.approx(float(m.interval_score(lower, upper, y, 0.8)))
    assert all(isinstance(value, float) for value in table.values())


def test_table_of_moments_and_of_a_noiseless_regression():
    mean, y = normals(30), normals(30, seed=1)
    moments = Predictive.from_moments("regression", mean, epistemic=0.2, aleatoric=0.3)
    table = m.regression_metrics(moments, y)
    assert table["crps"] == pytest.approx(float(m.crps_gaussian(mean, math.sqrt(0.5), y)))
    assert table["mpiw"] == pytest.approx(2 * 1.959964 * math.sqrt(0.5), rel=1e-5)
    exact = m.regression_metrics(Predictive.from_moments("regression", mean, epistemic=0.0, aleatoric=0.0), y)
    assert "nll" not in exact
    assert exact["crps"] == pytest.approx(exact["mae"])
    with pytest.raises(ValueError, match=r"write 0\.95"):
        m.regression_metrics(moments, y, level=95)
    with pytest.raises(ValueError, match="shape"):
        m.regression_metrics(moments, y[:, None])
