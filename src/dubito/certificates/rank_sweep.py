"""The PAC-Bayes bound against the rank: of networks retrained at each rank, or extrapolated from one.

The paper's figure 3 is of the second kind: one trained network's largest KL a coordinate, times the number of
coordinates. Here it is the mean KL a coordinate, and the result says that only the point at the trained rank is a
certificate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dubito.bayesian import BayesianModule
from dubito.certificates.certificate import RefusedError
from dubito.certificates.kl_inversion import kl_bound, sqrt_bound
from dubito.certificates.loss_constants import BoundedLoss
from dubito.certificates.pac_bayes import (
    MONTE_CARLO_SHARE,
    PacBayes,
    coordinates,
    dense_coordinates,
    largest_rank,
    pac_bayes,
)
from dubito.certificates.validity import require_fixed_prior
from dubito.scalar_checks import count
from dubito.weights.low_rank_factors import LowRankFactorsPosterior

__all__ = ["RankPoint", "RankSweep", "rank_sweep"]


@dataclass(frozen=True)
class RankPoint:
    """The bound at one rank.

    Attributes:
        rank: r.
        kl: KL(Q‖P) in nats, measured or scaled.
        kl_form: the inverted-kl bound.
        sqrt_form: the square-root bound.
        certified: whether a network of this rank stands behind it; otherwise it is a forecast.
        vacuous: whether the inverted-kl bound says nothing.
    """

    rank: int
    kl: float
    kl_form: float
    sqrt_form: float
    certified: bool
    vacuous: bool


@dataclass(frozen=True)
class RankSweep:
    """Bounds against rank; `dubito.rank_plots.bound_against_rank` draws it, `print` tabulates it.

    Attributes:
        points: in order of rank.
        certificates: of the networks, by rank; all hold together with probability 1 - δ.
        dense: the forecast for the dense matrices at the same KL a coordinate (None for retrained networks).
        trivial: at or above this a bound says nothing.
    """

    points: tuple[RankPoint, ...]
    certificates: Mapping[int, PacBayes]
    dense: RankPoint | None
    trivial: float

    @property
    def extrapolated(self) -> bool:
        """Whether the points away from the trained rank are forecasts."""
        return self.dense is not None

    @property
    def vacuous_from(self) -> int | None:
        """The smallest rank whose inverted-kl bound says nothing, or None."""
        return next((p.rank for p in self.points if p.vacuous), None)

    @property
    def best(self) -> RankPoint:
        """The certified point of the smallest bound."""
        certified = [p for p in self.points if p.certified]
        return min(certified, key=lambda p: p.kl_form)

    def __str__(self) -> str:
        head = f"{'rank':>6} {'KL (nats)':>12} {'kl form':>9} {'sqrt form':>9}"
        points = [*self.points, *([self.dense] if self.dense else [])]
        lines = ["PAC-Bayes bound of the Gibbs predictor against rank", head]
        for p in points:
            note = "" if p.certified else "  forecast"
            note += "  vacuous" if p.vacuous else ""
            label = "dense" if p is self.dense else f"{p.rank}"
            lines.append(f"{label:>6} {p.kl:>12,.1f} {p.kl_form:>9.4f} {p.sqrt_form:>9.4f}{note}")
        if self.extrapolated:
            lines.append(
                "forecast: the trained network's KL a coordinate and empirical risk, at another number of coordinates"
            )
        return "\n".join(lines)


def rank_sweep(
    source: BayesianModule | Mapping[int, BayesianModule],
    data: Any,
    ranks: Sequence[int] | None = None,
    *,
    loss: str | BoundedLoss = "zero_one",
    delta: float = 0.05,
    samples: int = 64,
    prior_is_fixed: bool = False,
    generator: torch.Generator | None = None,
) -> RankSweep:
    """The bound against rank.

    Args:
        source: networks by rank, each trained at it: every point is a certificate, δ divided by their number, so that
            the smallest may be picked. Or one network with `LowRankFactors`: the curve is extrapolated from it.
        data, loss, delta, samples, prior_is_fixed, generator: as for `pac_bayes`.
        ranks: for one network, the ranks to forecast (None: 1 to the largest min(m, n), in at most 24 steps). Layers
            whose min(m, n) is smaller stay at it.

    Raises:
        RefusedError: as `pac_bayes`, or one network without a factored matrix.
        ValueError: no networks, ranks that are no positive numbers, or `ranks` beside several networks.
    """
    options: dict[str, Any] = {
        "loss": loss,
        "delta": delta,
        "samples": samples,
        "prior_is_fixed": prior_is_fixed,
        "generator": generator,
    }
    if isinstance(source, Mapping):
        if not source or ranks is not None:
            raise ValueError("give networks by rank, {4: bayes_4, 8: bayes_8}, at least one, and no ranks=")
        return _retrained({count("rank", r, "key of a network"): b for r, b in source.items()}, data, options)
    return _extrapolated(source, data, ranks, options)


def _retrained(networks: dict[int, BayesianModule], data: Any, options: dict[str, Any]) -> RankSweep:
    found = {
        rank: pac_bayes(networks[rank], data, choices=len(networks), **options) for rank in sorted(networks)
    }
    points = tuple(RankPoint(r, c.kl, c.kl_form, c.sqrt_form, True, c.vacuous) for r, c in found.items())
    return RankSweep(points, found, None, next(iter(found.values())).trivial)


def _extrapolated(
    bayes: BayesianModule, data: Any, ranks: Sequence[int] | None, options: dict[str, Any]
) -> RankSweep:
    require_fixed_prior(bayes, bool(options["prior_is_fixed"]))
    factored = [p for p in bayes.posteriors() if isinstance(p, LowRankFactorsPosterior)]
    if not factored:
        raise RefusedError("no parameter has LowRankFactors, so there is no rank to vary")
    own = pac_bayes(bayes, data, **options)
    most = max(largest_rank(p) for p in factored)
    trained = max(p.rank for p in factored)
    wanted = _default_ranks(most) if ranks is None else [count("ranks", r, "a rank") for r in ranks]
    alike = all(p.rank == min(trained, largest_rank(p)) for p in factored)
    names = {p.slot.name for p in factored}
    rest = math.fsum(v for n, v in own.kl_by_parameter.items() if n not in names)

    def forecast(rank: int | None) -> RankPoint:
        kl = rest
        for p in factored:
            size = dense_coordinates(p) if rank is None else coordinates(p, rank)
            kl += own.kl_by_parameter[p.slot.name] * size / coordinates(p)
        arguments = (own.corrected_risk, kl, own.n, (1 - MONTE_CARLO_SHARE) * own.delta)
        form = kl_bound(*arguments)
        certified = alike and rank == trained
        return RankPoint(rank or 0, kl, form, sqrt_bound(*arguments), certified, not form < own.trivial)

    points = [forecast(rank) for rank in sorted({*wanted, *([trained] if alike else [])})]
    if not alike:  # layers of different ranks: the network's own point stands at the largest
        points = [p for p in points if p.rank != trained]
        points.append(RankPoint(trained, own.kl, own.kl_form, own.sqrt_form, True, own.vacuous))
        points.sort(key=lambda p: p.rank)
    return RankSweep(tuple(points), {trained: own}, forecast(None), own.trivial)


def _default_ranks(most: int) -> list[int]:
    if most <= 24:
        return list(range(1, most + 1))
    return sorted({round(math.exp(t * math.log(most) / 23)) for t in range(24)})
