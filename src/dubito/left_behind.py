"""What a network leaves in itself during a call, and must not keep from one under `vmap`.

A module may keep what it has computed (a cache, a running statistic assigned anew, the weight that
`torch.nn.utils.weight_norm` makes). Under `vmap` that is a batched tensor, which is dead outside: it can be neither
copied nor saved, and stands for no one draw.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class LeftBehind(RuntimeError):
    """The network kept something that was computed under `vmap`: its draws must run one after the other."""


@contextlib.contextmanager
def nothing_left_behind(module: nn.Module) -> Iterator[None]:
    """Attributes and buffers that became batched tensors inside are put back as they were.

    Raises:
        LeftBehind: if there were any (and nothing else was raised).
    """
    places: list[dict[str, Any]] = [place for m in module.modules() for place in (m.__dict__, m._buffers)]
    before = [dict(place) for place in places]
    try:
        yield
    except BaseException:
        _put_back(places, before)
        raise
    if _put_back(places, before):
        raise LeftBehind("the network keeps a tensor that it computed under vmap")


def _put_back(places: list[dict[str, Any]], before: list[dict[str, Any]]) -> bool:
    found = False
    for place, old in zip(places, before, strict=True):
        for name in [name for name, value in place.items() if _batched(value)]:
            found = True
            value = place[name]
            if name not in old:
                del place[name]
            elif old[name] is not value:
                place[name] = old[name]
            elif isinstance(value, list):  # one that the call appended to
                value[:] = [part for part in value if not _batched(part)]
    return found


def _batched(value: Any) -> bool:
    if isinstance(value, Tensor):
        return bool(torch._C._functorch.is_batchedtensor(value))
    return isinstance(value, tuple | list) and any(_batched(part) for part in value)
