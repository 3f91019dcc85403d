import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dubito.certificates import (
    LossConstants,
    eckart_young,
    learned_factors,
    loss_constants,
    network_eckart_young,
)


def drawn(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def best(weight, rank):
    u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vh[:rank]


LOSSES = {
    "cross_entropy": lambda z, y: F.cross_entropy(z, y, reduction="none"),
    "mae": lambda z, y: (z - F.one_hot(y, z.shape[1])).norm(dim=1),
}


@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("rank", [0, 1, 15, 43])
def test_every_form_bounds_the_true_change_and_they_are_ordered(loss, rank):
    weight, x = drawn(64, 44, scale=44**-0.5), drawn(300, 44, seed=1)
    y = torch.randint(64, (300,), generator=torch.Generator().manual_seed(2))
    change = (LOSSES[loss](x @ weight.T, y) - LOSSES[loss](x @ best(weight, rank).T, y)).abs()
    gap = eckart_young(weight, rank, loss=loss, inputs=x)
    assert 0 < change.mean() <= gap.on_data <= gap.spectral <= gap.frobenius
    assert change.max() <= gap.spectral
    assert gap.bound == gap.on_data
    assert gap.predictor == "plain network"


def test_the_forms_are_tail_norm_next_singular_value_and_mean_distance():
    weight, x = drawn(64, 44), drawn(50, 44, seed=1)
    values = torch.linalg.svdvals(weight)
    gap = eckart_young(weight, 15, loss="mae", inputs=x, radius=20.0)
    assert gap.frobenius == pytest.approx(20 * float(values[15:].square().sum().sqrt()))
    assert gap.spectral == pytest.approx(20 * float(values[15]))
    assert gap.on_data == pytest.approx(float((x @ (weight - best(weight, 15)).T).norm(dim=1).mean()))
    assert gap.measured["energy kept"] == pytest.approx(
        float(values[:15].square().sum() / values.square().sum())
    )
    free = eckart_young(weight, 15, loss="mae", radius=20.0)
    assert free.on_data is None
    assert free.bound == free.spectral


def test_the_data_form_is_attained():
    """MAE against targets at the truncated outputs changes by exactly ‖(W - W_r) x‖."""
    weight, x = drawn(8, 5), drawn(40, 5, seed=1)
    kept = best(weight, 2)
    target = x @ kept.T
    change = (x @ weight.T - target).norm(dim=1) - (x @ kept.T - target).norm(dim=1)
    assert eckart_young(weight, 2, loss="mae", inputs=x).bound == pytest.approx(float(change.mean()))


def test_full_rank_costs_nothing_and_kernels_are_matrices():
    assert eckart_young(drawn(6, 4), 4, radius=1.0).bound == 0.0
    kernel = drawn(6, 3, 2, 2)
    assert eckart_young(kernel, 2, radius=1.0).bound == eckart_young(kernel.flatten(1), 2, radius=1.0).bound


def test_learned_factors_bound_the_change_and_follow_theorem_3_7():
    full, x = drawn(20, 12), drawn(200, 12, seed=3)
    y = torch.randint(20, (200,), generator=torch.Generator().manual_seed(2))
    a, b = drawn(20, 4, seed=5), drawn(12, 4, seed=6)
    learned = 0.9 * best(full, 4) + 0.02 * best(a @ b.T, 4)
    learned = best(learned, 4)
    gap = learned_factors(learned, full, 4, inputs=x)
    change = (LOSSES["cross_entropy"](x @ learned.T, y) - LOSSES["cross_entropy"](x @ full.T, y)).abs()
    assert 0 < change.mean() <= gap.on_data <= gap.spectral <= gap.frobenius
    tail = torch.linalg.svdvals(full)[4:].square().sum().sqrt()
    radius = float(x.norm(dim=1).max())
    assert gap.frobenius == pytest.approx(
        math.sqrt(2) * radius * float((learned - best(full, 4)).norm() + tail)
    )
    at_best = learned_factors(best(full, 4), full, 4, inputs=x)
    assert at_best.frobenius == pytest.approx(eckart_young(full, 4, inputs=x).frobenius)
    with pytest.raises(ValueError, match="rank above"):
        learned_factors(full, full, 4, inputs=x)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh(), nn.GELU(), nn.LeakyReLU(0.2)])
