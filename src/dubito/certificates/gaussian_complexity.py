"""Gaussian complexity of one layer of bounded rank and norm, with constant 1, and the risk bound it gives.

Over the linear maps `f(x) = W x`, rank at most r, ‖W‖₂ ≤ C (so over `A Bᵀ` with ‖A‖₂ ‖B‖₂ ≤ C), on inputs X (N, n):

    Ĝ = (1/N) E sup_W Σ_j ⟨g_j, W x_j⟩ = (C/N) E Σ_{i≤r} σ_i(M),   M = Σ_j g_j x_jᵀ  (h × n),
      ≤ (C/N) √r E ‖M‖_F ≤ C √(r h) ‖X‖_F / N.

The equality is the duality of the spectral norm under a bound on rank; the rest is Cauchy-Schwarz and Jensen.
For a loss in [0, 1] that is Lip-Lipschitz in the outputs, symmetrisation and Sudakov-Fernique give, with probability
1 - δ for all W of the class at once,

    risk ≤ empirical risk + √(2π) Lip Ĝ + 3 sqrt(ln(2/δ) / (2 N)),

linear in Lip, where theorem 3.9 of the singular BNN paper prints sqrt(π Lip), which no rescaling of the loss respects,
and an unspecified constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.argument_checks import check_fraction, to_double
from dubito.certificates.certificate import Certificate, Predictor
from dubito.scalar_checks import count, positive
from dubito.weights.family import WeightPosterior
from dubito.weights.low_rank_factors import LowRankFactorsPosterior

__all__ = ["GaussianComplexity", "complexity_bound", "complexity_estimate", "gaussian_complexity"]


@dataclass(frozen=True, kw_only=True)
class GaussianComplexity(Certificate):
    """A bound of the risk over one layer's whole class, and so of the layer at hand.

    Attributes:
        complexity: C √(r h) ‖X‖_F / N, the bound of Ĝ.
        norm: C, the bound of ‖W‖₂ that defines the class.
        empirical_risk: mean loss on the data.
    """

    name: str = "Gaussian complexity, one layer"
    statement: str = "risk ≤ empirical risk + √(2π) Lip C √(r h) ‖X‖_F / N + 3 sqrt(ln(2/δ) / (2 N))"
    trivial: float = 1.0
    complexity: float
    norm: float
    empirical_risk: float


def complexity_bound(inputs: Tensor, rank: int, outputs: int, norm: float) -> float:
    """C √(r h) ‖X‖_F / N, an upper bound of Ĝ.

    Args:
        inputs: X, (N, n).
        rank: r; one above min(h, n) is that.
        outputs: h.
        norm: C.

    Raises:
        ValueError: arguments out of range, or NaN.
    """
    x, r, h = _checked(inputs, rank, outputs)
    return positive("norm", norm) * math.sqrt(r * h) * float(x.norm()) / len(x)


def complexity_estimate(
    inputs: Tensor,
    rank: int,
    outputs: int,
    norm: float,
    draws: int = 64,
    generator: torch.Generator | None = None,
) -> tuple[float, float]:
    """Ĝ itself by Monte Carlo, (mean, standard error): C/N times the sum of r singular values of Σ g_j x_jᵀ.

    Args:
        inputs, rank, outputs, norm: as for `complexity_bound`.
        draws: of g, at least 2.
        generator: their source.
    """
    x, r, h = _checked(inputs, rank, outputs)
    number = count("draws", draws, "Monte Carlo draws", 2)
    scale = positive("norm", norm) / len(x)
    # with X = Q R, G X has the law of G R: min(N, n) columns of noise are enough
    root = torch.linalg.qr(x, mode="r").R
    values = []
    for _ in range(number):
        noise = torch.randn(h, len(root), generator=generator, dtype=x.dtype, device=x.device)
        values.append(torch.linalg.svdvals(noise @ root)[:r].sum() * scale)
    found = torch.stack(values)
    return float(found.mean()), float(found.std() / math.sqrt(number))


def gaussian_complexity(
    weight: WeightPosterior | Tensor,
    inputs: Tensor,
    empirical_risk: float,
    *,
    lipschitz: float,
    rank: int | None = None,
    norm: float | None = None,
    delta: float = 0.05,
) -> GaussianComplexity:
    """Bound the risk of a one-layer predictor by the Gaussian complexity of its class.

    Of a posterior it certifies the posterior mean of the outputs, `E[W] x`, which is a member of the class itself where
    ‖E W‖₂ ≤ C; no support has to be bounded for that. (For outputs that are not linear in W, the mean would have to lie
    in the closed convex hull of a class that holds every draw, and Gaussian posteriors would have to be truncated.)

    Args:
        weight: a posterior of one weight matrix, without bias (append a constant input for one), or its weights (h, n).
        inputs: X, (N, n), the data of the empirical risk.
        empirical_risk: mean on them of a loss in [0, 1], of the mean's outputs.
        lipschitz: Lip of that loss in the outputs; of a loss cut at c and divided by c, L / c.
        rank: r; None takes that of the factors, of plain weights min(h, n).
        norm: C, if fixed before the data. None takes the smallest of 2^k, k = 0, ±1, ±2, …, above ‖W‖₂ and pays for
            that choice by δ_k = δ / ((j+1)(j+2)), j = 0, 1, 2, … in the order of the list.
        delta: δ.

    Raises:
        ValueError: a risk outside [0, 1], a norm or rank below that of the weights, or shapes that do not fit.
    """
    check_fraction("delta", delta)
    matrix, kept, predictor = _class_of(weight, rank)
    if not 0.0 <= float(empirical_risk) <= 1.0:
        raise ValueError(f"empirical_risk={empirical_risk} must be a mean of losses in [0, 1]: clip them")
    slope = positive("lipschitz", lipschitz)
    own = float(torch.linalg.matrix_norm(matrix, 2))
    reach, share = _norm(norm, own, delta)
    x, _, _ = _checked(inputs, kept, len(matrix))
    if x.shape[1] != matrix.shape[1]:
        raise ValueError(f"inputs have {x.shape[1]} features, the weights take {matrix.shape[1]}")
    complexity = complexity_bound(x, kept, len(matrix), reach)
    term = math.sqrt(2 * math.pi) * slope * complexity
    deviation = 3.0 * math.sqrt(math.log(2.0 / share) / (2 * len(x)))
    return GaussianComplexity(
        predictor=predictor,
        bound=float(empirical_risk) + term + deviation,
        assumptions=_assumptions(kept, reach, norm is not None),
        measured={
            "N": len(x),
            "‖X‖_F": float(x.norm()),
            "‖W‖₂": own,
            "empirical risk": float(empirical_risk),
            "complexity": complexity,
            "Lip": slope,
            "complexity term": term,
            "deviation term": deviation,
        },
        complexity=complexity,
        norm=reach,
        empirical_risk=float(empirical_risk),
    )


def _assumptions(rank: int, norm: float, fixed: bool) -> tuple[str, ...]:
    how = "fixed before the data" if fixed else "taken from the powers of 2 after training, paid for within δ"
    return (
        "The data are independent draws of the distribution on which the risk is taken.",
        "The loss lies in [0, 1] and is Lip-Lipschitz in the outputs.",
        f"The predictor is one linear map without bias, of rank at most {rank}, which was fixed before the data.",
        f"C = {norm:.4g} was {how}.",
    )


def _class_of(weight: WeightPosterior | Tensor, rank: int | None) -> tuple[Tensor, int, Predictor]:
    if isinstance(weight, Tensor):
        matrix, natural, predictor = weight.detach(), None, "plain network"
    elif not isinstance(weight, WeightPosterior):
        raise TypeError(
            "weight must be a matrix or the posterior of one, list(bayes.posteriors())[0], not "
            f"{type(weight).__name__}"
        )
    else:
        if len(weight.slots) != 1 or len(weight.slots[0].shape) < 2:
            raise ValueError("one weight matrix is needed; this posterior covers other parameters")
        matrix = weight.mean()[weight.slots[0].name].detach()
        natural = weight.rank if isinstance(weight, LowRankFactorsPosterior) else None
        predictor = "posterior mean"
    if matrix.dim() < 2 or not matrix.numel() or not bool(torch.isfinite(matrix).all()):
        raise ValueError(f"weight must be a matrix (h, n) of finite entries, got shape {tuple(matrix.shape)}")
    matrix = to_double(matrix).flatten(1)
    most = min(matrix.shape)
    kept = rank if rank is not None else natural if natural is not None else most
    kept = min(count("rank", kept, "largest rank of the class"), most)
    values = torch.linalg.svdvals(matrix)
    if kept < most and float(values[kept]) > 1e-5 * float(values[0]):
        raise ValueError(
            f"the weights have a rank above rank={kept} (σ_{kept + 1} = {float(values[kept]):.3g})"
        )
    return matrix, kept, predictor  # type: ignore[return-value]


def _norm(norm: float | None, own: float, delta: float) -> tuple[float, float]:
    """(C, its share of δ)."""
    if norm is not None:
        reach = positive("norm", norm)
        if own > reach * (1 + 1e-9):
            raise ValueError(f"norm={norm} is below ‖W‖₂ = {own:.4g}: the predictor is not in the class")
        return reach, delta
    k = math.ceil(math.log2(own)) if own > 0 else 0
    place = 2 * abs(k) - (k > 0)
    return 2.0**k, delta / ((place + 1) * (place + 2))


def _checked(inputs: Tensor, rank: int, outputs: int) -> tuple[Tensor, int, int]:
    h, r = count("outputs", outputs, "entries of an output"), count("rank", rank, "largest rank")
    if not isinstance(inputs, Tensor) or inputs.dim() != 2 or not inputs.numel():
        got = tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
        raise ValueError(f"inputs must have shape (N, n) with N, n ≥ 1, got {got}")
    if not bool(torch.isfinite(inputs).all()):
        raise ValueError("inputs contain NaN or infinity")
    return to_double(inputs.detach()), min(r, h, inputs.shape[1]), h
