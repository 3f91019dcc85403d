"""The loss of one batch, for modules with random weights and without."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dubito.bayesian import BayesianModule
from dubito.likelihoods import Likelihood
from dubito.objectives import Elbo, negative_elbo
from dubito.training.batches import Batch

Loss = Callable[[Tensor, Tensor], Tensor]


class NotFiniteInput(ValueError):
    """What the likelihood was given holds NaN or infinity."""


@dataclass
class Criterion:
    """Outputs and targets to nats an example.

    Attributes:
        model: the module in training.
        likelihood: p(y | outputs), or None where `loss` is given.
        loss: a function of outputs and targets to a scalar mean over the batch, or None.
        samples: draws of the weights a call.
        with_kl: whether the objective has a KL term.
        n_data: N, which divides the KL.
        shift: subtracted from targets (None: nothing).
        scale: divides them.
    """

    model: nn.Module
    likelihood: Likelihood | None
    loss: Loss | None
    samples: int
    with_kl: bool
    n_data: int
    shift: Tensor | None = None
    scale: Tensor | None = None

    def __call__(self, batch: Batch, beta: float) -> Elbo:
        """Loss, NLL and KL of one batch, differentiable."""
        outputs, target = self.outputs(batch), self.target(batch.target)
        with _not_finite_told_apart(outputs=outputs, target=target):
            nll = self.nll(outputs, target)
        kl = nll.new_zeros(())
        if self.with_kl and isinstance(self.model, BayesianModule):
            kl = self.model.kl()
        return negative_elbo(nll, kl, self.n_data, beta, check=False)

    def outputs(self, batch: Batch) -> Tensor:
        """(batch, …) for one draw or a plain module, (S, batch, …) for several."""
        if self.samples > 1 and isinstance(self.model, BayesianModule):
            return self.model.outputs(batch.inputs, samples=self.samples)
        return self._tensor(self.model(*batch.args, **batch.kwargs))

    def nll(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Mean negative log likelihood (or loss) over the batch and the draws."""
        if self.likelihood is not None:
            return self.likelihood.nll(outputs, target)
        assert self.loss is not None
        if self.samples > 1 and isinstance(self.model, BayesianModule):
            return torch.stack([_scalar(self.loss(draw, target)) for draw in outputs]).mean()
        return _scalar(self.loss(outputs, target))

    def target(self, target: Tensor) -> Tensor:
        """Targets as the network is trained on them."""
        if self.shift is None or self.scale is None:
            return target
        return (target - self.shift) / self.scale

    @property
    def offset(self) -> float:
        """What turns an NLL of standardised targets into one of the targets as given: sum of log sd."""
        return 0.0 if self.scale is None else float(self.scale.double().log().sum())

    def predictive_nll(self, batch: Batch, draws: Any | None) -> Tensor:
        """Sum over a batch of −log of the predictive density of the targets as given.

        Args:
            batch: the data.
            draws: draws of the weights, over which densities are averaged; None: one call in the mode the
                model is in.
        """
        target = self.target(batch.target)
        if draws is not None and isinstance(self.model, BayesianModule):
            outputs = self.model.outputs(batch.inputs, draws=draws)
        else:
            outputs = self._tensor(self.model(*batch.args, **batch.kwargs))[None]
        if self.likelihood is None:
            assert self.loss is not None
            return torch.stack([_scalar(self.loss(draw, target)) for draw in outputs]).mean() * batch.size
        with _not_finite_told_apart(outputs=outputs, target=target):
            self.likelihood.check_target(outputs, target)
        log_prob = self.likelihood.log_prob(outputs, target)
        mixture = torch.logsumexp(log_prob, 0) - math.log(log_prob.shape[0])
        return -mixture.sum() + self.offset * batch.size

    def _tensor(self, outputs: Any) -> Tensor:
        if isinstance(self.model, BayesianModule):
            return self.model.select(outputs)
        if isinstance(outputs, Tensor):
            return outputs
        logits = getattr(outputs, "logits", None)
        if isinstance(logits, Tensor):
            return logits
        raise TypeError(
            f"the model's output is a {type(outputs).__name__}, not a tensor, and has no `.logits`; return one tensor"
        )


@contextmanager
def _not_finite_told_apart(**tensors: Tensor) -> Iterator[None]:
    """A likelihood refuses NaN itself, as it does a wrong label; what training does about it differs."""
    try:
        yield
    except ValueError as error:
        bad = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
        if bad:
            raise NotFiniteInput(f"not finite: {' and '.join(bad)}") from error
        raise


def _scalar(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"loss must return a tensor, got {type(value).__name__}: keep the graph, no .item()")
    if value.ndim != 0:
        raise ValueError(
            f"loss must return a scalar, the mean over the batch, got shape {tuple(value.shape)}: use reduction='mean'"
        )
    return value


def resolve_likelihood(
    model: nn.Module, likelihood: Likelihood | None, loss: Loss | None
) -> Likelihood | None:
    """The likelihood in force, or None where a loss takes its place.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: neither is given, or both, or the model has another likelihood already.
    """
    if likelihood is not None and not isinstance(likelihood, Likelihood):
        raise TypeError(
            f"likelihood must be a dubito likelihood, got {type(likelihood).__name__}"
            + ("; a function of (outputs, y) goes to loss=" if callable(likelihood) else "")
        )
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of (outputs, y), got {type(loss).__name__}")
    if isinstance(loss, type):
        raise TypeError(f"loss is the class {loss.__name__}: give an instance, {loss.__name__}()")
    if likelihood is not None and loss is not None:
        raise ValueError("likelihood and loss are both given: pass one of them")
    if loss is not None:
        return None
    own = model.likelihood if isinstance(model, BayesianModule) else None
    if likelihood is not None and own is not None and likelihood is not own:
        raise ValueError(
            f"likelihood={type(likelihood).__name__} is given, but the model already has {type(own).__name__}: leave "
            "the argument out, or set model.likelihood"
        )
    found = likelihood if likelihood is not None else own
    if found is None:
        remedy = (
            "bayesianize(..., likelihood=) or fit(..., likelihood=)"
            if isinstance(model, BayesianModule)
            else "likelihood="
        )
        raise ValueError(
            f"no likelihood: pass {remedy}, such as dubito.Categorical() for classes or dubito.Gaussian() for real "
            "numbers, or loss=, a function of (outputs, y)"
        )
    assert isinstance(found, Likelihood)
    return found
