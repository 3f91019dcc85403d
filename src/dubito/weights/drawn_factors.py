"""Drawn weights kept as factors, `W = A Bᵀ`, and the operators that use them so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.weights.drawn import DrawnWeight, as_dense, rule
from dubito.weights.drawn_gaussian import LocalWeight
from dubito.weights.factor_entries import FactorLaw, standard_noise

_CONVOLUTIONS: dict[Any, int] = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
_TRANSPOSED: dict[Any, int] = {F.conv_transpose1d: 1, F.conv_transpose2d: 2, F.conv_transpose3d: 3}


class DrawnFactors(DrawnWeight):
    """A weight kept as drawn factors, which may be drawn weights themselves; it has no rules of its own."""

    left: Tensor
    right: Tensor

    @property
    def estimator(self) -> str | None:
        """The factors' estimator."""
        return self.left.estimator if isinstance(self.left, DrawnWeight) else None

    @classmethod
    def of(cls, left: Tensor, right: Tensor, shape: Sequence[int]) -> Self:
        """Wrap two drawn factors."""
        self = cls.wrap(shape, (left, right))
        self.left, self.right = left, right
        return self

    def progress(self) -> Any:
        """The memo, and the factors' progress."""
        factors = (self.left, self.right)
        return super().progress(), [f.progress() if isinstance(f, DrawnWeight) else None for f in factors]

    def rewind(self, progress: Any) -> None:
        """Back to that point, the factors too."""
        memo, parts = progress
        super().rewind(memo)
        for factor, part in zip((self.left, self.right), parts, strict=True):
            if isinstance(factor, DrawnWeight):
                factor.rewind(part)


class FactoredWeight(DrawnFactors):
    """`W = A Bᵀ` reshaped to the parameter's shape, with `A` (m, r) and `B` (n, r) drawn.

    For a kernel of shape (out, in, k…) the matrix is (out, in·k…), for any other parameter (first, rest). Two
    `LocalWeight`s as factors make two-stage local reparametrisation.
    """

    def draw_dense(self) -> Tensor:
        """`A Bᵀ` in the parameter's shape."""
        return (self.left @ self.right.mT).reshape(self.shape)


class EmbeddingRows(DrawnWeight):
    """A factored embedding table of which only the rows that are looked up are drawn.

    `A`'s rows are drawn at the first look-up of a token and kept for the length of the draw, so that a repeated
    token has one row. The output's gradient reaches only the rows used.
    """

    left_mean: Tensor
    left_sd: Tensor
    right: Tensor
    drawn: Tensor
    row_noise: Tensor
    law: FactorLaw
    source: torch.Generator

    @classmethod
    def of(
        cls,
        left_mean: Tensor,
        left_sd: Tensor,
        right: Tensor,
        law: FactorLaw = "gaussian",
        fixed_row: int | None = None,
    ) -> EmbeddingRows:
        """Wrap the moments of the rows' factor (the Laplace law's b for the sd) and a draw of the other factor.

        `fixed_row` (of the padding token) has no noise.
        """
        shape = (left_mean.shape[0], right.shape[0])
        self = cls.wrap(shape, (left_mean, left_sd, right))
        self.left_mean, self.left_sd, self.right, self.law = left_mean, left_sd, right, law
        self.drawn = torch.zeros(shape[0], dtype=torch.bool, device=left_mean.device)
        self.row_noise = torch.empty_like(
            left_mean, requires_grad=False
        )  # filled row by row: untouched pages cost nothing
        if fixed_row is not None:
            self.row_noise[fixed_row] = 0.0
            self.drawn[fixed_row] = True
        # A source of its own: a block that is run again finds its rows drawn, and must not find the global generator,
        # hence its dropout, elsewhere than the first time.
        self.source = torch.Generator(left_mean.device)
        self.source.manual_seed(int(torch.randint(2**62, ()).item()))
        return self

    def rows(self, tokens: Tensor) -> Tensor:
        """The drawn rows of `A` for distinct `tokens`: (len(tokens), r)."""
        new = tokens[~self.drawn[tokens]]
        shape, like = (len(new), self.left_mean.shape[1]), self.left_mean
        self.row_noise[new] = standard_noise(shape, like, self.law, self.source)
        self.drawn[new] = True
        noise = self.row_noise[tokens]
        return F.embedding(tokens, self.left_mean) + F.embedding(tokens, self.left_sd) * noise

    def draw_dense(self) -> Tensor:
        """The whole table, rows already looked up included."""
        return self.rows(torch.arange(self.shape[0], device=self.device)) @ self.right.mT


@rule(FactoredWeight, F.linear)
def _linear(input: Tensor, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, FactoredWeight) or weight.ndim != 2:
        return NotImplemented
    if input.ndim != 2 or weight.estimator is not None or torch.is_grad_enabled():
        return F.linear(F.linear(input, weight.right.mT), weight.left, bias)
    # Many draws under `vmap` and one input: in this order the first product is one of all the draws' factors at once.
    hidden = (weight.right.mT.contiguous() @ input.mT).mT
    output = F.linear(hidden, weight.left)
    return output if bias is None else output.add_(as_dense(bias))


@rule(FactoredWeight, torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)
def _matmul(input: Any, other: Any) -> Any:
    if isinstance(other, FactoredWeight) and other.ndim == 2 and not isinstance(input, DrawnWeight):
        return (input @ other.left) @ other.right.mT
    if isinstance(input, FactoredWeight) and input.ndim == 2 and not isinstance(other, DrawnWeight):
        return input.left @ (input.right.mT @ other)
    return NotImplemented


