"""Drawn weights of which each block of rows has factors of its own, `W_b = A_b B_bᵀ` (a block is an attention head)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.weights.drawn import DrawnWeight, as_dense, rule
from dubito.weights.drawn_factors import DrawnFactors, FactoredWeight


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """`A Bᵀ`, (m, n), block by block: A (m, r) holds the blocks' rows, B (n, h·r) their factors side by side."""
    rank = left.shape[-1]
    blocks = right.shape[-1] // rank if rank else 1
    if blocks == 1:
        return left @ right.mT
    rows: Tensor = left.unflatten(0, (blocks, -1)) @ right.mT.unflatten(0, (blocks, rank))
    return rows.flatten(0, 1)


class BlockFactoredWeight(DrawnFactors):
    """h blocks of rows, each `A_b Bᵀ_b`, with `A` (m, r) and `B` (n, h·r) drawn.

    `x Wᵀ` takes one product with all of B and h small ones, never the dense weight.
    """

    @property
    def blocks(self) -> int:
        """h."""
        return int(self.right.shape[1] // self.left.shape[1])

    def draw_dense(self) -> Tensor:
        """The dense draw in the parameter's shape."""
        return multiply(as_dense(self.left), as_dense(self.right)).reshape(self.shape)


@rule(BlockFactoredWeight, F.linear)
def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, BlockFactoredWeight) or weight.ndim != 2 or isinstance(input, DrawnWeight):
        return NotImplemented
    blocks = weight.blocks
    hidden = F.linear(input, weight.right.mT)
    if weight.estimator is None:
        rows = weight.left.unflatten(0, (blocks, -1))
        stacked = hidden.reshape(-1, blocks, hidden.shape[-1] // blocks).transpose(0, 1)
        output = torch.bmm(stacked, rows.mT).transpose(0, 1).reshape(*hidden.shape[:-1], weight.shape[0])
        return output if bias is None else output + as_dense(bias)
    # each block draws its outputs, or flips their signs, with its part of the bias
    biases = [None] * blocks if bias is None else bias.chunk(blocks)
    parts = zip(hidden.chunk(blocks, -1), weight.left.chunk(blocks, 0), biases, strict=True)
    return torch.cat([F.linear(h, a, b) for h, a, b in parts], -1)


@rule(BlockFactoredWeight, Tensor.__getitem__)
def _rows(weight: BlockFactoredWeight, index: Any) -> Any:
    index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    if weight.ndim != 2 or not isinstance(index, slice) or index.step not in (None, 1):
        return NotImplemented
    start, stop, _ = index.indices(weight.shape[0])
    return _piece(weight, start, stop)


@rule(BlockFactoredWeight, torch.chunk, Tensor.chunk)
def _chunk(weight: BlockFactoredWeight, chunks: int, dim: int = 0) -> Any:
    return _pieces(weight, -(-weight.shape[0] // chunks), dim)


@rule(BlockFactoredWeight, torch.split, Tensor.split)
def _split(weight: BlockFactoredWeight, split_size: Any, dim: int = 0) -> Any:
    return _pieces(weight, split_size, dim)


def _pieces(weight: BlockFactoredWeight, size: int | Sequence[int], dim: int) -> Any:
    if weight.ndim != 2 or dim not in (0, -2):
        return NotImplemented
    rows, found, start = weight.shape[0], [], 0
    for length in [size] * -(-rows // size) if isinstance(size, int) else size:
        piece = _piece(weight, start, min(start + length, rows))
        if piece is NotImplemented:
            return NotImplemented
        found.append(piece)
        start += length
    return tuple(found)


def _piece(weight: BlockFactoredWeight, start: int, stop: int) -> Any:
    """Whole blocks only: any other rows come from the dense draw."""
    height, rank = weight.shape[0] // weight.blocks, weight.left.shape[1]
    if start % height or stop % height or stop <= start:
        return NotImplemented
    left, shape = weight.left[start:stop], (stop - start, weight.shape[1])
    right = weight.right[:, start // height * rank : stop // height * rank]
    return (FactoredWeight if stop - start == height else BlockFactoredWeight).of(left, right, shape)
