import math

import pytest
import torch
from torch import nn

import dubito
from dubito.spectrum import MatrixSpectrum


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(72, 20), nn.ReLU(), nn.Linear(20, 4)
    )


def of(values, rows=None, columns=None, energy=0.95):
    values = torch.tensor(values)
    return MatrixSpectrum("w", rows or len(values), columns or len(values), values, None, energy)


def test_singular_values_are_those_of_the_matrices_and_of_kernels_by_outputs():
    net = network()
    found = dubito.spectrum(net)
    assert [m.name for m in found.matrices] == ["0.weight", "3.weight", "5.weight"]
    kernel = torch.linalg.svdvals(net[0].weight.detach().reshape(8, 27))
    assert torch.allclose(found["0.weight"].singular_values, kernel)
    assert (found["0.weight"].rows, found["0.weight"].columns) == (8, 27)
    with pytest.raises(KeyError, match=r"5\.weight"):
        found["1.weight"]


def test_energies_and_ranks_of_known_values():
    matrix = of([3.0, 2.0, 1.0, 0.0])
    assert torch.allclose(matrix.cumulative_energy, torch.tensor([9, 13, 14, 14], dtype=torch.float64) / 14)
    assert matrix.stable_rank == pytest.approx(14 / 9)
    assert [matrix.rank_at(e) for e in (0.5, 0.9, 0.95, 1.0)] == [1, 2, 3, 3]
    assert of([0.0, 0.0]).stable_rank == 0.0


def test_a_rank_is_suggested_only_below_break_even():
    assert of([1.0, 1e-3, 1e-3, 1e-3], 4, 40).break_even == pytest.approx(160 / 44)
    assert of([1.0, 1e-3, 1e-3, 1e-3], 4, 40).suggested_rank == 1
    assert of([1.0, 1.0, 1.0, 1.0], 4, 40).suggested_rank is None


def test_an_exactly_low_rank_matrix_is_found_out():
    torch.manual_seed(0)
    layer = nn.Linear(30, 40)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(40, 3) @ torch.randn(3, 30))
    found = dubito.spectrum(layer, energy=0.9999)
    assert found["weight"].suggested_rank == 3
    assert found.suggested_ranks() == {"weight": 3}


def test_of_a_bayesian_module_the_means_are_taken_and_ranks_known():
    net = network()
    families = {"3.weight": dubito.LowRankFactors(5, init="svd"), "5": dubito.MeanField()}
    weight = net[3].weight.detach().clone()
    bayes = dubito.bayesianize(net, families)
    found = dubito.spectrum(bayes)
    assert found["3.weight"].rank == 5
    assert found["5.weight"].rank is None
    expected = torch.linalg.svdvals(weight)
    assert torch.allclose(found["3.weight"].singular_values[:5], expected[:5], atol=1e-5)
    assert float(found["3.weight"].singular_values[5:].max()) < 1e-5 * float(expected[0])


def test_patterns_choose_matrices():
    assert [m.name for m in dubito.spectrum(network(), only=nn.Linear).matrices] == ["3.weight", "5.weight"]
    assert [m.name for m in dubito.spectrum(network(), only=["0", "5.*"]).matrices] == [
        "0.weight",
        "5.weight",
    ]


def test_it_prints_a_table_whose_columns_line_up():
    lines = str(dubito.spectrum(network())).splitlines()
    assert lines[0].startswith("weight")
    assert "break-even" in lines[0]
    assert len({len(line) for line in lines}) == 1
    assert "72" in lines[3]


def test_half_precision_is_widened():
    found = dubito.spectrum(nn.Linear(6, 4).bfloat16())
    assert found["weight"].singular_values.dtype == torch.float32


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="no weight matrix"):
        dubito.spectrum(nn.LayerNorm(4))
    with pytest.raises(ValueError, match="fraction"):
        dubito.spectrum(nn.Linear(2, 2), energy=1.5)
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"weight.*NaN"):
        dubito.spectrum(layer)
    with pytest.raises(ValueError, match="nothing_like_it"):
        dubito.spectrum(nn.Linear(2, 2), only="nothing_like_it")
