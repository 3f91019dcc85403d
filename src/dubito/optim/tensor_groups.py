"""Tensors that can be worked on together: of one device and dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor


def alike(tensors: Sequence[Tensor], *lists: Sequence[Any]) -> Iterator[tuple[list[Any], ...]]:
    """The entries of several lists, split by device and dtype of the first one's tensors."""
    places = [(t.device, t.dtype) for t in tensors]
    for place in dict.fromkeys(places):
        chosen = [i for i, where in enumerate(places) if where == place]
        yield tuple([values[i] for i in chosen] for values in (tensors, *lists))


def use_foreach(wanted: bool | None, parameters: Iterable[Tensor]) -> bool:
    """Whether to use `torch._foreach_*`; on a processor the plain form is as quick, as the tensors are what costs."""
    return wanted if wanted is not None else all(p.device.type != "cpu" for p in parameters)
