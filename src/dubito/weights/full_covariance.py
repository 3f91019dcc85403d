"""Full covariance: Gaussian weights with a Cholesky factor over each output unit, each layer, or the whole network.

`w = m + p ⊙ (L eps)` with `eps ~ N(0, I)`, L lower triangular and p the prior's standard deviations. Measured against
the prior in this way, and with off-diagonal entries held as `√D L_ij` (D entries a row of the group), every parameter
of L has a gradient and a natural step of the same order; a raw Cholesky factor of many weights diverges at the learning
rates that its means want. Unit-wise factors are those of Ober & Aitchison (2021), the whole network's the textbook's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from dubito.divergences import KLMethod, gaussian_kl, kl_divergence, wasserstein2_gaussian_factors
from dubito.priors import PriorSpec
from dubito.scalar_checks import choice, computing_dtype, count, positive
from dubito.weights.family import (
    CapabilityError,
    Components,
    Family,
    Granularity,
    Group,
    Noise,
    WeightPosterior,
    key_of,
)
from dubito.weights.gaussian_entries import log_sd_of, spread_of_sd
from dubito.weights.gaussian_weights import CorrelatedMoments, Moments
from dubito.weights.initial_scale import fan_in
from dubito.weights.slots import Slot
from dubito.weights.unit_layout import Block, unit_blocks, whole_block

Grouping = Literal["unit", "layer", "network"]

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True)
class FullCovariance(Family):
    """Gaussian weights with a full covariance over each group of parameters.

    Args:
        group: "unit" (each output unit's incoming weights and its bias, so P · D/2 numbers for P weights of D inputs),
            "layer" (all parameters of a module: P²/2) or "network" (all parameters of the pattern: P²/2).
        prior: as for `MeanField`; None takes `bayesianize`'s, else the default `Normal(0, fan_in ** -0.5)`.
        scale: initial standard deviation as a fraction of the prior's (of the fan-in scale where the prior is not
            Gaussian); weights start uncorrelated.
        kl_samples: draws of a Monte Carlo KL, where the prior has no closed form or bound.
        max_entries: refuse to make a covariance factor with more entries than this.

    Raises:
        ValueError: an unknown group, a scale that is not positive, `kl_samples` or `max_entries` below 1; at use, a
            factor above `max_entries`, with its size.
    """

    group: Grouping = "layer"
    prior: PriorSpec = None
    scale: float = 0.1
    kl_samples: int = 1
    max_entries: int = 2**25

    @property
    def granularity(self) -> Granularity:  # type: ignore[override]
        """One posterior a module, or one for all parameters."""
        return "all" if self.group == "network" else "module"

    def __post_init__(self) -> None:
        choice("group", self.group, Grouping)
        positive("scale", self.scale)
        count("kl_samples", self.kl_samples, "draws of a Monte Carlo KL")
        count("max_entries", self.max_entries, "entries of one covariance factor")

    def attach(self, group: Group) -> FullCovariancePosterior:
        """The posterior of a module's parameters, or of all."""
        units = unit_blocks(group.slots)
        blocks = units if self.group == "unit" else whole_block(group.slots)
        entries = _entries(blocks)
        if entries > self.max_entries:
            size = max(slot.parameter.element_size() for slot in group.slots)
            names = ", ".join(slot.name for slot in group.slots[:3]) + (", …" if len(group.slots) > 3 else "")
            smaller = _entries(units)
            hint = (
                f'group="unit" takes {_bytes(smaller * size)}; '
                if self.group != "unit" and smaller <= self.max_entries
                else ""
            )
            raise ValueError(
                f'FullCovariance(group="{self.group}") needs a covariance factor of {entries:,} entries '
                f"({_bytes(entries * size)}; training holds about four times that) for {names} "
                f"({sum(s.shape.numel() for s in group.slots):,} parameters), above max_entries={self.max_entries:,}. "
                f"{hint}LowRankCovariance or MeanField take far less; or raise max_entries"
            )
        return FullCovariancePosterior(group, self, blocks)


