"""Classification metrics against scikit-learn, numpy histograms and hand values."""

import math

import numpy as np
import pytest
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dubito import metrics as m
from dubito.likelihoods import Categorical
from dubito.predictive import Predictive
from dubito.selective import area_under_risk_coverage

BINNINGS = ["width", "mass"]


def problem(n=500, classes=4, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, classes, generator=generator, dtype=torch.float64)
    y = torch.distributions.Categorical(logits=logits / 2).sample()
    return logits.softmax(-1).to(dtype), y


def numpy_ece(confidence, correct, edges):
    """The textbook's ECE from three numpy histograms (whose last bin is closed)."""
    count, _ = np.histogram(confidence, edges)
    claimed, _ = np.histogram(confidence, edges, weights=confidence)
    right, _ = np.histogram(confidence, edges, weights=correct.astype(float))
    assert count.sum() == len(confidence)
    return np.abs(claimed - right).sum() / len(confidence)


# ---------------------------------------- proper scores
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_agree_with_scikit_learn(dtype):
    p, y = problem(dtype=dtype)
    one_hot = np.eye(4)[y.numpy()]
    exact = p.double().numpy()
    assert float(m.accuracy(p, y)) == sklearn.metrics.accuracy_score(y.numpy(), exact.argmax(1))
    nll = -np.log(exact[np.arange(len(y)), y.numpy()]).mean()
    assert float(m.negative_log_likelihood(p, y)) == pytest.approx(nll, abs=1e-12)
    assert nll == pytest.approx(
        sklearn.metrics.log_loss(y.numpy(), exact / exact.sum(1, keepdims=True)), abs=1e-6
    )
    assert float(m.brier_score(p, y)) == pytest.approx(((exact - one_hot) ** 2).sum(1).mean(), abs=1e-12)
    assert m.brier_score(p, y).dtype == torch.float64


@pytest.mark.parametrize("shape", [(300,), (300, 1)])
def test_binary_column_equals_two_columns_and_scikit_learn(shape):
    p, y = problem(300, 2)
    column = p[:, 1].reshape(shape)
    for metric in (
        m.accuracy,
        m.negative_log_likelihood,
        m.brier_score,
        m.expected_calibration_error,
        m.classwise_calibration_error,
    ):
        torch.testing.assert_close(metric(column, y), metric(p, y))
    half = m.brier_score(column, y, over_classes="mean")
    assert float(half) == pytest.approx(
        sklearn.metrics.brier_score_loss(y.numpy(), p[:, 1].numpy()), abs=1e-12
    )
    assert float(m.brier_score(column, y)) == pytest.approx(2 * float(half))
    # A Bernoulli target is often floating point, and shaped as its probability.
    torch.testing.assert_close(m.accuracy(column, y.double().reshape(shape)), m.accuracy(p, y))


def test_nll_from_log_probabilities():
    p, y = problem()
    torch.testing.assert_close(
        m.negative_log_likelihood(p.log(), y, log_probs=True), m.negative_log_likelihood(p, y)
    )
    deep = torch.tensor([[-900.0, 0.0]], dtype=torch.float64)  # exp underflows, the log-probability does not
    assert float(m.negative_log_likelihood(deep, torch.tensor([0]), log_probs=True)) == 900.0
    floored = m.negative_log_likelihood(deep, torch.tensor([0]), log_probs=True, floor=1e-10)
    assert float(floored) == pytest.approx(-math.log(1e-10))
    column = p[:, 0]
    torch.testing.assert_close(
        m.negative_log_likelihood(column.log(), (y == 0).long(), log_probs=True),
        m.negative_log_likelihood(column, (y == 0).long()),
    )


@pytest.mark.parametrize(("dtype", "worst"), [(torch.float32, 87.336545), (torch.float64, 708.396419)])
def test_nll_of_probability_exactly_zero_is_finite_unless_asked(dtype, worst):
    p = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=dtype)
    y = torch.tensor([1, 1])
    each = m.negative_log_likelihood(p, y, reduction="none")
    assert each.tolist() == pytest.approx([worst, 0.0])
    assert float(m.negative_log_likelihood(p, y, floor=0.0)) == math.inf
    assert float(m.negative_log_likelihood(p, y, floor=0.01, reduction="sum")) == pytest.approx(
        -math.log(0.01)
    )
    impossible = torch.tensor([[0.0, -math.inf]], dtype=dtype)
    assert float(m.negative_log_likelihood(impossible, torch.tensor([1]), log_probs=True)) == math.inf


