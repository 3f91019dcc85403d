"""Priors over the weights of a layer, learned with the process: Gaussians in four shapes.

A layer with U units and D inputs (the bias's constant 1 among them) has weights (U, D). All start at N(0, 1/D): mean
zero, independent, at the fan-in scale. Off-diagonals are held in units of that scale, so that one learning rate suits
all. Part of the weights can be kept from learning (`set_trainable`): what is fixed is read from buffers, so that no
optimiser, and no weight decay, can move it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from dubito.gaussian_conditionals import LayerGaussian

PriorKind = Literal["unit", "diagonal", "low-rank", "layer"]


class _Held(nn.Module):
    """A tensor that is learned except where it is held at its first value."""

    held: Tensor | None
    first: Tensor | None

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.free = nn.Parameter(value)
        self.register_buffer("held", None)
        self.register_buffer("first", None)

    def forward(self) -> Tensor:
        """The value in force."""
        if self.held is None or self.first is None:
            return self.free
        return torch.where(self.held, self.first, self.free)

    def hold(self, held: Tensor) -> None:
        """Keep the entries where `held` is True as they are now."""
        now = self.forward().detach().clone()
        with torch.no_grad():
            self.free.copy_(now)
        self.held, self.first = (held.clone(), now) if bool(held.any()) else (None, None)

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: object) -> None:
        for name in ("held", "first"):  # present only where something is held
            value = state.get(prefix + name)
            setattr(self, name, None if value is None else torch.empty_like(value))
        super()._load_from_state_dict(state, prefix, *rest)  # type: ignore[arg-type]


class LayerPrior(nn.Module, ABC):
    """A Gaussian over the weights of one layer.

    Attributes:
        units, width: U and D.
        blocks: (K, M), the independent blocks: (U, D), or (1, UD) for the layer-wise one.
        trainable: which weights have a learned prior, (U, D).
    """

    trainable: Tensor

    def __init__(self, units: int, width: int, whole: bool = False) -> None:
        super().__init__()
        self.units, self.width = units, width
        self.blocks = (1, units * width) if whole else (units, width)
        self.scale: float = width**-0.5
        self.mean = _Held(torch.zeros(self.blocks))
        self.log_scale = _Held(torch.zeros(self.blocks))
        self.register_buffer("trainable", torch.ones(units, width, dtype=torch.bool))

    @abstractmethod
    def gaussian(self) -> LayerGaussian:
        """Mean, precision and its factor, in float64; differentiable."""

    @abstractmethod
    def draw(self, noise: Tensor) -> Tensor:
        """Weights (…, K, M) from standard normal noise of that shape (and more, see `noise_width`)."""

    @abstractmethod
    def covariance(self) -> Tensor:
        """(K, M, M)."""

    @property
    def noise_width(self) -> int:
        """Standard normals a block that a draw takes."""
        return self.blocks[1]

    def log_prob(self, weights: Tensor) -> Tensor:
        """log density of weights (…, U, D), summed, in nats."""
        shaped = weights.to(torch.float64).reshape(*weights.shape[:-2], *self.blocks)
        return self.gaussian().log_prob(shaped)

    def set_trainable(self, trainable: Tensor) -> None:
        """Which weights' prior is learned from now on; the others stay, independent of the rest if never learned.

        Args:
            trainable: booleans, (U, D).

        Raises:
            ValueError: for another shape.
        """
        if trainable.shape != (self.units, self.width):
            raise ValueError(
                f"trainable has shape {tuple(trainable.shape)}, but the weights here have {(self.units, self.width)}"
            )
        self.trainable = trainable.to(self.mean.free.device).bool()
        held = ~self.trainable.reshape(self.blocks)
        self.mean.hold(held)
        self.log_scale.hold(held)
        self._hold_off_diagonal(held)

    def _hold_off_diagonal(self, held: Tensor) -> None:
        """Hold what ties the held weights to others."""

    def _double(self, held: _Held) -> Tensor:
        return held.forward().to(torch.float64)

    def _sd(self) -> Tensor:
        return self._double(self.log_scale).exp() * self.scale


class DiagonalPrior(LayerPrior):
    """Independent weights."""

    def gaussian(self) -> LayerGaussian:
        """See `LayerPrior.gaussian`."""
        inverse = self._sd().reciprocal()
        return LayerGaussian(
            self._double(self.mean),
            inverse.diag_embed(),
            inverse.square().diag_embed(),
            inverse.log().sum(-1),
        )

    def draw(self, noise: Tensor) -> Tensor:
        """mean + sd·noise."""
        return self._double(self.mean) + self._sd() * noise

    def covariance(self) -> Tensor:
        """Diagonal."""
        return self._sd().square().diag_embed()


class FullPrior(LayerPrior):
    """A full covariance C Cᵀ over each unit's weights, or over the layer's, by its Cholesky factor."""

    def __init__(self, units: int, width: int, whole: bool = False) -> None:
        super().__init__(units, width, whole)
        blocks, size = self.blocks
        self.lower = _Held(torch.zeros(blocks, size, size))  # its strict lower triangle is used

    def factor(self) -> Tensor:
        """C, (K, M, M)."""
        return self._double(self.lower).tril(-1) * self.scale + self._sd().diag_embed()

    def gaussian(self) -> LayerGaussian:
        """See `LayerPrior.gaussian`: the precision's factor is C⁻ᵀ."""
        factor = self.factor()
        identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
        inverse = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False)
        half = -factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return LayerGaussian(self._double(self.mean), inverse.mT, inverse.mT @ inverse, half)

    def draw(self, noise: Tensor) -> Tensor:
        """mean + C·noise."""
        return self._double(self.mean) + (self.factor() @ noise.unsqueeze(-1)).squeeze(-1)

    def covariance(self) -> Tensor:
        """C Cᵀ."""
        factor = self.factor()
        return factor @ factor.mT

    def _hold_off_diagonal(self, held: Tensor) -> None:
        self.lower.hold(held.unsqueeze(-1) | held.unsqueeze(-2))


