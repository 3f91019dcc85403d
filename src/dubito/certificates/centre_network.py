"""The deterministic centre check: does the noise of the factors leave the centre network's decisions alone?

A diagnostic. For a bias-free ReLU network of D layers, `‖x‖ ≤ B`, with mean weights `W_i` and balanced factors
(`A = U S^½`, `B = V S^½`) perturbed by isotropic noise of standard deviations sA and sB: with probability at least 1/2

    ‖ΔW_i‖₂ / ‖W_i‖₂ ≤ ρ_i = x_i + y_i + x_i y_i,
    x_i = sA (√h_i + √r_i + t) / ‖W_i‖₂^½,   y_i = sB (√h_{i-1} + √r_i + t) / ‖W_i‖₂^½,   4 D e^{-t²/2} ≤ 1/2,

and, by the perturbation bound of Neyshabur et al. (2018), if every ρ_i ≤ 1/D and Σ ρ_i < γ / (4 e B Π ‖W_j‖₂), then

    0-1 risk of the centre ≤ margin risk at γ on the data + 4 sqrt((KL + ln(6 N / δ)) / (N - 1)).

At the noise that training finds the condition fails as a rule, by a wide margin: what the check tells is how far it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dubito.argument_checks import check_fraction, to_double
from dubito.bayesian import BayesianModule
from dubito.certificates.certificate import Certificate, Predictor, RefusedError
from dubito.certificates.layer_chain import Link, chain_of
from dubito.certificates.validity import require_fixed_prior
from dubito.divergences import gaussian_kl
from dubito.monte_carlo import device_of
from dubito.scalar_checks import non_negative, positive
from dubito.weights.low_rank_factors import LowRankFactorsPosterior

__all__ = ["CentreCheck", "centre_check"]


_ASSUMPTIONS = (
    "The data are independent draws of the distribution on which the risk is taken.",
    "The margin γ, the prior, the ranks and the noise factor were fixed before the data.",
    "Each factor's noise is taken as isotropic, at its root mean square, around the balanced factors.",
)


@dataclass(frozen=True, kw_only=True)
class CentreCheck(Certificate):
    """Whether the noise leaves the centre network's decisions alone, and the bound if it does.

    `bound` is infinite where the conditions fail.

    Attributes:
        holds: whether all conditions do.
        condition: Σ ρ_i divided by what it must stay below; below 1 it passes.
        perturbations: ρ_i by layer.
        passes_at: the largest factor by which the learned noise may be multiplied so that the conditions hold.
        kl: of the isotropic posterior around the balanced factors, at the noise checked, in nats.
    """

    name: str = "centre network (diagnostic)"
    predictor: Predictor = "centre network"
    statement: str = (
        "if Σ ρ_i < γ / (4 e B Π ‖W_j‖₂) and ρ_i ≤ 1/D: risk ≤ margin risk + 4 sqrt((KL + ln(6N/δ)) / (N-1))"
    )
    trivial: float = 1.0
    holds: bool
    condition: float
    perturbations: dict[str, float]
    passes_at: float
    kl: float


@dataclass(frozen=True)
class _Layer:
    link: Link
    posterior: LowRankFactorsPosterior
    norm: float
    sds: tuple[float, float]

    def perturbation(self, scale: float, t: float) -> float:
        rows, columns = self.link.weight.shape
        root = math.sqrt(self.posterior.rank)
        x, y = (
            scale * sd * (math.sqrt(size) + root + t) / math.sqrt(self.norm)
            for sd, size in zip(self.sds, (rows, columns), strict=True)
        )
        return x + y + x * y

    def kl(self, scale: float) -> float:
        u, s, vh = torch.linalg.svd(self.link.weight, full_matrices=False)
        kept = s[: self.posterior.rank].sqrt()
        total = 0.0
        for side, mean, sd in zip(
            ("left", "right"), (u[:, : len(kept)] * kept, vh[: len(kept)].mT * kept), self.sds, strict=True
        ):
            moments = self.posterior.factor_prior(side).gaussian()
            if moments is None:
                raise RefusedError(
                    "the centre check needs Gaussian priors on the factors: prior=Normal(0.0, s)"
                )
            log_sd = torch.full_like(mean, math.log(scale * sd))
            total += float(gaussian_kl(mean, log_sd, *moments))
        return total


@torch.no_grad()
def centre_check(
    bayes: BayesianModule,
    x: Tensor,
    y: Tensor,
    *,
    margin: float,
    radius: float | None = None,
    noise: float = 1.0,
    delta: float = 0.05,
    prior_is_fixed: bool = False,
) -> CentreCheck:
    """Run the check.

    Args:
        bayes: an `nn.Sequential` of bias-free `nn.Linear` and ReLU, every weight with `LowRankFactors` under Gaussian
            priors.
        x: the training inputs, (N, features).
        y: int64 labels, (N,).
        margin: γ > 0, fixed beforehand, in units of the outputs.
        radius: B, fixed beforehand; None takes the largest norm in `x`, which must then hold for new data too.
        noise: multiplies the learned standard deviations (their root mean square over each factor).
        delta: δ.
        prior_is_fixed: as for `pac_bayes`.

    Raises:
        TypeError, ValueError: a network of another kind, or bad arguments.
        RefusedError: a prior that may depend on the data, or is not Gaussian.
    """
    check_fraction("delta", delta)
    gap, scale = positive("margin", margin), positive("noise", noise)
    require_fixed_prior(bayes, prior_is_fixed)
    layers, reach = _layers(bayes), _reach(x, y, radius)
    t = math.sqrt(2.0 * math.log(8.0 * len(layers)))
    allowed = gap / (4 * math.e * max(reach, 1e-300) * math.prod(layer.norm for layer in layers))
    perturbations = {layer.link.name: layer.perturbation(scale, t) for layer in layers}
    holds = _passes(layers, scale, t, allowed)
    kl = math.fsum(layer.kl(scale) for layer in layers)
    risk = _margin_risk(layers, x.to(device_of(bayes)), y.to(device_of(bayes)), gap)
    complexity = 4.0 * math.sqrt((kl + math.log(6 * len(x) / delta)) / (len(x) - 1))
    condition, limit = sum(perturbations.values()) / allowed, _limit(layers, t, allowed)
    return CentreCheck(
        bound=risk + complexity if holds else math.inf,
        assumptions=(*_ASSUMPTIONS, f"‖x‖ ≤ {reach:.4g} holds for all data, new ones too."),
        measured={
            "N": len(x),
            "margin risk": risk,
            "Σ ρ_i / allowed (passes below 1)": condition,
            "largest ρ_i · D (passes up to 1)": max(perturbations.values()) * len(layers),
            "passes at noise times": limit,
            "KL (nats)": kl,
            "complexity term": complexity,
        },
        holds=holds,
        condition=condition,
        perturbations=perturbations,
        passes_at=limit,
        kl=kl,
    )


def _reach(x: Tensor, y: Tensor, radius: float | None) -> float:
    if len(x) != len(y) or len(x) < 2 or not bool(torch.isfinite(x).all()):
        raise ValueError(f"x and y must hold the same number N ≥ 2 of finite data, got {len(x)} and {len(y)}")
    largest = float(to_double(x).flatten(1).norm(dim=1).max())
    reach = largest if radius is None else positive("radius", radius)
    if largest > reach * (1 + 1e-6):
        raise ValueError(f"radius={radius} is below the largest norm of x, {largest:.4g}")
    return reach


def _layers(bayes: BayesianModule) -> list[_Layer]:
    posteriors = {name: p for p in bayes.posteriors() for name in p.slots[0].aliases}
    layers = []
    for link in chain_of(bayes.merge()):
        name = f"{link.name}.weight" if link.name else "weight"
        posterior = posteriors.get(name)
        if (
            not isinstance(posterior, LowRankFactorsPosterior)
            or link.bias is not None
            or posterior.blocks != 1
        ):
            raise ValueError(
                f"{name!r} must have LowRankFactors, in one block, and no bias: nn.Linear(…, bias=False)"
            )
        if any(not isinstance(a, nn.ReLU | nn.Identity | nn.Dropout) for a in link.activations):
            raise ValueError(f"the activation after {link.name!r} must be nn.ReLU for the centre check")
        sds = tuple(float(to_double(posterior.moments(side)[1]).mean().sqrt()) for side in ("left", "right"))
        norm = float(torch.linalg.matrix_norm(link.weight, 2))
        if not norm > 0:
            raise ValueError(f"the mean of {name!r} is zero: there is no centre network")
        layers.append(_Layer(link, posterior, norm, (sds[0], sds[1])))
    return layers


def _passes(layers: list[_Layer], scale: float, t: float, allowed: float) -> bool:
    found = [layer.perturbation(scale, t) for layer in layers]
    return max(found) <= 1.0 / len(layers) and sum(found) < allowed


def _limit(layers: list[_Layer], t: float, allowed: float) -> float:
    """The largest factor that passes, by bisection: the conditions are monotone in it."""
    low, high = 0.0, 1.0
    while _passes(layers, high, t, allowed):
        low, high = high, 2.0 * high
    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _passes(layers, middle, t, allowed) else (low, middle)
    return non_negative("limit", low)


def _margin_risk(layers: list[_Layer], x: Tensor, y: Tensor, gap: float) -> float:
    state = to_double(x)
    for layer in layers:
        state = layer.link(state)
    own = state.gather(1, y.long().unsqueeze(1)).squeeze(1)
    rest = state.scatter(1, y.long().unsqueeze(1), -math.inf).amax(1)
    return float((own <= rest + gap).double().mean())
