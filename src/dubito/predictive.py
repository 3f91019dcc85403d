"""Predictive: the one result type of every method, for classification and regression.

Monte Carlo, propagated moments, ensembles, Laplace, HMC and processes all answer with a `Predictive`. It
knows what is averaged over (the weights) and what is not (the noise of the data), and takes the uncertainty
apart accordingly. Draws lead: an array of S draws has shape `(S, batch, …)`. Entropies and log probabilities
are in nats.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NoReturn, get_args

import torch
from torch import Tensor

from dubito import targets
from dubito.gaussian_mixtures import log_mean_exp

Kind = Literal["categorical", "bernoulli", "regression"]
Index = int | slice | Tensor | Sequence[int]

BATCH = {"batch": 0}  # a stored tensor whose batch is its first dimension
AFTER_DRAWS = {"batch": 1}  # one whose draws come before the batch
SLACK = 1e-3  # by how much approximate moments may break an inequality before it is called a mistake


class NotAvailableError(AttributeError, RuntimeError):
    """This kind of predictive, or the way it was made, does not have what was asked for."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Predictive(ABC):
    """Distribution over what will be observed, the weights averaged out. Frozen; made by its constructors.

    Shapes, where the network's outputs are `(batch, …)`; "datum" is one entry of the batch, "outcome" one
    observed quantity (a label, a 0/1, a real number), of which a datum may have many (pixels, several
    outputs):

    ===================== ======================================= ============================================
    attribute             classification                          regression
    ===================== ======================================= ============================================
    `probs`               mean over draws of the probabilities    not available
    `mean`                not available                           mean over draws
    `prediction`          most probable label (int64)             `mean`
    `draws`               per-draw probabilities (S, batch, …)    per-draw means (S, batch, …)
    `confidence`          probability of `prediction`             not available
    `entropy`             of `probs`, per outcome                 of the mixture over draws, per outcome
    `expected_entropy`    mean over draws of the entropy          the same, `E ½ log(2πe σ_s²)`
    `mutual_information`  `entropy - expected_entropy`            the same
    `variance`            of the one-hot outcome, `p (1 - p)`     total, `aleatoric + epistemic`
    `aleatoric`           `E[p_s (1 - p_s)]`                      `E[σ_s²]`
    `epistemic`           `Var[p_s]` (population: 0 at S = 1)     `Var[μ_s]` (population: 0 at S = 1)
    `std`, `quantile`, …  not available                           of the mixture over draws
    ===================== ======================================= ============================================

    Bernoulli probabilities are `P(y = 1)` and have the outputs' shape. Asking for what is not available
    raises `NotAvailableError` (an `AttributeError`, so that `hasattr` tells).

    With the draws dropped (`keep_draws=False`) only statistics reduced over draws are held. Then `draws` is
    None; `log_prob(joint=True)` is an error; `log_prob` of a datum with several outcomes takes them as
    independent; and in regression `log_prob`, `quantile`, `entropy` and `sample` are of the Gaussian with the
    same mean and total variance, whose entropy (and so the mutual information) is an upper bound.

    The decomposition is that of Depeweg et al. (2018), "Decomposition of uncertainty in Bayesian deep
    learning", by entropy (eq. 2) and by the law of total variance.

    Attributes:
        samples: the number of draws S, or None where there were none.
        consistent: one draw is one function over the whole batch, so that joint probabilities mean something;
            False where the noise is independent per example (local reparametrisation, flipout).
        logits_mean: propagated mean of the logits, carried along where a method has it.
        logits_variance: propagated variance of the logits, likewise.
    """

    samples: int | None = None
    consistent: bool = True
    logits_mean: Tensor | None = dataclasses.field(default=None, metadata=BATCH)
    logits_variance: Tensor | None = dataclasses.field(default=None, metadata=BATCH)

    # -- making ----------------------------------------------------------------------------------------------

    @staticmethod
    def from_draws(
        kind: Kind,
        draws: Tensor,
        *,
        logits: bool = False,
        aleatoric: Tensor | float | None = None,
        keep_draws: bool = True,
        consistent: bool = True,
        dim: int = -1,
    ) -> Predictive:
        """Predictive of S equally weighted draws.

        Args:
            kind: "categorical", "bernoulli" or "regression".
            draws: shape (S, batch, …): probabilities (or logits) or, for regression, means.
            logits: the draws are logits. Better than probabilities: tiny ones keep a finite logarithm.
            aleatoric: regression only, and required there: the noise variance, per draw (S, batch, …) or
                broadcastable to that. It comes from the likelihood; the spread of the draws does not contain
                it.
            keep_draws: hold the draws; see the class for what is lost without them.
            consistent: see the class.
            dim: class axis of a categorical, counted from the end.

        Raises:
            TypeError, ValueError: wrong dtype, too few dimensions, NaN, probabilities that are none.
        """
        from dubito.predictive_classification import classify
        from dubito.predictive_regression import regress

        draws = _checked(kind, "draws", draws, lead=1)
        common: dict[str, Any] = {"samples": draws.shape[0], "consistent": consistent}
        if kind == "regression":
            return regress(draws, aleatoric, keep_draws, common)
        if aleatoric is not None:
            raise ValueError(f"aleatoric is for regression: a {kind} predictive has its own, E[p (1 - p)].")
        return classify(kind, draws, logits, keep_draws, dim, common)

    @staticmethod
    def from_moments(
        kind: Kind,
        center: Tensor,
        *,
        epistemic: Tensor | float | None = None,
        aleatoric: Tensor | float | None = None,
        expected_entropy: Tensor | None = None,
        logits_mean: Tensor | None = None,
        logits_variance: Tensor | None = None,
        dim: int = -1,
    ) -> Predictive:
        """Predictive of moments found without draws.

        Args:
            kind: "categorical", "bernoulli" or "regression".
            center: probabilities, or the mean of a regression; shape (batch, …).
            epistemic: variance, over the weights, of the center. Required for regression (0.0 where the
                weights are known); for classification without it `epistemic` and `aleatoric` are not
                available.
            aleatoric: regression only, and required there: the noise variance.
            expected_entropy: mean over the weights of the entropy, per outcome. Without it a classification
                has no `mutual_information`; a regression takes the entropy at the mean noise.
            logits_mean: carried along.
            logits_variance: carried along.
            dim: class axis of a categorical, counted from the end.

        Raises:
            TypeError, ValueError: wrong dtype, NaN, negative variances, moments that contradict each other.
        """
        from dubito.predictive_classification import classify_moments
        from dubito.predictive_regression import regress_moments

        center = _checked(kind, "center", center, lead=0)
        common = {"logits_mean": logits_mean, "logits_variance": logits_variance}
        for name, carried in common.items():
            if carried is not None and carried.shape[:1] != center.shape[:1]:
                raise ValueError(
                    f"{name} has shape {tuple(carried.shape)}, but the batch comes first: {len(center)}."
                )
        if kind == "regression":
            return regress_moments(center, epistemic, aleatoric, expected_entropy, common)
        if aleatoric is not None:
            raise ValueError(
                f"aleatoric is for regression: a {kind} predictive has it as p (1 - p) - epistemic."
            )
        return classify_moments(kind, center, epistemic, expected_entropy, dim, common)

    @staticmethod
    def concatenate(parts: Sequence[Predictive]) -> Predictive:
        """Join predictives of one kind along the batch, as a stream of batches gives them.

        Joint probabilities of the whole presume that every part was made with the same draws.
        """
        parts = list(parts)
        if not parts:
            raise ValueError("There is nothing to concatenate: the list of predictives is empty.")
        first, values = parts[0], {}
        for part in parts[1:]:
            _check_alike(first, part)
        for name, batch in _stored(first):
            tensors = [getattr(part, name) for part in parts]
            values[name] = None if tensors[0] is None else torch.cat(tensors, batch)
        samples = first.samples if all(part.samples == first.samples for part in parts) else None
        return dataclasses.replace(
            first, samples=samples, consistent=all(part.consistent for part in parts), **values
        )

    # -- what every kind has ---------------------------------------------------------------------------------

    @property
    @abstractmethod
    def kind(self) -> Kind:
        """ "categorical", "bernoulli" or "regression"."""

    @property
    @abstractmethod
    def prediction(self) -> Tensor:
        """Most probable label (int64), or the mean of a regression."""

    @property
    @abstractmethod
    def draws(self) -> Tensor | None:
        """Per-draw probabilities or means, shape (S, batch, …); None where they were not kept."""

    @property
    @abstractmethod
    def entropy(self) -> Tensor:
        """Entropy of the averaged predictive, per outcome, in nats; see the class."""

    @property
    @abstractmethod
    def expected_entropy(self) -> Tensor:
        """Mean over the weights of the entropy given the weights, per outcome, in nats."""

    @property
    def mutual_information(self) -> Tensor:
        """Mutual information of outcome and weights, `entropy - expected_entropy`, per outcome, in nats."""
        return (self.entropy - self.expected_entropy).clamp_min(0.0)  # below zero by rounding only

    @property
    @abstractmethod
    def epistemic(self) -> Tensor:
        """Variance that knowing the weights would remove; see the class."""

    @property
    @abstractmethod
    def aleatoric(self) -> Tensor:
        """Variance that would remain if the weights were known; see the class."""

    @property
    def variance(self) -> Tensor:
        """Total variance of the outcome: always `aleatoric + epistemic`."""
        return self.aleatoric + self.epistemic

    def log_prob(self, y: Tensor, joint: bool = False) -> Tensor:
        """Log probability (density) of `y`, averaged over draws as probability: `log 1/S Σ_s p(y | w_s)`.

        Args:
            y: targets, as the likelihood takes them: labels (batch, …), or real numbers of the outputs'
                shape.
            joint: of the whole batch together, `log 1/S Σ_s Π_i p(y_i | w_s)`: a scalar. Needs the draws,
                made so that a draw is one function.

        Returns:
            Shape (batch,), outcomes of one datum summed; or a scalar where `joint`.
        """
        self._check_target(y)
        if not joint:
            return log_mean_exp(self._log_likelihood(y))
        if not self._kept:
            raise NotAvailableError(
                "joint=True needs the draws, which this predictive has not: keep_draws=True."
            )
        if not self.consistent:
            raise NotAvailableError(
                "joint=True needs draws that are one function over the batch, but these were made with "
                "independent noise per example (local reparametrisation or flipout): predict with whole "
                "weights drawn."
            )
        return log_mean_exp(self._log_likelihood(y).sum(1))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw outcomes, shape (n, batch, …): labels (int64) or real numbers.

        With the draws kept each of the n picks one draw for the whole batch, so that its outcomes belong
        together.
        """
        if n < 1:
            raise ValueError(f"n is {n}, but at least one outcome is drawn.")
        return self._sample(n, generator)

    # -- what one kind has -----------------------------------------------------------------------------------

    @property
    def probs(self) -> Tensor:
        """Probabilities averaged over draws (never averaged logits)."""
        self._lacks("probs")

    @property
    def confidence(self) -> Tensor:
        """Probability of `prediction`."""
        self._lacks("confidence")

    @property
    def mean(self) -> Tensor:
        """Mean over draws of a regression."""
        self._lacks("mean")

    @property
    def std(self) -> Tensor:
        """Square root of the total variance of a regression."""
        self._lacks("std")

    def quantile(self, q: float | Sequence[float] | Tensor) -> Tensor:
        """Quantile of a regression, per outcome: of the mixture over draws where kept, else of the Gaussian.

        Args:
            q: probability in (0, 1); several of them lead the result's shape.
        """
        self._lacks("quantile")

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Central interval of a regression: lower and upper quantile enclosing `level` of the probability."""
        self._lacks("interval")

    def components(self) -> tuple[Tensor, Tensor]:
        """Means and variances of the Gaussians a regression mixes with equal weight, each (S, batch, …).

        S is 1 where the draws were not kept, and leads the variances as 1 where all draws share the noise.
        """
        self._lacks("components")

    def affine(self, shift: Tensor | float, scale: Tensor | float) -> Predictive:
        """Predictive of `shift + scale · y`: undoes the standardisation of a regression target.

        Args:
            shift: the mean that was subtracted; a number, or per feature.
            scale: the standard deviation that was divided by; not zero.
        """
        self._lacks("affine")

    # -- as a container of a batch ---------------------------------------------------------------------------

    def __len__(self) -> int:
        held = ((getattr(self, name), batch) for name, batch in _stored(self))
        return int(next(tensor.shape[batch] for tensor, batch in held if tensor is not None))

    def __getitem__(self, index: Index) -> Predictive:
        """Part of the batch; a single number keeps the batch dimension."""
        if isinstance(index, int):
            if not -len(self) <= index < len(self):
                raise IndexError(f"index {index} is outside a batch of {len(self)}.")
            index = slice(index, index + 1 or None)
        at = index if isinstance(index, slice | Tensor) else torch.as_tensor(index)
        return self._map(lambda tensor, batch: tensor[at] if batch == 0 else tensor[:, at])

    def __iter__(self) -> Iterator[Predictive]:
        return (self[i] for i in range(len(self)))

    def to(self, device: torch.device | str) -> Predictive:
        """The same on another device."""
        return self._map(lambda tensor, _: tensor.to(device))

    def cpu(self) -> Predictive:
        """The same in main memory."""
        return self.to("cpu")

    def detach(self) -> Predictive:
        """The same, cut from the graph."""
        return self._map(lambda tensor, _: tensor.detach())

    def __repr__(self) -> str:
        held = "no draws" if self.samples is None else f"{self.samples} draws"
        if self.samples is not None and not self._kept:
            held += " (reduced)"
        return f"Predictive({self.kind}, outcomes {tuple(self.prediction.shape)}, {held})"

    # -- inside ----------------------------------------------------------------------------------------------

    def _map(self, function: Callable[[Tensor, int], Tensor]) -> Predictive:
        stored = {name: getattr(self, name) for name, _ in _stored(self)}
        changed: dict[str, Any] = {
            name: None if stored[name] is None else function(stored[name], batch)
            for name, batch in _stored(self)
        }
        return dataclasses.replace(self, **changed)

    def _lacks(self, name: str) -> NoReturn:
        if self.kind == "regression":
            has = "mean, prediction, variance, std, entropy, mutual_information, quantile(q), interval(level)"
        else:
            has = "probs, prediction, confidence, entropy, mutual_information, variance"
        raise NotAvailableError(
            f"A {self.kind} predictive has no {name}. It has {has}, aleatoric, epistemic, log_prob(y), "
            "sample(n)."
        )

    @property
    @abstractmethod
    def _kept(self) -> bool:
        """Whether the draws were kept."""

    @abstractmethod
    def _log_likelihood(self, y: Tensor) -> Tensor:
        """Log likelihood per draw and datum, (S, batch); (1, batch) where the draws were not kept."""

    @abstractmethod
    def _sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        """See `sample`."""

    @abstractmethod
    def _check_target(self, y: Tensor) -> None: ...


