"""`train()` and `eval()`, borrowed and given back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def flags_kept(*modules: nn.Module | None) -> Iterator[None]:
    """The `training` flags of all submodules come back whatever happens inside."""
    flags = [(m, m.training) for module in modules if module is not None for m in module.modules()]
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
