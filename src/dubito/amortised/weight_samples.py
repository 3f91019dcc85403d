"""Sampling a network's weights layer by layer, each layer's posterior conditional on the layers drawn before it.

Layer-major sweeps: for layer l, with W¹ … W^(l-1) drawn, all batches of the context are pushed through those and their
natural terms summed; then W^l is drawn, once, and the next sweep begins. If the inference network answers datum by
datum, the sums are those of the whole context, so nothing depends on the batches' size or order. (Batch by batch
through all layers would not do: the second layer's statistics of the first batch would be those of an outdated W¹.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dubito.amortised.linear import NaturalTerms, accumulated
from dubito.amortised.tasks import TaskBatch
from dubito.gaussian_conditionals import LayerGaussian

if TYPE_CHECKING:
    from dubito.amortised.process import BNNProcess


@dataclass(frozen=True)
class WeightSamples:
    """S draws of all weights for each of several tasks.

    Attributes:
        weights: of each layer, (S, tasks, units, inputs + 1), float64.
        kl: Σ_l KL(q(W^l | W^<l, D) ‖ prior or reference) along each draw, (S, tasks), in nats.
        log_q: log q(W | D) of each draw, (S, tasks).
        log_p: log density of each draw under the prior, (S, tasks).
        last: the last layer's posterior given the layers before it.
    """

    weights: tuple[Tensor, ...]
    kl: Tensor
    log_q: Tensor
    log_p: Tensor
    last: LayerGaussian

    @property
    def samples(self) -> int:
        """S."""
        return self.kl.shape[0]


def sample_weights(
    process: BNNProcess,
    context: TaskBatch,
    noise: tuple[Tensor, ...],
    batch_size: int | None = None,
    reference: TaskBatch | None = None,
) -> WeightSamples:
    """Draw weights given contexts.

    Args:
        process: the process.
        context: data of each task; tasks without points draw from the prior.
        noise: of each layer, (S, tasks, K, M).
        batch_size: points of every task worked through at once (None: all). Memory for activations, and with gradient
            for what backward needs, is then that of one batch: each is run again during backward.
        reference: measure the KL from the posterior given these data, along the same draws, and not from the prior.
    """
    chunks = context.chunks(batch_size)
    reference_chunks = [] if reference is None else reference.chunks(batch_size)
    lead = noise[0].shape[:2]
    drawn: list[Tensor] = []
    sums = [noise[0].new_zeros(lead) for _ in range(3)]
    posterior: LayerGaussian | None = None
    for index, layer in enumerate(process.layers):
        prior = layer.prior.gaussian()
        posterior = layer.conditional(prior, _swept(process, index, chunks, tuple(drawn)))
        base = prior
        if reference is not None:
            base = layer.conditional(prior, _swept(process, index, reference_chunks, tuple(drawn)))
        blocks = posterior.draw(noise[index])
        values = (posterior.kl(base), posterior.log_prob(blocks), prior.log_prob(blocks))
        sums = [total + value for total, value in zip(sums, values, strict=True)]
        drawn.append(layer.shaped(blocks))
    assert posterior is not None
    kl, log_q, log_p = sums
    return WeightSamples(tuple(drawn), kl, log_q, log_p, posterior)


def _swept(
    process: BNNProcess, index: int, chunks: list[TaskBatch], drawn: tuple[Tensor, ...]
) -> NaturalTerms | None:
    """The natural terms of one layer, summed over the batches of a context."""
    total: NaturalTerms | None = None
    again = len(chunks) > 1 and torch.is_grad_enabled()
    for chunk in chunks:
        if chunk.points == 0:
            continue
        if again:
            terms = checkpoint(process.natural_terms, index, chunk, *drawn, use_reentrant=False)
        else:
            terms = process.natural_terms(index, chunk, *drawn)
        total = accumulated(total, terms)
    return total
