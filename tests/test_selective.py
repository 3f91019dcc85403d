"""Risk-coverage curves against a direct scan of the sorted data and hand values."""

import math

import numpy as np
import pytest
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dubito.selective import area_under_risk_coverage, coverage_at_risk, risk_at_coverage, risk_coverage


def problem(n=300, seed=0):
    generator = torch.Generator().manual_seed(seed)
    confidence = torch.rand(n, generator=generator, dtype=torch.float64)
    return confidence, (torch.rand(n, generator=generator) > confidence).double()


def scan(confidence, risk):
    """Coverage k/n and risk of the k surest, datum by datum."""
    order = np.argsort(-confidence.numpy(), kind="stable")
    r = np.cumsum(risk.double().numpy()[order]) / np.arange(1, len(order) + 1)
    return np.arange(1, len(order) + 1) / len(order), r, confidence.numpy()[order]


def scanned_coverage_at_risk(confidence, risk, bound):
    """From full coverage down to the first risk within the bound that does not split a group of ties."""
    coverage, r, sorted_confidence = scan(confidence, risk)
    k = len(r) - 1
    while k >= 0:
        inside_group = k + 1 < len(r) and sorted_confidence[k] == sorted_confidence[k + 1]
        if r[k] <= bound + 1e-12 and not inside_group:
            return 100 * coverage[k]
        k -= 1
    return 0.0


def test_curve_without_ties_is_the_datum_by_datum_scan():
    confidence, risk = problem()
    curve = risk_coverage(confidence, risk)
    coverage, r, thresholds = scan(confidence, risk)
    assert curve.coverage.numpy() == pytest.approx(coverage)
    assert curve.risk.numpy() == pytest.approx(r)
    assert curve.thresholds.numpy() == pytest.approx(thresholds)


def test_ties_are_one_point_and_thresholds_answer_what_they_say():
    confidence = torch.tensor([0.9, 0.5, 0.9, 0.5, 0.1])
    risk = torch.tensor([0, 1, 1, 1, 0])
    curve = risk_coverage(confidence, risk)
    assert curve.coverage.tolist() == pytest.approx([0.4, 0.8, 1.0])
    assert curve.risk.tolist() == pytest.approx([0.5, 0.75, 0.6])
    for coverage, r, threshold in zip(*curve, strict=True):
        answered = confidence >= threshold
        assert float(coverage) == pytest.approx(float(answered.double().mean()))
        assert float(r) == pytest.approx(float(risk[answered].double().mean()))


def test_area_variants_against_the_scan():
    confidence, risk = problem()
    coverage, r, _ = scan(confidence, risk)
    trapezoid = 100 * sklearn.metrics.auc(coverage, r)
    assert float(area_under_risk_coverage(confidence, risk)) == pytest.approx(trapezoid)
    normalised = float(area_under_risk_coverage(confidence, risk, "normalised"))
    assert normalised == pytest.approx(trapezoid / (1 - 1 / 300))
    assert float(area_under_risk_coverage(confidence, risk, "mean")) == pytest.approx(100 * r.mean())


def test_area_by_hand():
    confidence, wrong = torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([False, True, False, True])
    # r = 0, 1/2, 1/3, 1/2 at coverage 1/4 … 1
    assert float(area_under_risk_coverage(confidence, wrong)) == pytest.approx(
        100 * (0.25 + 1 / 2 + 1 / 3) / 4
    )


def test_area_with_ties_is_the_average_over_their_orders():
    generator = torch.Generator().manual_seed(3)
    confidence = torch.tensor([0.9, 0.5, 0.5, 0.5, 0.2, 0.2])
    risk = torch.tensor([0.0, 1.0, 0.0, 0.3, 1.0, 0.0])
    for variant in ("trapezoid", "normalised", "mean"):
        broken = []
        for _ in range(500):
            jitter = torch.rand(6, generator=generator) * 1e-3
            broken.append(float(area_under_risk_coverage(confidence + jitter, risk, variant)))
        error = np.std(broken) / math.sqrt(len(broken))
        assert abs(float(area_under_risk_coverage(confidence, risk, variant)) - np.mean(broken)) < 4 * error


def test_constant_confidence_gives_the_overall_risk():
    confidence, risk = torch.full((8,), 0.5), torch.tensor([1, 0, 0, 0, 1, 0, 0, 0])
    assert float(area_under_risk_coverage(confidence, risk, "normalised")) == pytest.approx(25)
    assert float(area_under_risk_coverage(confidence, risk, "mean")) == pytest.approx(25)
    assert float(area_under_risk_coverage(confidence, risk)) == pytest.approx(25 * 7 / 8)
    assert float(coverage_at_risk(confidence, risk, 0.25)) == 100
    assert float(coverage_at_risk(confidence, risk, 0.24)) == 0


