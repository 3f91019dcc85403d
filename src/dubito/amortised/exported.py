"""The learned prior for the rest of the library: a plain network, and a joint Gaussian prior over its weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from dubito.amortised.process_prior import joined, parted
from dubito.gaussian_conditionals import LayerGaussian
from dubito.likelihoods import Likelihood
from dubito.priors import WeightPrior
from dubito.weights.family import CapabilityError
from dubito.weights.full_covariance import FullCovariancePosterior
from dubito.weights.mean_field import MeanFieldPosterior

if TYPE_CHECKING:
    from dubito.amortised.process import BNNProcess


class ProcessNetwork(nn.Module):
    """The network of a process as an ordinary module: `layers.0` … `layers.L`, `nn.Linear` each.

    Args:
        process: whose sizes, activation and prior it has.
        start: weights at the prior's "mean", or one "draw" from it.
        dtype: of the weights.
        generator: source of the draw.
    """

    def __init__(
        self,
        process: BNNProcess,
        start: Literal["mean", "draw"] = "mean",
        dtype: torch.dtype = torch.float32,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if start not in ("mean", "draw"):
            raise ValueError(f'start={start!r} must be "mean" or "draw"')
        self.activation, self.residual = process.activation, process.residual
        device = process.layers[0].prior.mean.free.device
        self.layers: Any = nn.ModuleList(
            nn.Linear(layer.inputs, layer.units, device=device, dtype=dtype) for layer in process.layers
        )
        with torch.no_grad():
            if start == "draw":
                values = [w[0] for w in process.prior.draw(1, generator)]
            else:
                values = [layer.shaped(layer.prior.gaussian().mean) for layer in process.layers]
            for name, value in parted(values).items():
                self.get_parameter(name).copy_(value)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (…, outputs) at inputs (…, dim_x)."""
        from dubito.amortised.process import ACTIVATIONS

        act, values, before = ACTIVATIONS[self.activation], x, None
        for layer in self.layers[:-1]:
            out = layer(values)
            if self.residual and before is not None and before.shape == out.shape:
                out = out + before
            values, before = act(out), out
        return self.layers[-1](values)  # type: ignore[no-any-return]


