"""Drawn weights kept as `W = W0 ⊙ r sᵀ`: a shared matrix, and a drawn multiplier for each output and each input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.weights.drawn import DrawnWeight, as_dense, rule


class RankOneWeight(DrawnWeight):
    """`W0 ⊙ r sᵀ` of a matrix: `x Wᵀ = ((x ⊙ s) W0ᵀ) ⊙ r`, at the cost of the plain product."""

    matrix: Tensor
    left: Tensor
    right: Tensor

    @classmethod
    def of(cls, matrix: Tensor, left: Tensor, right: Tensor) -> RankOneWeight:
        """Wrap W0 (m, n), r (m,) and s (n,)."""
        self = cls.wrap((left.shape[0], right.shape[0]), (matrix, left, right))
        self.matrix, self.left, self.right = matrix, left, right
        return self

    def draw_dense(self) -> Tensor:
        """`W0 ⊙ r sᵀ`."""
        return self.matrix * self.left.unsqueeze(-1) * self.right


@rule(RankOneWeight, F.linear)
def _linear(input: Tensor, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, RankOneWeight) or isinstance(input, DrawnWeight):
        return NotImplemented
    output = F.linear(input * weight.right, weight.matrix) * weight.left
    return output if bias is None else output + as_dense(bias)


@rule(RankOneWeight, torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)
def _matmul(input: Any, other: Any) -> Any:
    if isinstance(other, RankOneWeight) and not isinstance(input, DrawnWeight):
        return ((input * other.left) @ other.matrix) * other.right
    return NotImplemented


@rule(RankOneWeight, torch.addmm, Tensor.addmm)
def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    if not isinstance(mat2, RankOneWeight) or isinstance(mat1, DrawnWeight) or beta != 1 or alpha != 1:
        return NotImplemented
    return ((mat1 * mat2.left) @ mat2.matrix) * mat2.right + as_dense(input)


_TRANSPOSES: tuple[Any, ...] = (torch.t, Tensor.t, Tensor.T.__get__, Tensor.mT.__get__)  # type: ignore[attr-defined]


@rule(RankOneWeight, *_TRANSPOSES)
def _t(weight: RankOneWeight) -> RankOneWeight:
    return RankOneWeight.of(weight.matrix.mT, weight.right, weight.left)


@rule(RankOneWeight, torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.swapaxes)
def _transpose(weight: RankOneWeight, dim0: int, dim1: int) -> Any:
    return NotImplemented if (dim0 - dim1) % 2 == 0 else _t(weight)


@rule(RankOneWeight, Tensor.__getitem__)
def _rows(weight: RankOneWeight, index: Any) -> Any:
    index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    if not isinstance(index, slice):
        return NotImplemented
    return RankOneWeight.of(weight.matrix[index], weight.left[index], weight.right)


@rule(RankOneWeight, torch.chunk, Tensor.chunk)
def _chunk(weight: RankOneWeight, chunks: int, dim: int = 0) -> Any:
    return _pieces(weight, weight.matrix.chunk(chunks, 0), weight.left.chunk(chunks, 0), dim)


@rule(RankOneWeight, torch.split, Tensor.split)
def _split(weight: RankOneWeight, split_size: Any, dim: int = 0) -> Any:
    return _pieces(weight, weight.matrix.split(split_size, 0), weight.left.split(split_size, 0), dim)


def _pieces(weight: RankOneWeight, matrices: Sequence[Tensor], lefts: Sequence[Tensor], dim: int) -> Any:
    if dim not in (0, -2):
        return NotImplemented
    return tuple(RankOneWeight.of(w, r, weight.right) for w, r in zip(matrices, lefts, strict=True))


@rule(RankOneWeight, F.embedding)
def _embedding(
    input: Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if max_norm is not None or scale_grad_by_freq:
        return NotImplemented
    row = F.embedding(input, weight.left.unsqueeze(-1), padding_idx)
    return F.embedding(input, weight.matrix, padding_idx, sparse=sparse) * row * weight.right
