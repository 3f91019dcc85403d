"""Sentences with many human ratings each: film reviews, and three domains they can be compared with.

The ratings are those of Hutto & Gilbert (2014), "VADER", from −4 (most negative) to 4 (most positive), 15 to 99 for
each sentence, so that what people disagree about is known and not only what they say on average. The Stanford
Sentiment Treebank (SST-2) and AG News are read from the usual files where a user has them.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import math
import os
import statistics
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

SOURCES = ("movie_reviews", "amazon_reviews", "nyt_editorials", "tweets")
LEAST_MEAN = 0.5  # sentences whose mean rating is not beyond this, either way, have no label
WORST, BEST = -4, 4
_ENVIRONMENT = "DUBITO_DATA"
_COLUMNS = ["id", "mean", "ratings", "text"]
_VALIDATION, _TEST = 0.1, 0.1  # shares of the sentences


@dataclass(frozen=True)
class Sentences:
    """Sentences, of which some or all may be labelled and rated.

    Attributes:
        name: of the source.
        texts: N sentences.
        labels: 1 positive, 0 negative; int64 ``(N,)``, or None where the source has none.
        ratings: every person's rating of every sentence, or None where the source has none.
        mean: mean rating as the source states it, float64 ``(N,)``, or None likewise.
    """

    name: str
    texts: tuple[str, ...]
    labels: Tensor | None = None
    ratings: tuple[tuple[int, ...], ...] | None = None
    mean: Tensor | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def subset(self, rows: Sequence[int]) -> Sentences:
        """The sentences at these positions, in this order."""
        index = torch.as_tensor(list(rows), dtype=torch.long)
        return Sentences(
            self.name,
            tuple(self.texts[i] for i in rows),
            None if self.labels is None else self.labels[index],
            None if self.ratings is None else tuple(self.ratings[i] for i in rows),
            None if self.mean is None else self.mean[index],
        )

    def some(self, count: int | None) -> Sentences:
        """At most `count` of them, chosen by the hash of their text; None takes all, in the source's order."""
        if count is None or count >= len(self):
            return self
        return self.subset(sorted(range(len(self)), key=lambda i: place_of(self.texts[i]))[:count])

    def rating_sd(self) -> Tensor:
        """Standard deviation of each sentence's ratings (with N − 1), float64 ``(N,)``.

        Raises:
            ValueError: if the source has no ratings.
        """
        return self._of_ratings(statistics.stdev)

    def sign_entropy(self) -> Tensor:
        """Entropy in nats of negative, neutral and positive among each sentence's ratings, float64 ``(N,)``.

        Raises:
            ValueError: if the source has no ratings.
        """
        return self._of_ratings(_sign_entropy)

    def _of_ratings(self, function: Callable[[tuple[int, ...]], float]) -> Tensor:
        if self.ratings is None:
            raise ValueError(
                f"{self.name} has no ratings: only the sources {', '.join(SOURCES)} say how people differ"
            )
        return torch.tensor([function(one) for one in self.ratings], dtype=torch.float64)


@dataclass(frozen=True)
class SentenceSplit:
    """Labelled sentences to learn from, to choose by, and to be judged on; `ambiguous` have ratings but no label.

    `ambiguous` are the test part's sentences whose mean rating is too near zero; empty where there are no ratings.
    """

    train: Sentences
    validation: Sentences
    test: Sentences
    ambiguous: Sentences


def rated_sentences(source: str, root: str | os.PathLike[str] | None = None) -> Sentences:
    """All sentences of a source with their ratings; the label is the sign of the mean rating.

    Args:
        source: one of `SOURCES`.
        root: folder of ``movie_reviews.tsv[.gz]`` and the others, by default ``sentiment`` in the folder named by
            the environment variable ``DUBITO_DATA``. Columns: id, mean, ratings (whole numbers between spaces),
            text; quotation marks have no meaning in the file.

    Raises:
        FileNotFoundError: if the file is not there.
        ValueError: for a source there is not, or a damaged file (naming the line).
    """
    if source not in SOURCES:
        raise ValueError(f"source={source!r}: there are {', '.join(SOURCES)}")
    path = _existing(_folder(root, "sentiment"), f"{source}.tsv")
    means, ratings, texts = [], [], []
    rows = _rows(path)
    if next(rows, (0, []))[1] != _COLUMNS:
        raise ValueError(f"{path} must begin with the columns {', '.join(_COLUMNS)}, separated by tabs")
    for number, row in rows:
        stated, given, text = _parsed(path, number, row)
        means.append(stated)
        ratings.append(given)
        texts.append(text)
    mean = torch.tensor(means, dtype=torch.float64)
    return Sentences(source, tuple(texts), (mean > 0).long(), tuple(ratings), mean)


def movie_split(root: str | os.PathLike[str] | None = None) -> SentenceSplit:
    """The film reviews with a label (mean rating beyond ±0.5), divided 80 : 10 : 10.

    The division goes by a hash of the text without regard to case (`place_of`): it is the same everywhere and for ever,
    and a sentence that occurs twice is on one side only. On the file of the package vaderSentiment: 7,977 sentences
    to train, 1,026 for validation, 1,040 for the test and 61 ambiguous ones of the test part.

    Args:
        root: see `rated_sentences`, whose errors it raises.
    """
    sentences = rated_sentences("movie_reviews", root)
    assert sentences.mean is not None
    labelled = (sentences.mean.abs() > LEAST_MEAN).tolist()
    places = [place_of(text) for text in sentences.texts]

    def part(low: float, high: float, wanted: bool = True) -> Sentences:
        return sentences.subset(
            [i for i, at in enumerate(places) if low <= at < high and labelled[i] == wanted]
        )

    return SentenceSplit(
        part(_TEST + _VALIDATION, 1.0),
        part(_TEST, _TEST + _VALIDATION),
        part(0.0, _TEST),
        part(0.0, _TEST, False),
    )