@pytest.mark.parametrize("ranks", [3, {"0": 4}, {"0": 2, "4": 1}])
def test_a_chain_of_layers_is_bounded(activation, ranks):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(10, 16), activation, nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)), activation, nn.Linear(16, 5)
    ).eval()  # fmt: skip
    names = {"0": net[0], "2.0": net[2][0], "4": net[4]}
    x, y = torch.randn(200, 10), torch.randint(5, (200,))
    gap = network_eckart_young(net, ranks, x)
    truncated = {n: (ranks if isinstance(ranks, int) else ranks.get(n, 99)) for n in names}
    with torch.no_grad():
        before = F.cross_entropy(net(x), y, reduction="none")
        for name, layer in names.items():
            layer.weight.copy_(best(layer.weight, truncated[name]))
        change = (F.cross_entropy(net(x), y, reduction="none") - before).abs()
    assert 0 < change.mean() <= gap.bound
    assert change.max() <= gap.spectral <= gap.frobenius


def test_a_chain_of_one_layer_is_the_layer():
    layer, x = nn.Linear(6, 4), torch.randn(30, 6)
    assert network_eckart_young(layer, 2, x).bound == pytest.approx(
        eckart_young(layer.weight, 2, inputs=x).bound
    )


def test_what_has_no_known_constant_is_refused():
    with pytest.raises(TypeError, match="LayerNorm"):
        network_eckart_young(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), 1, torch.randn(2, 3))
    with pytest.raises(ValueError, match="names"):
        network_eckart_young(nn.Sequential(nn.Linear(3, 3)), {"1": 1}, torch.randn(2, 3))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rank": 5, "radius": 1.0}, "above min"),
        ({"rank": -1, "radius": 1.0}, "at least 0"),
        ({"rank": 1}, "give inputs"),
        ({"rank": 1, "inputs": torch.ones(2, 3)}, "shape"),
        ({"rank": 1, "inputs": torch.full((2, 4), math.nan)}, "NaN"),
        ({"rank": 1, "inputs": torch.ones(2, 4), "radius": 1.0}, "largest norm"),
        ({"rank": 1, "radius": 1.0, "loss": "l2"}, "unknown loss"),
        ({"rank": 1, "radius": 1.0, "loss": "half_squared"}, "output_bound"),
    ],
)
def test_bad_arguments_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        eckart_young(torch.ones(5, 4), **options)


def test_constants_are_the_suprema_of_slopes_and_curvatures():
    """L and b of the table from the derivatives at many points: approached and never passed."""
    z = 4 * drawn(2000, 3)
    p = z.softmax(-1)
    binary = torch.sigmoid(z[:, 0])
    slopes = {
        "cross_entropy": (p - F.one_hot(torch.zeros(2000, dtype=torch.long), 3)).norm(dim=1),
        "binary_cross_entropy": binary,
    }
    curvatures = {
        "cross_entropy": torch.linalg.eigvalsh(torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1))[:, -1],
        "binary_cross_entropy": binary * (1 - binary),
    }
    for name in slopes:
        constants = loss_constants(name)
        assert 0.95 * constants.lipschitz < slopes[name].max() <= constants.lipschitz
        assert 0.95 * constants.curvature < curvatures[name].max() <= constants.curvature
    assert loss_constants("half_squared", 3.0).lipschitz == 6.0
    own = LossConstants("own", 2.0)
    assert loss_constants(own) is own
    with pytest.raises(ValueError, match="positive"):
        LossConstants("own", 0.0)


def test_it_prints_its_assumptions_and_the_rich_table_too():
    from rich.console import Console

    gap = eckart_young(drawn(6, 4), 2, radius=1.0)
    for text in (str(gap), _rendered(Console(width=200, record=True), gap)):
        assert "Lipschitz" in text
        assert "every x with" in text
        assert "spectral form" in text
    assert not gap.vacuous
    with pytest.raises(TypeError):
        gap.measured["L"] = 0.0


def _rendered(console, thing):
    with console.capture() as capture:
        console.print(thing)
    return capture.get()
