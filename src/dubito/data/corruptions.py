"""Fifteen corruptions of images in five severities, after Hendrycks and Dietterich (2019, ImageNet-C).

Each works on float tensors of shape ``(N, C, H, W)`` with values in [0, 1], of any size and on any device,
and is a function of the images, the severity and the seed alone. The same seed uses the same noise, places
and directions at every severity, so that severity alone is compared. Lengths are stated relative to the
image's side. The strengths are our own, chosen for small grey images; they are not those of MNIST-C.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

Corruption = Callable[[Tensor, float, torch.Generator], Tensor]
SEVERITIES = (1, 2, 3, 4, 5)
_STEPS_OF_MOTION = 15


def _gaussian_noise(x: Tensor, sd: float, generator: torch.Generator) -> Tensor:
    return x + sd * torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)


def _shot_noise(x: Tensor, photons: float, generator: torch.Generator) -> Tensor:
    return torch.poisson(x * photons, generator=generator) / photons


def _impulse_noise(x: Tensor, share: float, generator: torch.Generator) -> Tensor:
    draw = torch.rand(x.shape, generator=generator, device=x.device, dtype=x.dtype)
    salt = torch.rand(x.shape, generator=generator, device=x.device, dtype=x.dtype) < 0.5
    return torch.where(draw < share, salt.to(x.dtype), x)


def _gaussian_blur(x: Tensor, width: float, generator: torch.Generator) -> Tensor:
    for axis in (-2, -1):
        sigma = width * x.shape[axis]
        radius = min(math.ceil(3 * sigma), x.shape[axis] - 1)
        steps = torch.arange(-radius, radius + 1, device=x.device, dtype=x.dtype)
        kernel = torch.exp(-0.5 * (steps / sigma) ** 2)
        shape = (1, 1, -1, 1) if axis == -2 else (1, 1, 1, -1)
        weight = (kernel / kernel.sum()).reshape(shape).expand(x.shape[1], -1, -1, -1)
        pad = (0, 0, radius, radius) if axis == -2 else (radius, radius, 0, 0)
        x = F.conv2d(F.pad(x, pad, mode="replicate"), weight, groups=x.shape[1])
    return x


def _contrast(x: Tensor, factor: float, generator: torch.Generator) -> Tensor:
    mean = x.mean(dim=(-3, -2, -1), keepdim=True)
    return mean + (x - mean) * factor


def _brightness(x: Tensor, shift: float, generator: torch.Generator) -> Tensor:
    return x + shift


def _rotation(x: Tensor, degrees: float, generator: torch.Generator) -> Tensor:
    angle = _signs(x, generator) * math.radians(degrees)
    # Coordinates of the map are relative to each side, so images that are not square need the ratio.
    ratio = x.shape[-2] / x.shape[-1]
    zero = torch.zeros_like(angle)
    rows = [
        torch.stack([angle.cos(), -angle.sin() * ratio, zero], dim=-1),
        torch.stack([angle.sin() / ratio, angle.cos(), zero], dim=-1),
    ]
    return _warp(x, torch.stack(rows, dim=1))


def _translate(x: Tensor, share: float, generator: torch.Generator) -> Tensor:
    horizontal, vertical = _signs(x, generator), _signs(x, generator)
    one, zero = torch.ones_like(horizontal), torch.zeros_like(horizontal)
    rows = [
        torch.stack([one, zero, 2 * share * horizontal], dim=-1),
        torch.stack([zero, one, 2 * share * vertical], dim=-1),
    ]
    return _warp(x, torch.stack(rows, dim=1))


def _occlusion(x: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """A grey square around a random point of the central half (Cutout, DeVries and Taylor 2017)."""
    hidden = torch.ones_like(x[:, :1], dtype=torch.bool)
    for axis in (-2, -1):
        side = x.shape[axis]
        centre = side * (0.25 + 0.5 * torch.rand(len(x), generator=generator, device=x.device))
        distance = (torch.arange(side, device=x.device) + 0.5 - centre[:, None]).abs()
        inside = distance <= share * side / 2
        hidden = hidden & (inside[:, None, :, None] if axis == -2 else inside[:, None, None, :])
    return torch.where(hidden, torch.full_like(x, 0.5), x)


def _pixelate(x: Tensor, share: float, generator: torch.Generator) -> Tensor:
    coarse = [max(1, round(side * share)) for side in x.shape[-2:]]
    return F.interpolate(F.interpolate(x, size=coarse, mode="area"), size=x.shape[-2:], mode="nearest-exact")


def _defocus_blur(x: Tensor, width: float, generator: torch.Generator) -> Tensor:
    """A disc of the given radius, anti-aliased at its rim, in place of every point."""
    radii = [max(width * side, 1e-6) for side in x.shape[-2:]]
    reach = [min(math.ceil(radius), side - 1) for radius, side in zip(radii, x.shape[-2:], strict=True)]
    rows = torch.arange(-reach[0], reach[0] + 1, device=x.device, dtype=x.dtype) / radii[0]
    columns = torch.arange(-reach[1], reach[1] + 1, device=x.device, dtype=x.dtype) / radii[1]
    distance = (rows[:, None].square() + columns.square()).sqrt()
    disc = ((1.0 - distance) * min(radii) + 0.5).clamp(0.0, 1.0)
    weight = (disc / disc.sum()).expand(x.shape[1], 1, *disc.shape)
    pad = (reach[1], reach[1], reach[0], reach[0])
    return F.conv2d(F.pad(x, pad, mode="replicate"), weight, groups=x.shape[1])


def _motion_blur(x: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """The average over a straight way of this length, in a random direction for each image."""
    angle = math.pi * torch.rand(len(x), generator=generator, device=x.device, dtype=x.dtype)
    one, zero = torch.ones_like(angle), torch.zeros_like(angle)
    steps = torch.linspace(-share, share, _STEPS_OF_MOTION).tolist()
    total = torch.zeros_like(x)
    for step in steps:
        rows = [
            torch.stack([one, zero, step * angle.cos()], dim=-1),
            torch.stack([zero, one, step * angle.sin()], dim=-1),
        ]
        total = total + _warp(x, torch.stack(rows, dim=1))
    return total / len(steps)


def _shear(x: Tensor, slope: float, generator: torch.Generator) -> Tensor:
    """Rows shifted in proportion to their height, to either side."""
    side = slope * _signs(x, generator) * x.shape[-2] / x.shape[-1]
    one, zero = torch.ones_like(side), torch.zeros_like(side)
    rows = [torch.stack([one, side, zero], dim=-1), torch.stack([zero, one, zero], dim=-1)]
    return _warp(x, torch.stack(rows, dim=1))


def _haze(x: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Blended with clouds: smooth noise in [0.4, 1] with structure over a quarter of the image."""
    noise = torch.rand((len(x), 1, 5, 5), generator=generator, device=x.device, dtype=x.dtype)
    clouds = F.interpolate(noise, size=x.shape[-2:], mode="bicubic", align_corners=True).clamp(0.0, 1.0)
    return (1.0 - share) * x + share * (0.4 + 0.6 * clouds)


