import pytest

from dubito.data import DATASETS, DataSplit, UnknownDataError, load_dataset


def test_unknown_name_lists_the_valid_ones():
    with pytest.raises(UnknownDataError) as caught:
        load_dataset("cifar")
    for name in DATASETS:
        assert name in str(caught.value)


def test_load_by_name_passes_the_seed_on():
    pytest.importorskip("sklearn")
    first, second = load_dataset("digits-8x8", 0), load_dataset("digits-8x8", 1)
    assert isinstance(first, DataSplit)
    assert first.name == "digits-8x8"
    assert not first.validation.images.equal(second.validation.images)
    assert first.test.images.equal(second.test.images)


@pytest.mark.parametrize("name", DATASETS)
def test_every_entry_says_what_it_is(name):
    assert DATASETS[name].summary
