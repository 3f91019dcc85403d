"""What a loader gives: counting it, taking a batch apart, moving it, and target standardisation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_TARGET_KEYS = ("labels", "label", "target", "targets", "y")


@dataclass(frozen=True)
class Batch:
    """One batch, taken apart: `model(*args, **kwargs)` against `target`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Tensor

    @property
    def inputs(self) -> Any:
        """What `BayesianModule.outputs` takes: a mapping of keyword arguments, or a tuple of positional ones."""
        return self.kwargs if self.kwargs else self.args

    @property
    def size(self) -> int:
        """How many examples."""
        return int(self.target.shape[0]) if self.target.ndim else 1


def split_batch(batch: Any) -> Batch:
    """Inputs and target of a batch.

    `(x, y)` calls the model with `x`; `(x1, x2, y)` with both, the target last; a mapping (Hugging Face) with
    its entries as keyword arguments, all but `labels` (or `label`, `target`, `targets`, `y`). An input that
    is itself a mapping gives keyword arguments, one that is a tuple positional ones.

    Raises:
        TypeError: the batch is none of these, or its target is not a tensor.
    """
    if isinstance(batch, Mapping):
        key = next((k for k in _TARGET_KEYS if k in batch), None)
        if key is None:
            raise TypeError(
                f"a batch that is a mapping needs its target under one of {', '.join(map(repr, _TARGET_KEYS))}; got "
                f"the keys {', '.join(repr(str(k)) for k in batch)}"
            )
        args, kwargs, target = (), {k: v for k, v in batch.items() if k != key}, batch[key]
    elif isinstance(batch, tuple | list) and len(batch) >= 2:
        *inputs, target = batch
        args, kwargs = tuple(inputs), {}
        if len(args) == 1 and isinstance(args[0], Mapping):
            args, kwargs = (), dict(args[0])
        elif len(args) == 1 and isinstance(args[0], tuple | list):
            args = tuple(args[0])
    else:
        raise TypeError(
            "a batch must be (inputs, target) or a mapping with 'labels', got "
            f"{type(batch).__name__}{f' of length {len(batch)}' if isinstance(batch, Sequence) else ''}: let the "
            "loader give both"
        )
    if not isinstance(target, Tensor):
        raise TypeError(
            f"a batch's target must be a tensor, got {type(target).__name__}: use torch.as_tensor"
        )
    return Batch(args, kwargs, target)


def check_loader(name: str, loader: Any) -> None:
    """Refuse a loader that is empty or can be gone through only once.

    Raises:
        TypeError: it cannot be iterated, or only once.
        ValueError: it has no batches.
    """
    whole = isinstance(loader, tuple | list) and bool(loader) and all(isinstance(t, Tensor) for t in loader)
    if isinstance(loader, Tensor) or whole or not isinstance(loader, Iterable):
        given = f"a {type(loader).__name__} of tensors" if whole else type(loader).__name__
        from torch.utils.data import Dataset

        data = name if isinstance(loader, Dataset) else "TensorDataset(x, y)"
        raise TypeError(
            f"{name} must be a DataLoader or a sequence of batches (inputs, target), got {given}: pass "
            f"DataLoader({data}, batch_size=64{', shuffle=True' if name == 'train' else ''})"
        )
    if isinstance(loader, Iterator):  # asking iter() would start workers and draw a seed
        raise TypeError(
            f"{name} is a {type(loader).__name__} that can be gone through only once; pass a DataLoader or a list"
        )
    try:
        empty = len(loader) == 0  # type: ignore[arg-type]
    except TypeError:
        return  # a streaming data set has no length
    if empty:
        dropped = getattr(loader, "drop_last", False)
        raise ValueError(
            f"{name} is empty: it gives no batches"
            + (" (drop_last=True drops a data set smaller than one batch)" if dropped else "")
        )


def first_batch(name: str, loader: Any) -> Any:
    """The first batch.

    Raises:
        ValueError: there is none.
    """
    for batch in loader:
        return batch
    raise ValueError(f"{name} is empty: it gives no batches")


def count_data(loader: Any) -> int:
    """N, the number of training examples behind a loader.

    The length of its data set; of its sampler where that picks a fixed subset; of all batches together where
    it is a sequence of batches.

    Raises:
        ValueError: none of these is known, so `n_data` must be given.
    """
    from torch.utils.data import SubsetRandomSampler

    own = getattr(loader, "sampler", None)  # beside a batch sampler of the user's, one that is not used
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", own)
    if isinstance(sampler, SubsetRandomSampler):
        return len(sampler)
    if isinstance(sampler, range | list | tuple):  # plain indices
        return len(set(sampler))
    dataset = getattr(loader, "dataset", None)
    if dataset is not None:
        try:
            return len(dataset)
        except TypeError:
            pass
    elif isinstance(loader, Sequence):
        return sum(split_batch(batch).size for batch in loader)
    raise ValueError(
        "n_data is missing: the number of training examples cannot be read from this loader (its data set has no "
        "length), and the ELBO divides the KL by it; pass n_data="
    )


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`."""
    from accelerate.utils import send_to_device

    args, kwargs, target = send_to_device((batch.args, batch.kwargs, batch.target), device, non_blocking=True)
    return Batch(args, kwargs, target)


def target_scale(loader: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the training targets, each of the shape of one target.

    One pass, float64 sums updated batch by batch (Chan, Golub & LeVeque 1983), so nothing large is squared
    and subtracted. A dimension that does not vary gets standard deviation 1.

    Raises:
        TypeError: the targets are not floating point.
        ValueError: a target is NaN or infinite.
    """
    count = 0
    mean = torch.zeros((), dtype=torch.float64)
    squares = torch.zeros((), dtype=torch.float64)
    dtype = torch.float32
    for batch in loader:
        y = split_batch(batch).target
        if not y.is_floating_point():
            raise TypeError(
                f"standardize_targets needs floating-point targets, got {y.dtype}; class labels have no scale"
            )
        if not bool(torch.isfinite(y).all()):
            raise ValueError(f"standardize_targets: batch {count} on holds a NaN or infinite target")
        dtype, y = y.dtype, y.detach().cpu().double()
        size, batch_mean = y.shape[0], y.mean(0)
        delta = batch_mean - mean
        total = count + size
        squares = squares + ((y - batch_mean) ** 2).sum(0) + delta**2 * (count * size / total)
        mean = mean + delta * (size / total)
        count = total
    sd = (squares / max(count, 1)).sqrt()
    sd = torch.where(sd > 0, sd, torch.ones_like(sd))
    return mean.to(device, dtype), sd.to(device, dtype)
