"""The posterior of one data set under a Bayesian neural network process: a frozen object that answers questions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dubito.amortised.linear import accumulated
from dubito.amortised.tasks import Task, TaskBatch
from dubito.amortised.weight_samples import WeightSamples
from dubito.gaussian_conditionals import LayerGaussian
from dubito.predictive import Predictive

if TYPE_CHECKING:
    from dubito.amortised.process import BNNProcess

MIN_EFFECTIVE = 100.0


class ImportanceSamplingError(RuntimeError):
    """Too few draws carry weight for an importance sampling estimate to mean anything."""


@dataclass(frozen=True)
class Evidence:
    """log p(Y | X) by importance sampling with the amortised posterior as proposal.

    Attributes:
        log_evidence: log mean_s p(Y | W_s) p(W_s) / q(W_s | D), in nats: a lower bound in expectation.
        elbo: mean_s of the same logarithm; log_evidence - elbo estimates KL(q ‖ true posterior).
        effective: effective sample size, (Σ r)² / Σ r² over the ratios r.
        samples: draws S.
        standard_error: of log_evidence, by the delta method.
    """

    log_evidence: float
    elbo: float
    effective: float
    samples: int
    standard_error: float

    @property
    def kl(self) -> float:
        """KL(q ‖ true posterior) in nats, estimated as log_evidence - elbo."""
        return self.log_evidence - self.elbo


class ProcessPosterior:
    """q(W | D) by S draws. Nothing in it changes; `update` gives a new one.

    Attributes:
        samples: S.
        approximate: whether it has been updated, see `update`.
        context: the data it is conditional on, as a batch of one task.
    """

    def __init__(
        self,
        process: BNNProcess,
        context: TaskBatch,
        drawn: WeightSamples,
        batch_size: int | None = None,
        approximate: bool = False,
    ) -> None:
        self._process = process
        self._drawn = drawn
        self._batch_size = batch_size
        self.context = context
        self.approximate = approximate

    @property
    def samples(self) -> int:
        """S."""
        return self._drawn.samples

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The drawn weights of each layer, (S, units, inputs + 1), the bias last."""
        return tuple(w.squeeze(1).clone() for w in self._drawn.weights)

    @property
    def kl(self) -> Tensor:
        """KL to the prior along each draw, (S,), in nats."""
        return self._drawn.kl.squeeze(1)

    @torch.no_grad()
    def sample_functions(self, x: Tensor) -> Tensor:
        """The S functions at inputs (n, dim_x): the network's outputs (S, n, outputs), the same functions each time."""
        batch = self._inputs(x)
        parts = [self._process.outputs(self._drawn.weights, part).squeeze(1) for part in batch]
        return torch.cat(parts, dim=1)

    @torch.no_grad()
    def predict(self, x: Tensor, keep_draws: bool = True) -> Predictive:
        """The predictive distribution at inputs (n, dim_x), the draws averaged out."""
        return self._process.likelihood.predictive(self.sample_functions(x), keep_draws=keep_draws)

    @torch.no_grad()
    def log_prob(self, x: Tensor, y: Tensor, joint: bool = False) -> Tensor:
        """Log predictive density of targets, in nats: log mean_s p(y_n | W_s), (n,), or of all together, a scalar."""
        batch = self._process.gather([(x, y)])
        parts = [
            self._process.log_likelihood(self._drawn.weights, chunk)
            for chunk in batch.chunks(self._batch_size)
        ]
        scores = torch.cat(parts, dim=-1).squeeze(1)
        return (scores.sum(-1) if joint else scores).logsumexp(0) - math.log(self.samples)

    @torch.no_grad()
    def evidence(
        self,
        samples: int = 1024,
        chunk_size: int = 256,
        minimum: float = MIN_EFFECTIVE,
        generator: torch.Generator | None = None,
    ) -> Evidence:
        """The log evidence of the context, with its effective sample size.

        Args:
            samples: fresh draws.
            chunk_size: draws made at once.
            minimum: smallest effective sample size that is accepted.
            generator: source of noise.

        Raises:
            ImportanceSamplingError: with fewer effective draws; the message has the ELBO, which stays valid.
            RuntimeError: of an updated posterior, whose law is not that of its context alone.
        """
        if self.approximate:
            raise RuntimeError(
                "evidence is of a posterior conditional on one data set; this one was updated. Condition on all data "
                "at once: process.condition(x, y)"
            )
        ratios = []
        left = samples
        while left > 0:
            now = min(chunk_size, left)
            drawn = self._process.infer(self.context, now, batch_size=self._batch_size, generator=generator)
            fit = sum(
                self._process.log_likelihood(drawn.weights, chunk).sum(-1)
                for chunk in self.context.chunks(self._batch_size)
            )
            ratios.append((fit + drawn.log_p - drawn.log_q).squeeze(1))
            left -= now
        return importance_evidence(torch.cat(ratios), minimum)

    def update(self, x: Tensor, y: Tensor, generator: torch.Generator | None = None) -> ProcessPosterior:
        """Add data to the last layer only: the hidden layers' draws stay and never see them.

        Exact Bayesian linear regression given those features, but an approximation of the posterior of all data
        together (`approximate` says so); the last layer is drawn anew.

        Args:
            x, y: further data of the same task.
            generator: source of noise.

        Raises:
            ValueError: for an inference network that looks at the whole context at once.
        """
        process = self._process
        if not process.inference.per_datum:
            raise ValueError(
                f"{type(process.inference).__name__} looks at the whole context at once, so data cannot be added; "
                "condition on all of them: process.condition(x, y)"
            )
        new: Task = (x, y)
        batch = process.gather([new])
        process.check(batch)
        with torch.no_grad():
            last = process.layers[-1]
            before: LayerGaussian = self._drawn.last
            terms = process.natural_terms(len(process.layers) - 1, batch, *self._drawn.weights[:-1])
            total = accumulated((before.precision, before.shift), terms)
            posterior = last.conditional_of(total)
            noise = last.noise(self.samples, 1, generator)
            blocks = posterior.draw(noise)
        weights = (*self._drawn.weights[:-1], last.shaped(blocks))
        drawn = WeightSamples(weights, self._drawn.kl, self._drawn.log_q, self._drawn.log_p, posterior)
        return ProcessPosterior(process, self.context.joined(batch), drawn, self._batch_size, True)

    def _inputs(self, x: Tensor) -> list[Tensor]:
        if x.ndim == 1 and self._process.dim_x == 1:
            x = x.unsqueeze(-1)
        if x.ndim != 2 or x.shape[1] != self._process.dim_x:
            raise ValueError(f"x has shape {tuple(x.shape)}, but inputs are (n, {self._process.dim_x})")
        if not bool(x.isfinite().all()):
            raise ValueError(f"x holds NaN or infinity at point {int((~x.isfinite()).nonzero()[0, 0])}")
        place = self._drawn.kl.device
        size = self._batch_size or max(1, len(x))
        return [part.unsqueeze(0) for part in x.to(place, torch.float64).split(size)]

    def __repr__(self) -> str:
        marked = ", approximate" if self.approximate else ""
        return f"ProcessPosterior({int(self.context.counts.sum())} points, {self.samples} draws{marked})"


def importance_evidence(log_ratios: Tensor, minimum: float = MIN_EFFECTIVE) -> Evidence:
    """The evidence from log ratios log p(Y, W_s) - log q(W_s), (S,).

    Raises:
        ImportanceSamplingError: with an effective sample size below `minimum`, or NaN.
    """
    count = len(log_ratios)
    total = log_ratios.logsumexp(0)
    effective = float((2 * total - (2 * log_ratios).logsumexp(0)).exp())
    bound = float(log_ratios.mean())
    if not effective >= minimum:
        raise ImportanceSamplingError(
            f"the effective sample size is {effective:.1f} of {count} draws, below {minimum:g}: the log evidence "
            f"cannot be told. The ELBO, a lower bound, is {bound:.3f}. Draw more (samples=…), or train further"
        )
    relative = (log_ratios - total + math.log(count)).exp()
    error = float(relative.std() / math.sqrt(count)) if count > 1 else math.inf
    return Evidence(float(total) - math.log(count), bound, effective, count, error)