@rule(FactoredWeight, Tensor.__rmatmul__)
def _rmatmul(weight: Any, other: Any) -> Any:
    return _matmul(other, weight)


@rule(FactoredWeight, torch.addmm, Tensor.addmm)
def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    if not isinstance(mat2, FactoredWeight) or isinstance(mat1, DrawnWeight):
        return NotImplemented
    return torch.addmm(as_dense(input), mat1 @ mat2.left, mat2.right.mT, beta=beta, alpha=alpha)


_TRANSPOSES: tuple[Any, ...] = (torch.t, Tensor.t, Tensor.T.__get__, Tensor.mT.__get__)  # type: ignore[attr-defined]


@rule(FactoredWeight, *_TRANSPOSES)
def _t(weight: FactoredWeight) -> Any:
    if weight.ndim != 2:
        return NotImplemented
    return FactoredWeight.of(weight.right, weight.left, (weight.shape[1], weight.shape[0]))


@rule(FactoredWeight, torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.swapaxes)
def _transpose(weight: FactoredWeight, dim0: int, dim1: int) -> Any:
    return NotImplemented if weight.ndim != 2 or (dim0 - dim1) % 2 == 0 else _t(weight)


@rule(FactoredWeight, Tensor.__getitem__)
def _rows(weight: FactoredWeight, index: Any) -> Any:
    index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    if weight.ndim != 2 or not isinstance(index, slice):
        return NotImplemented
    left = weight.left[index]
    return _piece(weight, left)


@rule(FactoredWeight, torch.chunk, Tensor.chunk)
def _chunk(weight: FactoredWeight, chunks: int, dim: int = 0) -> Any:
    return _pieces(weight, weight.left.chunk(chunks, 0), dim)


@rule(FactoredWeight, torch.split, Tensor.split)
def _split(weight: FactoredWeight, split_size: Any, dim: int = 0) -> Any:
    return _pieces(weight, weight.left.split(split_size, 0), dim)


def _pieces(weight: FactoredWeight, parts: Sequence[Tensor], dim: int) -> Any:
    if weight.ndim != 2 or dim not in (0, -2):
        return NotImplemented
    return tuple(_piece(weight, part) for part in parts)


def _piece(weight: FactoredWeight, left: Tensor) -> FactoredWeight:
    """Some rows. Where outputs are drawn, pieces may meet different inputs: A's rows say whether a use is a second."""
    right = weight.right.uncounted() if isinstance(weight.right, LocalWeight) else weight.right
    return FactoredWeight.of(left, right, (left.shape[0], weight.shape[1]))


@rule(FactoredWeight, F.embedding)
def _embedding(
    input: Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if max_norm is not None or scale_grad_by_freq or weight.ndim != 2:
        return NotImplemented
    rows = F.embedding(input, weight.left)
    return _keep_padding(F.linear(rows, weight.right), input, padding_idx, weight.shape[0])


@rule(EmbeddingRows, F.embedding)
def _embedding_rows(
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
    tokens, inverse = torch.unique(input, return_inverse=True)
    table = F.linear(weight.rows(tokens), weight.right)
    return _keep_padding(F.embedding(inverse, table), input, padding_idx, weight.shape[0])


def _keep_padding(output: Tensor, tokens: Tensor, padding_idx: int | None, rows: int) -> Tensor:
    """A padding token's row gets no gradient, in either factor."""
    if padding_idx is None:
        return output
    padding = (tokens == padding_idx % rows).unsqueeze(-1)
    return torch.where(padding, output.detach(), output)


def _convolution(function: Any, spatial: int) -> Any:
    def convolve(
        input: Tensor,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        if not isinstance(weight, FactoredWeight):
            return NotImplemented
        rank, (out, inner, *kernel) = weight.left.shape[1], weight.shape
        area = inner * _product(kernel)
        cheaper = groups * rank * area + out * rank >= out * area
        if cheaper and weight.estimator is None:  # the dense kernel, that is
            return function(input, weight.dense(), as_dense(bias), stride, padding, dilation, groups)
        first = weight.right.mT.reshape(rank, inner, *kernel)
        first = first.repeat(groups, *[1] * (spatial + 1)) if groups > 1 else first
        hidden = function(input, first, None, stride, padding, dilation, groups)
        last = weight.left.reshape(out, rank, *[1] * spatial)
        return function(hidden, last, bias, 1, 0, 1, groups)

    return convolve


def _transposed_convolution(function: Any, plain: Any, spatial: int) -> Any:
    def convolve(
        input: Tensor,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        if not isinstance(weight, FactoredWeight) or groups != 1:
            return NotImplemented
        rank, (inner, out, *kernel) = weight.left.shape[1], weight.shape
        area = out * _product(kernel)
        if inner * rank + rank * area >= inner * area and weight.estimator is None:
            return NotImplemented
        # Where kernels overlap, an output sums hidden values at several places, all of one draw of A: outputs may be
        # drawn at the second stage only.
        left = weight.left.dense() if isinstance(weight.left, LocalWeight) else weight.left
        hidden = plain(input, left.mT.reshape(rank, inner, *[1] * spatial))
        last = weight.right.mT.reshape(rank, out, *kernel)
        return function(hidden, last, bias, stride, padding, output_padding, groups, dilation)

    return convolve


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


for _function, _spatial in _CONVOLUTIONS.items():
    FactoredWeight.rules[_function] = _convolution(_function, _spatial)
for (_function, _spatial), _plain in zip(_TRANSPOSED.items(), _CONVOLUTIONS, strict=True):
    FactoredWeight.rules[_function] = _transposed_convolution(_function, _plain, _spatial)
