import math

import pytest
import torch

from dubito.experiments.bbb.regression_curve import LEVELS, CurveSettings, curve_data, fit_curve
from dubito.experiments.bbb.regression_part import outcome, run_regression
from dubito.experiments.reproduction import PartJob

FAST = CurveSettings(points=60, hidden=10, steps=60, draws=30)


def test_data_are_the_papers_function():
    x, y = curve_data(20_000, torch.Generator().manual_seed(0))
    assert 0 <= float(x.min()) < 0.01 < 0.49 < float(x.max()) <= 0.5
    clean = x + 0.3 * torch.sin(2 * math.pi * x) + 0.3 * torch.sin(4 * math.pi * x)
    slope = (
        1 + 0.3 * 2 * math.pi * torch.cos(2 * math.pi * x) + 0.3 * 4 * math.pi * torch.cos(4 * math.pi * x)
    )
    z = (y - clean) / (0.02 * slope.abs().clamp_min(0.5))
    steep = slope.abs() > 1  # where e moves y to first order
    assert float(z[steep].std()) == pytest.approx(1.0, abs=0.1)
    assert float(z[steep].mean()) == pytest.approx(0.0, abs=0.1)


def test_the_curve_has_ordered_quantiles_and_follows_its_seed():
    first, again = fit_curve(FAST, 1), fit_curve(FAST, 1)
    assert first.quantiles.shape == (len(LEVELS), len(first.grid))
    assert bool((first.quantiles.diff(dim=0) >= 0).all())
    assert torch.equal(first.quantiles, again.quantiles)
    assert bool(first.on_data.any())
    assert bool(first.off_data.any())
    assert not bool((first.on_data & first.off_data).any())
    near = (first.grid > 0.5) & (first.grid < 0.69)
    assert not bool((first.off_data & near).any())


def test_widths_are_measured_on_and_off_the_data():
    curve = fit_curve(FAST, 0)
    width = curve.quantiles[3] - curve.quantiles[1]
    values = curve.values()
    assert values["interquartile_on_data"] == pytest.approx(float(width[curve.on_data].mean()))
    expected = float(width[curve.off_data].mean() / width[curve.on_data].mean())
    assert values["interquartile_ratio"] == pytest.approx(expected)


def test_the_part_says_whether_the_bands_widen():
    found = run_regression(PartJob(seeds=(0,)), FAST)
    assert len(found.tables[0].rows) == 3
    (met,) = found.targets.values()
    assert met == (found.values["seeds"][0]["interquartile_ratio"] >= 1.5)


def test_a_flat_band_is_not_called_widening():
    curve = fit_curve(FAST, 0)
    band = torch.tensor(LEVELS)[:, None].expand(-1, len(curve.grid))
    flat = type(curve)(**{**vars(curve), "quantiles": band})
    assert list(outcome([flat], FAST).targets.values()) == [False]


def test_bands_widen_where_there_are_no_data():
    settings = CurveSettings(points=100, hidden=20, steps=300, draws=60, lr=2e-2)
    assert fit_curve(settings, 0).values()["epistemic_sd_ratio"] > 1.5


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="points must be at least 1"):
        CurveSettings(points=0)
