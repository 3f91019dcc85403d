import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dubito.data import DataSplit, Images, split_images, stratified_split


def some_images(n: int = 30, classes: int = 3, seed: int = 0) -> Images:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    return Images(torch.rand(n, 1, 5, 7, generator=generator), labels, tuple("abcdefgh"[:classes]))


@settings(deadline=None, max_examples=40)
@given(
    counts=st.lists(st.integers(1, 60), min_size=2, max_size=5),
    shares=st.tuples(st.floats(0.1, 0.5), st.floats(0.1, 0.3)),
    seed=st.integers(0, 100),
)
def test_stratified_split_is_a_partition_with_proportional_classes(counts, shares, seed):
    labels = torch.cat([torch.full((c,), i) for i, c in enumerate(counts)])
    n = len(labels)
    sizes = [int(n * shares[0]), int(n * shares[1])]
    sizes.append(n - sum(sizes))
    parts = stratified_split(labels, sizes, seed)
    assert [len(part) for part in parts] == sizes
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(n))
    for part, size in zip(parts, sizes, strict=True):
        expected = torch.tensor(counts) * size / n
        got = labels[part].bincount(minlength=len(counts))
        assert (got - expected).abs().max() <= 2.0


def test_stratified_split_balanced_classes_come_out_exactly_balanced():
    labels = torch.arange(100) % 10
    for part, each in zip(stratified_split(labels, (70, 10, 20)), (7, 1, 2), strict=True):
        assert labels[part].bincount().tolist() == [each] * 10


def test_stratified_split_depends_on_the_seed_alone():
    labels = torch.arange(60) % 3
    first, again = stratified_split(labels, (30, 30), 1), stratified_split(labels, (30, 30), 1)
    other = stratified_split(labels, (30, 30), 2)
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    state = torch.get_rng_state()
    stratified_split(labels, (30, 30), 1)
    assert torch.equal(state, torch.get_rng_state())


def test_stratified_split_may_leave_some_out_but_not_invent_any():
    labels = torch.arange(60) % 3
    (part,) = stratified_split(labels, (9,))
    assert labels[part].bincount().tolist() == [3, 3, 3]
    with pytest.raises(ValueError, match="at most the 60"):
        stratified_split(labels, (50, 11))
    with pytest.raises(ValueError, match="≥ 0"):
        stratified_split(labels, (50, -1))


def test_standardisation_uses_the_training_part_only():
    split = split_images("some", some_images(), (15, 6, 9))
    seen = split.standardise(split.train.images)
    assert seen.mean().abs() < 1e-6
    assert abs(float(seen.std()) - 1) < 1e-6
    brighter = DataSplit.of("some", split.train, split.validation, some_images(9, 3, seed=5))
    assert (brighter.mean, brighter.sd) == (split.mean, split.sd)
    x, y = split.dataset(split.test)[3]
    assert torch.allclose(x * split.sd + split.mean, split.test.images[3], atol=1e-6)
    assert y == split.test.labels[3]


def test_constant_training_images_are_refused():
    flat = Images(torch.zeros(4, 1, 2, 2), torch.zeros(4, dtype=torch.int64), ("a",))
    with pytest.raises(ValueError, match="constant"):
        DataSplit.of("flat", flat, flat, flat)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(2, 5, 5), torch.zeros(2, dtype=torch.int64), r"\(N, C, H, W\)"),
        (torch.zeros(2, 1, 5, 5).double(), torch.zeros(2, dtype=torch.int64), "float32"),
        (torch.zeros(2, 1, 5, 5), torch.zeros(3, dtype=torch.int64), "one an image"),
        (torch.zeros(2, 1, 5, 5), torch.zeros(2), "int64"),
        (torch.full((2, 1, 5, 5), 255.0), torch.zeros(2, dtype=torch.int64), "255"),
        (torch.full((2, 1, 5, 5), float("nan")), torch.zeros(2, dtype=torch.int64), "NaN"),
        (torch.zeros(2, 1, 5, 5), torch.tensor([0, 2]), "class name"),
        (torch.zeros(2, 1, 5, 5), torch.tensor([0, -1]), "class name"),
    ],
)
def test_images_check_what_they_are_given(images, labels, message):
    with pytest.raises(ValueError, match=message):
        Images(images, labels, ("a", "b"))


def test_images_subset_keeps_pairs_together():
    data = some_images()
    part = data.subset(torch.tensor([4, 1]))
    assert len(part) == 2
    assert part.size == (5, 7)
    assert part.labels.tolist() == [1, 1]
    assert torch.equal(part.images[0], data.images[4])


def test_the_test_part_is_the_same_for_every_seed_and_never_validated_on():
    data = some_images(90, 3)
    splits = [split_images("some", data, (50, 10, 30), seed) for seed in range(5)]
    tested = {image.numpy().tobytes() for image in splits[0].test.images}
    assert len(tested) == 30
    for split in splits:
        assert torch.equal(split.test.images, splits[0].test.images)
        for part, size in ((split.train, 50), (split.validation, 10)):
            assert len(part) == size
            assert not tested & {image.numpy().tobytes() for image in part.images}
            assert (part.labels.bincount() - size / 3).abs().max() <= 1.5
    assert not torch.equal(splits[0].validation.images, splits[1].validation.images)
