import pytest
import torch

from dubito.data import letters
from dubito.data.letters import FACES, LETTERS, _all_glyphs


def test_letters_are_deterministic_and_seeded():
    first, again, other = letters(30, 28, 4), letters(30, 28, 4), letters(30, 28, 5)
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.labels, again.labels)
    assert not torch.equal(first.images, other.images)


@pytest.mark.parametrize("size", [8, 28, (20, 32)])
def test_letters_fit_any_size_and_are_balanced(size):
    data = letters(105, size)
    expected = (size, size) if isinstance(size, int) else size
    assert data.images.shape == (105, 1, *expected)
    assert data.class_names == LETTERS
    counts = data.labels.bincount()
    assert counts.sum() == 105
    assert counts.max() - counts.min() <= 1
    # ink: neither empty nor full; digits have a mean of .13
    ink = data.images.mean(dim=(1, 2, 3))
    assert ink.min() > 0.02
    assert ink.max() < 0.5


def test_faces_and_letters_all_differ():
    glyphs = _all_glyphs()
    assert glyphs.shape[:2] == (len(FACES), len(LETTERS))
    drawn = torch.tensor([letter != "I" for letter in LETTERS])  # a sans-serif I is a bar in every face
    flat = glyphs[:, drawn].flatten(0, 1).flatten(1)
    assert torch.unique(flat, dim=0).shape[0] == len(flat)


def test_glyphs_fill_their_square_and_keep_proportions():
    lit = _all_glyphs() > 0.5
    height, width = lit.any(-1).sum(-1), lit.any(-2).sum(-1)
    assert torch.maximum(height, width).min() >= lit.shape[-1] - 3
    i = LETTERS.index("I")
    assert (width[0, i].double() / height[0, i]) < 0.3


def test_a_letter_is_closest_to_its_own_kind():
    """The images hold the letter their label names: the nearest other image mostly has the same label."""
    data = letters(400, 28, 0)
    distance = torch.cdist(data.images.flatten(1), data.images.flatten(1)).fill_diagonal_(float("inf"))
    agreement = (data.labels[distance.argmin(1)] == data.labels).double().mean()
    assert agreement > 0.6  # chance is 0.1


@pytest.mark.parametrize(("n", "size"), [(0, 28), (5, 0)])
def test_letters_refuse_nothing(n, size):
    with pytest.raises(ValueError, match="at least 1"):
        letters(n, size)
