"""Predictive of a classification: categorical, and Bernoulli as two classes.

Logarithms of probabilities are what is held, so that a tiny probability keeps a finite log probability.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dubito import targets
from dubito.gaussian_mixtures import log_mean_exp
from dubito.predictive import (
    AFTER_DRAWS,
    BATCH,
    SLACK,
    Kind,
    NotAvailableError,
    Predictive,
    check_expected_entropy,
    sum_events,
    variance_like,
)


def classify(
    kind: Kind, draws: Tensor, logits: bool, keep: bool, dim: int, common: dict[str, Any]
) -> Predictive:
    """Reduce draws (S, batch, …) of probabilities or logits to a predictive."""
    axis = None if kind == "bernoulli" else _class_axis(dim, draws.ndim - 1)
    log_probs = _log_probs("draws", draws, axis, logits)
    probs = log_probs.exp()
    return _Classification(
        _axis=axis,
        _log_probs_mean=log_mean_exp(log_probs),
        _log_probs_draws=log_probs if keep else None,
        _expected_entropy=_entropy(log_probs).mean(0),
        _epistemic=(probs - probs.mean(0))
        .square()
        .mean(0),  # var(0) takes ten times as long over a leading axis
        _aleatoric=(probs * -log_probs.expm1()).mean(0),  # -expm1 keeps 1 - p sharp next to p = 1
        **common,
    )


def classify_moments(
    kind: Kind,
    probs: Tensor,
    epistemic: Tensor | float | None,
    expected_entropy: Tensor | None,
    dim: int,
    common: dict[str, Any],
) -> Predictive:
    """Predictive of averaged probabilities (batch, …) and, where known, the moments of what was averaged."""
    axis = None if kind == "bernoulli" else _class_axis(dim, probs.ndim)
    log_probs = _log_probs("center", probs, axis, logits=False)
    spread = noise = None
    if epistemic is not None:
        spread = variance_like("epistemic", epistemic, probs)
        spread = torch.stack([spread, spread], -1) if axis is None else spread.movedim(axis, -1)
        noise = log_probs.exp() * -log_probs.expm1() - spread
        if bool((noise < -SLACK).any()):
            raise ValueError(
                "epistemic exceeds the variance p (1 - p) of the outcome itself somewhere: it is the "
                "variance of the probability, not of the logit."
            )
        noise = noise.clamp_min(0.0)
        spread = log_probs.exp() * -log_probs.expm1() - noise
    if expected_entropy is not None:
        check_expected_entropy(expected_entropy, _entropy(log_probs))
    stats: dict[str, Any] = {"_expected_entropy": expected_entropy, "_epistemic": spread, "_aleatoric": noise}
    return _Classification(_axis=axis, _log_probs_mean=log_probs, **stats, **common)


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class _Classification(Predictive):
    """Categorical, or Bernoulli held as two classes (no, yes); inside, the classes are the last axis."""

    _axis: int | None  # the class axis in the outputs, counted from the end; None for Bernoulli
    _log_probs_mean: Tensor = dataclasses.field(metadata=BATCH)
    _log_probs_draws: Tensor | None = dataclasses.field(default=None, metadata=AFTER_DRAWS)
    _expected_entropy: Tensor | None = dataclasses.field(default=None, metadata=BATCH)
    _epistemic: Tensor | None = dataclasses.field(default=None, metadata=BATCH)
    _aleatoric: Tensor | None = dataclasses.field(default=None, metadata=BATCH)

    @property
    def kind(self) -> Kind:
        return "bernoulli" if self._axis is None else "categorical"

    @property
    def _kept(self) -> bool:
        return self._log_probs_draws is not None

    def _outward(self, classes_last: Tensor) -> Tensor:
        return classes_last[..., 1] if self._axis is None else classes_last.movedim(-1, self._axis)

    def _held(self, statistic: Tensor | None, name: str, remedy: str) -> Tensor:
        if statistic is None:
            raise NotAvailableError(f"This predictive was made from probabilities without {name}: {remedy}.")
        return statistic

    @property
    def probs(self) -> Tensor:
        return self._outward(self._log_probs_mean.exp())

    @property
    def prediction(self) -> Tensor:
        return self._log_probs_mean.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        return self._log_probs_mean.amax(-1).exp()

    @property
    def draws(self) -> Tensor | None:
        return None if self._log_probs_draws is None else self._outward(self._log_probs_draws.exp())

    @property
    def entropy(self) -> Tensor:
        return _entropy(self._log_probs_mean)

    @property
    def expected_entropy(self) -> Tensor:
        return self._held(
            self._expected_entropy, "expected_entropy", "give it to from_moments, or predict with draws"
        )

    @property
    def epistemic(self) -> Tensor:
        return self._outward(self._held(self._epistemic, "epistemic", "give it to from_moments"))

    @property
    def aleatoric(self) -> Tensor:
        return self._outward(self._held(self._aleatoric, "epistemic", "give it to from_moments"))

    @property
    def variance(self) -> Tensor:
        if self._epistemic is None:
            return self._outward(self._log_probs_mean.exp() * -self._log_probs_mean.expm1())
        return super().variance

    def _log_likelihood(self, y: Tensor) -> Tensor:
        kept = self._log_probs_draws
        log_probs = self._log_probs_mean.unsqueeze(0) if kept is None else kept
        if self._axis is None:
            yes = y.to(log_probs.dtype).expand(log_probs.shape[:-1])
            terms = _times(1.0 - yes, log_probs[..., 0]) + _times(yes, log_probs[..., 1])
        else:
            index = y.long().unsqueeze(-1).expand(*log_probs.shape[:-1], 1)
            terms = log_probs.gather(-1, index).squeeze(-1)
        return sum_events(terms, 2)

    def _check_target(self, y: Tensor) -> None:
        outcomes = self._log_probs_mean.shape[:-1]
        targets.check_tensor("y", y)
        targets.check_shape(y, outcomes, 0, tuple(self._outward(self._log_probs_mean).shape), self._axis)
        if self._axis is None:
            targets.raise_faults(targets.binary_fault(y))
        else:
            targets.check_label_dtype(y)
            targets.raise_faults(targets.label_fault(y, self._log_probs_mean.shape[-1]))

    def _sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        kept = self._log_probs_draws
        if kept is None:
            log_probs = self._log_probs_mean.expand(n, *self._log_probs_mean.shape)
        else:
            log_probs = kept[torch.randint(len(kept), (n,), generator=generator, device=kept.device)]
        rows = log_probs.exp().reshape(-1, log_probs.shape[-1])
        return torch.multinomial(rows, 1, generator=generator).reshape(log_probs.shape[:-1])


def _class_axis(dim: int, ndim: int) -> int:
    """The class axis as a negative number that is not the batch's."""
    if dim >= 0 or -dim >= ndim:
        raise ValueError(
            f"dim is {dim}, but the class axis of outputs with {ndim} dimensions (draws not counted) is "
            f"counted from the end and is not the batch: from -1 to {1 - ndim}."
        )
    return dim


