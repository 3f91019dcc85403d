"""Learning-rate transfer and the toys, at sizes of seconds."""

import math

import pytest
import torch

from dubito.experiments.ibvi import IBVI
from dubito.experiments.ibvi.toys import (
    Clusters,
    ToySettings,
    cluster_data,
    clusters,
    clusters_figure,
    moon_data,
    moons,
    moons_figure,
)
from dubito.experiments.ibvi.transfer import (
    TransferSettings,
    best_exponent,
    data,
    drift,
    final_loss,
    spread,
    transfer,
    transfer_figure,
    transfer_table,
)

SMALL = TransferSettings((16, 64), (-7, -4), 20, 128)


def test_losses_are_found_for_every_width_and_rate_and_repeat() -> None:
    said: list[str] = []
    losses = transfer(SMALL, said.append)
    assert set(losses) == {"standard", "mup"}
    assert all(set(row) == {-7, -4} for part in losses.values() for row in part.values())
    assert losses["mup"][16][-4] == final_loss(16, "mup", 2.0**-4, 0, SMALL)
    assert len(said) == 4
    assert losses["mup"][64][-4] < math.log(4), "better than guessing after 20 steps"


def test_a_rate_that_diverges_is_infinite_and_kept_out_of_the_figure() -> None:
    settings = TransferSettings((16,), (10,), 20, 128)
    assert final_loss(16, "standard", 2.0**10, 0, settings) == math.inf
    figure = transfer_figure({"standard": {16: {-4: 1.0, 10: math.inf}}, "mup": {16: {-4: 1.0, 10: 2.0}}})
    lines = figure.axes[0].lines
    assert len(lines[0].get_xdata()) == 1


def test_drift_and_spread_of_the_best_rate() -> None:
    falling = {32: {-4: 0.1, -6: 0.2}, 64: {-4: 0.2, -6: 0.1}}
    assert best_exponent(falling[32]) == -4
    assert drift(falling) == -2
    assert spread(falling, 0) == 2
    assert spread(falling, 64) == 0
    assert best_exponent({-3: 1.0, -5: 1.0}) == -5
    table = transfer_table({"mup": falling}, (32, 64))
    assert table.rows[0].cells == ("2^-4", "2^-6")


def test_data_do_not_depend_on_the_seed_in_force() -> None:
    x, y = data(64)
    torch.manual_seed(3)
    again, labels = data(64)
    assert torch.equal(x, again)
    assert torch.equal(y, labels)
    assert set(y.tolist()) <= set(range(4))


def test_clusters_are_three_and_moons_two() -> None:
    x, y = cluster_data(0)
    gaps = x.sort().values.diff()
    assert int((gaps > 0.3).sum()) == 2
    assert float((y - (torch.sigmoid(10 * x) - 0.5)).std()) == pytest.approx(0.02, rel=0.3)
    points, labels = moon_data(0)
    assert points.shape == (200, 2)
    assert labels.bincount().tolist() == [100, 100]
    assert torch.equal(points, moon_data(0)[0])


def test_the_ratio_compares_off_and_on_the_data() -> None:
    grid = torch.linspace(-1.5, 1.5, 301)
    x = torch.zeros(3)
    sd = torch.where(grid.abs() > 0.15, 4.0, 0.5)
    found = Clusters(x, x, grid, torch.zeros(301), sd, sd)
    assert found.ratio() == pytest.approx(8.0)


def test_training_takes_the_spread_away_from_the_data_points() -> None:
    state = torch.get_rng_state()
    found = clusters(ToySettings(epochs=40, draws=64))
    assert torch.equal(state, torch.get_rng_state())
    near = (found.grid[:, None] - found.x[None]).abs().min(1).values < 0.02
    assert float(found.sd[near].median()) < 0.5 * float(found.prior_sd[near].median())
    assert clusters_figure(found).axes


def test_moons_are_drawn() -> None:
    found = moons(ToySettings(epochs=20, draws=16))
    assert found.accuracy > 0.7
    assert len(moons_figure(found).axes) == 4


def test_parts_of_the_reproduction() -> None:
    assert list(IBVI.parts) == ["comparison", "mup", "toys"]
