"""Amortised attention: a process whose network attends to its context (BNAM).

Query, key, value and output projections, and a perceptron of two layers after them, are amortised linear layers: each
has its learned prior, its inference network, and an exact conditional posterior given what was drawn before it. The
function is then f(x; W, context): every point attends to the context.

Two ways for targets to attend:

- `"context"` (the default): to the context and to itself alone. What is predicted at one input does not depend on which
  other inputs are asked about, so the predictions for all sets of inputs belong to one process.
- `"targets"`: among the targets of a call, as published. Predictions then change with the company they are asked for
  in: they are not those of any stochastic process. Kept for comparison.

A context cannot be worked through in batches, since its points attend to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from dubito.amortised import outcomes
from dubito.amortised.inference_networks import LayerOutputs
from dubito.amortised.layer_priors import PriorKind
from dubito.amortised.linear import AmortisedLinear, with_constant
from dubito.amortised.process import (
    ACTIVATIONS,
    BNNProcess,
    LastLayer,
    inference_network,
)
from dubito.amortised.process_prior import ProcessPrior
from dubito.amortised.tasks import TaskBatch
from dubito.amortised.weight_samples import WeightSamples
from dubito.gaussian_conditionals import LayerGaussian
from dubito.likelihoods import Gaussian, Likelihood
from dubito.weights.family import CapabilityError

TargetAttention = Literal["context", "targets"]
_PER_BLOCK = 6  # query, key, value, output, and the perceptron's two layers


class _Keys(NamedTuple):
    """What of the context a block's attention looks at: (S, tasks, points, width) each."""

    keys: Tensor
    values: Tensor