class FullCovariancePosterior(WeightPosterior):
    """The posterior that `FullCovariance` makes for a group of parameters.

    Attributes:
        blocks: which entries vary together (`unit_layout.Block`).
        log_diagonals: logarithms of L's diagonals, by block: (units, D).
        lowers: √D times L's strictly lower entries, row by row, by block: (units, D(D-1)/2).
    """

    realizes_stacks = True
    collapses = (
        "is held as a triangular factor of positive diagonal, so the expected loss moves also what no data speak of: "
        "the limit is another one, with less variance"
    )

    def __init__(self, group: Group, family: FullCovariance, blocks: list[Block]) -> None:
        super().__init__(group)
        self.family = family
        self.blocks = blocks
        self.log_diagonals, self.lowers = nn.ParameterList(), nn.ParameterList()
        for slot in self.slots:
            self.set_prior(slot, group.prior)
        scales = {slot.name: self._prior_scale(slot) for slot in self.slots}
        for index, block in enumerate(blocks):
            unit = block.rows(scales)
            start = spread_of_sd(torch.full_like(unit, family.scale), "log")
            self.log_diagonals.append(nn.Parameter(start))
            below = block.width * (block.width - 1) // 2
            self.lowers.append(nn.Parameter(unit.new_zeros(block.units, below)))
            self.register_buffer(f"unit_{index}", unit)

    def _prior_scale(self, slot: Slot) -> Tensor:
        """The prior's standard deviation as it stands, in the parameter's shape."""
        gaussian = None if self.joint_prior else self.prior_of(slot).gaussian()
        scale = fan_in(slot) ** -0.5 if gaussian is None else gaussian[1]
        like = slot.parameter.detach()
        if isinstance(scale, Tensor):
            return scale.detach().to(like.dtype).expand(slot.shape)
        return torch.full_like(like, scale)

    # ---- the factor ---------------------------------------------------------------------------------------

    def factors(self) -> list[Tensor]:
        """p ⊙ L of each block, `(units, D, D)` lower triangular, with `Cov = factor factorᵀ`; differentiable.

        float32 at least.
        """
        return [self._factor(index) for index in range(len(self.blocks))]

    def _factor(self, index: int) -> Tensor:
        diagonal, lower, unit = self._parts(index)
        units, width = diagonal.shape
        rows, columns = torch.tril_indices(width, width, -1, device=lower.device)
        places = torch.cat((torch.arange(width, device=lower.device) * (width + 1), rows * width + columns))
        entries = torch.cat((diagonal.exp(), lower * max(1, width) ** -0.5), dim=-1)
        flat = entries.new_zeros(units, width * width).scatter(1, places.expand(units, -1), entries)
        return flat.view(units, width, width) * unit.unsqueeze(-1)

    def _parts(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        dtype = computing_dtype(self.log_diagonals[index].dtype)
        log_diagonal = log_sd_of(self.log_diagonals[index].to(dtype), "log")
        unit: Tensor = getattr(self, f"unit_{index}")
        return log_diagonal, self.lowers[index].to(dtype), unit.to(dtype)

    def _log_diagonal(self, index: int) -> Tensor:
        """Logarithms of the factor's diagonal, `(units, D)`: conditional standard deviations given earlier entries."""
        log_diagonal, _, unit = self._parts(index)
        return log_diagonal + unit.log()

    def covariance(self) -> Tensor:
        """The covariance of all entries, the parameters one after the other, each flattened: (P, P)."""
        places = torch.arange(sum(s.shape.numel() for s in self.slots), device=self.lowers[0].device)
        parts = places.split([slot.shape.numel() for slot in self.slots])
        where = {slot.name: part.reshape(slot.shape) for slot, part in zip(self.slots, parts, strict=True)}
        result: Tensor | None = None
        for block, factor in zip(self.blocks, self.factors(), strict=True):
            result = factor.new_zeros(len(places), len(places)) if result is None else result
            rows = block.rows(where)
            result = result.index_put((rows.unsqueeze(-1), rows.unsqueeze(-2)), factor @ factor.mT)
        assert result is not None
        return result

    # ---- moments ------------------------------------------------------------------------------------------

    def mean(self) -> dict[str, Tensor]:
        """The module's own parameters."""
        return {slot.name: slot.parameter for slot in self.slots}

    def variance(self) -> dict[str, Tensor]:
        """Row sums of squares of the factors."""
        result: dict[str, Tensor] = {}
        for block, factor in zip(self.blocks, self.factors(), strict=True):
            result.update(block.split(factor.square().sum(-1)))
        return {slot.name: result[slot.name].to(slot.parameter.dtype) for slot in self.slots}

    def gaussian_weights(self) -> dict[str, Moments]:
        """The factor's columns. Those of different units are taken as one's: their outputs never meet in one sum."""
        result: dict[str, Moments] = {}
        for block, factor in zip(self.blocks, self.factors(), strict=True):
            source, columns = object(), block.split(factor.permute(2, 0, 1))
            for slot in block.slots:
                column = columns[slot.name].to(slot.parameter.dtype)
                result[slot.name] = CorrelatedMoments(slot.parameter, column, source)
        return result

    @torch.no_grad()
    def rescale_spread_(self, factor: float) -> None:
        """L ← factor·L."""
        for log_diagonal, lower in zip(self.log_diagonals, self.lowers, strict=True):
            log_diagonal.copy_(spread_of_sd(log_diagonal.exp() * factor, "log"))
            lower.mul_(factor)

    @torch.no_grad()
    def reset_spread_(self, scales: Mapping[str, float], generator: torch.Generator | None = None) -> None:
        """Uncorrelated again, each entry at the family's fraction of its initial standard deviation."""
        for index, block in enumerate(self.blocks):
            given = {s.name: torch.full_like(s.parameter, scales[s.name]) for s in block.slots}
            relative = self.family.scale * block.rows(given) / getattr(self, f"unit_{index}")
            self.log_diagonals[index].copy_(spread_of_sd(relative, "log"))
            self.lowers[index].zero_()

    # ---- drawing ------------------------------------------------------------------------------------------

    def noise(self, generator: torch.Generator | None = None) -> Noise:
        """eps ~ N(0, I), `(units, D)` for each block."""
        return {
            str(index): torch.randn(p.shape, generator=generator, dtype=p.dtype, device=p.device)
            for index, p in enumerate(self.log_diagonals)
        }

    def components(self, noise: Noise) -> Components:
        """w = m + p ⊙ (L eps), by parameter."""
        made: dict[str, Tensor] = {}
        with torch.autocast(self.lowers[0].device.type, enabled=False):
            for index, block in enumerate(self.blocks):
                factor = self._factor(index)
                eps = noise[str(index)].to(factor.dtype)
                made.update(block.split(torch.einsum("uij,...uj->...ui", factor, eps)))
        return {key_of(s.name): s.parameter + made[s.name].to(s.parameter.dtype) for s in self.slots}

    def realize(self, components: Components) -> dict[str, Tensor]:
        """Dense draws."""
        return {slot.name: components[key_of(slot.name)] for slot in self.slots}

    # ---- divergences --------------------------------------------------------------------------------------

    def kl(
        self, method: KLMethod = "auto", samples: int | None = None, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """KL(q || prior) in nats: exact for a Gaussian prior.

        Priors act on single entries, so KL(q || p) is the sum of the entries' own KLs, by `method`, and the total
        correlation of q, which is exact: sum log(sd of an entry) - log(its sd given the entries before it). An
        entry's share of that is counted with its parameter.
        """
        if method in ("monte_carlo", "stick_the_landing"):
            return self._sampled_kl(method, samples, generator)
        result: dict[str, Tensor] = {}
        wanted = samples if samples is not None else self.family.kl_samples
        for index, block in enumerate(self.blocks):
            log_sd = _log_norms(self._factor(index))
            shares = block.split(log_sd - self._log_diagonal(index))
            for name, marginal in block.split(log_sd).items():
                entries = self._entries_kl(name, marginal, method, wanted, generator)
                result[name] = entries + shares[name].sum()
        return {slot.name: result[slot.name] for slot in self.slots}

    def _entries_kl(
        self, name: str, log_sd: Tensor, method: KLMethod, samples: int, generator: torch.Generator | None
    ) -> Tensor:
        slot = next(s for s in self.slots if s.name == name)
        prior, mean = self.prior_of(slot), slot.parameter.to(log_sd.dtype)
        moments = prior.gaussian() if method in ("auto", "closed") else None
        if moments is not None:
            return gaussian_kl(mean, log_sd, *moments)
        q = torch.distributions.Normal(mean, log_sd.exp(), validate_args=False)
        return kl_divergence(q, prior.distribution(mean), method, samples, generator).sum()

    def _sampled_kl(
        self, method: KLMethod, samples: int | None, generator: torch.Generator | None
    ) -> dict[str, Tensor]:
        """Mean of log q(w) - log p(w) over joint draws; with q's parameters held in log q to stick the landing."""
        wanted = count("samples", self.family.kl_samples if samples is None else samples, "Monte Carlo draws")
        result: dict[str, Tensor] = {}
        for _ in range(wanted):
            noise = self.noise(generator)
            weights = self.realize(self.components(noise))
            for index, block in enumerate(self.blocks):
                log_q = self._log_entries(index, noise, weights, held=method == "stick_the_landing")
                for name, value in block.split(log_q).items():
                    slot = next(s for s in self.slots if s.name == name)
                    term = value.sum() - self.prior_of(slot).log_prob(weights[name]).sum()
                    result[name] = result[name] + term / wanted if name in result else term / wanted
        return {slot.name: result[slot.name] for slot in self.slots}

    def _log_entries(self, index: int, noise: Noise, weights: Mapping[str, Tensor], held: bool) -> Tensor:
        """log q of each entry given those before it, at a draw; `held` leaves only the draw's gradient."""
        log_diagonal = self._log_diagonal(index)
        eps = noise[str(index)].to(log_diagonal.dtype)
        if held:
            block = self.blocks[index]
            rows = block.rows({s.name: weights[s.name] for s in block.slots}).to(eps.dtype)
            moved = (rows - rows.detach()).unsqueeze(-1)  # zero, with the draw's gradient
            solved = torch.linalg.solve_triangular(self._factor(index).detach(), moved, upper=False)
            eps, log_diagonal = eps + solved.squeeze(-1), log_diagonal.detach()
        return -0.5 * eps.square() - log_diagonal - _HALF_LOG_TWO_PI

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """log q(w) of the whole group, leading dimensions kept."""
        total: Tensor | None = None
        for index, block in enumerate(self.blocks):
            factor = self._factor(index)
            deviations = {s.name: (weights[s.name] - s.parameter).to(factor.dtype) for s in block.slots}
            rows = block.rows(deviations).unsqueeze(-1)
            solved = torch.linalg.solve_triangular(factor, rows, upper=False).squeeze(-1)
            terms = -0.5 * solved.square() - self._log_diagonal(index) - _HALF_LOG_TWO_PI
            value = terms.sum(dim=(-2, -1))
            total = value if total is None else total + value
        assert total is not None
        return total

    def wasserstein(self, other: WeightPosterior) -> Tensor:
        """Squared 2-Wasserstein distance to another full-covariance posterior with the same grouping."""
        if not isinstance(other, FullCovariancePosterior) or other.family.group != self.family.group:
            raise CapabilityError(
                "FullCovariance has a closed form only to FullCovariance with the same group; this is "
                f"{type(other).__name__}"
            )
        total: Tensor | None = None
        for block, theirs, a, b in zip(
            self.blocks, other.blocks, self.factors(), other.factors(), strict=True
        ):
            mine = block.rows({s.name: s.parameter.to(a.dtype) for s in block.slots})
            those = theirs.rows({s.name: s.parameter.to(b.dtype) for s in theirs.slots})
            for unit in range(block.units):
                value = wasserstein2_gaussian_factors(mine[unit], a[unit], those[unit], b[unit])
                total = value if total is None else total + value
        assert total is not None
        return total

    def extra_repr(self) -> str:
        """Parameters and grouping."""
        return f'{super().extra_repr()}, group="{self.family.group}"'


def _log_norms(rows: Tensor) -> Tensor:
    """Logarithms of the rows' Euclidean norms, finite where their squares leave the range of the dtype."""
    largest = rows.detach().abs().amax(dim=-1)
    return largest.log() + 0.5 * (rows / largest.unsqueeze(-1)).square().sum(dim=-1).log()


def _entries(blocks: list[Block]) -> int:
    return sum(block.units * block.width**2 for block in blocks)


def _bytes(size: int) -> str:
    value = float(size)
    for name in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {name}"
        value /= 1000
    return f"{value:.3g} TB"
