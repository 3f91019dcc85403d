"""The gradients of a step's draws: their mean, and the mean of gradient times noise.

The mean gradient is kept where it belongs, in `.grad`, so that whatever is done to it before the step (unscaling,
clipping) is done to the estimate of the curvature too: with one draw the product is taken at the step; with several,
or once averaged over processes, a factor by which a whole gradient was changed since is applied to its product.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from dubito.scalar_checks import computing_dtype


class GatheredDraws:
    """What the draws since the last step have given.

    Attributes:
        count: how many draws.
        synchronized: whether the gradients are already the mean over all processes.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all draws."""
        self.count = 0
        self.synchronized = False
        self._noise: dict[Tensor, Tensor] = {}  # of the one draw whose product is not yet taken
        self._products: dict[Tensor, Tensor] = {}
        self._sizes: dict[Tensor, Tensor] = {}  # of the gradients when the products were taken

    def set_aside(self, parameters: Iterable[Tensor]) -> dict[Tensor, Tensor | None]:
        """Take the gradients of earlier draws out of `.grad`, to make room for the next draw's."""
        if self.count == 0:
            return {}  # what stands in .grad belongs to the first draw, as zero_grad() may not have been called
        self.take_products()
        self._measure()
        aside: dict[Tensor, Tensor | None] = {}
        for p in parameters:
            aside[p], p.grad = p.grad, None
        return aside

    def add(self, noise: Mapping[Tensor, Tensor], aside: Mapping[Tensor, Tensor | None]) -> None:
        """One more draw, whose gradients stand in `.grad`."""
        self.count += 1
        if self.count == 1:
            self._noise = dict(noise)
            return
        share = 1 / self.count
        for p in set(noise) | set(aside):
            new, old, eps = p.grad, aside.get(p), noise.get(p)
            product = None if new is None or eps is None else new.to(eps.dtype) * eps
            p.grad = _running_mean(old, new, share)
            mean = _running_mean(self._products.get(p), product, share)
            if mean is not None:
                self._products[p] = mean
        self._measure()

    def take_products(self) -> None:
        """Bring the products up to date with what stands in `.grad` now."""
        if self._noise:
            for p, eps in self._noise.items():
                if p.grad is not None:
                    self._products[p] = eps.mul_(p.grad)
            self._noise = {}
        elif self._sizes:
            for p, size in self._sizes.items():
                if p.grad is not None:
                    factor = torch.where(size > 0, _size(p.grad) / size, 1)
                    self._products[p].mul_(factor.to(self._products[p].dtype))
            self._measure()

    def products(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The mean over draws of gradient times noise; zeros for a parameter that was not drawn."""
        self.take_products()
        return [
            self._products[p]
            if p in self._products
            else torch.zeros_like(p, dtype=computing_dtype(p.dtype), requires_grad=False)
            for p in parameters
        ]

    def replace(self, p: Tensor, gradient: Tensor | None, product: Tensor) -> None:
        """Put means over processes in place of a parameter's gradient and product."""
        if gradient is None:
            p.grad = None
            self._products.pop(p, None)
        else:
            if p.grad is None:
                p.grad = torch.empty_like(p, requires_grad=False)
            p.grad.copy_(gradient)
            self._products[p] = product

    def mark_synchronized(self) -> None:
        """All gradients and products are now means over the processes."""
        self.synchronized = True
        self._measure()

    def _measure(self) -> None:
        self._sizes = {p: _size(p.grad) for p in self._products if p.grad is not None}


def _size(gradient: Tensor) -> Tensor:
    # a 1-norm, which unlike a sum of squares does not overflow under a loss scale
    size: Tensor = torch.linalg.vector_norm(gradient, ord=1, dtype=computing_dtype(gradient.dtype))
    return size


def _running_mean(old: Tensor | None, new: Tensor | None, share: float) -> Tensor | None:
    """`old + share (new - old)`, where None stands for zeros."""
    if old is None:
        return None if new is None else new.mul_(share)
    return old.mul_(1 - share) if new is None else old.lerp_(new, share)