class AttentionProcess(BNNProcess):
    """A process with attention to its context.

    Args:
        dim_x: features of an input.
        dim_y: outcomes a point; for `Categorical` the number of classes.
        width: of the representation of a point.
        blocks: attention blocks.
        heads: of each attention; they divide `width`.
        likelihood: as for `BNNProcess`.
        activation: of the perceptrons.
        prior: covariance of a layer's weights.
        prior_rank: rank of a "low-rank" prior.
        target_attention: "context" or "targets", see the module.
        inference_hidden: widths of the inference networks.
        last_layer: as for `BNNProcess`.
        missing_outputs: as for `BNNProcess`.

    Raises:
        ValueError: heads that do not divide the width, or as `BNNProcess`.
    """

    def __init__(
        self,
        dim_x: int,
        dim_y: int,
        width: int = 32,
        blocks: int = 1,
        *,
        likelihood: Likelihood,
        heads: int = 4,
        activation: str = "relu",
        prior: PriorKind = "unit",
        prior_rank: int = 4,
        target_attention: TargetAttention = "context",
        inference_hidden: Sequence[int] = (64, 64),
        last_layer: LastLayer = "likelihood",
        missing_outputs: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        if width < 1 or heads < 1 or width % heads:
            raise ValueError(f"heads={heads} must divide width={width}")
        if blocks < 1:
            raise ValueError(f"blocks={blocks} must be at least 1")
        if target_attention not in get_args(TargetAttention):
            raise ValueError(f'target_attention={target_attention!r} must be "context" or "targets"')
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r} must be one of {', '.join(map(repr, ACTIVATIONS))}")
        self.dim_x, self.dim_y, self.activation, self.residual = dim_x, dim_y, activation, True
        self.heads, self.blocks, self.target_attention = heads, blocks, target_attention
        self.missing_outputs = missing_outputs
        self.likelihood = likelihood
        self.labels = outcomes.takes_labels(likelihood)
        out = outcomes.output_width(likelihood, dim_y)
        sizes = [(dim_x, width)] + [(width, width)] * (_PER_BLOCK * blocks) + [(width, out)]
        self.widths = (dim_x, width, out)
        self.layers: Any = nn.ModuleList(
            AmortisedLinear(before, after, prior, prior_rank, f"layer {index}")
            for index, (before, after) in enumerate(sizes)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * blocks))
        self.last_layer = last_layer if isinstance(likelihood, Gaussian) else "amortised"
        wanted: list[LayerOutputs | None] = [LayerOutputs(after, True) for _, after in sizes[:-1]]
        wanted.append(self._wanted_of_last(out))
        features = dim_x + dim_y * (2 if missing_outputs else 1)
        self.inference = inference_network("layerwise", features, wanted, inference_hidden)
        self.prior = ProcessPrior(self)

    # ---- inference --------------------------------------------------------------------------------------------

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
        """Draws of the weights given contexts; `weights` also carries what targets attend to.

        Raises:
            ValueError: a batch size: the context's points attend to each other.
            CapabilityError: a reference posterior (the "npvi" objective): its features would need attention too.
        """
        self.check(context)
        if batch_size is not None and batch_size < context.points:
            raise ValueError(
                f"batch_size={batch_size}: the points of a context attend to each other, so it cannot be worked "
                "through in batches; use dubito.BNNProcess"
            )
        if reference is not None:
            raise CapabilityError('"npvi" is not offered with attention; use "pp-avi", "avi" or "npml"')
        noise = noise if noise is not None else self.noise(samples, len(context), generator)
        drawing = _Drawing(self, context, noise)
        kept: list[Tensor] = []
        x = context.x.to(torch.float64).unsqueeze(0)

        def looked_at(own: _Keys) -> _Keys:
            kept.extend(own)
            return own

        self._run(x, drawing.layer, looked_at, context.mask)
        assert drawing.last is not None
        weights = (*drawing.weights, *kept, context.mask)
        kl, log_q, log_p = drawing.sums
        return WeightSamples(weights, kl, log_q, log_p, drawing.last)

    def outputs(self, weights: Sequence[Tensor], x: Tensor) -> Tensor:
        """The network's outputs at targets (tasks, points, dim_x): (S, tasks, points, outputs).

        Args:
            weights: `WeightSamples.weights` of `infer`.
            x: inputs.
        """
        layers, kept, mask = weights[: len(self.layers)], weights[len(self.layers) : -1], weights[-1]
        pairs = [_Keys(kept[i], kept[i + 1]) for i in range(0, len(kept), 2)]
        index, block = count(), count()
        values = x.to(torch.float64).unsqueeze(0)

        def layer(features: Tensor) -> Tensor:
            return with_constant(features) @ layers[next(index)].mT

        def looked_at(own: _Keys) -> _Keys:
            stored = pairs[next(block)]
            return own if self.target_attention == "targets" else stored

        among = None if self.target_attention == "targets" else mask
        return self._run(values, layer, looked_at, among)

    def _run(self, x: Tensor, layer: Any, looked_at: Any, mask: Tensor | None) -> Tensor:
        """The network: `layer` applies the next amortised layer, `looked_at` chooses keys and values to attend to."""
        act = ACTIVATIONS[self.activation]
        values = layer(x)
        for block in range(self.blocks):
            normed = self._normed(2 * block, values)
            query, key, value = layer(normed), layer(normed), layer(normed)
            mixed = self._attended(query, _Keys(key, value), looked_at(_Keys(key, value)), mask)
            values = values + layer(mixed)
            values = values + layer(act(layer(self._normed(2 * block + 1, values))))
        return layer(values)  # type: ignore[no-any-return]

    def _normed(self, index: int, values: Tensor) -> Tensor:
        norm: Any = self.norms[index]
        weight, bias = norm.weight.to(values.dtype), norm.bias.to(values.dtype)
        return nn.functional.layer_norm(values, norm.normalized_shape, weight, bias, norm.eps)

    def _attended(self, query: Tensor, own: _Keys, others: _Keys, mask: Tensor | None) -> Tensor:
        """Attention to `others` (where `mask`, if given) and to oneself; heads apart."""
        q, k, v, own_k, own_v = (
            t.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for t in (query, *others, *own)
        )
        scale = q.shape[-1] ** -0.5
        scores = (q @ k.mT) * scale
        if mask is None:  # published: among the targets of this call, oneself included
            among: Tensor = scores.softmax(-1) @ v
            return among.transpose(-2, -3).flatten(-2)
        scores = scores.masked_fill(~mask[None, :, None, None, :], float("-inf"))
        to_self = (q * own_k).sum(-1, keepdim=True) * scale
        weights = torch.cat((scores, to_self), dim=-1).softmax(-1)
        mixed: Tensor = weights[..., :-1] @ v + weights[..., -1:] * own_v
        return mixed.transpose(-2, -3).flatten(-2)

    # ---- what attention does not offer ------------------------------------------------------------------------

    def natural_terms(self, index: int, batch: TaskBatch, *drawn: Tensor) -> Any:
        """Not offered: a layer's features depend on the whole context."""
        raise CapabilityError(
            "with attention a layer's features depend on the whole context: condition on all data"
        )

    def sample_functions(
        self, x: Tensor, samples: int = 16, generator: torch.Generator | None = None
    ) -> Tensor:
        """Functions drawn from the prior: those of an empty context, (S, n, outputs)."""
        shape = (0,) if self.labels else (0, self.dim_y)
        y = torch.zeros(shape, dtype=torch.int64 if self.labels else torch.float64)
        empty = self.condition(torch.zeros(0, self.dim_x), y, samples, generator=generator)
        return empty.sample_functions(x)

    def network(self) -> nn.Module:
        """Not offered: the function has its context in it."""
        raise CapabilityError(
            "an attention process has no network apart from its context; use dubito.BNNProcess"
        )

    def weight_prior(self) -> Any:
        """Not offered, as `network`; `process.prior` has density and draws."""
        raise CapabilityError("an attention process has no network to hand a prior to; see process.prior")

    def extra_repr(self) -> str:
        """Sizes."""
        sizes = f"widths={self.widths}, blocks={self.blocks}, heads={self.heads}"
        return f'{sizes}, target_attention="{self.target_attention}"'


class _Drawing:
    """Conditions and draws one layer after the other, as the context is run through the network."""

    def __init__(self, process: AttentionProcess, context: TaskBatch, noise: tuple[Tensor, ...]) -> None:
        self.process, self.context, self.noise = process, context, noise
        self.index = count()
        self.weights: list[Tensor] = []
        lead = noise[0].shape[:2]
        self.sums = [noise[0].new_zeros(lead) for _ in range(3)]
        self.last: LayerGaussian | None = None

    def layer(self, features: Tensor) -> Tensor:
        """Condition the next layer on what the inference network says of the context, draw it, apply it."""
        index = next(self.index)
        layer: AmortisedLinear = self.process.layers[index]
        prior = layer.prior.gaussian()
        phi = with_constant(features)
        terms = None
        if self.context.points:
            terms = layer.terms(phi, self.process.observations(index, self.context))
        posterior = layer.conditional(prior, terms)
        blocks = posterior.draw(self.noise[index])
        found = (posterior.kl(prior), posterior.log_prob(blocks), prior.log_prob(blocks))
        self.sums = [total + value for total, value in zip(self.sums, found, strict=True)]
        weights = layer.shaped(blocks)
        self.weights.append(weights)
        self.last = posterior
        return phi @ weights.mT