class LearnedWeightPrior(WeightPrior):
    """A process's prior over the weights of its network, as it was when this was made.

    Accepted wherever a `WeightPrior` is, for the modules `process.network()` gives. The KL of mean-field and
    full-covariance posteriors (unit, layer or network) is in closed form; of others by Monte Carlo. `whiten` and
    `unwhiten` map to coordinates in which the prior is standard normal.

    Attributes:
        likelihood: a copy of the process's, with its noise.
        activation: the network's.
        residual: whether it has residual connections.
    """

    def __init__(self, process: BNNProcess) -> None:
        super().__init__()
        self.likelihood: Likelihood = copy.deepcopy(process.likelihood).requires_grad_(False)
        self.activation, self.residual = process.activation, process.residual
        self.count = len(process.layers)
        self._shapes = [(layer.units, layer.inputs + 1) for layer in process.layers]
        self._blocks = [layer.blocks for layer in process.layers]
        for index, layer in enumerate(process.layers):
            with torch.no_grad():
                gaussian = layer.prior.gaussian()
            self.register_buffer(f"mean_{index}", gaussian.mean.detach().clone())
            self.register_buffer(f"factor_{index}", gaussian.factor.detach().clone())
            self.register_buffer(f"spread_{index}", torch.linalg.inv(gaussian.factor.detach().mT))

    @property
    def names(self) -> list[str]:
        """The weights it is over."""
        return [f"layers.{i}.{part}" for i in range(self.count) for part in ("weight", "bias")]

    def mean(self) -> dict[str, Tensor]:
        """The prior's mean by name."""
        return parted([self._parts(i)[0].reshape(self._shapes[i]) for i in range(self.count)])

    def covariance(self, layer: int) -> Tensor:
        """Covariance of a layer's blocks of weights, (K, M, M), the bias last in each unit's weights."""
        spread: Tensor = getattr(self, f"spread_{layer}")
        return spread @ spread.mT

    def precision(self, layer: int) -> Tensor:
        """Its inverse."""
        _, factor = self._parts(layer)
        return factor @ factor.mT

    def layer_gaussians(self) -> list[LayerGaussian]:
        """Each layer's Gaussian over its blocks of weights."""
        result = []
        for index in range(self.count):
            mean, factor = self._parts(index)
            half = torch.linalg.slogdet(factor).logabsdet
            result.append(LayerGaussian(mean, factor, self.precision(index), half))
        return result

    def _parts(self, index: int) -> tuple[Tensor, Tensor]:
        return getattr(self, f"mean_{index}"), getattr(self, f"factor_{index}")

    def _deviations(self, weights: Mapping[str, Tensor]) -> list[Tensor]:
        """F ᵀ(w - μ) of each layer, (…, K, M)."""
        result = []
        for index, value in enumerate(joined(weights, self.count)):
            mean, factor = self._parts(index)
            blocks = value.to(mean.dtype).reshape(*value.shape[:-2], *self._blocks[index])
            result.append((factor.mT @ (blocks - mean).unsqueeze(-1)).squeeze(-1))
        return result

    def log_prob(self, weights: dict[str, Tensor]) -> Tensor:
        """log p(W) in nats; leading dimensions of the weights are kept."""
        total: Tensor | None = None
        for index, whitened in enumerate(self._deviations(weights)):
            term = torch.distributions.Normal(0.0, 1.0).log_prob(whitened).sum((-2, -1)) + self._log_det(
                index
            )
            total = term if total is None else total + term
        assert total is not None
        return total

    def _log_det(self, index: int) -> Tensor:
        """½ log det of the precision, summed over blocks."""
        log_det: Tensor = torch.linalg.slogdet(self._parts(index)[1]).logabsdet
        return log_det.sum()

    def whiten(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Standard normal coordinates, by the same names and in the same shapes."""
        return self._named(self._deviations(weights), weights)

    def unwhiten(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `whiten`."""
        values = []
        for index, value in enumerate(joined(weights, self.count)):
            mean, _ = self._parts(index)
            spread: Tensor = getattr(self, f"spread_{index}")
            blocks = value.to(mean.dtype).reshape(*value.shape[:-2], *self._blocks[index])
            values.append(mean + (spread @ blocks.unsqueeze(-1)).squeeze(-1))
        return self._named(values, weights)

    def _named(self, blocks: Sequence[Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = [b.reshape(*b.shape[:-2], *shape) for b, shape in zip(blocks, self._shapes, strict=True)]
        return {name: value.to(like[name].dtype) for name, value in parted(values).items()}

    def kl(self, posterior: Any) -> Tensor:
        """KL(q ‖ p) in nats of posteriors that together cover the network: closed form.

        E_q[-log p] needs q's means and, within each block of the prior, its covariances; q's entropy is its own.

        Args:
            posterior: the network's posteriors, mean field or full covariance.

        Raises:
            CapabilityError: another family: ask for method="monte_carlo".
            ValueError: weights that no posterior covers.
        """
        members = list(posterior)
        for member in members:
            if not isinstance(member, MeanFieldPosterior | FullCovariancePosterior):
                raise CapabilityError(
                    f"no closed-form KL between {type(member).__name__} and a learned prior: ask for "
                    'bayes.kl("monte_carlo")'
                )
        means = {name: value for member in members for name, value in member.mean().items()}
        missing = [name for name in self.names if name not in means]
        if missing:
            raise ValueError(f"the learned prior is over {', '.join(missing)} too, which have no posterior")
        moved = sum((d.square().sum() for d in self._deviations(means)), torch.zeros(()))
        entries = sum(value.numel() for value in means.values())
        trace = self._traces(members)
        log_det = sum((self._log_det(i) for i in range(self.count)), torch.zeros(()))
        entropy = sum((_log_volume(member) for member in members), torch.zeros(()))
        total: Tensor = 0.5 * (trace + moved - entries) - log_det - entropy
        return total

    def _traces(self, members: Sequence[Any]) -> Tensor:
        """tr(P₀ Σ_q) over the prior's blocks."""
        where = {slot.name: member for member in members for slot in member.slots}
        total = torch.zeros((), dtype=torch.float64, device=self._parts(0)[0].device)
        for index in range(self.count):
            covariance = _block_covariance(where, index, self._shapes[index], self._blocks[index])
            total = total + (self.precision(index) * covariance.to(torch.float64)).sum()
        return total


def _log_volume(member: Any) -> Tensor:
    """½ log det of q's covariance."""
    if isinstance(member, MeanFieldPosterior):
        return member.log_sd().to(torch.float64).sum()
    assert isinstance(member, FullCovariancePosterior)
    diagonals = [factor.diagonal(dim1=-2, dim2=-1) for factor in member.factors()]
    return torch.stack([d.to(torch.float64).log().sum() for d in diagonals]).sum()


def _block_covariance(
    where: Mapping[str, Any], index: int, shape: tuple[int, int], blocks: tuple[int, int]
) -> Tensor:
    """q's covariance within each of the prior's blocks of a layer, (K, M, M)."""
    names = (f"layers.{index}.weight", f"layers.{index}.bias")
    weight, bias = (where[name] for name in names)
    if isinstance(weight, MeanFieldPosterior) and isinstance(bias, MeanFieldPosterior):
        variances = torch.cat((weight.variance()[names[0]], bias.variance()[names[1]].unsqueeze(-1)), dim=-1)
        return variances.reshape(blocks).diag_embed()
    if weight is not bias:
        raise CapabilityError(
            f"{names[0]} and {names[1]} have posteriors of different families; give both one family, or ask for "
            'bayes.kl("monte_carlo")'
        )
    return _picked(weight, names, shape, blocks)


def _picked(
    member: FullCovariancePosterior, names: tuple[str, str], shape: tuple[int, int], blocks: tuple[int, int]
) -> Tensor:
    if member.family.group == "unit" and blocks[0] == shape[0] and len(member.blocks) == 1:
        (factor,) = member.factors()  # rows are (weights, bias) of a unit, as the prior's
        return factor @ factor.mT
    places, start = {}, 0
    for slot in member.slots:
        places[slot.name] = torch.arange(start, start + slot.shape.numel()).reshape(slot.shape)
        start += slot.shape.numel()
    rows = torch.cat((places[names[0]], places[names[1]].unsqueeze(-1)), dim=-1).reshape(blocks)
    covariance = member.covariance()
    rows = rows.to(covariance.device)
    return covariance[rows.unsqueeze(-1), rows.unsqueeze(-2)]