def _log_probs(name: str, values: Tensor, axis: int | None, logits: bool) -> Tensor:
    """Log probabilities with the classes last."""
    if logits:
        if axis is None:
            return torch.stack([F.logsigmoid(-values), F.logsigmoid(values)], -1)
        log_probs = F.log_softmax(values.movedim(axis, -1), -1)
        remedy = "They come of a logit of +inf, or of all being -inf: half precision overflows at 65504."
        targets.raise_faults(targets.nan_fault(f"the softmax of {name}", log_probs, remedy))
        return log_probs
    if bool(((values < 0) | (values > 1 + SLACK)).any()):
        raise ValueError(
            f"{name} holds numbers outside [0, 1]: for logits say logits=True, or pass probabilities."
        )
    values = values.clamp(max=1.0)
    if axis is None:
        return torch.stack([torch.log1p(-values), values.log()], -1)
    values = values.movedim(axis, -1)
    if bool(((values.sum(-1) - 1.0).abs() > 10 * SLACK).any()):
        raise ValueError(
            f"{name} does not sum to one over the class axis {axis}: for logits say logits=True, for "
            "another class axis dim=…, for labels that do not exclude each other kind='bernoulli'."
        )
    return values.log()


def _entropy(log_probs: Tensor) -> Tensor:
    """Entropy over the last axis; where a probability is zero (or underflows) it contributes nothing."""
    probs = log_probs.exp()
    return -(probs * log_probs.masked_fill(probs == 0, 0.0)).sum(-1)


def _times(weight: Tensor, log_prob: Tensor) -> Tensor:
    """`weight · log_prob`, zero where the weight is, even of minus infinity."""
    return weight * log_prob.masked_fill(weight == 0, 0.0)
