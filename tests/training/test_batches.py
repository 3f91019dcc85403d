from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from dubito.training.batches import check_loader, count_data, split_batch, target_scale

X, Y = torch.randn(10, 3), torch.arange(10)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(X, Y, strict=True)


def test_the_forms_of_a_batch() -> None:
    pair = split_batch([X, Y])
    assert pair.args == (X,)
    assert pair.target is Y
    assert pair.size == 10
    assert split_batch((X, X, Y)).args == (X, X)
    assert split_batch(((X, Y), Y)).args == (X, Y)
    mapping = split_batch({"input_ids": X, "labels": Y})
    assert mapping.args == ()
    assert mapping.kwargs == {"input_ids": X}
    assert mapping.inputs == {"input_ids": X}
    assert split_batch(({"x": X}, Y)).kwargs == {"x": X}


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        (X, "got Tensor"),
        ([X], "got list of length 1"),
        ({"x": X}, "'labels'.*got the keys 'x'"),
        ((X, [1, 2]), "target must be a tensor, got list"),
    ],
)
def test_a_batch_without_a_target_is_refused(batch: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        split_batch(batch)


def test_n_is_the_data_set_or_the_fixed_subset_drawn_from_it() -> None:
    data = TensorDataset(X, Y)
    assert count_data(DataLoader(data, 4, shuffle=True, drop_last=True)) == 10
    assert count_data(DataLoader(data, 4, sampler=SubsetRandomSampler([1, 2, 3]))) == 3
    # sampling with replacement changes the length of an epoch, not the amount of data
    halves = BatchSampler(SubsetRandomSampler(range(5)), 2, drop_last=False)
    assert count_data(DataLoader(data, batch_sampler=halves)) == 5
    assert count_data(DataLoader(data, 4, sampler=[1, 2, 3, 3])) == 3
    assert count_data(DataLoader(data, 4, sampler=WeightedRandomSampler([1.0] * 10, 50))) == 10
    assert count_data([(X, Y), (X[:3], Y[:3])]) == 13


def test_n_unknown_says_what_to_pass() -> None:
    with pytest.raises(ValueError, match="pass n_data="):
        count_data(DataLoader(Stream(), 4))


def test_loaders_that_cannot_serve() -> None:
    with pytest.raises(ValueError, match=r"train is empty.*drop_last"):
        check_loader("train", DataLoader(TensorDataset(X, Y), 20, drop_last=True))
    with pytest.raises(ValueError, match="validation is empty"):
        check_loader("validation", [])
    with pytest.raises(TypeError, match="only once"):
        check_loader("train", iter([(X, Y)]))
    with pytest.raises(TypeError, match="got int"):
        check_loader("train", 3)
    for whole in (X, (X, Y), [X, Y]):
        with pytest.raises(TypeError, match=r"ensors?: pass DataLoader\(TensorDataset\(x, y\).*shuffle=True"):
            check_loader("train", whole)
    with pytest.raises(TypeError, match=r"got TensorDataset: pass DataLoader\(validation, batch_size=64\)"):
        check_loader("validation", TensorDataset(X, Y))
    check_loader("train", DataLoader(Stream(), 4))


def test_target_scale_is_that_of_all_targets_and_does_not_cancel() -> None:
    torch.manual_seed(0)
    y = torch.randn(1000, 3, dtype=torch.float64) * torch.tensor([1e-3, 1.0, 50.0]) + torch.tensor(
        [1e6, 0.0, -7.0]
    )
    loader = DataLoader(TensorDataset(torch.zeros(1000, 1), y), 77)
    shift, scale = target_scale(loader, torch.device("cpu"))
    torch.testing.assert_close(shift, y.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scale, y.std(0, unbiased=False), rtol=1e-6, atol=0)
    assert scale.dtype == torch.float64


def test_target_scale_of_what_does_not_vary_is_one_and_nan_is_refused() -> None:
    _, scale = target_scale([(X, torch.full((10, 2), 3.0))], torch.device("cpu"))
    assert scale.tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="NaN"):
        target_scale([(X, torch.tensor([1.0, float("nan")]))], torch.device("cpu"))
    with pytest.raises(TypeError, match="class labels have no scale"):
        target_scale([(X, Y)], torch.device("cpu"))
