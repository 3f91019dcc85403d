"""The paired bootstrap of AURC against closed forms and against resampling one sample at a time."""

import pytest
import torch

from dubito.experiments.cvp.bootstrap import Difference, compare, weighted_aurc
from dubito.selective import area_under_risk_coverage


def examples(seed: int, size: int = 300, noise: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The same 300 errors for every seed; confidences that know of them, more or less."""
    errors = (torch.rand(size, generator=torch.Generator().manual_seed(99)) < 0.2).to(torch.uint8)
    chance = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return (noise * chance - errors.float()).float(), errors


def test_counts_of_one_are_the_plain_mean_of_risks_ties_aside() -> None:
    confidence, wrong = examples(0)
    ones = torch.ones(1, len(wrong), dtype=torch.float64)
    expected = area_under_risk_coverage(confidence, wrong.bool(), "mean")
    torch.testing.assert_close(weighted_aurc((confidence, wrong), ones)[0], expected)
    constant = weighted_aurc((torch.zeros(300), wrong), ones)[0]
    torch.testing.assert_close(constant, 100 * wrong.double().mean())


def test_counts_are_repetitions() -> None:
    wrong = torch.tensor([0, 1, 0, 1], dtype=torch.uint8)
    confidence = torch.tensor([0.9, 0.8, 0.7, 0.6])
    counts = torch.tensor([[2.0, 0.0, 1.0, 1.0]], dtype=torch.float64)
    # risks: 0 for the two of .9, 0 for .7, 1/4 for .6
    assert float(weighted_aurc((confidence, wrong), counts)) == pytest.approx(100 * (0.25 / 4))


def test_difference_of_a_method_to_itself_is_nothing_and_decides_nothing() -> None:
    own = [examples(0), examples(1)]
    gap = compare(own, own, resamples=200)
    assert (gap.value, gap.low, gap.high) == (0.0, 0.0, 0.0)
    assert gap.verdict is None
    assert compare(own, own, 1.02, resamples=200).verdict is True  # anything is within 2 % of itself


def test_a_clear_difference_is_found_and_its_sign_is_right() -> None:
    sharp, blunt = [examples(s, noise=0.3) for s in range(3)], [examples(s, noise=3.0) for s in range(3)]
    assert compare(sharp, blunt, resamples=300).verdict is True
    assert compare(blunt, sharp, resamples=300).verdict is False


def test_interval_covers_as_stated() -> None:
    hits = 0
    for trial in range(40):  # two equally good methods: the true difference is nothing
        ours, theirs = [examples(2 * trial)], [examples(2 * trial + 1)]
        hits += compare(ours, theirs, resamples=200).verdict is None
    assert hits >= 34


def test_unpaired_is_refused() -> None:
    with pytest.raises(ValueError, match="1 seeds of one method and 2"):
        compare([examples(0)], [examples(0), examples(1)])
    with pytest.raises(ValueError, match="cannot be paired"):
        compare([examples(0)], [examples(0, size=200)])


def test_words() -> None:
    assert str(Difference(-0.5, -1.0, 0.25)) == "-0.500 [-1.000, +0.250]"