def sum_events(values: Tensor, start: int) -> Tensor:
    """Sum over the dimensions from `start` on: the outcomes of one datum."""
    return values.flatten(start).sum(-1) if values.ndim > start else values


def variance_like(name: str, value: Tensor | float, center: Tensor) -> Tensor:
    """A variance as a tensor of the shape and type of what it is the variance of."""
    variance = torch.as_tensor(value, device=center.device).to(center.dtype)
    if not bool((variance >= 0).all()):
        raise ValueError(f"{name} holds NaN or negative numbers, but it is a variance.")
    try:
        return variance.expand_as(center)
    except RuntimeError:
        raise ValueError(
            f"{name} has shape {tuple(variance.shape)}, which does not broadcast to {tuple(center.shape)}."
        ) from None


def check_expected_entropy(expected: Tensor, entropy: Tensor) -> None:
    """Raise `ValueError` where an expected entropy is of the wrong shape or above the entropy itself."""
    if expected.shape != entropy.shape:
        raise ValueError(
            f"expected_entropy has shape {tuple(expected.shape)}, but there is one for each outcome: "
            f"{tuple(entropy.shape)}."
        )
    if not bool((expected <= entropy + SLACK).all()):
        raise ValueError(
            "expected_entropy holds NaN or exceeds the entropy of the average, which no distribution over "
            "weights can do: it is in nats, averaged over the weights."
        )