def test_brier_hand_values():
    p = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.2, 0.3, 0.5]])
    y = torch.tensor([0, 0, 2])
    assert m.brier_score(p, y, reduction="none").tolist() == pytest.approx([0.0, 2.0, 0.38], abs=1e-6)
    assert float(m.brier_score(p, y, over_classes="mean")) == pytest.approx(2.38 / 9, abs=1e-6)


# ---------------------------------------- calibration
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bins", [1, 2, 10, 15])
def test_ece_equals_numpy_histogram(bins, dtype):
    p, y = problem(dtype=dtype)
    confidence, correct = p.max(-1).values.numpy(), (p.argmax(-1) == y).numpy()
    edges = (np.arange(bins + 1) / bins).astype(confidence.dtype)
    expected = numpy_ece(confidence, correct, edges)
    assert float(m.expected_calibration_error(p, y, bins)) == pytest.approx(expected, abs=1e-6)


def test_confidence_one_is_in_the_last_bin_unlike_torchmetrics():
    """torchmetrics 1.9 opens a bin of its own for confidence 1: ECE 0.525 where the textbook has 0.475."""
    from torchmetrics.functional.classification import multiclass_calibration_error

    p = torch.tensor([[1.0, 0.0], [0.95, 0.05]], dtype=torch.float64)
    y = torch.tensor([1, 0])
    ours = float(m.expected_calibration_error(p, y, bins=10))
    assert ours == pytest.approx(numpy_ece(np.array([1.0, 0.95]), np.array([0, 1]), np.arange(11) / 10))
    assert ours == pytest.approx(0.475)
    theirs = float(multiclass_calibration_error(p, y, num_classes=2, n_bins=10))
    assert theirs == pytest.approx(0.525) or theirs == pytest.approx(ours)  # should they mend it
    table = m.reliability(p, y, bins=10)
    assert table.count.tolist() == [0] * 9 + [2]
    # Without a confidence of exactly 1 the two agree.
    p, y = problem()
    assert float(m.expected_calibration_error(p, y)) == pytest.approx(
        float(multiclass_calibration_error(p, y, num_classes=4, n_bins=15)), abs=1e-6
    )


def test_probability_zero_is_in_the_first_bin_and_edges_close_on_the_left():
    p = torch.tensor([0.0, 1.0, 0.5, 0.0])  # of class 1; class 0 has 1, 0, 0.5, 1
    y = torch.tensor([0, 1, 0, 0])
    per_class = m.classwise_calibration_error(p, y, bins=2, reduction="none")
    # Class 1: bin [0, 0.5) holds two 0s, never right: gap 0.
    # Bin [0.5, 1] holds 1 and 0.5, right once: |1 - 1.5| / 4.
    assert per_class.tolist() == pytest.approx([0.125, 0.125])
    top = m.reliability(p, y, bins=2)
    assert top.count.tolist() == [0, 4]
    assert math.isnan(float(top.confidence[0]))
    assert float(top.confidence[1]) == pytest.approx(0.875)


def test_float32_confidence_on_an_edge_joins_the_bin_it_opens():
    p = torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.9, 0.1]])
    table = m.reliability(p, torch.tensor([0, 0, 0]), bins=10)
    assert table.count.tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 0, 1]


def test_overshoot_of_a_rounded_probability_opens_no_bin():
    p = torch.tensor([[1.0 + 1e-7, 0.0], [1.0, -1e-8]])
    assert m.reliability(p, torch.tensor([0, 1]), bins=15).count.tolist() == [0] * 14 + [2]


def test_norms_by_hand():
    p = torch.tensor([0.9, 0.9, 0.9, 0.6], dtype=torch.float64)
    y = torch.tensor([1, 1, 0, 1])  # gaps: |2/3 - .9| with weight 3/4, |1 - .6| with weight 1/4
    gaps = np.array([0.9 - 2 / 3, 0.4])
    assert float(m.expected_calibration_error(p, y)) == pytest.approx(gaps @ [0.75, 0.25])
    assert float(m.expected_calibration_error(p, y, norm="l2")) == pytest.approx(
        np.sqrt(gaps**2 @ [0.75, 0.25])
    )
    assert float(m.expected_calibration_error(p, y, norm="max")) == pytest.approx(0.4)
    assert float(m.maximum_calibration_error(p, y)) == pytest.approx(0.4)


