"""Detection metrics against scikit-learn, torchmetrics where it is right, and hand values."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dubito import ood


def problem(n=400, seed=0, ties=False):
    generator = torch.Generator().manual_seed(seed)
    positive = torch.rand(n, generator=generator) < 0.3
    scores = torch.randn(n, generator=generator, dtype=torch.float64) + positive
    return (scores.round() if ties else scores), positive


def scanned_fpr(scores, positive, tpr):
    best = 1.0
    for threshold in np.unique(scores):
        if (scores[positive] >= threshold).mean() >= tpr - 1e-12:
            best = min(best, (scores[~positive] >= threshold).mean())
    return best


@pytest.mark.parametrize("ties", [False, True])
def test_agrees_with_scikit_learn(ties):
    scores, positive = problem(ties=ties)
    s, t = scores.numpy(), positive.numpy()
    assert float(ood.auroc(scores, positive)) == pytest.approx(sklearn.metrics.roc_auc_score(t, s))
    assert float(ood.average_precision(scores, positive)) == pytest.approx(
        sklearn.metrics.average_precision_score(t, s)
    )
    for tpr in (0.5, 0.8, 0.95, 0.999):
        assert float(ood.fpr_at_tpr(scores, positive, tpr)) == pytest.approx(scanned_fpr(s, t, tpr))


def test_agrees_with_torchmetrics_inside_zero_one_but_not_on_large_scores():
    """torchmetrics squashes scores outside [0, 1] by a float32 sigmoid, where 20 and 30 are both 1."""
    from torchmetrics.functional.classification import binary_auroc, binary_average_precision

    scores, positive = problem()
    unit = scores.sigmoid()
    assert float(ood.auroc(unit, positive)) == pytest.approx(
        float(binary_auroc(unit, positive.long())), abs=1e-6
    )
    assert float(ood.average_precision(unit, positive)) == pytest.approx(
        float(binary_average_precision(unit, positive.long())), abs=1e-6
    )
    large, truth = torch.tensor([20.0, 30.0, 40.0, 50.0]), torch.tensor([0, 0, 1, 1])
    assert float(ood.auroc(large, truth)) == 1.0
    assert float(binary_auroc(large, truth)) in (0.5, 1.0)  # 0.5 in 1.9; 1.0 should they mend it


def test_ties_count_one_half():
    assert float(ood.auroc(torch.tensor([1.0, 1.0]), torch.tensor([0, 1]))) == 0.5
    # pairs (out, in): 2>1, 2=2, 3>1, 3>2
    scores, positive = torch.tensor([1.0, 2.0, 2.0, 3.0]), torch.tensor([0, 0, 1, 1])
    assert float(ood.auroc(scores, positive)) == pytest.approx(3.5 / 4)


def test_separated_reversed_and_constant():
    low, high = torch.linspace(0, 1, 30), torch.linspace(2, 3, 10)
    best = ood.ood_metrics(low, high)
    assert (best.auroc, best.aupr_out, best.aupr_in, best.fpr95) == pytest.approx((1, 1, 1, 0))
    assert best.chance == pytest.approx({"auroc": 0.5, "aupr_out": 0.25, "aupr_in": 0.75, "fpr95": 0.95})
    worst = ood.ood_metrics(high, low)
    assert worst.auroc == 0
    assert worst.fpr95 == 1
    constant = ood.ood_metrics(torch.ones(30), torch.ones(10))
    assert constant[:4] == pytest.approx((0.5, 0.25, 0.75, 1.0))


def test_independent_scores_give_the_chance_levels():
    generator = torch.Generator().manual_seed(1)
    result = ood.ood_metrics(torch.rand(40_000, generator=generator), torch.rand(10_000, generator=generator))
    for name, level in result.chance.items():
        assert getattr(result, name) == pytest.approx(level, abs=0.015), name


def test_ood_metrics_names_its_positives():
    scores, positive = problem()
    result = ood.ood_metrics(scores[~positive], scores[positive])
    s, t = scores.numpy(), positive.numpy()
    assert result.auroc == pytest.approx(sklearn.metrics.roc_auc_score(t, s))
    assert result.aupr_out == pytest.approx(sklearn.metrics.average_precision_score(t, s))
    assert result.aupr_in == pytest.approx(sklearn.metrics.average_precision_score(~t, -s))
    assert result.fpr95 == pytest.approx(scanned_fpr(s, t, 0.95))
    assert all(isinstance(value, float) for value in result[:4])


def test_fpr_threshold_reached_exactly():
    scores = torch.cat((torch.arange(20.0), torch.tensor([0.5])))  # positive 0 … 19, one negative
    positive = torch.arange(21) < 20
    assert float(ood.fpr_at_tpr(scores, positive)) == 0.0  # 19 of 20 are above it: 95 % exactly
    assert float(ood.fpr_at_tpr(scores, positive, 0.96)) == 1.0


def test_error_detection():
    uncertainty = torch.tensor([0.1, 0.4, 0.2, 0.9, 0.3])
    correct = torch.tensor([True, False, True, False, True])
    assert float(ood.aupr_error(uncertainty, correct)) == 1.0
    assert float(ood.aupr_success(uncertainty, correct)) == 1.0
    scores, positive = problem()
    wrong = positive.numpy()
    assert float(ood.aupr_error(scores, ~positive)) == pytest.approx(
        sklearn.metrics.average_precision_score(wrong, scores.numpy())
    )
    assert float(ood.aupr_success(scores, ~positive)) == pytest.approx(
        sklearn.metrics.average_precision_score(~wrong, -scores.numpy())
    )


@settings(deadline=None, max_examples=40)
@given(data=st.data(), n=st.integers(2, 30))
def test_order_and_monotone_maps_never_matter(data, n):
    scores = torch.tensor(data.draw(st.lists(st.integers(-3, 3), min_size=n, max_size=n))).double()
    flags = data.draw(st.lists(st.booleans(), min_size=n, max_size=n).filter(lambda f: any(f) and not all(f)))
    positive, order = torch.tensor(flags), torch.tensor(data.draw(st.permutations(range(n))))
    for metric in (ood.auroc, ood.average_precision, ood.fpr_at_tpr):
        value = metric(scores, positive)
        torch.testing.assert_close(metric(scores[order], positive[order]), value)
        torch.testing.assert_close(metric(scores.exp() * 1e3, positive), value)
    mirrored = float(ood.auroc(-scores, positive))
    assert float(ood.auroc(scores, positive)) + mirrored == pytest.approx(1.0)


def test_scores_rise_with_uncertainty():
    predictive = SimpleNamespace(
        confidence=torch.tensor([0.9, 0.4]),
        entropy=torch.tensor([0.3, 1.0]),
        mutual_information=torch.tensor([0.01, 0.5]),
        variance=torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    )
    assert ood.ood_scores(predictive).tolist() == pytest.approx([0.01, 0.5])
    assert ood.ood_scores(predictive, "entropy").tolist() == pytest.approx([0.3, 1.0])
    assert ood.ood_scores(predictive, "confidence").tolist() == pytest.approx([0.1, 0.6])
    assert ood.ood_scores(predictive, "variance").tolist() == [3.0, 7.0]
    with pytest.raises(ValueError, match="'mutual_information', 'entropy'"):
        ood.ood_scores(predictive, "energy")


def test_bad_input_is_refused():
    scores, positive = problem(6)
    with pytest.raises(ValueError, match="no positive datum"):
        ood.auroc(scores, torch.zeros(6))
    with pytest.raises(ValueError, match="no negative datum"):
        ood.average_precision(scores, torch.ones(6))
    with pytest.raises(ValueError, match="0 and 1 only"):
        ood.auroc(scores, torch.arange(6))
    with pytest.raises(ValueError, match="Shapes differ"):
        ood.auroc(scores, positive[:, None])
    with pytest.raises(ValueError, match="`out_scores` holds 1 NaN"):
        ood.ood_metrics(scores, torch.tensor([math.nan]))
    with pytest.raises(ValueError, match="`in_scores` is empty"):
        ood.ood_metrics(scores[:0], scores)
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        ood.fpr_at_tpr(scores, positive, 1.0)
    with pytest.raises(ValueError, match="not the label"):
        ood.aupr_error(scores, torch.arange(6))
    with pytest.raises(ValueError, match="no positive datum"):
        ood.aupr_error(scores, torch.ones(6))
    with pytest.raises(TypeError, match="list"):
        ood.aupr_success(scores, [True] * 6)
