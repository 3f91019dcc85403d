"""Matching propagated variances to draws of the weights: calibration without labels.

alpha = mean Monte Carlo variance / mean propagated variance, site after site within one propagation; rho before, since
a pooling's or an attention's mean variance is linear in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dubito.moments.moments import Context, Moments
from dubito.moments.propagate import propagated, sites_of_draw

if TYPE_CHECKING:
    from dubito.moments.calibration_fitting import Fitting

MAX_LOG = 12.0  #: alphas stay within e^±12


class _SiteVariances:
    """Mean variance over draws at every site, entries and inputs averaged."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.squares: dict[str, Tensor] = {}
        self.count = 0

    def record(self, site: str, moments: Moments) -> None:
        value = moments.mean.detach().double()
        if site not in self.sums:
            self.sums[site], self.squares[site] = torch.zeros_like(value), torch.zeros_like(value)
        self.sums[site] += value
        self.squares[site] += value.square()

    def means(self) -> dict[str, float]:
        result = {}
        for site, total in self.sums.items():
            mean = total / self.count
            variance = (self.squares[site] / self.count - mean.square()).clamp_min(0.0)
            result[site] = float(variance.mean()) * self.count / (self.count - 1)
        return result


class _Matching:
    """Answers alpha by what just arrived at a site: as a propagation goes on, each site is matched to the draws."""

    def __init__(self, wanted: Mapping[str, float], rhos: Mapping[str, Any]) -> None:
        self.wanted, self.rhos = wanted, rhos
        self.arrived: dict[str, float] = {}
        self.results: dict[str, Tensor] = {}
        self.alphas: dict[str, float] = {}

    def record(self, site: str, moments: Moments) -> None:
        mean = moments.variance.mean()
        self.results[site] = mean
        self.arrived[site] = float(mean.detach())

    def alpha(self, site: str) -> float:
        propagated_mean, wanted = self.arrived[site], self.wanted[site]
        usable = propagated_mean > 0 and wanted > 0
        ratio = min(max(wanted / propagated_mean, math.exp(-MAX_LOG)), math.exp(MAX_LOG)) if usable else 1.0
        self.alphas[site] = ratio
        return ratio

    def rho(self, site: str) -> Any:
        return self.rhos.get(site)


def matched(
    fitting: Fitting, correlations: bool, draws: int, generator: torch.Generator | None
) -> tuple[dict[str, float], dict[str, float]]:
    """Alphas and rhos by site, at which mean variances are those of `draws` draws of the weights.

    Raises:
        ValueError: fewer than two draws.
    """
    if draws < 2:
        raise ValueError(f"draws={draws} must be at least 2: a variance over draws is needed")
    sums: list[dict[str, float]] = []
    for inputs, _ in fitting.batches:
        sites = _SiteVariances()
        with torch.no_grad():
            for _ in range(draws):
                weights: dict[str, Tensor] = {}
                for posterior in fitting.bayes.posteriors():
                    weights.update(posterior.draw((), generator))
                sites_of_draw(fitting.bayes, inputs, weights, sites.record)
                sites.count += 1
        sums.append(sites.means())
    wanted = {site: sum(s[site] for s in sums) / len(sums) for site in sums[0]}
    rhos = _matched_rhos(fitting, wanted) if correlations and fitting.correlated else {}
    alphas: dict[str, list[float]] = {}
    for inputs, _ in fitting.batches:
        matching = _Matching(wanted, rhos)
        with torch.no_grad():
            _propagated(fitting, inputs, matching)
        for site, value in matching.alphas.items():
            alphas.setdefault(site, []).append(value)
    return {site: math.exp(sum(map(math.log, v)) / len(v)) for site, v in alphas.items()}, rhos


def _matched_rhos(fitting: Fitting, wanted: Mapping[str, float]) -> dict[str, float]:
    """rho at which a pooling's or an attention's mean variance is that of the draws: it is linear in rho."""
    zeros = {site: torch.zeros((), requires_grad=True) for site in fitting.correlated}
    matching = _Matching(wanted, zeros)
    with torch.enable_grad():
        _propagated(fitting, fitting.batches[0][0], matching)
    result = {}
    for site, zero in zeros.items():
        value = matching.results[site]
        slope = (
            torch.autograd.grad(value, zero, retain_graph=True, allow_unused=True)[0]
            if value.requires_grad
            else None
        )
        missing = wanted[site] - float(value.detach())
        known = slope is not None and float(slope) > 0
        result[site] = min(max(missing / float(slope), 0.0), 1.0) if known else 0.0  # type: ignore[arg-type]
    return result


def _propagated(fitting: Fitting, inputs: Any, matching: _Matching) -> Moments:
    context = Context(fitting.rules, matching, record=matching.record)
    return propagated(fitting.bayes, inputs, context, fitting.weights)