@pytest.mark.parametrize("bins", [1, 7, 15, 500, 900])
def test_mass_bins_hold_equal_counts(bins):
    p, y = problem()
    table = m.reliability(p, y, bins, "mass")
    assert int(table.count.sum()) == 500
    assert int(table.count.max()) - int(table.count.min()) <= 1
    order = p.max(-1).values.argsort()
    correct = (p.argmax(-1) == y).double()[order].numpy()
    confidence = p.max(-1).values[order].numpy()
    parts = np.split(np.arange(500), [500 * k // bins for k in range(1, bins)])
    expected = sum(abs(correct[i].sum() - confidence[i].sum()) for i in parts) / 500
    assert float(m.expected_calibration_error(p, y, bins, "mass")) == pytest.approx(expected)
    assert float(table.edges[0]) == confidence[0]
    assert float(table.edges[-1]) == confidence[-1]


@pytest.mark.parametrize("binning", BINNINGS)
def test_all_confidences_equal(binning):
    p = torch.full((10, 2), 0.5)
    y = torch.tensor([0] * 7 + [1] * 3)
    assert float(m.expected_calibration_error(p, y, binning=binning)) == pytest.approx(0.2)
    assert int((m.reliability(p, y, binning=binning).count > 0).sum()) == 1


@pytest.mark.parametrize("binning", BINNINGS)
def test_one_sample(binning):
    p, y = torch.tensor([[0.2, 0.8]]), torch.tensor([1])
    assert float(m.expected_calibration_error(p, y, binning=binning)) == pytest.approx(0.2)
    assert float(m.classwise_calibration_error(p, y, binning=binning)) == pytest.approx(0.2)
    assert float(m.accuracy(p, y)) == 1.0
    assert float(m.accuracy(p[0], y[0])) == 1.0  # no batch axis at all


@pytest.mark.parametrize("bins", [5, 15])
def test_classwise_equals_numpy_histogram_with_a_class_absent(bins):
    p, y = problem(classes=5)
    y = y.clamp(max=3)  # class 4 never occurs
    edges = np.arange(bins + 1) / bins
    expected = [numpy_ece(p[:, k].numpy(), (y == k).numpy(), edges) for k in range(5)]
    each = m.classwise_calibration_error(p, y, bins, reduction="none")
    assert each.tolist() == pytest.approx(expected)
    assert float(m.classwise_calibration_error(p, y, bins)) == pytest.approx(np.mean(expected))
    assert expected[4] == pytest.approx(float(p[:, 4].mean()))


def test_dense_labels_are_flattened():
    p, y = problem(60, 3)
    for metric in (m.accuracy, m.brier_score, m.expected_calibration_error):
        torch.testing.assert_close(metric(p.reshape(3, 4, 5, 3), y.reshape(3, 4, 5)), metric(p, y))


@settings(deadline=None, max_examples=30)
@given(data=st.data(), n=st.integers(1, 40), binning=st.sampled_from(BINNINGS))
def test_order_of_data_never_matters(data, n, binning):
    tenths = data.draw(st.lists(st.integers(0, 10), min_size=n, max_size=n))  # many ties, 0 and 1 included
    p = torch.tensor(tenths, dtype=torch.float64) / 10
    y = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)))
    order = torch.tensor(data.draw(st.permutations(range(n))))
    for metric in (m.expected_calibration_error, m.maximum_calibration_error, m.classwise_calibration_error):
        torch.testing.assert_close(metric(p, y, 4, binning), metric(p[order], y[order], 4, binning))
    assert 0 <= float(m.expected_calibration_error(p, y, 4, binning)) <= 1


# ---------------------------------------- errors
@pytest.mark.parametrize(
    ("p", "y", "message"),
    [
        (torch.randn(5, 3) * 3 - 4, torch.zeros(5).long(), "look like logits"),
        (torch.randn(5, 3).log_softmax(-1), torch.zeros(5).long(), "log-probabilities"),
        (torch.tensor([[0.9, 0.8]]), torch.tensor([0]), "normalise"),
        (torch.tensor([1.7]), torch.tensor([0]), "sigmoid for one column"),
        (torch.full((2, 2), float("nan")), torch.tensor([0, 1]), "4 NaN"),
        (torch.empty(0, 3), torch.empty(0).long(), "empty"),
        (torch.full((2, 2), 0.5), torch.tensor([0, 2]), "0 … 1"),
        (torch.full((2, 2), 0.5), torch.tensor([0, -100]), "ignored"),
        (torch.full((2, 2), 0.5), torch.tensor([0.5, 1.0]), "whole numbers"),
        (torch.full((2, 2), 0.5), torch.eye(2), r"argmax\(-1\)"),
        (torch.full((7, 2, 2), 0.5), torch.tensor([0, 1]), r"mean\(0\)"),
        (torch.full((4, 2, 3, 3), 0.5), torch.zeros(4, 3, 3).long(), "movedim"),
        (torch.full((3, 2), 0.5), torch.tensor([0, 1]), r"\(3, 2\)"),
        (torch.tensor([[math.inf, 0.0]]), torch.tensor([0]), "no probabilities"),
    ],
)
def test_what_is_no_classification_is_refused(p, y, message):
    for metric in (m.accuracy, m.negative_log_likelihood, m.brier_score, m.classwise_calibration_error):
        with pytest.raises(ValueError, match=message):
            metric(p, y)


