"""Calibration of propagated variances: what each way finds, and what a calibration refuses."""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito.moments import propagated
from dubito.moments.calibration import Calibration, CalibrationError
from dubito.moments.calibration_fitting import calibrate
from dubito.moments.moments import Context


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, padding=1),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


def made(scale: float = 0.5) -> dubito.BayesianModule:
    return dubito.bayesianize(network(), dubito.MeanField(scale=scale), likelihood=dubito.Categorical())


def data(n: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 1, 5, 5, generator=generator)
    return x, (x.mean((1, 2, 3)) > 0).long()


SITES = {"1:norm", "2:activation", "4:activation", ":output"}


def test_matching_needs_no_labels_and_meets_the_draws_at_every_site() -> None:
    bayes, (x, _) = made(), data()
    found = calibrate(bayes, [(x,)], "matched", draws=60, generator=torch.Generator().manual_seed(0))
    assert set(found.alphas) == SITES
    assert set(found.rhos) == {"5:pool"}
    assert 0.0 < found.rhos["5:pool"] <= 1.0  # the convolution's noise is shared by all positions
    with torch.no_grad():
        draws = bayes.outputs(x, draws=bayes.draw(400, torch.Generator().manual_seed(5)))
        plain = propagated(bayes, x).variance.mean()
        matched = propagated(bayes, x, Context(calibration=found)).variance.mean()
    truth = draws.var(0).mean()
    assert abs(float(matched / truth) - 1) < 0.2
    assert abs(float(matched / truth) - 1) < abs(float(plain / truth) - 1)


@pytest.mark.parametrize("method", ["nll", "matched+nll", "output"])
def test_fitting_by_likelihood_lowers_it(method: str) -> None:
    bayes, (x, y) = made(), data()
    before = -bayes.propagate(x, head="probit").log_prob(y).mean()
    found = calibrate(bayes, (x, y), method, steps=25, draws=10)  # type: ignore[arg-type]
    assert found.history[1] <= found.history[0]
    after = -bayes.propagate(x, calibration=found, head="probit").log_prob(y).mean()
    assert float(after) < float(before)
    assert float(after) == pytest.approx(found.history[1], abs=1e-4)
    if method == "output":
        assert set(found.alphas) == {":output"}


def test_gradient_of_an_alpha_is_that_of_finite_differences() -> None:
    bayes, (x, y) = made(), data(12)

    def nll(alpha: float) -> float:
        calibration = Calibration({"2:activation": alpha})
        return float(-bayes.propagate(x, calibration=calibration, head="probit").log_prob(y).mean())

    class One:
        def __init__(self) -> None:
            self.value = torch.ones((), requires_grad=True)

        def alpha(self, site: str) -> Tensor | None:
            return self.value if site == "2:activation" else None

        def rho(self, site: str) -> None:
            return None

    one = One()
    moments = propagated(bayes, x, Context(calibration=one))
    loss = (
        -dubito.moments.predictive_from_moments(
            bayes.require_likelihood(), moments.mean, moments.variance, head="probit"
        )
        .log_prob(y)
        .mean()
    )
    loss.backward()
    assert one.value.grad is not None
    assert float(one.value.grad) == pytest.approx((nll(1.05) - nll(0.95)) / 0.1, abs=2e-3)


def test_a_calibration_belongs_to_its_network_and_rules(tmp_path: Path) -> None:
    bayes, (x, y) = made(), data()
    found = calibrate(bayes, (x, y), "output", steps=2)
    found.save(tmp_path / "calibration.json")
    again = Calibration.load(tmp_path / "calibration.json")
    assert again == found
    first, second = (bayes.propagate(x, calibration=c).probs for c in (found, again))
    assert torch.equal(first, second)
    other = dubito.bayesianize(
        nn.Sequential(nn.Flatten(), nn.Linear(25, 3)), dubito.MeanField(), likelihood=dubito.Categorical()
    )
    with pytest.raises(CalibrationError, match="other names or shapes"):
        other.propagate(x, calibration=found)
    with pytest.raises(CalibrationError, match="rules='cvp'"):
        bayes.propagate(x, calibration=found, rules="streamlining")
    copied = copy.deepcopy(bayes)
    assert torch.equal(copied.propagate(x, calibration=found).probs, first)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    found = Calibration({"a:norm": 2.0}, {"b:pool": 0.5})
    found.save(path)
    whole = json.loads(path.read_text())
    for change, said in (
        ({"format": 99}, "newer version"),
        ({"alphas": {"a:norm": -1.0}}, "must be positive"),
        ({"surprise": 1}, "not a calibration"),
    ):
        path.write_text(json.dumps({**whole, **change}))
        with pytest.raises(CalibrationError, match=said):
            Calibration.load(path)
    path.write_text("{")
    with pytest.raises(CalibrationError, match=r"calibration\.json"):
        Calibration.load(path)
    with pytest.raises(FileNotFoundError):
        Calibration.load(tmp_path / "nothing.json")


def test_bad_input() -> None:
    bayes, (x, y) = made(), data()
    with pytest.raises(ValueError, match="empty"):
        calibrate(bayes, [])
    with pytest.raises(ValueError, match="no targets"):
        calibrate(bayes, [(x,)], "nll")
    with pytest.raises(ValueError, match="method='mle'"):
        calibrate(bayes, (x, y), "mle")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 2"):
        calibrate(bayes, (x, y), "matched", draws=1)
    plain = dubito.bayesianize(network(), dubito.MeanField())
    with pytest.raises(ValueError, match="likelihood"):
        calibrate(plain, (x, y))


def test_temperature_divides_mean_and_deviation() -> None:
    bayes, (x, _) = made(), data(6)
    plain = bayes.propagate(x)
    cooled = bayes.propagate(x, calibration=Calibration({}, temperature=2.0))
    assert plain.logits_mean is not None
    assert cooled.logits_mean is not None
    assert cooled.logits_variance is not None
    torch.testing.assert_close(cooled.logits_mean, plain.logits_mean / 2)
    torch.testing.assert_close(cooled.logits_variance, plain.logits_variance / 4)
