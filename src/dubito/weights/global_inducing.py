"""Global inducing points: a posterior over all layers of a perceptron that ties them to each other (GIVI).

M inducing inputs Z are pushed through the network as it is drawn. At layer l, whose features there are φ(U^(l-1)), free
pseudo-outputs V^l with precisions Λ^l make a Bayesian linear regression of each unit's weights:

    q(w_u | W^<l) = N(P_u⁻¹ h_u, P_u⁻¹),  P_u = Σ⁻¹ + Σ_m Λ_mu φ_m φ_mᵀ,  h_u = Σ⁻¹μ + Σ_m Λ_mu V_mu φ_m

Then W^l is drawn, U^l = W^l φ(U^(l-1)), and so on. Each conditional is Gaussian, their product is not: layers are
correlated (Ober & Aitchison 2021, "Global inducing point variational posteriors for Bayesian neural networks").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dubito.divergences import KLMethod
from dubito.gaussian_conditionals import (
    LayeredGaussian,
    LayerGaussian,
    as_one_block,
    data_term,
    from_natural,
)
from dubito.priors import ParameterPrior, PriorRule, PriorSpec, WeightPrior, resolve_prior
from dubito.scalar_checks import positive
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
from dubito.weights.initial_scale import centre, fan_in
from dubito.weights.slots import Slot

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "softplus": nn.functional.softplus,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}


@dataclass(frozen=True, eq=False)
class GlobalInducingWeights(Family):
    """Global inducing points over all layers of a perceptron: `nn.Linear`s in a chain with one activation between.

    Args:
        inducing: inducing inputs, (M, features): as a rule some training inputs.
        activation: between the layers: "tanh", "relu", "silu", "gelu", "softplus", "sigmoid" or "identity"; None takes
            it from a prior that knows (`process.weight_prior()`), and is an error otherwise.
        residual: pre-activations are added to the next ones where widths match; None as for `activation`, else False.
        prior: Gaussian, on single weights or a learned joint one; None takes `bayesianize`'s, else the fan-in one.
        precision: at which pseudo-outputs start.
        train_inducing: whether the inducing inputs move.

    Raises:
        ValueError: inducing inputs that are no finite matrix, an unknown activation, a precision that is not positive;
            at use, layers that are no chain of `nn.Linear`, or a prior that is not Gaussian.
    """

    inducing: Tensor
    activation: str | None = None
    residual: bool | None = None
    prior: PriorSpec = None
    precision: float = 1.0
    train_inducing: bool = True

    granularity: ClassVar[Granularity] = "all"

    def __post_init__(self) -> None:
        if not isinstance(self.inducing, Tensor) or self.inducing.ndim != 2 or not len(self.inducing):
            raise ValueError(
                "inducing must be a matrix of inputs (M, features), such as some rows of the training data"
            )
        if not bool(self.inducing.isfinite().all()):
            raise ValueError("inducing holds NaN or infinity")
        if self.activation is not None and self.activation not in _ACTIVATIONS:
            raise ValueError(
                f"activation={self.activation!r} must be one of {', '.join(map(repr, _ACTIVATIONS))}"
            )
        positive("precision", self.precision)

    def attach(self, group: Group) -> GlobalInducingPosterior:
        """The posterior of all layers."""
        return GlobalInducingPosterior(group, self)


class _Layer(nn.Module):
    """Pseudo-outputs of one layer, and its prior in natural form."""

    prior_mean: Tensor
    prior_factor: Tensor

    def __init__(
        self, weight: Slot, bias: Slot | None, prior: LayerGaussian, points: int, precision: float
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        units = weight.shape[0]
        like = weight.parameter.detach()
        self.values = nn.Parameter(0.01 * torch.randn(points, units, dtype=like.dtype, device=like.device))
        self.log_precision = nn.Parameter(torch.full_like(self.values, math.log(precision)))
        self.register_buffer("prior_mean", prior.mean.detach().to(torch.float64))
        self.register_buffer("prior_factor", prior.factor.detach().to(torch.float64))

    def prior(self) -> LayerGaussian:
        """In float64, as all that follows."""
        mean, factor = self.prior_mean.double(), self.prior_factor.double()
        half = torch.linalg.slogdet(factor).logabsdet
        return LayerGaussian(mean, factor, factor @ factor.mT, half)

    def features(self, values: Tensor) -> Tensor:
        """Inputs of the layer, with the constant where it has a bias."""
        if self.bias is None:
            return values
        return torch.cat((values, values.new_ones(*values.shape[:-1], 1)), dim=-1)

    def conditional(self, features: Tensor) -> LayerGaussian:
        """q(W^l | W^<l) from features at the inducing points, (S, M, D)."""
        prior = self.prior()
        values, precisions = self.values.double(), self.log_precision.double().exp()
        terms = data_term(features.unsqueeze(1), values.unsqueeze(0), precisions.unsqueeze(0))
        if prior.mean.shape[0] == 1 and self.weight.shape[0] > 1:
            terms = as_one_block(*terms)
        precision, shift = (t.squeeze(1) for t in terms)
        return from_natural(
            prior.precision + precision, prior.shift + shift, f"the layer of {self.weight.name}"
        )

    def shaped(self, blocks: Tensor) -> Tensor:
        """(S, K, M) as (S, units, inputs of the layer)."""
        units = self.weight.shape[0]
        return blocks.reshape(blocks.shape[0], units, -1)


class GlobalInducingPosterior(WeightPosterior):
    """The posterior that `GlobalInducingWeights` makes.

    Attributes:
        inducing: Z, (M, features).
        layers: pseudo-outputs and their log precisions of every layer.
    """

    takes_over = True
    realizes_stacks = True
    collapses = (
        "is that of regressions on pseudo-outputs, which the expected loss makes exact: it ends in a point"
    )

    def __init__(self, group: Group, family: GlobalInducingWeights) -> None:
        super().__init__(group)
        self.family = family
        pairs = _chain(group.slots, family.inducing.shape[1])
        gaussians = _layer_gaussians(group.prior, pairs)
        known = group.prior if isinstance(group.prior, WeightPrior) else None
        stated: Any = family.activation or getattr(known, "activation", "")
        self.activation: str = stated
        if self.activation not in _ACTIVATIONS:
            raise ValueError(
                "activation: what stands between the layers is not known; say GlobalInducingWeights(activation=…), "
                "one of "
                f"{', '.join(map(repr, _ACTIVATIONS))}"
            )
        self.residual = bool(
            family.residual if family.residual is not None else getattr(known, "residual", False)
        )
        like = pairs[0][0].parameter.detach()
        start = family.inducing.detach().to(like.device, like.dtype).clone()
        self.inducing = nn.Parameter(start, requires_grad=family.train_inducing)
        self.layers: Any = nn.ModuleList(
            _Layer(weight, bias, gaussian, len(start), family.precision)
            for (weight, bias), gaussian in zip(pairs, gaussians, strict=True)
        )
        self._pending: list[Tensor] | None = None

    # ---- drawing ------------------------------------------------------------------------------------------

    def noise(self, generator: torch.Generator | None = None) -> Noise:
        """eps ~ N(0, I) of each layer, (K, M)."""
        return {
            str(index): torch.randn(
                layer.prior_mean.shape,
                generator=generator,
                dtype=layer.values.dtype,
                device=layer.values.device,
            )
            for index, layer in enumerate(self.layers)
        }

    def components(self, noise: Noise) -> Components:
        """Every layer's weights, drawn one after the other."""
        return self._drawn(noise)[0]

    def realize(self, components: Components) -> dict[str, Tensor]:
        """Dense draws."""
        return {slot.name: components[key_of(slot.name)] for slot in self.slots}

    def training_weights(self) -> dict[str, Tensor]:
        """One draw; the KL along it is kept for `kl`."""
        components, self._pending = self._drawn(self.noise(), with_kl=True)
        return self.realize(components)

    def _drawn(self, noise: Noise, with_kl: bool = False) -> tuple[Components, list[Tensor]]:
        lead = noise["0"].shape[:-2]
        made: Components = {}
        divergences: list[Tensor] = []

        def draw(index: int, layer: _Layer, q: LayerGaussian) -> Tensor:
            eps = noise[str(index)].double().reshape(-1, *layer.prior_mean.shape)
            if with_kl:
                divergences.append(q.kl(layer.prior()).mean())
            weights = layer.shaped(q.draw(eps))
            for slot, value in _parts(layer, weights):
                made[key_of(slot.name)] = value.reshape(*lead, *slot.shape).to(slot_dtype(layer))
            return weights

        with torch.autocast(self.inducing.device.type, enabled=False):
            self._through(draw)
        return made, divergences

    def _through(self, choose: Callable[[int, _Layer, LayerGaussian], Tensor]) -> None:
        """Push the inducing points through; `choose` gives each layer's weights (S, units, D) from its conditional."""
        act = _ACTIVATIONS[self.activation]
        values, before = self.inducing.double().unsqueeze(0), None
        for index, layer in enumerate(self.layers):
            features = layer.features(values)
            weights = choose(index, layer, layer.conditional(features))
            if index == len(self.layers) - 1:
                return
            out = features @ weights.mT
            if self.residual and before is not None and before.shape == out.shape:
                out = out + before
            values, before = act(out), out

    # ---- densities ----------------------------------------------------------------------------------------

    def kl(
        self, method: KLMethod = "auto", samples: int | None = None, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Σ_l KL(q(W^l | W^<l) ‖ p), each in closed form, averaged over draws of the layers before; in nats.

        Directly after a training call it is the one along that call's draw.

        Raises:
            CapabilityError: for method="closed" or "bound": the layers before have to be drawn.
        """
        if method in ("closed", "bound"):
            raise CapabilityError(
                f"method={method!r}: only each layer's KL given the layers before is in closed form, which have to be "
                'drawn; use "auto"'
            )
        pending, self._pending = self._pending, None
        if pending is None or samples is not None or generator is not None:
            noises = [self.noise(generator) for _ in range(samples or 1)]
            stacked = {key: torch.stack([n[key] for n in noises]) for key in noises[0]}
            pending = self._drawn(stacked, with_kl=True)[1]
        result = {slot.name: pending[0].new_zeros(()) for slot in self.slots}
        for layer, value in zip(self.layers, pending, strict=True):
            result[layer.weight.name] = value
        return result

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """log q(W), the layers' conditionals summed; leading dimensions are kept."""
        first = self.layers[0].weight
        lead = weights[first.name].shape[: -len(first.shape)]
        total: list[Tensor] = []

        def given(index: int, layer: _Layer, q: LayerGaussian) -> Tensor:
            parts = [weights[slot.name].double().reshape(-1, *slot.shape) for slot, _ in _slots_of(layer)]
            joined = parts[0] if len(parts) == 1 else torch.cat((parts[0], parts[1].unsqueeze(-1)), dim=-1)
            total.append(q.log_prob(joined.reshape(len(joined), *layer.prior_mean.shape)))
            return joined

        self._through(given)
        return torch.stack(total).sum(0).reshape(lead)

    def mean(self) -> dict[str, Tensor]:
        """No closed form: raises."""
        raise CapabilityError(
            "the mean of weights tied by global inducing points has no closed form; use draws"
        )

    def mean_weights(self) -> dict[str, Tensor] | None:
        """No closed form: raises."""
        self.mean()
        return None

    def variance(self) -> dict[str, Tensor]:
        """No closed form: raises."""
        raise CapabilityError(
            "variances of weights tied by global inducing points have no closed form; use draws"
        )

    def rescale_spread_(self, factor: float) -> None:
        """Not defined: raises."""
        raise CapabilityError("a posterior by global inducing points has no spread of its own to rescale")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pending": None}  # part of a graph, and of no copy

    def extra_repr(self) -> str:
        """Parameters and the number of inducing points."""
        return f'{super().extra_repr()}, inducing={len(self.inducing)}, activation="{self.activation}"'


def slot_dtype(layer: _Layer) -> torch.dtype:
    """The dtype of the layer's weights in the network."""
    return layer.values.dtype


def _slots_of(layer: _Layer) -> list[tuple[Slot, int]]:
    return [(slot, i) for i, slot in enumerate((layer.weight, layer.bias)) if slot is not None]


def _parts(layer: _Layer, weights: Tensor) -> list[tuple[Slot, Tensor]]:
    """(S, units, D) as the weight and, where there is one, the bias."""
    if layer.bias is None:
        return [(layer.weight, weights)]
    return [(layer.weight, weights[..., :-1]), (layer.bias, weights[..., -1])]


def _chain(slots: tuple[Slot, ...], features: int) -> list[tuple[Slot, Slot | None]]:
    """Weights and biases of `nn.Linear`s whose widths follow on each other."""
    by_owner: dict[int, dict[str, Slot]] = {}
    for slot in slots:
        if not isinstance(slot.owner, nn.Linear) or slot.tied:
            raise ValueError(
                f"{slot.name!r} is not a weight or bias of an nn.Linear of its own: GlobalInducingWeights is for "
                "chains of nn.Linear with one activation between them; use FullCovariance or MeanField"
            )
        by_owner.setdefault(id(slot.owner), {})[slot.name.rpartition(".")[2]] = slot
    pairs: list[tuple[Slot, Slot | None]] = []
    width = features
    for parts in by_owner.values():
        if "weight" not in parts or (("bias" in parts) != (parts["weight"].owner.bias is not None)):
            raise ValueError(
                f"{next(iter(parts.values())).name!r}: GlobalInducingWeights wants a layer's weight and bias together"
            )
        weight = parts["weight"]
        if weight.shape[1] != width:
            raise ValueError(
                f"{weight.name!r} takes {weight.shape[1]} inputs, but {width} come "
                f"{'from inducing' if not pairs else 'out of the layer before'}: the layers must be a chain, in order"
            )
        pairs.append((weight, parts.get("bias")))
        width = weight.shape[0]
    return pairs


def _layer_gaussians(spec: PriorSpec, pairs: list[tuple[Slot, Slot | None]]) -> list[LayerGaussian]:
    if isinstance(spec, WeightPrior):
        if not isinstance(spec, LayeredGaussian):
            raise ValueError(
                f"prior: {type(spec).__name__} is not Gaussian layer by layer, which the regressions need; use "
                "process.weight_prior() or a Normal"
            )
        found = spec.layer_gaussians()
        sizes = [sum(s.shape.numel() for s in pair if s is not None) for pair in pairs]
        if [g.mean.numel() for g in found] != sizes:
            raise ValueError("prior: its layers have other sizes than the network's; use process.network()")
        return found
    return [_from_entries(spec, weight, bias) for weight, bias in pairs]


def _from_entries(spec: PriorSpec, weight: Slot, bias: Slot | None) -> LayerGaussian:
    columns = []
    for slot in (weight, bias):
        if slot is None:
            continue
        rule = spec.at(slot.owner) if isinstance(spec, PriorRule) else spec
        prior = resolve_prior(rule, slot.parameter, fan_in(slot), centre(slot))
        moments = prior.gaussian() if isinstance(prior, ParameterPrior) else None
        if moments is None:
            raise ValueError(
                f"prior of {slot.name!r} is not Gaussian, which the regressions need; use a Normal"
            )
        shape = slot.shape if len(slot.shape) == 2 else (*slot.shape, 1)
        like = torch.ones(shape, dtype=torch.float64, device=slot.parameter.device)
        mean, sd = (
            like * (m.detach().double().reshape(shape) if isinstance(m, Tensor) and m.ndim else m)
            for m in moments
        )
        columns.append((mean, sd))
    mean, sd = (torch.cat([c[i] for c in columns], dim=-1).detach() for i in (0, 1))
    inverse = sd.reciprocal()
    return LayerGaussian(mean, inverse.diag_embed(), inverse.square().diag_embed(), inverse.log().sum(-1))
