"""How much loss a rank costs: Eckart-Young-Mirsky bounds for one layer and for a chain of layers.

For a loss that is L-Lipschitz in the outputs and `‖x‖ ≤ R` (singular BNN paper, theorems 3.6 and 3.7, with the steps of
their proofs that fail replaced):

    |l(W x) - l(W_r x)| ≤ L ‖(W - W_r) x‖ ≤ L R σ_{r+1} ≤ L R (Σ_{i>r} σ_i²)^½

by the Lipschitz constant alone, for any W: no optimality of W is needed. The first form is measured on data, the other
two hold for every x of that norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dubito.argument_checks import to_double
from dubito.certificates.certificate import Certificate
from dubito.certificates.layer_chain import Link, chain_of
from dubito.certificates.loss_constants import LossConstants, loss_constants
from dubito.scalar_checks import count, non_negative, positive

__all__ = ["LossGap", "eckart_young", "learned_factors", "network_eckart_young"]

_FREE = "The loss is L-Lipschitz in the outputs; nothing is assumed of how the weights were trained."
_CHAIN = "The bound is about the mean over the given inputs, the other two forms about each of them; dropout is off."
_ONE_LAYER = "The statement is about one layer's linear map, the same bias on both sides."


@dataclass(frozen=True, kw_only=True)
class LossGap(Certificate):
    """A bound of the change in loss when weights are exchanged, in three forms.

    `bound` is the sharpest: on the data where inputs were given (it then holds for the mean over these), else spectral.

    Attributes:
        frobenius: from the Frobenius norm, for every x with ‖x‖ ≤ R.
        spectral: from the spectral norm, for every such x.
        on_data: mean over the given inputs, or None.
    """

    frobenius: float
    spectral: float
    on_data: float | None


def eckart_young(
    weight: Tensor,
    rank: int,
    *,
    loss: str | LossConstants = "cross_entropy",
    inputs: Tensor | None = None,
    radius: float | None = None,
    later_norm: float = 1.0,
    output_bound: float | None = None,
) -> LossGap:
    """What the best rank-r approximation of a layer may cost (theorem 3.6).

    Args:
        weight: (m, n), or more dimensions, the first by the rest.
        rank: r, from 0 to min(m, n).
        loss: a name or constants, as for `loss_constants`.
        inputs: the layer's inputs (N, n), for the form on data; their largest norm is R where `radius` is not given.
        radius: R.
        later_norm: Lipschitz constant of what follows the layer (`network_eckart_young` finds it for chains).
        output_bound: B of "half_squared".

    Raises:
        ValueError: neither inputs nor radius, an impossible rank, shapes that do not fit, or NaN.
    """
    matrix = _matrix("weight", weight)
    kept = count("rank", rank, "singular values kept", 0)
    if kept > min(matrix.shape):
        raise ValueError(f"rank={rank} is above min(m, n) = {min(matrix.shape)}: such a matrix loses nothing")
    u, values, vh = torch.linalg.svd(matrix, full_matrices=False)
    tail = (u[:, kept:] * values[kept:]) @ vh[kept:]
    constants = loss_constants(loss, output_bound)
    frobenius = float(values[kept:].square().sum().sqrt())
    spectral = float(values[kept]) if kept < len(values) else 0.0
    gap = _gap(tail, (frobenius, spectral), constants, inputs, radius, later_norm)
    energy = float(values[:kept].square().sum() / values.square().sum().clamp_min(1e-300))
    return replace(
        gap,
        name=f"Eckart-Young-Mirsky, rank {kept} of {matrix.shape[0]} × {matrix.shape[1]}",
        statement="|loss(W x) - loss(W_r x)| ≤ L ‖(W - W_r) x‖ ≤ L R σ_{r+1} ≤ L R (Σ_{i>r} σ_i²)^½",
        measured={"σ_{r+1}": spectral, "tail norm": frobenius, "energy kept": energy, **gap.measured},
    )


def learned_factors(
    weight: Tensor,
    target: Tensor,
    rank: int,
    *,
    loss: str | LossConstants = "cross_entropy",
    inputs: Tensor | None = None,
    radius: float | None = None,
    output_bound: float | None = None,
) -> LossGap:
    """What learned low-rank weights W may cost against full-rank weights W* (theorem 3.7).

    `‖W - W*‖ ≤ ‖W - W*_r‖_F + (Σ_{i>r} σ_i(W*)²)^½`: distance to the best of that rank, and what no rank r can reach.
    The spectral form takes ‖W - W*‖₂ itself.

    Args:
        weight: W, (m, n), such as a posterior mean.
        target: W*, of the same shape.
        rank: r of W; it must have no higher one.
        loss, inputs, radius, output_bound: as for `eckart_young`.

    Raises:
        ValueError: as `eckart_young`, or a `weight` of higher rank.
    """
    matrix, full = _matrix("weight", weight), _matrix("target", target)
    if matrix.shape != full.shape:
        raise ValueError(f"weight {tuple(weight.shape)} and target {tuple(target.shape)} must agree in shape")
    kept = count("rank", rank, "rank of the learned weights", 0)
    own = torch.linalg.svdvals(matrix)
    if kept < len(own) and float(own[kept]) > 1e-5 * float(own[0]):
        raise ValueError(f"weight has a rank above rank={rank} (σ_{kept + 1} = {float(own[kept]):.3g})")
    u, values, vh = torch.linalg.svd(full, full_matrices=False)
    best = (u[:, :kept] * values[:kept]) @ vh[:kept]
    distance, tail = float((matrix - best).norm()), float(values[kept:].square().sum().sqrt())
    difference = matrix - full
    spectral = float(torch.linalg.matrix_norm(difference, 2))
    constants = loss_constants(loss, output_bound)
    gap = _gap(difference, (distance + tail, spectral), constants, inputs, radius, 1.0)
    return replace(
        gap,
        name=f"learned factors, rank {kept} of {matrix.shape[0]} × {matrix.shape[1]}",
        statement="|loss(W x) - loss(W* x)| ≤ L ‖(W - W*) x‖ ≤ L R ‖W - W*‖₂ ≤ L R (‖W - W*_r‖_F + (Σ_{i>r} σ_i²)^½)",
        measured={"‖W - W*_r‖_F": distance, "tail norm": tail, "‖W - W*‖₂": spectral, **gap.measured},
    )


def network_eckart_young(
    module: nn.Module,
    ranks: int | Mapping[str, int],
    inputs: Tensor,
    *,
    loss: str | LossConstants = "cross_entropy",
    output_bound: float | None = None,
) -> LossGap:
    """What truncating the layers of a chain may cost, all at once.

    The layers are exchanged one after the other, from the last to the first, so that each error is made at the original
    network's activations `a_l` and passes through truncated layers, whose norms are the originals':

        |loss(f(x)) - loss(f_r(x))| ≤ L Σ_l Π_{k>l} c_k ‖W_k‖₂ · ‖(W_l - W_{l,r}) a_l‖

    with c_k the Lipschitz constants of the activations. All forms hold for the given inputs; R is the largest norm of
    a layer's activations over them.

    Args:
        module: an `nn.Sequential` (or nested ones) of `nn.Linear` and elementwise activations; one `nn.Linear`.
        ranks: one for all layers, clipped to min(m, n), or by layer name; layers not named stay whole.
        inputs: (N, features).
        loss, output_bound: as for `eckart_young`.

    Raises:
        TypeError: a module in the chain whose Lipschitz constant is not known.
        ValueError: unknown names, impossible ranks, or inputs that are no matrix, or hold NaN.
    """
    links = chain_of(module)
    constants = loss_constants(loss, output_bound)
    wanted = _ranks(links, ranks)
    activations, norm = _inputs(inputs, links[0].weight.shape[1]), 1.0
    states = [activations]
    for link in links:
        states.append(link(states[-1]))
    total, measured = [0.0, 0.0, 0.0], {}
    for link, state in zip(reversed(links), reversed(states[:-1]), strict=True):
        rank = wanted[link.name]
        norm *= link.activation_norm
        forms = eckart_young(link.weight, rank, loss=constants, inputs=state, later_norm=norm)
        assert forms.on_data is not None
        for place, value in enumerate((forms.frobenius, forms.spectral, forms.on_data)):
            total[place] += value
        measured[f"{link.name or 'weight'}: share at rank {rank}"] = forms.on_data
        norm *= float(torch.linalg.matrix_norm(link.weight, 2))
    return LossGap(
        name=f"Eckart-Young-Mirsky, a chain of {len(links)} layers",
        predictor="plain network",
        statement="mean |loss(f(x)) - loss(f_r(x))| ≤ L Σ_l Π_{k>l} c_k ‖W_k‖₂ · mean ‖(W_l - W_{l,r}) a_l‖",
        bound=total[2],
        trivial=math.inf,
        assumptions=(_FREE, _CHAIN),
        measured={"L": constants.lipschitz, **measured, **_forms(*total)},
        frobenius=total[0],
        spectral=total[1],
        on_data=total[2],
    )


def _gap(
    difference: Tensor,
    norms: tuple[float, float],
    constants: LossConstants,
    inputs: Tensor | None,
    radius: float | None,
    later_norm: float,
) -> LossGap:
    """The three forms for one difference of weights, with (Frobenius, spectral) bounds of its norm."""
    later = non_negative("later_norm", later_norm)
    x = None if inputs is None else _inputs(inputs, difference.shape[1])
    if x is None and radius is None:
        raise ValueError("give inputs=x of shape (N, n), or radius=R with ‖x‖ ≤ R")
    largest = None if x is None else float(x.norm(dim=1).max())
    reach = positive("radius", radius) if radius is not None else largest
    assert reach is not None
    if largest is not None and reach < largest * (1 - 1e-6):
        raise ValueError(f"radius={radius} is below the largest norm of the inputs, {largest:.4g}")
    factor = constants.lipschitz * later
    forms = [factor * reach * norm for norm in norms]
    on_data = None
    if x is not None:
        on_data = factor * float((x @ difference.to(x.device).mT).norm(dim=1).mean())
    where = "the mean over the given inputs" if x is not None else "every x with ‖x‖ ≤ R"
    assumptions = [_FREE, _ONE_LAYER, f"The bound is about {where}."]
    if later != 1.0:
        assumptions.append(f"What follows the layer is {later:.4g}-Lipschitz.")
    return LossGap(
        name="loss gap",
        predictor="plain network",
        statement="",
        bound=on_data if on_data is not None else forms[1],
        trivial=math.inf,
        assumptions=tuple(assumptions),
        measured={"L": constants.lipschitz, "R": reach, **_forms(forms[0], forms[1], on_data)},
        frobenius=forms[0],
        spectral=forms[1],
        on_data=on_data,
    )


def _forms(frobenius: float, spectral: float, on_data: float | None) -> dict[str, float]:
    found = {"Frobenius form": frobenius, "spectral form": spectral}
    return found if on_data is None else {**found, "form on data": on_data}


def _matrix(name: str, weight: Tensor) -> Tensor:
    if not isinstance(weight, Tensor):
        raise TypeError(f"{name} must be a tensor (m, n), got {type(weight).__name__}")
    if weight.dim() < 2 or not weight.numel():
        raise ValueError(f"{name} must be a matrix (m, n) with entries, got shape {tuple(weight.shape)}")
    if not bool(torch.isfinite(weight).all()):
        raise ValueError(f"{name} contains NaN or infinity")
    return to_double(weight.detach()).flatten(1)


def _inputs(inputs: Tensor, columns: int) -> Tensor:
    if not isinstance(inputs, Tensor):
        raise TypeError(f"inputs must be a tensor (N, n), got {type(inputs).__name__}")
    if inputs.dim() != 2 or inputs.shape[1] != columns or not len(inputs):
        raise ValueError(f"inputs must have shape (N, {columns}) with N ≥ 1, got {tuple(inputs.shape)}")
    if not bool(torch.isfinite(inputs).all()):
        raise ValueError("inputs contain NaN or infinity")
    return to_double(inputs.detach())


def _ranks(links: list[Link], ranks: int | Mapping[str, int]) -> dict[str, int]:
    whole = {link.name: min(link.weight.shape) for link in links}
    if not isinstance(ranks, Mapping):
        wanted = count("ranks", ranks, "rank of every layer", 0)
        return {name: min(wanted, most) for name, most in whole.items()}
    unknown = [name for name in ranks if name not in whole]
    if unknown:
        raise ValueError(f"ranks names {unknown}, but the layers are {list(whole)}")
    return {**whole, **ranks}
