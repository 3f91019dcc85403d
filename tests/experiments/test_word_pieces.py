"""The word-piece tokeniser of the sentiment experiment."""

import sys

import pytest

pytest.importorskip("tokenizers")

from dubito.data.digits import MissingExtraError
from dubito.experiments.singular.word_pieces import SPECIAL, train_word_pieces

TEXTS = [
    "The film is a delight.",
    "A dull, dull film!",
    "Delightful acting; the plot is thin.",
    "Thin and dull.",
]


def test_start_padding_and_cutting() -> None:
    pieces = train_word_pieces(TEXTS, 60, length=8)
    numbers = pieces.encode(["dull", "the film is a delight and the plot is thin and dull"])
    assert numbers.shape == (2, 8)
    assert numbers[0, 0] == numbers[1, 0] == SPECIAL.index("[CLS]")
    known = len(pieces.pieces("dull"))
    assert (numbers[0, :known] > 0).all()
    assert (numbers[0, known:] == 0).all()
    assert (numbers[1] > 0).all()
    assert pieces.encode([]).shape == (0, 8)


def test_pieces_make_up_the_words() -> None:
    pieces = train_word_pieces(TEXTS, 60, length=32)
    found = pieces.pieces("The DULL, delightful film")[1:]
    assert "".join(one.removeprefix("##") for one in found) == "thedull,delightfulfilm"
    assert pieces.pieces("✈")[1:] == ["[UNK]"]
    assert len(pieces) <= 60
    assert pieces.vocabulary[:3] == SPECIAL
    assert len(set(pieces.vocabulary)) == len(pieces)


def test_numbers_do_not_depend_on_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # the package's hash tables are seeded anew each time, so runs of one process differ as those of several do
    texts = [f"{a}{b}{c} {c}{a}" for a in TEXTS for b in "aeiou" for c in "bdfgk"]
    made = [train_word_pieces(texts, 80, 8) for _ in range(6)]
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    made.append(train_word_pieces(texts, 80, 8))
    assert len({one.vocabulary for one in made}) == 1
    assert len({str(one.encode(texts).tolist()) for one in made}) == 1


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="texts is empty"):
        train_word_pieces([])
    with pytest.raises(ValueError, match="size=3 must be above 3"):
        train_word_pieces(TEXTS, 3)
    with pytest.raises(ValueError, match="length=1 must be at least 2"):
        train_word_pieces(TEXTS, 50, 1)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"dubito\[text\]"):
        train_word_pieces(TEXTS)