def _elastic(x: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Displaced by smooth random fields of the given standard deviation (Simard et al. 2003)."""
    noise = torch.randn((len(x), 2, 7, 7), generator=generator, device=x.device, dtype=x.dtype)
    field = F.interpolate(noise, size=x.shape[-2:], mode="bicubic", align_corners=True)
    identity = torch.eye(2, 3, device=x.device, dtype=x.dtype).expand(len(x), 2, 3)
    grid = F.affine_grid(identity, list(x.shape), align_corners=False) + 2 * share * field.movedim(1, -1)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _signs(x: Tensor, generator: torch.Generator) -> Tensor:
    draw = torch.rand(len(x), generator=generator, device=x.device, dtype=x.dtype)
    return torch.where(draw < 0.5, -1.0, 1.0).to(x.dtype)


def _warp(x: Tensor, maps: Tensor) -> Tensor:
    grid = F.affine_grid(maps, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


_TABLE: dict[str, tuple[Corruption, tuple[float, float, float, float, float]]] = {
    "gaussian_noise": (_gaussian_noise, (0.1, 0.2, 0.3, 0.45, 0.6)),
    "shot_noise": (_shot_noise, (30.0, 12.0, 6.0, 3.0, 1.5)),
    "impulse_noise": (_impulse_noise, (0.03, 0.07, 0.12, 0.2, 0.3)),
    "gaussian_blur": (_gaussian_blur, (0.02, 0.035, 0.05, 0.07, 0.1)),
    "contrast": (_contrast, (0.7, 0.5, 0.35, 0.2, 0.1)),
    "brightness": (_brightness, (0.1, 0.2, 0.35, 0.5, 0.65)),
    "rotation": (_rotation, (10.0, 20.0, 30.0, 45.0, 60.0)),
    "translate": (_translate, (0.04, 0.08, 0.12, 0.16, 0.2)),
    "occlusion": (_occlusion, (0.15, 0.25, 0.35, 0.45, 0.55)),
    "pixelate": (_pixelate, (0.5, 0.4, 0.32, 0.25, 0.15)),
    "defocus_blur": (_defocus_blur, (0.05, 0.075, 0.1, 0.14, 0.19)),
    "motion_blur": (_motion_blur, (0.1, 0.16, 0.23, 0.32, 0.45)),
    "shear": (_shear, (0.2, 0.35, 0.5, 0.7, 0.9)),
    "haze": (_haze, (0.2, 0.35, 0.5, 0.62, 0.75)),
    "elastic": (_elastic, (0.015, 0.025, 0.035, 0.05, 0.065)),
}

#: For each corruption its parameter at the five severities (a standard deviation, degrees, a share …).
CORRUPTIONS: Mapping[str, tuple[float, ...]] = MappingProxyType({key: row[1] for key, row in _TABLE.items()})


def corrupt(images: Tensor, name: str, severity: int = 3, seed: int = 0) -> Tensor:
    """Corrupt every image.

    Args:
        images: float, shape ``(N, C, H, W)``, values in [0, 1]; not altered.
        name: one of :data:`CORRUPTIONS`.
        severity: 1 (mild) … 5 (strong).
        seed: of everything random in it.

    Returns:
        Same shape, dtype and device, values in [0, 1].

    Raises:
        ValueError: if the name or severity is unknown, or the images are not as stated.
    """
    if name not in _TABLE:
        raise ValueError(f"unknown corruption {name!r}; there are {', '.join(sorted(_TABLE))}")
    if severity not in SEVERITIES:
        raise ValueError(f"severity must be one of {SEVERITIES}; got {severity!r}")
    if images.dim() != 4 or not images.is_floating_point():
        raise ValueError(
            f"images must be floating point of shape (N, C, H, W); got {images.dtype} {tuple(images.shape)}"
        )
    if images.numel() and not bool(((images >= 0) & (images <= 1)).all()):
        raise ValueError("images must lie in [0, 1] and hold no NaN; corrupt before standardising")
    function, strengths = _TABLE[name]
    generator = torch.Generator(device=images.device).manual_seed(seed)
    return function(images, strengths[severity - 1], generator).clamp(0.0, 1.0)
