"""Sources of tasks: the functions they claim to be, repeatable, within their bounds."""

import math

import pytest
import torch

from dubito.amortised import BNNProcess, gather_tasks
from dubito.amortised.generators import (
    FieldTasks,
    FunctionTasks,
    GaussianProcessTasks,
    HeavisideTasks,
    ImageTasks,
    NetworkTasks,
    SawtoothTasks,
    SineTasks,
    pixel_grid,
)

SOURCES = [
    SineTasks(points=(3, 7)),
    SawtoothTasks(points=(3, 7)),
    GaussianProcessTasks(points=(3, 7), kernel="matern32"),
    HeavisideTasks(points=(3, 7)),
    NetworkTasks(points=(3, 7)),
]


def seed(value: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(value)


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: type(s).__name__)
def test_tasks_are_well_formed_repeatable_and_fresh(source: FunctionTasks) -> None:
    tasks, again, other = source(6, seed()), source(6, seed()), source(6, seed(1))
    batch = gather_tasks(tasks, 1, 1)
    assert int(batch.counts.min()) >= 3
    assert int(batch.counts.max()) <= 7
    for x, _ in tasks:
        assert float(x.abs().max()) <= 4.0
    assert all(torch.equal(a[1], b[1]) for a, b in zip(tasks, again, strict=True))
    assert not torch.equal(tasks[0][0], other[0][0])


def test_a_sawtooth_rises_by_one_and_repeats() -> None:
    function = SawtoothTasks(period=3.0).function(seed())
    x = torch.linspace(-4, 4, 81, dtype=torch.float64).unsqueeze(-1)
    y = function(x)
    torch.testing.assert_close(function(x + 3.0), y, atol=1e-9, rtol=0)
    assert float(y.abs().max()) <= 1.5
    steps = (y[1:] - y[:-1]) / 0.1
    assert int((steps < 0).sum()) in (2, 3)  # the falls; everywhere else it rises by one
    torch.testing.assert_close(steps[steps > 0], torch.ones(int((steps > 0).sum()), dtype=torch.float64))


@pytest.mark.parametrize("kernel", ["rbf", "matern12", "matern32", "matern52", "periodic"])
def test_gaussian_processes_have_their_kernels_covariance(kernel: str) -> None:
    source = GaussianProcessTasks(kernel=kernel, lengthscale=0.7, variance=2.0)  # type: ignore[arg-type]
    x = torch.tensor([[0.0], [0.4], [1.5]], dtype=torch.float64)
    generator = seed()
    draws = torch.cat([source.function(generator)(x) for _ in range(6000)], dim=1)
    torch.testing.assert_close(torch.cov(draws), source.covariance(x), atol=0.15, rtol=0)
    expected = {
        "rbf": math.exp(-0.5 * (0.4 / 0.7) ** 2),
        "matern12": math.exp(-0.4 / 0.7),
        "periodic": math.exp(-2 * (math.sin(math.pi * 0.2) / 0.7) ** 2),
    }
    if kernel in expected:
        assert float(source.covariance(x)[0, 1]) == pytest.approx(2 * expected[kernel])


def test_heaviside_functions_jump_between_two_values() -> None:
    (_, y), *_ = HeavisideTasks(points=(50, 50), noise=0.0)(1, seed())
    assert set(y.flatten().tolist()) == {-1.0, 1.0}


def test_network_functions_have_the_prior_a_process_starts_at() -> None:
    import dubito

    torch.manual_seed(0)
    process = BNNProcess(1, 1, (5, 5), likelihood=dubito.Gaussian())
    x = torch.tensor([[0.5], [2.0]], dtype=torch.float64)
    theirs = process.sample_functions(x, 4000, seed())[..., 0]
    generator = seed(1)
    source = NetworkTasks(hidden=(5, 5))
    ours = torch.cat([source.function(generator)(x) for _ in range(4000)], dim=1).mT
    torch.testing.assert_close(torch.cov(ours.mT), torch.cov(theirs.mT), atol=0.03, rtol=0.1)


def test_images_become_pixels_at_any_resolution() -> None:
    images = torch.arange(2 * 3 * 2 * 2).reshape(2, 3, 2, 2).float() / 24
    source = ImageTasks(images)
    x, y = source.whole(1)
    torch.testing.assert_close(x, torch.tensor([[-0.5, -0.5], [-0.5, 0.5], [0.5, -0.5], [0.5, 0.5]]).double())
    torch.testing.assert_close(y[2], images[1, :, 1, 0].double())
    assert float(pixel_grid(28, 14).abs().max()) < 1
    some = ImageTasks(images, points=(2, 3))(5, seed())
    assert all(2 <= len(x) <= 3 for x, _ in some)
    with pytest.raises(ValueError, match="images have shape"):
        ImageTasks(torch.zeros(3))


def test_fields_are_patches_in_space_and_time_without_gaps() -> None:
    values = torch.arange(4 * 6 * 5).reshape(4, 6, 5).float()
    values[:, 0, 0] = torch.nan
    source = FieldTasks(values, patch=(3, 3), times=2, points=10, within=(2, 4))
    for x, y in source(20, seed()):
        assert x.shape == (10, 3)
        assert bool(y.isfinite().all())
        assert float(y.min()) >= 2 * 30  # from the third instant on
        assert float(x.abs().max()) < 1
    for options, said in (
        ({"patch": (9, 3)}, "does not fit"),
        ({"within": (3, 4), "times": 2}, "fewer than 2"),
    ):
        with pytest.raises(ValueError, match=said):
            FieldTasks(values, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="almost all NaN"):
        FieldTasks(torch.full((2, 4, 4), torch.nan), patch=(2, 2))(1, seed())


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="low < high"):
        SineTasks(low=1.0, high=0.0)
    with pytest.raises(ValueError, match="kernel='cubic'"):
        GaussianProcessTasks(kernel="cubic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="above zero"):
        GaussianProcessTasks(lengthscale=0.0)