def has_sst2(root: str | os.PathLike[str] | None = None) -> bool:
    """Whether `sst2_split` would find its files."""
    try:
        folder = _folder(root, "sst2")
    except FileNotFoundError:
        return False
    return all((folder / name).is_file() for name in ("train.tsv", "dev.tsv"))


def sst2_split(root: str | os.PathLike[str] | None = None) -> SentenceSplit:
    """SST-2 as GLUE distributes it: ``train.tsv`` less 5 % for validation, and ``dev.tsv`` to be judged on.

    Validation sentences are chosen by `place_of`. Many of the training part are phrases of one another, so validation
    is easier than the test; the paper stops early on the test part itself, which is not done here.

    Args:
        root: folder of the two files, columns ``sentence`` and ``label``; by default ``sst2`` in the folder named
            by ``DUBITO_DATA``.

    Raises:
        FileNotFoundError: if a file is not there.
        ValueError: if a file is damaged.
    """
    folder = _folder(root, "sst2")
    whole, test = (_glue(_existing(folder, name)) for name in ("train.tsv", "dev.tsv"))
    held_out = [place_of(text) < 0.05 for text in whole.texts]
    train = whole.subset([i for i, held in enumerate(held_out) if not held])
    return SentenceSplit(
        train, whole.subset([i for i, held in enumerate(held_out) if held]), test, test.subset([])
    )


def ag_news(root: str | os.PathLike[str] | None = None) -> Sentences | None:
    """The paper's out-of-distribution set, AG News test, from ``ag_news/test.csv``; None where it is not there.

    Title and description are joined. Labels are topics, not sentiments, and are left out.

    Args:
        root: folder of ``test.csv`` (class, title, description); by default ``ag_news`` in that of ``DUBITO_DATA``.

    Raises:
        ValueError: if a row has other than three columns.
    """
    try:
        path = _existing(_folder(root, "ag_news"), "test.csv")
    except FileNotFoundError:
        return None
    with _opened(path) as file:
        rows = list(csv.reader(file))
    bad = next((i for i, row in enumerate(rows, 1) if len(row) != 3), None)
    if bad is not None:
        raise ValueError(
            f"{path}, row {bad}: class, title and description are wanted, got {len(rows[bad - 1])} columns"
        )
    return Sentences("ag_news", tuple(f"{title} {text}" for _, title, text in rows))


def place_of(text: str) -> float:
    """A number in [0, 1) that depends on the text alone, case and outer spaces aside (from its SHA-256)."""
    digest = hashlib.sha256(text.strip().lower().encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _folder(root: str | os.PathLike[str] | None, name: str) -> Path:
    if root is not None:
        return Path(root)
    parent = os.environ.get(_ENVIRONMENT)
    if not parent:
        raise FileNotFoundError(
            f"the sentences are read from files: pass root=, their folder, or set the environment variable "
            f"{_ENVIRONMENT} to the folder that holds {name}/"
        )
    return Path(parent) / name


def _existing(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"neither {name} nor {name}.gz is in {folder}")


def _opened(path: Path) -> TextIO:
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b" or path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path}: broken gzip file ({error}); fetch it again") from error
    try:
        return io.StringIO(data.decode("utf-8"), newline="")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line number, fields) of a file in which only tabs and line ends separate."""
    with _opened(path) as file:
        yield from enumerate(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE), 1)


def _parsed(path: Path, number: int, row: list[str]) -> tuple[float, tuple[int, ...], str]:
    try:
        _, mean, ratings, text = row
        value, given = float(mean), tuple(int(one) for one in ratings.split())
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: {', '.join(_COLUMNS)} are wanted; {error}") from error
    if len(given) < 2 or not all(WORST <= one <= BEST for one in given):
        raise ValueError(
            f"{path}, line {number}: at least two ratings from {WORST} to {BEST} are wanted, got {given}"
        )
    if not WORST <= value <= BEST:  # NaN is neither
        raise ValueError(f"{path}, line {number}: a mean from {WORST} to {BEST} is wanted, got {mean}")
    if not text.strip():
        raise ValueError(f"{path}, line {number}: the text is empty")
    return value, given, text


def _glue(path: Path) -> Sentences:
    rows = _rows(path)
    if next(rows, (0, []))[1] != ["sentence", "label"]:
        raise ValueError(f"{path} must begin with the columns sentence and label, separated by a tab")
    texts, labels = [], []
    for number, row in rows:
        if len(row) != 2 or row[1] not in ("0", "1"):
            raise ValueError(
                f"{path}, line {number}: a sentence and a label of 0 or 1 are wanted, got {row[1:]}"
            )
        texts.append(row[0].strip())
        labels.append(int(row[1]))
    return Sentences("sst2", tuple(texts), torch.tensor(labels))


def _sign_entropy(ratings: tuple[int, ...]) -> float:
    signs = [(one > 0) - (one < 0) for one in ratings]
    shares = [signs.count(sign) / len(signs) for sign in (-1, 0, 1)]
    return -sum(share * math.log(share) for share in shares if share) + 0.0
