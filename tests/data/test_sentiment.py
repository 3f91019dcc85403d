"""Rated sentences: reading, dividing, and how people differ."""

import gzip
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dubito.data.sentiment import (
    Sentences,
    ag_news,
    has_sst2,
    movie_split,
    place_of,
    rated_sentences,
    sst2_split,
)

HEADER = "id\tmean\tratings\ttext\n"


def write_ratings(folder: Path, lines: list[str], source: str = "movie_reviews", zipped: bool = True) -> Path:
    text = HEADER + "".join(line + "\n" for line in lines)
    if zipped:
        (folder / f"{source}.tsv.gz").write_bytes(gzip.compress(text.encode()))
    else:
        (folder / f"{source}.tsv").write_text(text, encoding="utf-8")
    return folder


def made(count: int) -> list[str]:
    """Sentences whose means run through -2, -1, 0.2, 1, 2."""
    ratings = {-2.0: "-2 -2", -1.0: "-1 -1", 0.2: "0 0 0 0 1", 1.0: "1 1", 2.0: "1 3"}
    values = list(ratings)
    return [f"{i}\t{values[i % 5]}\t{ratings[values[i % 5]]}\tfilm number {i}" for i in range(count)]


@pytest.mark.parametrize("zipped", [True, False])
def test_quotation_marks_are_text(tmp_path: Path, zipped: bool) -> None:
    lines = ['1\t2.0\t2 2\t"An opened quotation', "2\t-1.5\t-1 -2\tIt''s dull", "3\t1.0\t1 1\tÇa marche"]
    found = rated_sentences("movie_reviews", write_ratings(tmp_path, lines, zipped=zipped))
    assert found.texts == ('"An opened quotation', "It''s dull", "Ça marche")
    assert found.ratings == ((2, 2), (-1, -2), (1, 1))
    assert found.labels is not None
    assert found.labels.tolist() == [1, 0, 1]


def test_the_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sentiment").mkdir()
    write_ratings(tmp_path / "sentiment", made(3), "tweets")
    monkeypatch.setenv("DUBITO_DATA", str(tmp_path))
    assert len(rated_sentences("tweets")) == 3
    with pytest.raises(FileNotFoundError, match=r"neither movie_reviews\.tsv nor"):
        rated_sentences("movie_reviews")
    monkeypatch.delenv("DUBITO_DATA")
    with pytest.raises(FileNotFoundError, match="DUBITO_DATA"):
        rated_sentences("tweets")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1\tx\t1 2\ttext", "line 2.*float"),
        ("1\tnan\t1 2\ttext", "line 2.*mean"),
        ("1\t1.0\t1 7\ttext", "from -4 to 4"),
        ("1\t1.0\t1\ttext", "at least two ratings"),
        ("1\t1.0\t1 2", "line 2"),
        ("1\t1.0\t1 2\t ", "empty"),
    ],
)
def test_damage_is_named_by_its_line(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rated_sentences("movie_reviews", write_ratings(tmp_path, [line]))


def test_a_file_with_other_columns_and_an_unknown_source_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tweets.tsv").write_text("text\tmean\n")
    with pytest.raises(ValueError, match="must begin with the columns id, mean, ratings, text"):
        rated_sentences("tweets", tmp_path)
    with pytest.raises(ValueError, match="movie_reviews, amazon_reviews"):
        rated_sentences("imdb", tmp_path)


def test_division_keeps_labelled_sentences_once_and_in_the_shares_stated(tmp_path: Path) -> None:
    split = movie_split(write_ratings(tmp_path, made(2000)))
    parts = (split.train, split.validation, split.test)
    texts = [text for part in parts for text in part.texts]
    assert len(texts) == len(set(texts)) == 1600  # one in five is too near zero
    for part, share in zip(parts, (0.8, 0.1, 0.1), strict=True):
        assert len(part) / 1600 == pytest.approx(share, abs=0.03)
        assert part.mean is not None
        assert bool((part.mean.abs() > 0.5).all())
    assert split.ambiguous.mean is not None
    assert bool((split.ambiguous.mean.abs() <= 0.5).all())
    assert 0 < len(split.ambiguous) < 80


def test_division_depends_on_the_text_alone(tmp_path: Path) -> None:
    whole = movie_split(write_ratings(tmp_path, made(300)))
    backwards = movie_split(write_ratings(tmp_path, made(300)[::-1]))
    assert set(whole.test.texts) == set(backwards.test.texts)
    assert place_of(" A Film ") == place_of("a film")
    assert place_of("a film") == pytest.approx(0.91915, abs=1e-5)  # of its SHA-256, for ever


def test_disagreement_by_hand() -> None:
    sentences = Sentences("made", ("a", "b"), ratings=((1, 1, 1, 1), (-2, 0, 2, 4)))
    torch.testing.assert_close(sentences.rating_sd(), torch.tensor([0.0, math.sqrt(20 / 3)]).double())
    expected = -(0.25 * math.log(0.25) * 2 + 0.5 * math.log(0.5))
    torch.testing.assert_close(sentences.sign_entropy(), torch.tensor([0.0, expected]).double())
    with pytest.raises(ValueError, match="has no ratings"):
        Sentences("sst2", ("a",)).rating_sd()


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(-4, 4), min_size=2, max_size=30))
def test_sign_entropy_is_between_nothing_and_log_three(ratings: list[int]) -> None:
    sentences = Sentences("made", ("a",), ratings=(tuple(ratings),))
    (entropy,) = sentences.sign_entropy().tolist()
    assert -1e-12 <= entropy <= math.log(3) + 1e-12
    flipped = Sentences("made", ("a",), ratings=(tuple(-one for one in ratings),))
    assert flipped.sign_entropy().item() == pytest.approx(entropy)