class LowRankPrior(LayerPrior):
    """Each unit's covariance is low-rank plus diagonal, d² + V Vᵀ with V of `rank` columns; for wide layers."""

    def __init__(self, units: int, width: int, rank: int) -> None:
        super().__init__(units, width)
        self.rank = rank
        # not zero, where its gradient would vanish; a hundredth of the variance each
        self.columns = _Held(torch.randn(units, width, rank) * 0.1 * rank**-0.5)

    @property
    def noise_width(self) -> int:
        """The weights and the columns each have noise."""
        return self.width + self.rank

    def _columns(self) -> Tensor:
        return self._double(self.columns) * self.scale

    def gaussian(self) -> LayerGaussian:
        """See `LayerPrior.gaussian`: the precision by Woodbury's identity."""
        inverse = self._sd().square().reciprocal()
        columns = self._columns()
        scaled = inverse.unsqueeze(-1) * columns
        small = torch.eye(self.rank, dtype=scaled.dtype, device=scaled.device) + columns.mT @ scaled
        precision = inverse.diag_embed() - scaled @ torch.linalg.solve(small, scaled.mT)
        factor = torch.linalg.cholesky(precision)
        half = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return LayerGaussian(self._double(self.mean), factor, precision, half)

    def draw(self, noise: Tensor) -> Tensor:
        """mean + d·noise₁ + V·noise₂."""
        own, shared = noise[..., : self.width], noise[..., self.width :]
        moved: Tensor = self._columns() @ shared.unsqueeze(-1)
        return self._double(self.mean) + self._sd() * own + moved.squeeze(-1)

    def covariance(self) -> Tensor:
        """d² + V Vᵀ."""
        columns = self._columns()
        shared: Tensor = columns @ columns.mT
        return self._sd().square().diag_embed() + shared

    def _hold_off_diagonal(self, held: Tensor) -> None:
        """A held weight's row of V is held at zero, or it would move with the others' columns."""
        with torch.no_grad():
            rows = held.unsqueeze(-1).expand_as(self.columns.free)
            self.columns.free.masked_fill_(rows, 0.0)
            if self.columns.first is not None:
                self.columns.first.masked_fill_(rows, 0.0)
        self.columns.hold(rows)


def layer_prior(kind: PriorKind, units: int, width: int, rank: int = 4) -> LayerPrior:
    """The prior of that shape for a layer of `units` units with `width` inputs.

    Raises:
        ValueError: an unknown kind, or a rank below 1.
    """
    if kind not in get_args(PriorKind):
        raise ValueError(f"prior={kind!r} must be one of {', '.join(map(repr, get_args(PriorKind)))}")
    if kind == "diagonal":
        return DiagonalPrior(units, width)
    if kind == "low-rank":
        if rank < 1:
            raise ValueError(f"prior_rank={rank} must be at least 1")
        return LowRankPrior(units, width, rank)
    return FullPrior(units, width, whole=kind == "layer")
