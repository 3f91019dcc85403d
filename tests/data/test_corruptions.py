import itertools

import pytest
import torch

from dubito.data import CORRUPTIONS, SEVERITIES, corrupt, letters


@pytest.fixture(scope="module")
def pictures():
    return letters(40, 28, 7).images


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("size", [8, 28, (18, 31)])
def test_shape_range_and_determinism(name, size):
    images = letters(6, size, 1).images
    before = images.clone()
    state = torch.get_rng_state()
    once, again = corrupt(images, name, 3, seed=2), corrupt(images, name, 3, seed=2)
    assert torch.equal(once, again)
    assert torch.equal(images, before)
    assert torch.equal(state, torch.get_rng_state())
    assert once.shape == images.shape
    assert once.dtype == images.dtype
    assert once.min() >= 0
    assert once.max() <= 1


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_distance_from_the_clean_image_grows_with_severity(name, pictures):
    if name in (
        "rotation",
        "translate",
        "shear",
        "elastic",
    ):  # moved strokes soon miss themselves entirely: use broad spots
        rows, columns = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")
        pictures = torch.exp(-((rows - 13.5).square() / 30 + (columns - 8).square() / 100)).expand(
            40, 1, 28, 28
        )
    distances = [
        (corrupt(pictures, name, severity) - pictures).square().mean().sqrt().item()
        for severity in SEVERITIES
    ]
    assert distances[0] > 0.005
    assert all(later > 1.03 * earlier for earlier, later in itertools.pairwise(distances)), distances


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in CORRUPTIONS
        if n not in ("contrast", "brightness", "gaussian_blur", "defocus_blur", "pixelate")
    ],
)
def test_random_corruptions_depend_on_the_seed(name, pictures):
    assert not torch.equal(corrupt(pictures, name, 3, seed=0), corrupt(pictures, name, 3, seed=1))


def test_gaussian_noise_has_the_stated_standard_deviation():
    grey = torch.full((50, 1, 28, 28), 0.5)
    noise = corrupt(grey, "gaussian_noise", 1) - 0.5  # sd 0.1: clipping at 5 sd does not matter
    assert noise.std().item() == pytest.approx(CORRUPTIONS["gaussian_noise"][0], rel=0.02)


def test_shot_noise_has_the_mean_and_variance_of_photons():
    grey = torch.full((50, 1, 28, 28), 0.3)
    noisy = corrupt(grey, "shot_noise", 1)
    assert noisy.mean().item() == pytest.approx(0.3, abs=0.005)
    assert noisy.var().item() == pytest.approx(0.3 / CORRUPTIONS["shot_noise"][0], rel=0.05)


def test_impulse_noise_hits_the_stated_share():
    grey = torch.full((50, 1, 28, 28), 0.5)
    hit = corrupt(grey, "impulse_noise", 5) != 0.5
    assert hit.double().mean().item() == pytest.approx(CORRUPTIONS["impulse_noise"][4], rel=0.03)


def test_rotation_turns_a_point_by_the_stated_angle_also_where_not_square():
    images = torch.zeros(1, 1, 41, 61)
    images[0, 0, 20, 40] = 1.0  # ten pixels right of the centre (row 20, column 30)
    turned = corrupt(images, "rotation", 3)[0, 0]
    rows, columns = torch.meshgrid(torch.arange(41.0), torch.arange(61.0), indexing="ij")
    down = ((rows * turned).sum() / turned.sum() - 20).item()
    right = ((columns * turned).sum() / turned.sum() - 30).item()
    angle = torch.atan2(torch.tensor(abs(down)), torch.tensor(right)).rad2deg().item()
    assert angle == pytest.approx(30, abs=1.5)
    assert (down**2 + right**2) ** 0.5 == pytest.approx(10, abs=0.3)


def test_blur_keeps_the_light_of_an_inner_point_and_has_the_stated_width():
    images = torch.zeros(1, 1, 40, 40)
    images[0, 0, 20, 20] = 1.0
    blurred = corrupt(images, "gaussian_blur", 2)[0, 0]
    assert blurred.sum().item() == pytest.approx(1.0, abs=1e-5)
    spread = ((torch.arange(40.0) - 20).square() * blurred.sum(0)).sum().sqrt().item()
    assert spread == pytest.approx(40 * CORRUPTIONS["gaussian_blur"][1], rel=0.05)


def test_there_are_fifteen_as_in_the_protocols_of_mnist_c_and_cifar_c():
    assert len(CORRUPTIONS) == 15


def test_defocus_keeps_light_and_spreads_it_over_the_disc():
    images = torch.zeros(1, 1, 41, 41)
    images[0, 0, 20, 20] = 1.0
    blurred = corrupt(images, "defocus_blur", 5)[0, 0]
    radius = 41 * CORRUPTIONS["defocus_blur"][4]
    assert blurred.sum().item() == pytest.approx(1.0, abs=1e-5)
    assert blurred.max().item() == pytest.approx(1 / (torch.pi * radius**2), rel=0.05)
    assert int((blurred > 0.5 * blurred.max()).sum()) == pytest.approx(torch.pi * radius**2, rel=0.15)


def test_motion_blur_spreads_a_point_along_one_line():
    images = torch.zeros(30, 1, 41, 41)
    images[:, 0, 20, 20] = 1.0
    rows, columns = torch.meshgrid(torch.arange(41.0) - 20, torch.arange(41.0) - 20, indexing="ij")
    for blurred in corrupt(images, "motion_blur", 5)[:, 0]:
        weights = blurred / blurred.sum()
        off = (weights * rows * columns).sum()
        covariance = torch.stack(
            [torch.stack([(weights * rows**2).sum(), off]), torch.stack([off, (weights * columns**2).sum()])]
        )
        short, long = torch.linalg.eigvalsh(covariance).tolist()
        assert short < 0.6  # what bilinear interpolation spreads across the line
        assert long**0.5 == pytest.approx(41 * CORRUPTIONS["motion_blur"][4] / 12**0.5, rel=0.15)


def test_shear_moves_a_row_in_proportion_to_its_height():
    images = torch.zeros(1, 1, 41, 61)
    images[0, 0, 10, 30] = 1.0  # ten rows above the centre
    moved = corrupt(images, "shear", 3)[0, 0]
    rows, columns = torch.meshgrid(torch.arange(41.0), torch.arange(61.0), indexing="ij")
    assert (rows * moved).sum().item() / moved.sum().item() == pytest.approx(10, abs=0.01)
    shift = abs((columns * moved).sum().item() / moved.sum().item() - 30)
    assert shift == pytest.approx(10 * CORRUPTIONS["shear"][2], abs=0.05)


def test_bad_requests_are_explained(pictures):
    with pytest.raises(ValueError, match="gaussian_blur"):
        corrupt(pictures, "fog")
    with pytest.raises(ValueError, match="severity"):
        corrupt(pictures, "rotation", 6)
    with pytest.raises(ValueError, match="floating"):
        corrupt((pictures * 255).to(torch.uint8), "rotation")
    with pytest.raises(ValueError, match="before standardising"):
        corrupt(pictures - 0.5, "rotation")