def test_some_is_a_fixed_choice() -> None:
    sentences = Sentences("made", tuple(f"text {i}" for i in range(50)), torch.arange(50))
    few, more = sentences.some(10), sentences.some(20)
    assert few.texts == more.texts[:10]
    assert few.labels is not None
    assert [f"text {i}" for i in few.labels.tolist()] == list(few.texts)
    assert sentences.some(None) is sentences
    assert sentences.some(99) is sentences


def test_sst2_from_glue_files(tmp_path: Path) -> None:
    assert not has_sst2(tmp_path)
    rows = [f'a "phrase {i} \t{i % 2}' for i in range(400)]
    (tmp_path / "train.tsv").write_text("sentence\tlabel\n" + "\n".join(rows) + "\n")
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\ngood\t1\nbad\t0\n")
    assert has_sst2(tmp_path)
    split = sst2_split(tmp_path)
    assert len(split.train) + len(split.validation) == 400
    assert 5 <= len(split.validation) <= 40
    assert split.test.texts == ("good", "bad")
    assert split.test.ratings is None
    assert len(split.ambiguous) == 0
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\ngood\t-1\n")
    with pytest.raises(ValueError, match="line 2"):
        sst2_split(tmp_path)


def test_ag_news_where_it_is(tmp_path: Path) -> None:
    assert ag_news(tmp_path) is None
    (tmp_path / "test.csv").write_text('"3","Title, with comma","Words"\n"1","T","D"\n')
    news = ag_news(tmp_path)
    assert news is not None
    assert news.texts == ("Title, with comma Words", "T D")
    (tmp_path / "test.csv").write_text('"3","no description"\n')
    with pytest.raises(ValueError, match="row 1"):
        ag_news(tmp_path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:-12], "broken gzip"),
        (lambda data: data[:20] + bytes(40) + data[60:], "broken gzip"),
        (lambda data: b"nothing of the kind", "broken gzip"),
        (lambda data: gzip.compress(b"\xff\xfe" + gzip.decompress(data)), "not UTF-8"),
    ],
    ids=["cut short", "overwritten", "no gzip", "no text"],
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: Callable[[bytes], bytes], said: str) -> None:
    path = write_ratings(tmp_path, made(40)) / "movie_reviews.tsv.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"movie_reviews.*{said}"):
        rated_sentences("movie_reviews", tmp_path)
