"""Neural processes, to compare with: conditional, latent and Transformer. Small, on the same tasks and metrics.

A neural process maps a context to predictions by networks alone. It has no weights to be uncertain of, hence no prior
to look at, and no batches within a task. `fit_process` trains them as it does a `BNNProcess`.

- `ConditionalProcess`: the mean of the data's embeddings, then a decoder (Garnelo et al. 2018, CNP).
- `LatentProcess`: a Gaussian latent variable between, one for the whole function (Garnelo et al. 2018, NP).
- `TransformerProcess`: targets attend to the context (Nguyen & Grover 2022, TNP-D); predictions of different targets
  are independent given the context.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from dubito.amortised import outcomes
from dubito.amortised.objectives import ProcessObjective
from dubito.amortised.tasks import Task, TaskBatch, gather_tasks
from dubito.likelihoods import HeteroscedasticGaussian, Likelihood
from dubito.predictive import Predictive


class Conditioned(NamedTuple):
    """A context as a neural process keeps it.

    Attributes:
        summary: (S, tasks, width), or for attention the context's tokens (1, tasks, points, width).
        mask: which points exist, (tasks, points).
        kl: of the latent to the one given the context alone, (tasks,); zero where there is none.
    """

    summary: Tensor
    mask: Tensor
    kl: Tensor


class NeuralProcess(nn.Module, ABC):
    """A neural process of one kind.

    Args:
        dim_x: features of an input.
        dim_y: outcomes a point; for `Categorical` the number of classes.
        width: of all hidden layers.
        likelihood: None is `HeteroscedasticGaussian`, as is usual.

    Raises:
        ValueError: sizes below 1.
        TypeError: a likelihood that processes cannot take.
    """

    def __init__(
        self, dim_x: int, dim_y: int, width: int = 64, *, likelihood: Likelihood | None = None
    ) -> None:
        super().__init__()
        if min(dim_x, dim_y, width) < 1:
            raise ValueError(f"dim_x={dim_x}, dim_y={dim_y} and width={width} must be at least 1")
        self.dim_x, self.dim_y, self.width = dim_x, dim_y, width
        self.likelihood = likelihood if likelihood is not None else HeteroscedasticGaussian()
        self.labels = outcomes.takes_labels(self.likelihood)
        self.out = outcomes.output_width(self.likelihood, dim_y)

    @abstractmethod
    def encode(
        self,
        context: TaskBatch,
        samples: int = 1,
        posterior: TaskBatch | None = None,
        generator: torch.Generator | None = None,
    ) -> Conditioned:
        """What predictions need of the contexts; with `posterior`, a latent is drawn given those data."""

    @abstractmethod
    def outputs(self, state: Conditioned, x: Tensor) -> Tensor:
        """The likelihood's inputs at (tasks, points, dim_x): (S, tasks, points, outputs), float64."""

    def log_likelihood(self, state: Conditioned, batch: TaskBatch) -> Tensor:
        """log p(y | x, context) of every point, (S, tasks, points); 0 at padding."""
        return outcomes.log_likelihood(self.likelihood, self.outputs(state, batch.x), batch)

    def objective(
        self,
        context: TaskBatch,
        target: TaskBatch,
        samples: int = 8,
        per_point: bool = False,
        generator: torch.Generator | None = None,
    ) -> ProcessObjective:
        """Predictive maximum likelihood: log mean_s of the targets' joint probability, in nats."""
        state = self.encode(context, samples, generator=generator)
        joint = self.log_likelihood(state, target).sum(-1)
        value = joint.logsumexp(0) - math.log(len(joint))
        value = value / target.counts.clamp(min=1) if per_point else value
        nothing = torch.zeros_like(value)
        return ProcessObjective(-value.mean(), value, value, nothing, nothing)

    def predictive_density(
        self,
        context: TaskBatch,
        target: TaskBatch,
        samples: int = 32,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Mean over all targets of log mean_s p(y_n | …), in nats a point: a scalar."""
        scores = self.log_likelihood(self.encode(context, samples, generator=generator), target)
        marginal = scores.logsumexp(0) - math.log(len(scores))
        return (marginal * target.mask).sum() / target.mask.sum()

    def gather(self, tasks: Sequence[Task]) -> TaskBatch:
        """Tasks as a padded batch on this process's device. Raises as `gather_tasks`."""
        device = next(self.parameters()).device
        return gather_tasks(tasks, self.dim_x, self.dim_y, self.labels).to(device)

    @torch.no_grad()
    def condition(
        self, x: Tensor, y: Tensor, samples: int = 64, generator: torch.Generator | None = None
    ) -> NeuralProcessPosterior:
        """Predictions given a data set (n, dim_x) and (n, dim_y)."""
        return NeuralProcessPosterior(self, self.encode(self.gather([(x, y)]), samples, generator=generator))

    def _data(self, batch: TaskBatch) -> Tensor:
        """Inputs beside outcomes in the network's dtype, (tasks, points, features)."""
        return outcomes.encoded(self.likelihood, batch, self.dim_y, False).to(self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def _nothing(self, batch: TaskBatch) -> Tensor:
        return torch.zeros(len(batch), dtype=torch.float64, device=batch.x.device)


class NeuralProcessPosterior:
    """A neural process given one data set; answers as `ProcessPosterior` does."""

    def __init__(self, process: NeuralProcess, state: Conditioned) -> None:
        self._process, self._state = process, state

    @torch.no_grad()
    def sample_functions(self, x: Tensor) -> Tensor:
        """The network's outputs of every draw at (n, dim_x): (S, n, outputs)."""
        x = x.unsqueeze(-1) if x.ndim == 1 else x
        return self._process.outputs(self._state, x.unsqueeze(0)).squeeze(1)

    def predict(self, x: Tensor, keep_draws: bool = True) -> Predictive:
        """The predictive distribution at (n, dim_x)."""
        return self._process.likelihood.predictive(self.sample_functions(x), keep_draws=keep_draws)

    @torch.no_grad()
    def log_prob(self, x: Tensor, y: Tensor, joint: bool = False) -> Tensor:
        """Log predictive density of targets in nats: of each, (n,), or of all together."""
        scores = self._process.log_likelihood(self._state, self._process.gather([(x, y)])).squeeze(1)
        scores = scores.sum(-1) if joint else scores
        return scores.logsumexp(0) - math.log(len(scores))


class ConditionalProcess(NeuralProcess):
    """Deterministic: the context is its embeddings' mean."""

    def __init__(
        self, dim_x: int, dim_y: int, width: int = 64, *, likelihood: Likelihood | None = None
    ) -> None:
        super().__init__(dim_x, dim_y, width, likelihood=likelihood)
        self.encoder = perceptron(dim_x + dim_y, width, width, width)
        self.decoder = perceptron(dim_x + width, width, width, self.out)

    def encode(
        self,
        context: TaskBatch,
        samples: int = 1,
        posterior: TaskBatch | None = None,
        generator: torch.Generator | None = None,
    ) -> Conditioned:
        """See `NeuralProcess.encode`; there is one draw, whatever is asked for."""
        summary = _mean(self.encoder(self._data(context)), context.mask).unsqueeze(0)
        return Conditioned(summary, context.mask, self._nothing(context))

    def outputs(self, state: Conditioned, x: Tensor) -> Tensor:
        """See `NeuralProcess.outputs`."""
        return _decoded(self.decoder, state.summary, x)


class LatentProcess(NeuralProcess):
    """A Gaussian latent variable for the whole function.

    Args:
        dim_x, dim_y, width, likelihood: as for `NeuralProcess`.
        latent: dimensions of the latent variable.
        variational: train by the neural process ELBO (`npvi`), not by predictive likelihood.
    """

    def __init__(
        self,
        dim_x: int,
        dim_y: int,
        width: int = 64,
        *,
        likelihood: Likelihood | None = None,
        latent: int = 32,
        variational: bool = False,
    ) -> None:
        super().__init__(dim_x, dim_y, width, likelihood=likelihood)
        self.variational = variational
        self.encoder = perceptron(dim_x + dim_y, width, width, width)
        self.to_latent = perceptron(width, width, 2 * latent)
        self.decoder = perceptron(dim_x + latent, width, width, self.out)

    def latent(self, batch: TaskBatch) -> Normal:
        """q(z | data), (tasks, latent)."""
        mean, raw = self.to_latent(_mean(self.encoder(self._data(batch)), batch.mask)).chunk(2, -1)
        return Normal(mean, 0.01 + 0.99 * raw.sigmoid())

    def encode(
        self,
        context: TaskBatch,
        samples: int = 1,
        posterior: TaskBatch | None = None,
        generator: torch.Generator | None = None,
    ) -> Conditioned:
        """See `NeuralProcess.encode`."""
        prior = self.latent(context)
        q = prior if posterior is None else self.latent(posterior)
        eps = torch.randn(
            (samples, *q.mean.shape), generator=generator, dtype=q.mean.dtype, device=q.mean.device
        )
        kl = (
            self._nothing(context) if posterior is None else kl_divergence(q, prior).sum(-1).to(torch.float64)
        )
        return Conditioned(q.mean + q.stddev * eps, context.mask, kl)

    def outputs(self, state: Conditioned, x: Tensor) -> Tensor:
        """See `NeuralProcess.outputs`."""
        return _decoded(self.decoder, state.summary, x)

    def objective(
        self,
        context: TaskBatch,
        target: TaskBatch,
        samples: int = 8,
        per_point: bool = False,
        generator: torch.Generator | None = None,
    ) -> ProcessObjective:
        """Predictive likelihood, or E_q(z | c, t) log p(y_t | z) - KL(q(z | c, t) ‖ q(z | c))."""
        if not self.variational:
            return super().objective(context, target, samples, per_point, generator)
        state = self.encode(context, samples, context.joined(target), generator)
        value = self.log_likelihood(state, target).sum(-1).mean(0) - state.kl
        value = value / target.counts.clamp(min=1) if per_point else value
        return ProcessObjective(-value.mean(), value, torch.zeros_like(value), value, state.kl)


class TransformerProcess(NeuralProcess):
    """Context and targets are tokens; all attend to the context, a target also to itself.

    Args:
        dim_x, dim_y, width, likelihood: as for `NeuralProcess`.
        depth: attention layers.
        heads: of each; they divide `width`.
    """

    def __init__(
        self,
        dim_x: int,
        dim_y: int,
        width: int = 64,
        *,
        likelihood: Likelihood | None = None,
        depth: int = 2,
        heads: int = 4,
    ) -> None:
        super().__init__(dim_x, dim_y, width, likelihood=likelihood)
        if depth < 1 or heads < 1 or width % heads:
            raise ValueError(f"depth={depth} must be at least 1, and heads={heads} divide width={width}")
        self.heads = heads
        self.embed = perceptron(dim_x + dim_y + 1, width, width)
        self.blocks: Any = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.decoder = perceptron(width, width, self.out)

    def encode(
        self,
        context: TaskBatch,
        samples: int = 1,
        posterior: TaskBatch | None = None,
        generator: torch.Generator | None = None,
    ) -> Conditioned:
        """See `NeuralProcess.encode`; there is one draw, whatever is asked for."""
        data = self._data(context)
        tokens = self.embed(torch.cat((data, torch.ones_like(data[..., :1])), dim=-1))
        return Conditioned(tokens.unsqueeze(0), context.mask, self._nothing(context))

    def outputs(self, state: Conditioned, x: Tensor) -> Tensor:
        """See `NeuralProcess.outputs`."""
        context = state.summary[0]
        empty = x.new_zeros(*x.shape[:-1], self.dim_y + 1)
        targets = self.embed(torch.cat((x, empty), dim=-1).to(self._dtype))
        tokens = torch.cat((context, targets), dim=1)
        mask = self._mask(state.mask, targets.shape[1])
        for block in self.blocks:
            tokens = block(tokens, src_mask=mask)
        result: Tensor = self.decoder(tokens[:, context.shape[1] :])
        return result.unsqueeze(0).to(torch.float64)

    def _mask(self, seen: Tensor, targets: int) -> Tensor:
        """What may not be attended to, (tasks · heads, tokens, tokens): all but the context's points and oneself."""
        tasks, points = seen.shape
        total = points + targets
        hidden = torch.ones(tasks, total, total, dtype=torch.bool, device=seen.device)
        hidden[:, :, :points] = ~seen.unsqueeze(1)
        hidden &= ~torch.eye(total, dtype=torch.bool, device=seen.device)
        return hidden.repeat_interleave(self.heads, dim=0)


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers of these widths with SiLU between them."""
    modules: list[nn.Module] = []
    for before, after in pairwise(widths):
        modules += [nn.SiLU()] if modules else []
        modules.append(nn.Linear(before, after))
    return nn.Sequential(*modules)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the points that exist; zero where a task has none."""
    kept = mask.unsqueeze(-1)
    return (values * kept).sum(1) / kept.sum(1).clamp(min=1)


def _decoded(decoder: nn.Module, summary: Tensor, x: Tensor) -> Tensor:
    """The decoder at every input beside the summary of its context, (S, tasks, points, outputs) in float64."""
    inputs = x.to(summary.dtype).unsqueeze(0).expand(len(summary), *x.shape)
    context = summary.unsqueeze(2).expand(*summary.shape[:2], x.shape[1], summary.shape[-1])
    result: Tensor = decoder(torch.cat((inputs, context), dim=-1))
    return result.to(torch.float64)
