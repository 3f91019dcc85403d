"""Letters A–J as images no digit classifier has seen, rendered from the fonts matplotlib brings along."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F

from dubito.data.images import Images

LETTERS = tuple("ABCDEFGHIJ")
FACES = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSerif", "DejaVuSerif-Bold",
    "DejaVuSerif-Italic", "DejaVuSansMono", "DejaVuSansMono-Bold", "STIXGeneral", "STIXGeneralBol",
    "STIXGeneralItalic", "cmr10", "cmss10", "cmtt10", "cmb10",
)  # fmt: skip
_GLYPH = 112  # side in pixels at which a glyph is rendered, once a face and letter
_FILL = 20 / 28  # the larger side of a glyph relative to the image, as MNIST has it
_SUPERSAMPLE = 4


def letters(n: int = 1000, size: int | tuple[int, int] = 28, seed: int = 0) -> Images:
    """``n`` letters A–J, white on black: a small out-of-distribution set in the manner of notMNIST.

    Each letter is drawn in a random face of fifteen, turned by up to ±15°, scaled by 0.85 … 1.1 and moved by
    up to 6 % of the image; the letters are as evenly represented as ``n`` allows. Equal arguments give
    equal images.

    Args:
        n: number of images.
        size: height and width in pixels.
        seed: of faces, letters and distortions.

    Raises:
        ValueError: if ``n`` or ``size`` is not positive.
    """
    height, width = (size, size) if isinstance(size, int) else size
    if n < 1 or height < 1 or width < 1:
        raise ValueError(f"n and size must be at least 1; got n={n}, size={size}")
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.arange(n) % len(LETTERS))[torch.randperm(n, generator=generator)]
    faces = torch.randint(len(FACES), (n,), generator=generator)
    maps = _random_affine(n, generator)
    glyphs = _all_glyphs()[faces, labels].unsqueeze(1)
    parts = zip(glyphs.split(256), maps.split(256), strict=True)
    images = torch.cat([_place(part, map_, height, width) for part, map_ in parts])
    return Images(images, labels, LETTERS)


def _random_affine(n: int, generator: torch.Generator) -> Tensor:
    """Maps from the image's coordinates in [-1, 1] to the glyph's, shape (n, 2, 3)."""
    uniform = torch.rand(4, n, generator=generator) * 2 - 1
    angle, zoom, shift = uniform[0] * torch.pi / 12, 0.975 + 0.125 * uniform[1], uniform[2:] * 0.12
    scale = 1 / (_FILL * zoom)
    cos, sin = scale * angle.cos(), scale * angle.sin()
    rows = torch.stack([torch.stack([cos, -sin, shift[0]]), torch.stack([sin, cos, shift[1]])])
    return rows.permute(2, 0, 1)


def _place(glyphs: Tensor, maps: Tensor, height: int, width: int) -> Tensor:
    """Glyphs under ``maps``, sampled finely and averaged so that small images are smooth, not jagged."""
    fine = [len(glyphs), 1, height * _SUPERSAMPLE, width * _SUPERSAMPLE]
    grid = F.affine_grid(maps, fine, align_corners=False)
    placed = F.grid_sample(glyphs, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return F.avg_pool2d(placed, _SUPERSAMPLE).clamp(0, 1)


@functools.cache
def _all_glyphs() -> Tensor:
    """Every letter in every face, shape (faces, letters, _GLYPH, _GLYPH), in [0, 1]."""
    return torch.stack([torch.stack([_glyph(face, letter) for letter in LETTERS]) for face in FACES])


def _glyph(face: str, letter: str) -> Tensor:
    """One letter filling a square, centred, its proportions kept."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties
    from matplotlib.patches import PathPatch
    from matplotlib.textpath import TextPath
    from matplotlib.transforms import Affine2D

    file = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"
    outline = TextPath((0, 0), letter, size=100, prop=FontProperties(fname=str(file)))
    box = outline.get_extents()
    scale = _GLYPH / max(box.width, box.height)
    centre = Affine2D().translate(-(box.x0 + box.x1) / 2, -(box.y0 + box.y1) / 2).scale(scale)
    figure = Figure(figsize=(1, 1), dpi=_GLYPH, facecolor="black")
    canvas = FigureCanvasAgg(figure)
    place = centre.translate(_GLYPH / 2, _GLYPH / 2)
    figure.add_artist(PathPatch(outline, transform=place, facecolor="white", linewidth=0))
    canvas.draw()
    return torch.from_numpy(numpy.asarray(canvas.buffer_rgba())[..., 0].copy()).float() / 255.0
