"""Random quantities given by mean and variance, for propagation in a single pass (`dubito.moments`).

`Moments` is the plain pair. A family whose weights are correlated hands out one of its subclasses, which operators
with a rule for it use as they are, and which are their marginal means and variances to any other operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Moments:
    """Means and variances of the entries of a random tensor, two plain tensors of one shape.

    Attributes:
        mean: the means.
        variance: the variances.
        origin: what it was made from, where a later operator can use that (`dubito.moments.composition`).
    """

    __slots__ = ("__weakref__", "_mean", "_second", "_variance", "origin")

    def __init__(self, mean: Tensor, variance: Tensor) -> None:
        self._mean: Tensor | None = mean
        self._variance: Tensor | None = variance
        self._second: Tensor | None = None
        self.origin: Any = None

    @property
    def mean(self) -> Tensor:
        """E[x]."""
        assert self._mean is not None
        return self._mean

    @property
    def variance(self) -> Tensor:
        """Var[x], entry by entry."""
        assert self._variance is not None
        return self._variance

    @property
    def second(self) -> Tensor:
        """E[x²], kept: a weight's is used once a call."""
        if self._second is None:
            self._second = self.mean.square() + self.variance
        return self._second

    @property
    def shape(self) -> torch.Size:
        """The tensor's shape."""
        return self.mean.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.mean.ndim

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return self.mean.dtype

    @property
    def device(self) -> torch.device:
        """Where the tensor is."""
        return self.mean.device

    def __iter__(self) -> Any:
        """`mean, variance = moments`."""
        yield self.mean
        yield self.variance

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def rearranged(self, operator: Callable[[Tensor], Any]) -> Any:
        """The moments after an operator that only moves entries about: itself on mean and variance."""
        return paired(operator(self.mean), operator(self.variance))

    def marginal(self) -> Moments:
        """The plain pair, correlations left out."""
        return self


def paired(mean: Any, variance: Any) -> Any:
    """`Moments` of a mean and a variance, or tuples of them of tuples."""
    if isinstance(mean, Tensor):
        return Moments(mean, variance)
    return tuple(Moments(m, v) for m, v in zip(mean, variance, strict=True))


class FactoredMoments(Moments):
    """`W = A Bᵀ` reshaped to the parameter's shape, with independent Gaussian factor entries.

    Attributes:
        left: moments of A, (m, r).
        right: moments of B, (n, r).
    """

    __slots__ = ("full_shape", "left", "right")

    def __init__(self, left: Moments, right: Moments, shape: Sequence[int]) -> None:
        super().__init__(None, None)  # type: ignore[arg-type]
        self.left, self.right = left, right
        self.full_shape = torch.Size(shape)

    @property
    def mean(self) -> Tensor:
        """mA mBᵀ."""
        if self._mean is None:
            self._mean = (self.left.mean @ self.right.mean.mT).reshape(self.full_shape)
        return self._mean

    @property
    def variance(self) -> Tensor:
        """mA² (sB²)ᵀ + sA² (mB²)ᵀ + sA² (sB²)ᵀ."""
        if self._variance is None:
            value = self.left.second @ self.right.variance.mT
            value = value + self.left.variance @ self.right.mean.square().mT
            self._variance = value.reshape(self.full_shape)
        return self._variance

    @property
    def shape(self) -> torch.Size:
        """The parameter's shape."""
        return self.full_shape

    def transposed(self) -> FactoredMoments:
        """`Wᵀ = B Aᵀ`."""
        return FactoredMoments(self.right, self.left, (self.full_shape[1], self.full_shape[0]))

    def rows(self, operator: Callable[[Tensor], Any]) -> Any:
        """Some rows of a matrix: those of A, or several such pieces."""
        left = self.left.rearranged(operator)
        if isinstance(left, tuple):
            return tuple(FactoredMoments(p, self.right, (p.shape[0], self.full_shape[1])) for p in left)
        return FactoredMoments(left, self.right, (left.shape[0], self.full_shape[1]))

    def marginal(self) -> Moments:
        """Dense means and marginal variances."""
        return Moments(self.mean, self.variance)


class CorrelatedMoments(Moments):
    """Gaussian entries `w = m + S z` with `z ~ N(0, I_R)`.

    Attributes:
        factor: S, of shape (R, *shape).
        source: which z: parameters with the same source share it.
    """

    __slots__ = ("factor", "source")

    def __init__(self, mean: Tensor, factor: Tensor, source: object) -> None:
        super().__init__(mean, None)  # type: ignore[arg-type]
        self.factor, self.source = factor, source

    @property
    def variance(self) -> Tensor:
        """Row sums of squares of S."""
        if self._variance is None:
            self._variance = self.factor.square().sum(0)
        return self._variance

    def rearranged(self, operator: Callable[[Tensor], Any]) -> Any:
        """The operator on the mean and on every column of S."""
        mean, factor = operator(self.mean), torch.vmap(operator)(self.factor)
        if isinstance(mean, Tensor):
            return CorrelatedMoments(mean, factor, self.source)
        return tuple(CorrelatedMoments(m, f, self.source) for m, f in zip(mean, factor, strict=True))

    def marginal(self) -> Moments:
        """Means and marginal variances."""
        return Moments(self.mean, self.variance)


class KroneckerMoments(Moments):
    """Gaussian entries `W = M + U Z Vᵀ` with independent standard normal Z, the bias (if any) an input of 1.

    Attributes:
        row_variance: row sums of squares of U, (rows,).
        right: Vᵀ as kernels, (R_in, *shape without the rows).
        source: which Z; the bias has the same.
        bias_right: the bias's entries of V, (R_in,).
    """

    __slots__ = ("bias_right", "right", "row_variance", "source")

    def __init__(
        self, mean: Tensor, row_variance: Tensor, right: Tensor, source: object, bias_right: Tensor | None
    ) -> None:
        super().__init__(mean, None)  # type: ignore[arg-type]
        self.row_variance, self.right, self.bias_right = row_variance, right, bias_right
        self.source = source

    @property
    def variance(self) -> Tensor:
        """Products of the row sums of squares of U and V."""
        if self._variance is None:
            rows = self.row_variance.reshape(-1, *[1] * (self.right.ndim - 1))
            self._variance = rows * self.right.square().sum(0)
        return self._variance

    def marginal(self) -> Moments:
        """Means and marginal variances."""
        return Moments(self.mean, self.variance)


class KroneckerBias(Moments):
    """The bias that belongs to `KroneckerMoments` of the same source."""

    __slots__ = ("source",)

    def __init__(self, mean: Tensor, variance: Tensor, source: object) -> None:
        super().__init__(mean, variance)
        self.source = source


class RankOneMoments(Moments):
    """Independent entries whose variances are a row times a column: `V[o, i, …] = row[o] · column[0, i, …]`.

    Attributes:
        row: (outputs,).
        column: (1, *rest).
    """

    __slots__ = ("column", "row")

    def __init__(self, mean: Tensor, row: Tensor, column: Tensor) -> None:
        super().__init__(mean, None)  # type: ignore[arg-type]
        self.row, self.column = row, column

    @property
    def variance(self) -> Tensor:
        """Row times column."""
        if self._variance is None:
            self._variance = self.row.reshape(-1, *[1] * (self.column.ndim - 1)) * self.column
        return self._variance

    def transposed(self) -> RankOneMoments:
        """The matrix on its side."""
        return RankOneMoments(self.mean.mT, self.column.reshape(-1), self.row.reshape(1, -1))

    def marginal(self) -> Moments:
        """Means and variances."""
        return Moments(self.mean, self.variance)
