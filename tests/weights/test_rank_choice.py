import pytest
import torch

from dubito.weights.rank_choice import break_even_rank, rank_for_energy


def test_rank_for_energy_is_the_smallest_that_holds_it():
    values = torch.tensor([1.0, 3.0, 2.0])  # squares 9, 4, 1 of 14
    assert rank_for_energy(values, 9 / 14 - 1e-9) == 1
    assert rank_for_energy(values, 9 / 14 + 1e-6) == 2
    assert rank_for_energy(values, 13 / 14 - 1e-9) == 2
    assert rank_for_energy(values, 0.99) == 3
    assert rank_for_energy(values, 1.0) == 3


def test_all_energy_counts_exact_zeros_out_and_tiny_values_in():
    assert rank_for_energy(torch.tensor([1.0, 1e-9, 0.0], dtype=torch.float64), 1.0) == 2
    assert rank_for_energy(torch.zeros(4), 0.9) == 1


@pytest.mark.parametrize("energy", [0.0, -0.1, 1.1, float("nan")])
def test_an_energy_that_is_no_fraction_is_refused(energy):
    with pytest.raises(ValueError, match="fraction"):
        rank_for_energy(torch.ones(3), energy)


def test_no_or_bad_singular_values_are_refused():
    with pytest.raises(ValueError, match="vector"):
        rank_for_energy(torch.ones(2, 2), 0.9)
    with pytest.raises(ValueError, match="vector"):
        rank_for_energy(torch.ones(0), 0.9)
    with pytest.raises(ValueError, match="NaN"):
        rank_for_energy(torch.tensor([1.0, float("nan")]), 0.9)


def test_break_even_ranks_of_the_reference():
    sizes = {(44, 128): 32.7, (128, 128): 64.0, (15, 256): 14.2, (64, 256): 51.2, (784, 1200): 474.2}
    for (m, n), rank in sizes.items():
        assert break_even_rank(m, n) == pytest.approx(rank, abs=0.06)
