"""Bayesian neural network process: a meta-learner whose latent variable is a Bayesian network's weights.

The prior over a network's weights is learned from many data sets, and so are inference networks that turn a new data
set into a posterior over its weights in one forward pass, layer by layer ("Amortising Inference and Meta-Learning
Priors in Neural Networks"). Width of layer l: D_l; features φ⁰ = [x, 1], f^l = W^l φ^(l-1), φ^l = [act(f^l), 1].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from dubito.amortised import outcomes
from dubito.amortised.inference_networks import (
    InferenceNetwork,
    LayerOutputs,
    LayerwiseInference,
    PseudoObservations,
    SetInference,
    SharedInference,
)
from dubito.amortised.layer_priors import PriorKind
from dubito.amortised.linear import AmortisedLinear, NaturalTerms, with_constant
from dubito.amortised.process_prior import ProcessPrior
from dubito.amortised.tasks import Task, TaskBatch, gather_tasks
from dubito.amortised.weight_samples import WeightSamples, sample_weights
from dubito.likelihoods import Gaussian, Likelihood

if TYPE_CHECKING:
    from dubito.amortised.posterior import ProcessPosterior

Inference = Literal["layerwise", "shared", "set"]
LastLayer = Literal["likelihood", "amortised"]

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "tanh": torch.tanh,
        "relu": torch.relu,
        "silu": nn.functional.silu,
        "gelu": nn.functional.gelu,
        "softplus": nn.functional.softplus,
        "sigmoid": torch.sigmoid,
    }
)


class BNNProcess(nn.Module):
    """A Bayesian neural network with a learned prior and amortised inference.

    Args:
        dim_x: features of an input.
        dim_y: outcomes a point; for `Categorical` the number of classes.
        hidden: widths of the hidden layers; none makes Bayesian linear regression.
        likelihood: `dubito.Gaussian` (fixed or learned noise), `HeteroscedasticGaussian`, `Bernoulli` or
            `Categorical`.
        activation: "tanh", "relu", "silu", "gelu", "softplus" or "sigmoid".
        prior: covariance of a layer's weights: "unit" (full, over each output unit's weights), "diagonal",
            "low-rank" (plus diagonal, a unit) or "layer" (full, over the layer's).
        prior_rank: rank of a "low-rank" prior.
        residual: add the previous layer's pre-activations where widths match.
        inference: "layerwise" (a perceptron for every layer), "shared" (one trunk with low-rank adapters), "set"
            (attention over the whole context; no batches within a task), or an `InferenceNetwork`'s maker, called with
            the width of its input and the list of `LayerOutputs`.
        inference_hidden: widths of the hidden layers of the first two.
        last_layer: for Gaussian noise, whether the last layer conditions on the outcomes with the likelihood's own
            noise (then exact) or with an amortised one. Other likelihoods have a last layer amortised like the rest.
        missing_outputs: outcomes may be missing: the inference networks are told which were seen.

    Attributes:
        layers: the `AmortisedLinear` layers.
        prior: `ProcessPrior`, the explicit prior over all weights.
        inference: the inference networks.

    Raises:
        ValueError, TypeError: for settings outside these.
    """

    def __init__(
        self,
        dim_x: int,
        dim_y: int,
        hidden: Sequence[int],
        *,
        likelihood: Likelihood,
        activation: str = "tanh",
        prior: PriorKind = "unit",
        prior_rank: int = 4,
        residual: bool = False,
        inference: Inference | Callable[[int, list[LayerOutputs | None]], InferenceNetwork] = "layerwise",
        inference_hidden: Sequence[int] = (64, 64),
        last_layer: LastLayer = "likelihood",
        missing_outputs: bool = False,
    ) -> None:
        super().__init__()
        _check_sizes(dim_x, dim_y, hidden, activation, last_layer)
        self.dim_x, self.dim_y, self.activation, self.residual = dim_x, dim_y, activation, residual
        self.missing_outputs = missing_outputs
        self.likelihood = likelihood
        self.labels = outcomes.takes_labels(likelihood)
        widths = [dim_x, *hidden, outcomes.output_width(likelihood, dim_y)]
        self.widths = tuple(widths)
        self.layers: Any = nn.ModuleList(
            AmortisedLinear(before, after, prior, prior_rank, f"layer {index}")
            for index, (before, after) in enumerate(pairwise(widths))
        )
        self.last_layer: LastLayer = last_layer if isinstance(likelihood, Gaussian) else "amortised"
        wanted: list[LayerOutputs | None] = [LayerOutputs(width, True) for width in hidden]
        wanted.append(self._wanted_of_last(widths[-1]))
        features = dim_x + dim_y * (2 if missing_outputs else 1)
        self.inference = inference_network(inference, features, wanted, inference_hidden)
        self.prior = ProcessPrior(self)

    def _wanted_of_last(self, width: int) -> LayerOutputs | None:
        if isinstance(self.likelihood, Gaussian):
            return None if self.last_layer == "likelihood" else LayerOutputs(width, False)
        return LayerOutputs(width, True)

    # ---- the network as a function of its weights ------------------------------------------------------------

    def features(self, weights: Sequence[Tensor], x: Tensor) -> Tensor:
        """φ after the given layers, (S, tasks, points, width + 1), the constant last; S is 1 before the first.

        Args:
            weights: of the first layers, (S, tasks, units, inputs + 1).
            x: (tasks, points, dim_x).
        """
        values, before = x.to(torch.float64).unsqueeze(0), None
        act = ACTIVATIONS[self.activation]
        for layer in weights:
            out = with_constant(values) @ layer.mT
            if self.residual and before is not None and before.shape == out.shape:
                out = out + before
            values, before = act(out), out
        return with_constant(values)

    def outputs(self, weights: Sequence[Tensor], x: Tensor) -> Tensor:
        """The network's outputs, (S, tasks, points, outputs), float64."""
        return self.features(weights[:-1], x) @ weights[-1].mT

    def log_likelihood(self, weights: Sequence[Tensor], batch: TaskBatch) -> Tensor:
        """log p(y | x, W) of every point, (S, tasks, points); 0 at padding and for outcomes not seen."""
        return outcomes.log_likelihood(self.likelihood, self.outputs(weights, batch.x), batch)

    # ---- inference --------------------------------------------------------------------------------------------

    def observations(self, index: int, batch: TaskBatch) -> PseudoObservations:
        """What layer `index` is taken to have been observed at, (tasks, points, units); precision 0 at padding."""
        last = index == len(self.layers) - 1
        seen = batch.observed.to(torch.float64)
        if last and self.last_layer == "likelihood":
            assert isinstance(self.likelihood, Gaussian)
            variance = outcomes.noise_variance(self.likelihood)
            return PseudoObservations(batch.y, seen / variance)
        data = outcomes.encoded(self.likelihood, batch, self.dim_y, self.missing_outputs)
        values, precisions = self.inference(index, data, batch.mask)
        if last and values is None:
            return PseudoObservations(batch.y, precisions * seen)
        return PseudoObservations(values, precisions * batch.mask.unsqueeze(-1))

    def natural_terms(self, index: int, batch: TaskBatch, *drawn: Tensor) -> NaturalTerms:
        """What the points add to layer `index`'s precision and shift, given the layers before it."""
        terms: NaturalTerms = self.layers[index].terms(
            self.features(drawn, batch.x), self.observations(index, batch)
        )
        return terms

    def noise(
        self, samples: int, tasks: int = 1, generator: torch.Generator | None = None
    ) -> tuple[Tensor, ...]:
        """Standard normals of `samples` draws of all weights for each task."""
        if samples < 1:
            raise ValueError(f"samples={samples} must be at least 1")
        return tuple(layer.noise(samples, tasks, generator) for layer in self.layers)

    def infer(
        self,
        context: TaskBatch,
        samples: int = 8,
        *,
        batch_size: int | None = None,
        reference: TaskBatch | None = None,
        noise: tuple[Tensor, ...] | None = None,
        generator: torch.Generator | None = None,
    ) -> WeightSamples:
        """Draws of the weights given the contexts of several tasks; differentiable. See `sample_weights`.

        Raises:
            ValueError: a batch size below 1, or one given to an inference network that looks at the whole set;
                missing outcomes for a process made without `missing_outputs`.
            PrecisionError: a posterior precision that is not positive definite.
        """
        self.check(context)
        if batch_size is not None:
            if batch_size < 1:
                raise ValueError(
                    f"batch_size={batch_size} must be at least 1, or None for all points at once"
                )
            if not self.inference.per_datum:
                raise ValueError(
                    f"batch_size={batch_size}: {type(self.inference).__name__} looks at the whole context at once, so "
                    "batches would change the posterior. Leave batch_size at None, or make the process with inference="
                    '"layerwise" or "shared", whose answer for a datum depends on no other'
                )
        noise = noise if noise is not None else self.noise(samples, len(context), generator)
        return sample_weights(self, context, noise, batch_size, reference)

    def check(self, batch: TaskBatch) -> None:
        """Whether these points can be worked with.

        Raises:
            ValueError: missing outcomes for a process made without `missing_outputs`.
        """
        if not self.missing_outputs and not batch.complete:
            raise ValueError(
                "some outcomes are missing, which the inference networks of this process cannot tell from zeros: make "
                "it with missing_outputs=True"
            )

    def gather(self, tasks: Sequence[Task]) -> TaskBatch:
        """Tasks as a padded batch on this process's device. Raises as `gather_tasks`."""
        batch = gather_tasks(tasks, self.dim_x, self.dim_y, self.labels)
        return batch.to(self.layers[0].prior.mean.free.device)

    def condition(
        self,
        x: Tensor,
        y: Tensor,
        samples: int = 64,
        batch_size: int | None = None,
        observed: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> ProcessPosterior:
        """The posterior of a new data set, in one pass.

        Args:
            x: inputs (n, dim_x); n may be 0, which gives the prior.
            y: outcomes (n, dim_y), or labels (n,).
            samples: number of draws S.
            batch_size: points worked through at once; the result does not depend on it.
            observed: which outcomes were seen, as y.
            generator: source of noise.

        Raises:
            ValueError: as `gather_tasks` and `infer`.
        """
        from dubito.amortised.posterior import ProcessPosterior

        task: Task = (x, y) if observed is None else (x, y, observed)
        batch = self.gather([task])
        with torch.no_grad():
            drawn = self.infer(batch, samples, batch_size=batch_size, generator=generator)
        return ProcessPosterior(self, batch, drawn, batch_size)

    def sample_functions(
        self, x: Tensor, samples: int = 16, generator: torch.Generator | None = None
    ) -> Tensor:
        """Functions drawn from the prior, at inputs (n, dim_x): the network's outputs (S, n, outputs)."""
        if x.ndim == 1 and self.dim_x == 1:
            x = x.unsqueeze(-1)
        with torch.no_grad():
            weights = self.prior.draw(samples, generator)
            return self.outputs([w.unsqueeze(1) for w in weights], x.unsqueeze(0)).squeeze(1)

    def network(self) -> nn.Module:
        """The plain network, its weights at the prior's mean: for any other method. See `ProcessNetwork`."""
        from dubito.amortised.exported import ProcessNetwork

        return ProcessNetwork(self)

    def weight_prior(self) -> Any:
        """The learned prior as the library's `WeightPrior` over `network()`'s weights. See `LearnedWeightPrior`."""
        from dubito.amortised.exported import LearnedWeightPrior

        return LearnedWeightPrior(self)

    def extra_repr(self) -> str:
        """Widths and activation."""
        return f'widths={self.widths}, activation="{self.activation}", last_layer="{self.last_layer}"'


def _check_sizes(dim_x: int, dim_y: int, hidden: Sequence[int], activation: str, last_layer: str) -> None:
    for name, value in (("dim_x", dim_x), ("dim_y", dim_y), *(("hidden", h) for h in hidden)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: {value!r} must be a whole number of at least 1")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} must be one of {', '.join(map(repr, ACTIVATIONS))}")
    if last_layer not in get_args(LastLayer):
        raise ValueError(
            f"last_layer={last_layer!r} must be one of {', '.join(map(repr, get_args(LastLayer)))}"
        )


def inference_network(
    spec: Any, features: int, wanted: list[LayerOutputs | None], hidden: Sequence[int]
) -> InferenceNetwork:
    """The inference network asked for, by name or by its maker; see `BNNProcess`."""
    if spec == "layerwise":
        return LayerwiseInference(features, wanted, hidden)
    if spec == "shared":
        return SharedInference(features, wanted, hidden)
    if spec == "set":
        return SetInference(features, wanted)
    if not callable(spec):
        raise ValueError(
            f'inference={spec!r} must be "layerwise", "shared", "set" or make an InferenceNetwork'
        )
    made = spec(features, wanted)
    if not isinstance(made, InferenceNetwork):
        raise TypeError(f"inference made {type(made).__name__}, not an InferenceNetwork")
    return made
