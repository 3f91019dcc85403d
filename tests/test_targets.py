"""Checks of targets: what is said, and where nothing can be."""

import pytest
import torch

from dubito import targets


def fault(mask, text):
    return targets.Fault(mask, lambda index: f"{text} at {index}")


def test_first_fault_is_raised_with_its_first_index():
    good, bad = torch.zeros(2, 2, dtype=torch.bool), torch.tensor([[False, False], [True, True]])
    targets.raise_faults(fault(good, "a"), fault(good, "b"))
    with pytest.raises(ValueError, match=r"b at \(1, 0\)"):
        targets.raise_faults(fault(good, "a"), fault(bad, "b"), fault(bad, "c"))


def test_values_that_cannot_be_read_are_not():
    def run(y):
        targets.raise_faults(targets.finite_fault(y))
        return y.sum()

    assert torch.func.vmap(run)(torch.ones(3, 2)).tolist() == [2.0] * 3
    run(torch.ones(3, device="meta"))


@pytest.mark.parametrize(
    ("y", "like", "lead", "outputs", "axis", "message"),
    [
        ((4,), (4, 1), 0, (4, 1), None, r"unsqueeze\(-1\), or drop"),
        ((4,), (4, 1), 1, (4, 2), None, r"shape \(4, 1\). Pass y.unsqueeze\(-1\). It is not"),
        ((4, 1), (4,), 0, (4, 9), -1, r"pass y.squeeze\(-1\)"),
        ((4, 9), (4,), 0, (4, 9), -1, r"one-hot.*y.argmax\(-1\)"),
        ((5,), (4,), 0, (4, 9), -1, "looked for on axis -1"),
        ((4,), (4, 3), 1, (4, 3), None, r"need a y of shape \(4, 3\)"),
        ((5,), (4, 3), 1, (4, 3), None, r"need a y of shape \(3,\)"),
        ((5,), (4,), 0, (4,), None, "The batch comes first in both"),
    ],
)
def test_every_wrong_shape_has_its_remedy(y, like, lead, outputs, axis, message):
    with pytest.raises(ValueError, match=message):
        targets.check_shape(torch.zeros(y), like, lead, outputs, axis)


def test_one_output_is_no_two_classes():
    with pytest.raises(ValueError, match=r"labels run from 0 to 0. One output .* use Bernoulli"):
        targets.raise_faults(targets.label_fault(torch.tensor([0, 1]), 1))


def test_a_right_shape_passes():
    targets.check_shape(torch.zeros(4, 1), (7, 4, 1), 1, (7, 4, 1))