def test_wrong_options_and_types_are_refused():
    p, y = torch.full((2, 2), 0.5), torch.tensor([0, 1])
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        m.accuracy(p.numpy(), y)
    with pytest.raises(TypeError, match="labels"):
        m.accuracy(p, [0, 1])
    with pytest.raises(TypeError, match="floating point"):
        m.accuracy(torch.ones(2, 1).long(), y)
    with pytest.raises(ValueError, match="positive whole number"):
        m.expected_calibration_error(p, y, bins=0)
    with pytest.raises(ValueError, match="'width', 'mass'"):
        m.reliability(p, y, binning="quantile")
    with pytest.raises(ValueError, match="'l1', 'l2', 'max'"):
        m.expected_calibration_error(p, y, norm="l3")
    with pytest.raises(ValueError, match="reduction"):
        m.brier_score(p, y, reduction="batch")
    with pytest.raises(ValueError, match="floor"):
        m.negative_log_likelihood(p, y, floor=1.0)


def test_a_whole_predictive_is_told_which_part():
    predictive = Categorical().predictive(torch.zeros(2, 3, 4))
    with pytest.raises(TypeError, match=r"got .*: pass predictive\.probs"):
        m.accuracy(predictive, torch.zeros(3).long())
    with pytest.raises(TypeError, match=r"got ndarray: wrap it in torch\.as_tensor"):
        m.accuracy(np.ones((3, 4)) / 4, torch.zeros(3).long())


def test_half_precision_probabilities_pass():
    p, y = problem(classes=10)
    rounded = p.bfloat16()
    assert float(m.brier_score(rounded, y)) == pytest.approx(float(m.brier_score(p, y)), abs=5e-3)


# ---------------------------------------- table
def test_table_of_a_classifier():
    p, y = problem()
    predictive = Predictive.from_draws("categorical", torch.stack((p, p.roll(1, 0))))
    mean = (p + p.roll(1, 0)) / 2
    table = m.classification_metrics(predictive, y)
    assert table == pytest.approx(
        {
            "accuracy": float(m.accuracy(mean, y)),
            "nll": float(m.negative_log_likelihood(mean, y)),
            "brier": float(m.brier_score(mean, y)),
            "ece": float(m.expected_calibration_error(mean, y)),
            "mce": float(m.maximum_calibration_error(mean, y)),
            "classwise_ece": float(m.classwise_calibration_error(mean, y)),
            "aurc": float(area_under_risk_coverage(mean.max(-1).values, mean.argmax(-1) != y)),
        }
    )
    assert all(isinstance(value, float) for value in table.values())


def test_table_of_dense_and_of_multi_label_problems_is_per_outcome():
    p, y = problem(60, 3)
    flat = m.classification_metrics(Predictive.from_draws("categorical", p[None]), y)
    images, labels = p.reshape(5, 4, 3, 3).movedim(-1, 1), y.reshape(5, 4, 3)
    dense = m.classification_metrics(Predictive.from_draws("categorical", images[None], dim=-3), labels)
    assert dense == pytest.approx(flat)
    p, y = problem(60, 2)
    flat = m.classification_metrics(Predictive.from_draws("categorical", p[None]), y)
    several = Predictive.from_draws("bernoulli", p[:, 1].reshape(1, 20, 3))
    assert m.classification_metrics(several, y.reshape(20, 3)) == pytest.approx(flat)
    with pytest.raises(ValueError, match="shape"):
        m.classification_metrics(several, y)


def test_classes_are_found_where_they_are_though_all_sizes_agree():
    for seed in range(40):  # other axes fit by their shape, and by chance in their largest entries
        logits = torch.randn(3, 1, 2, 2, 2, generator=torch.Generator().manual_seed(seed))
        y = torch.randint(0, 2, (1, 2, 2), generator=torch.Generator().manual_seed(seed))
        p = Predictive.from_draws("categorical", logits, logits=True, dim=-3)
        right = (p.probs.argmax(1) == y).double().mean()
        square = (p.probs.movedim(1, -1) - torch.nn.functional.one_hot(y, 2)).square().sum(-1).mean()
        table = m.classification_metrics(p, y)
        assert table["accuracy"] == pytest.approx(float(right))
        assert table["brier"] == pytest.approx(float(square), rel=1e-5)