def test_one_datum():
    one = torch.tensor([0.7])
    assert float(area_under_risk_coverage(one, torch.tensor([0.4]))) == pytest.approx(40)
    assert float(coverage_at_risk(one, torch.tensor([1]), 0.5)) == 0
    assert float(risk_at_coverage(one, torch.tensor([0.4]), 0.1)) == pytest.approx(0.4)


def test_coverage_at_risk_by_hand():
    confidence, loss = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5]), torch.tensor([1, 0, 0, 0, 1])
    # r = 1, 1/2, 1/3, 1/4, 2/5: not monotone, so the scan comes from full coverage
    assert float(coverage_at_risk(confidence, loss, 0.25)) == pytest.approx(80)
    assert float(coverage_at_risk(confidence, loss, 0.4)) == pytest.approx(100)
    assert float(coverage_at_risk(confidence, loss, 0.24)) == 0
    assert float(coverage_at_risk(confidence, loss, 0.0)) == 0


def test_boundary_inside_a_group_steps_back_before_it():
    confidence, loss = torch.tensor([0.9, 0.9, 0.5, 0.5, 0.5]), torch.tensor([0, 0, 0, 1, 1])
    # In this order r_4 = 1/4 is within .3, but 0.5 cannot be split: only the first two are answered.
    assert float(coverage_at_risk(confidence, loss, 0.3)) == pytest.approx(40)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), n=st.integers(1, 25))
def test_against_the_scan_and_any_order_with_ties(data, n):
    confidence = torch.tensor(data.draw(st.lists(st.integers(0, 6), min_size=n, max_size=n))) / 6
    risk = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))).double() / 3
    bound = data.draw(st.sampled_from([0.0, 0.1, 1 / 3, 0.5, 1.0]))
    order = torch.tensor(data.draw(st.permutations(range(n))))
    ours = coverage_at_risk(confidence, risk, bound)
    assert float(ours) == pytest.approx(scanned_coverage_at_risk(confidence, risk, bound))
    torch.testing.assert_close(ours, coverage_at_risk(confidence[order], risk[order], bound))
    area = area_under_risk_coverage(confidence, risk)
    torch.testing.assert_close(area, area_under_risk_coverage(confidence[order], risk[order]))
    assert float(risk_at_coverage(confidence, risk, 1.0)) == pytest.approx(float(risk.mean()))


def test_risk_at_coverage_takes_whole_groups():
    confidence, risk = torch.tensor([0.9, 0.5, 0.5, 0.1]), torch.tensor([0, 1, 0, 1])
    assert float(risk_at_coverage(confidence, risk, 0.25)) == 0
    assert float(risk_at_coverage(confidence, risk, 0.5)) == pytest.approx(1 / 3)
    assert float(risk_at_coverage(confidence, risk, 0.75)) == pytest.approx(1 / 3)
    assert float(risk_at_coverage(confidence, risk, 0.76)) == pytest.approx(0.5)


def test_bound_met_exactly_survives_rounding():
    losses = torch.full((3,), 0.1, dtype=torch.float64)  # their mean comes out as 0.10000000000000002
    assert float(coverage_at_risk(torch.linspace(0, 1, 3), losses, 0.1)) == 100


def test_bad_input_is_refused():
    confidence, risk = problem(5)
    with pytest.raises(ValueError, match="Shapes differ"):
        risk_coverage(confidence, risk[:, None])
    with pytest.raises(ValueError, match="`confidence` holds 1 NaN"):
        risk_coverage(torch.tensor([math.nan]), torch.tensor([0.0]))
    with pytest.raises(ValueError, match="infinities"):
        risk_coverage(torch.tensor([0.5]), torch.tensor([math.inf]))
    with pytest.raises(ValueError, match="empty"):
        area_under_risk_coverage(confidence[:0], risk[:0])
    with pytest.raises(ValueError, match="'trapezoid', 'normalised', 'mean'"):
        area_under_risk_coverage(confidence, risk, "area")
    with pytest.raises(ValueError, match="max_risk"):
        coverage_at_risk(confidence, risk, math.nan)
    with pytest.raises(ValueError, match=r"0\.8 for 80 %"):
        risk_at_coverage(confidence, risk, 80)
    with pytest.raises(TypeError, match="list"):
        risk_coverage([0.5], risk)
