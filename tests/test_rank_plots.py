import pytest
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.distributions import Normal

import dubito
from dubito import plots, rank_plots
from dubito.certificates import rank_sweep
from dubito.spectrum import spectrum


def factored(rank=2, sizes=(5, 4)):
    torch.manual_seed(0)
    family = dubito.LowRankFactors(rank, init="random", prior=Normal(0.0, 0.5))
    return dubito.bayesianize(nn.Linear(*sizes, bias=False), family, likelihood=dubito.Categorical())


def test_singular_values_are_drawn_relative_with_their_energy():
    torch.manual_seed(0)
    found = spectrum(nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 3)))
    figure = rank_plots.singular_values(found, "decay")
    assert isinstance(figure, Figure)
    upper, lower = figure.axes
    assert [line.get_label() for line in upper.lines] == ["0.weight", "1.weight"]
    first = found["0.weight"]
    drawn = torch.tensor(upper.lines[0].get_ydata())
    assert torch.allclose(drawn, (first.singular_values / first.singular_values[0]).double())
    dots = [line for line in lower.lines if line.get_marker() == "o"]
    assert [int(line.get_xdata()[0]) for line in dots] == [m.rank_at(0.95) for m in found.matrices]
    assert "currentColor" in plots.to_svg(figure, "singular values", "s")


def test_of_many_matrices_the_largest_are_drawn():
    found = spectrum(nn.Sequential(*(nn.Linear(2 + i, 3 + i) for i in range(15))))
    assert len(rank_plots.singular_values(found).axes[0].lines) == 12


def test_bounds_are_drawn_against_rank_with_certificates_marked():
    sweep = rank_sweep(factored(), (torch.randn(50, 5), torch.randint(4, (50,))), samples=8)
    figure = rank_plots.bound_against_rank(sweep)
    lines = figure.axes[0].lines
    curves = [line for line in lines if line.get_linestyle() == "--"]
    assert list(curves[0].get_ydata()) == [p.kl_form for p in sweep.points]
    assert list(curves[1].get_ydata()) == [p.sqrt_form for p in sweep.points]
    dots = [line for line in lines if line.get_marker() == "o"]
    assert [list(line.get_xdata()) for line in dots] == [[2], [2]]
    assert sum(line.get_marker() == "x" for line in lines) == 2
    assert "<svg" in plots.to_svg(figure, "bounds", "b")


def test_only_entries_of_one_row_or_column_correlate():
    """The closed form's picture against draws: zeros where neither row nor column is shared."""
    with pytest.warns(dubito.DubitoWarning, match="break-even"):
        bayes = factored(2, (3, 4))
    with torch.no_grad():
        factors = bayes.draw(20000, torch.Generator().manual_seed(0)).components(bayes)[0]
        draws = (factors["left"] @ factors["right"].mT).reshape(20000, 12)
    figure = rank_plots.entry_correlations(torch.cov(draws.T), 4, 3)
    image = torch.as_tensor(figure.axes[0].images[0].get_array())
    assert torch.allclose(image.diagonal(), torch.ones(12, dtype=torch.float64))
    row, column = torch.arange(12) // 3, torch.arange(12) % 3
    apart = (row[:, None] != row) & (column[:, None] != column)
    assert float(image[apart].abs().max()) < 0.04
    assert float(image[~apart].abs().min()) >= 0.0
    assert float(image[~apart & ~torch.eye(12, dtype=torch.bool)].abs().max()) > 0.2
    exact = rank_plots.entry_correlations(next(iter(bayes.posteriors())))
    closed = torch.as_tensor(exact.axes[0].images[0].get_array())
    assert float(closed[apart].abs().max()) < 1e-7
    assert torch.allclose(closed, image, atol=0.04)


def test_a_covariance_that_is_none_is_refused():
    with pytest.raises(ValueError, match="need"):
        rank_plots.entry_correlations(torch.eye(5), 2, 3)
    with pytest.raises(ValueError, match="rows="):
        rank_plots.entry_correlations(torch.eye(6))
    with pytest.raises(ValueError, match="positive"):
        rank_plots.entry_correlations(torch.zeros(6, 6), 2, 3)
