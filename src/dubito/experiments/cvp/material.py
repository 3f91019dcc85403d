"""What is learned, what calibrations and settings are fitted on, what is judged, and what nobody has seen."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.data import DataSplit, Images, fashion_mnist, mnist, stratified_split
from dubito.data.sentiment import movie_split, place_of, rated_sentences

FURTHER_TEST = 960  # training sentences that are judged on as well: the test part alone has 1,040
UNKNOWN_SENTENCES = ("tweets", "nyt_editorials")
LARGEST_TURN = 30.0  # degrees, of a digit in a pair
PAIR_NOISE = 0.3  # standard deviation of its pixels' noise, on a scale of [0, 1]
VOCABULARY, LENGTH = 4000, 32

Labelled = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Sizes:
    """How many examples of each kind, at most; None takes all there are."""

    train: int | None = 10_000
    validation: int | None = 500
    test: int | None = 2_000
    unknown: int | None = 500


@dataclass(frozen=True)
class Material:
    """One task's data, as a network takes them.

    Attributes:
        train, validation, test: inputs and labels; they share no example.
        unknown: inputs from elsewhere.
        vocabulary, length: of sentences; 0 for images.
    """

    train: Labelled
    validation: Labelled
    test: Labelled
    unknown: Tensor
    vocabulary: int = 0
    length: int = 0


def load_material(part: str, sizes: Sizes, seed: int) -> Material:
    """The data of a part. The test examples are the same for every seed; which are learned from depends on it.

    Raises:
        FileNotFoundError: if the data are not there.
        MissingExtraError: for sentences, without the package ``tokenizers``.
        ValueError: for a part there is not.
    """
    if part in ("resnet", "vit"):
        return clothes(sizes, seed)
    if part == "bert":
        return sentences(sizes, seed)
    if part == "pairs":
        return pairs(sizes, seed)
    raise ValueError(f"part={part!r}: there are resnet, vit, bert and pairs")


def clothes(sizes: Sizes, seed: int) -> Material:
    """Fashion-MNIST, and digits as unknown."""
    split = fashion_mnist(seed=seed)
    train, validation = _some(split.train, sizes.train, seed), _some(split.validation, sizes.validation, seed)
    known = DataSplit.of(split.name, train, validation, _some(split.test, sizes.test, 0))
    unknown = known.standardise(_some(mnist().test, sizes.unknown, 0).images)

    def pair(part: Images) -> Labelled:
        return known.standardise(part.images), part.labels

    return Material(pair(known.train), pair(known.validation), pair(known.test), unknown)


def sentences(sizes: Sizes, seed: int) -> Material:
    """Sentences about films, positive or negative; tweets and editorials as unknown.

    The test part is joined by the `FURTHER_TEST` training sentences that come first in the order of their hashes. The
    rest is divided into training and validation by the seed.
    """
    from dubito.experiments.singular.word_pieces import train_word_pieces

    split = movie_split()
    further = split.train.some(FURTHER_TEST).texts if (sizes.test or math.inf) > len(split.test) else ()
    taken = {place_of(text) for text in further}  # without regard to case, as the data's own division is
    texts, labels = _texts(split.train)
    rest = [i for i, text in enumerate(texts) if place_of(text) not in taken]
    more = [i for i, text in enumerate(texts) if place_of(text) in taken]
    others, other_labels = _texts(split.validation)
    pool, pool_labels = [texts[i] for i in rest] + others, torch.cat((labels[rest], other_labels))
    held = sizes.validation or len(others)
    wanted = min(sizes.train or len(pool), len(pool) - held)
    train, validation = stratified_split(pool_labels, (wanted, held), seed)
    test_texts, test_labels = _texts(split.test)
    tested = test_texts + [texts[i] for i in more]
    tested_labels = torch.cat((test_labels, labels[more]))
    last = len(tested) if sizes.test is None else min(sizes.test, len(tested))
    pieces = train_word_pieces([pool[i] for i in train.tolist()], VOCABULARY, LENGTH)
    unknown = [
        text
        for source in UNKNOWN_SENTENCES
        for text in rated_sentences(source).some(None if sizes.unknown is None else sizes.unknown // 2).texts
    ]
    return Material(
        (pieces.encode([pool[i] for i in train.tolist()]), pool_labels[train]),
        (pieces.encode([pool[i] for i in validation.tolist()]), pool_labels[validation]),
        (pieces.encode(tested[:last]), tested_labels[:last]),
        pieces.encode(unknown),
        len(pieces),
        LENGTH,
    )


def pairs(sizes: Sizes, seed: int) -> Material:
    """Two handwritten digits side by side, turned and noisy: are they the same? Pairs of clothes are unknown."""
    digits, others = mnist(seed=seed), fashion_mnist(seed=seed)
    train = paired(digits.train, sizes.train or 60_000, seed)
    validation = paired(digits.validation, sizes.validation or 5_000, seed + 1)
    test = paired(digits.test, sizes.test or 10_000, 0)
    unknown, _ = paired(others.test, sizes.unknown or 10_000, 0)
    sd, mean = (float(value) for value in torch.std_mean(train[0]))
    return Material(
        ((train[0] - mean) / sd, train[1]),
        ((validation[0] - mean) / sd, validation[1]),
        ((test[0] - mean) / sd, test[1]),
        (unknown - mean) / sd,
    )


def paired(images: Images, count: int, seed: int) -> Labelled:
    """`count` pairs `(N, 1, 28, 56)` and whether both show the same class (1, every second pair) or not (0)."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(len(images), (count,), generator=generator)
    same = torch.arange(count) % 2
    classes = len(images.class_names)
    shift = torch.randint(1, classes, (count,), generator=generator)
    wanted = (images.labels[first] + (1 - same) * shift) % classes
    members = [(images.labels == label).nonzero().squeeze(-1) for label in range(classes)]
    place = torch.rand(count, generator=generator)
    second = torch.stack(
        [
            members[label][int(at * len(members[label]))]
            for label, at in zip(wanted.tolist(), place.tolist(), strict=True)
        ]
    )
    both = [_worn(images.images[index], generator) for index in (first, second)]
    return torch.cat(both, -1), same


def _worn(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each turned by an angle of its own, and noisy."""
    degrees = LARGEST_TURN * (2 * torch.rand(len(images), generator=generator) - 1)
    cosine, sine = (f(degrees * math.pi / 180) for f in (torch.cos, torch.sin))
    zero = torch.zeros_like(sine)
    turn = torch.stack((torch.stack((cosine, -sine, zero), -1), torch.stack((sine, cosine, zero), -1)), 1)
    grid = F.affine_grid(turn, list(images.shape), align_corners=False)
    turned = F.grid_sample(images, grid, align_corners=False)
    return turned + PAIR_NOISE * torch.randn(images.shape, generator=generator)


def _some(images: Images, size: int | None, seed: int) -> Images:
    if size is None or size >= len(images):
        return images
    (chosen,) = stratified_split(images.labels, (size,), seed)
    return images.subset(chosen)


def _texts(part: object) -> tuple[list[str], Tensor]:
    texts, labels = part.texts, part.labels  # type: ignore[attr-defined]
    return list(texts), labels