def _stored(predictive: Predictive) -> list[tuple[str, int]]:
    """Names of the tensors held, and the dimension along which each one's batch runs."""
    fields = dataclasses.fields(predictive)
    return [(field.name, field.metadata["batch"]) for field in fields if "batch" in field.metadata]


def _checked(kind: Kind, name: str, values: Tensor, lead: int) -> Tensor:
    """Values in the type to compute in, once kind, dtype, dimensions and NaN have been looked at."""
    if kind not in get_args(Kind):
        raise ValueError(f"kind is {kind!r}, but a predictive is one of {', '.join(get_args(Kind))}.")
    targets.check_floating(name, values)
    least = lead + (2 if kind == "categorical" else 1)
    if values.ndim < least:
        shape = ("(draws, batch" if lead else "(batch") + (", classes)" if kind == "categorical" else ", …)")
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}, but a {kind} predictive needs {shape}"
            + ("; a single draw is draws.unsqueeze(0)." if lead else ".")
        )
    if lead and values.shape[0] == 0:
        raise ValueError(f"{name} has shape {tuple(values.shape)}: no draws. At least one is needed.")
    remedy = "Look for NaN in the weights or the input; in training, for a step that was too large."
    targets.raise_faults(targets.nan_fault(name, values, remedy))
    return targets.compute_dtype(values)


def _check_alike(first: Predictive, other: Predictive) -> None:
    def layout(p: Predictive) -> tuple[object, ...]:
        held = tuple(name.strip("_") for name, _ in _stored(p) if getattr(p, name) is not None)
        draws = p.samples if p._kept else "none kept"
        return p.kind, getattr(p, "_axis", None), f"draws: {draws}", held

    if layout(first) != layout(other):
        raise ValueError(
            "Only predictives made in one way can be concatenated, but these differ in kind, class axis, "
            f"number of draws kept or statistics held: {layout(first)} and {layout(other)}."
        )
