from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dubito.training import load_checkpoint, save_checkpoint
from dubito.training.random_state import (
    loader_generators,
    random_state,
    set_random_state,
    untouched_randomness,
)

DATA = TensorDataset(torch.arange(12))


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(3))


def everything(batches: DataLoader[tuple[torch.Tensor, ...]]) -> list[float]:
    order = [int(i) for (batch,) in batches for i in batch]
    # a normal deviate each, since both keep half of a pair
    return [*torch.randn(2).tolist(), random.gauss(0, 1), float(np.random.normal()), random.random(), *order]


def test_everything_random_repeats_after_a_checkpoint(tmp_path) -> None:  # type: ignore[no-untyped-def]
    batches = loader()
    everything(batches)
    path = save_checkpoint(tmp_path / "state", random_state(batches))
    first = everything(batches)
    assert everything(batches) != first
    set_random_state(load_checkpoint(path), batches)
    assert everything(batches) == first


def test_what_is_drawn_inside_leaves_no_trace() -> None:
    batches = loader()
    state = random_state(batches)
    with untouched_randomness(batches):
        drawn = everything(batches)
    assert everything(batches) == drawn
    set_random_state(state, batches)
    assert everything(batches) == drawn


def test_each_generator_once_and_another_loader_is_refused() -> None:
    batches = loader()
    assert len(loader_generators(batches)) == 1
    assert loader_generators([1, 2]) == []
    with pytest.raises(ValueError, match="has 0 random generators, the saved state 1"):
        set_random_state(random_state(batches), [1, 2])
