"""The Gibbs predictor's empirical risk: the mean loss of single draws of the weights, with its confidence limit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dubito.argument_checks import to_double
from dubito.bayesian import BayesianModule
from dubito.certificates.certificate import RefusedError
from dubito.certificates.kl_inversion import kl_inverse
from dubito.certificates.loss_constants import BoundedLoss, is_clipped_cross_entropy
from dubito.likelihoods import Bernoulli, Categorical, Likelihood
from dubito.monte_carlo import LABELS, check_samples, device_of, evaluating

_BATCH = 256  # at most, of data given as tensors
_ENTRIES_AT_ONCE = 2**25  # of drawn weights: 128 MB in float32
_UNBOUNDED = (
    F.cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.binary_cross_entropy,
    F.nll_loss,
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.gaussian_nll_loss,
)
_REMEDY = (
    'PAC-Bayes needs a loss in [0, 1]: use loss="zero_one", or clip it, by '
    "certificates.clipped_cross_entropy(cap=4.0) or certificates.ClippedLoss(loss, cap)"
)


@dataclass(frozen=True)
class GibbsRisk:
    """An estimate of the Gibbs predictor's mean loss on given data.

    Attributes:
        risk: mean over draws and data.
        n: number of data.
        evaluations: independent draws in all: M for each batch.
        evenness: N / (batches · largest batch), 1 where all batches are of one size.
        chance: risk of a predictor that guesses evenly among the classes without looking, for the 0-1 loss and for
            `clipped_cross_entropy`; 1 for any other loss.
    """

    risk: float
    n: int
    evaluations: int
    evenness: float
    chance: float

    def upper(self, delta: float) -> float:
        """What the exact Gibbs risk on these data is above with probability at most δ over the draws.

        The batches' mean losses under the K evaluations are independent, in [0, 1], and meaned with the batches' sizes
        as weights; kl⁻¹ of the mean at ln(2/δ) / K (Langford and Caruana 2001; Hoeffding 1963 for unequal means).
        """
        return min(
            1.0,
            kl_inverse(self.risk * self.evenness, math.log(2.0 / delta) / self.evaluations) / self.evenness,
        )


def gibbs_risk(
    bayes: BayesianModule,
    data: Any,
    loss: str | BoundedLoss = "zero_one",
    samples: int = 64,
    generator: torch.Generator | None = None,
) -> GibbsRisk:
    """The mean loss of single draws of the weights, in evaluation mode.

    Every batch has M draws of its own, so the estimate sharpens with the number of batches at no cost; data given as
    tensors are cut into sixteen or more.

    Args:
        bayes: the network.
        data: (x, y) tensors, or an iterable of such batches (or of mappings with "labels"), run through once.
        loss: "zero_one", or a function from outputs (S, batch, …) and y to losses in [0, 1] of shape (S, batch, …).
            Losses of several outcomes a datum are meaned: a datum counts once. Outputs come as the network gives them,
            standardised where `fit` standardised the targets.
        samples: draws M for each batch.
        generator: source of the draws.

    Raises:
        RefusedError: a loss that is not in [0, 1].
        ValueError: no data, or a loss of the wrong shape.
    """
    measure = _loss(bayes, loss)
    sizes = _sizes(bayes, check_samples(samples))
    total, counts, classes = 0.0, [], 2
    with torch.no_grad(), evaluating(bayes):
        for x, y in batches_of(data, device_of(bayes)):
            for size in sizes:
                outputs = bayes.outputs(x, draws=bayes.draw(size, generator))
                values = to_double(_in_range(measure(outputs, y), outputs.shape[:2]))
                total += float(values.flatten(2).mean(2).sum() if values.dim() > 2 else values.sum())
            if isinstance(bayes.likelihood, Categorical):
                classes = outputs.shape[bayes.likelihood.dim]
            counts.append(outputs.shape[1])
    n = sum(counts)
    if not n:
        raise ValueError("data holds no batch: give (x, y), or an iterable of such pairs")
    chance = _chance(loss, classes)
    risk = min(total / (n * samples), 1.0)
    return GibbsRisk(risk, n, samples * len(counts), n / (len(counts) * max(counts)), chance)


def _chance(loss: str | BoundedLoss, classes: int) -> float:
    """The loss of even odds: what is known without any network."""
    if loss == "zero_one":
        return 1.0 - 1.0 / classes
    if is_clipped_cross_entropy(loss):
        return min(1.0, math.log(classes) / loss.cap)
    return 1.0


def _sizes(bayes: BayesianModule, samples: int) -> list[int]:
    """Draws at once: as many as keep the drawn weights within a bound."""
    entries = sum(
        max(sum(p.numel() for p in q.parameters()), sum(s.shape.numel() for s in q.slots))
        for q in bayes.posteriors()
    )
    step = max(1, min(samples, _ENTRIES_AT_ONCE // max(1, entries)))
    return [min(step, samples - start) for start in range(0, samples, step)]


def batches_of(data: Any, device: torch.device) -> Iterator[tuple[Any, Tensor]]:
    """(x, y) on the network's device, from a pair of tensors or an iterable of pairs."""
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], Tensor):
        x, y = data
        if not isinstance(x, Tensor):
            yield _moved(x, device), y.to(device)
            return
        if len(x) != len(y):
            raise ValueError(f"x holds {len(x)} data, y {len(y)}")
        size = max(8, min(_BATCH, len(x) // 16))
        for start in range(0, len(x), size):
            yield x[start : start + size].to(device), y[start : start + size].to(device)
        return
    if isinstance(data, Tensor) or not isinstance(data, Iterable):
        raise TypeError(f"data must be (x, y) or an iterable of such pairs, got {type(data).__name__}")
    for batch in data:
        if isinstance(batch, Mapping):
            name = next((label for label in LABELS if label in batch), None)
            if name is None:
                raise TypeError(f"a batch that is a mapping needs its targets under one of {LABELS}")
            batch = ({k: v for k, v in batch.items() if k not in LABELS}, batch[name])
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            raise TypeError(f"a batch must be a pair (x, y), got {type(batch).__name__}")
        yield _moved(batch[0], device), batch[1].to(device)


def _moved(x: Any, device: torch.device) -> Any:
    return torch.utils._pytree.tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, x)


def _loss(bayes: BayesianModule, loss: str | BoundedLoss) -> BoundedLoss:
    if isinstance(loss, str):
        if loss != "zero_one":
            raise RefusedError(f"loss={loss!r} is not known to be bounded. {_REMEDY}")
        return _zero_one(bayes)
    bound_to = getattr(loss, "__self__", None)
    if (
        loss in _UNBOUNDED
        or isinstance(loss, nn.modules.loss._Loss)
        or isinstance(bound_to, Likelihood | BayesianModule)
    ):
        name = getattr(loss, "__name__", type(loss).__name__)
        raise RefusedError(f"the loss {name} is unbounded, or gives one number a batch. {_REMEDY}")
    if not callable(loss):
        raise TypeError(f'loss must be "zero_one" or a function (outputs, y) → losses, got {loss!r}')
    return loss


def _zero_one(bayes: BayesianModule) -> BoundedLoss:
    likelihood = bayes.likelihood
    if isinstance(likelihood, Categorical | Bernoulli):

        def errors(outputs: Tensor, y: Tensor) -> Tensor:
            likelihood.check_target(outputs, y)
            if isinstance(likelihood, Categorical):
                return (outputs.argmax(likelihood.dim) != y).double()
            return ((outputs > 0) != (y > 0.5)).double()

        return errors
    raise RefusedError(
        f"the 0-1 loss needs a Categorical or Bernoulli likelihood, this network has {likelihood!r}: give a bounded "
        "loss of your own, such as certificates.ClippedLoss(lambda z, y: (z - y).square(), cap)"
    )


def _in_range(values: Tensor, lead: torch.Size) -> Tensor:
    if not isinstance(values, Tensor) or values.shape[:2] != lead:
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            f"the loss must keep draws and data, shape {tuple(lead)} and more, without reduction; it gave {got}"
        )
    if bool(torch.isnan(values).any()):
        raise ValueError("the loss is NaN for some data")
    low, high = float(values.min()), float(values.max())
    if low < 0.0 or high > 1.0:
        raise RefusedError(f"the loss takes values from {low:.4g} to {high:.4g}. {_REMEDY}")
    return values
