"""Likelihoods: from what a network puts out to the probability of what is observed.

A likelihood is chosen by the user, never guessed. It gives the loss (`nll`), the log probability of each
datum, and turns draws of the outputs into a `Predictive`. Draws lead: outputs are `(batch, …)` or `(S, batch,
…)`, told apart by comparing dimensions with the target. All log probabilities are in nats.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dubito import targets
from dubito.gaussian_mixtures import gaussian_log_prob
from dubito.predictive import Predictive, sum_events

_NAN_REMEDY = (
    "Training has diverged or the input holds NaN: look at the input first, then lower the learning rate, "
    "clip the gradient or start from a smaller posterior scale."
)


class Likelihood(nn.Module, ABC):
    """Conditional distribution of a target given the network's outputs.

    Learned noise is a parameter of this module; half-precision outputs are computed with in float32.
    """

    @abstractmethod
    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log probability (density) of each datum, outcomes after the batch dimension summed.

        Args:
            outputs: shape (batch, …), or (S, batch, …) with leading draws.
            y: targets, shape (batch, …).

        Returns:
            Shape (batch,), or (S, batch).

        Raises:
            ValueError: shapes that do not belong together; nothing is broadcast.
        """

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Negative log likelihood: mean over the batch (and over draws), a scalar.

        The mean is over data, not over outcomes: pixels or labels of one datum are summed, so that the loss
        stands to `kl / n_data` as it should.

        Raises:
            TypeError, ValueError: as `check_target`.
        """
        self.check_target(outputs, y)
        return -self.log_prob(outputs, y).mean()

    @abstractmethod
    def predictive(self, outputs: Tensor, keep_draws: bool = True, consistent: bool = True) -> Predictive:
        """Predictive of draws of the outputs.

        Args:
            outputs: shape (S, batch, …): the draws always lead; one draw is `outputs.unsqueeze(0)`.
            keep_draws: hold the draws, not only what is reduced over them.
            consistent: each draw is one function over the batch; False for noise independent per example.
        """

    @abstractmethod
    def check_target(self, outputs: Tensor, y: Tensor) -> None:
        """Check outputs and target for use together, shapes and values; synchronises once with the device.

        Raises:
            TypeError: a wrong dtype, or no tensor.
            ValueError: shapes that do not belong together, labels out of range, NaN. The message names the
                first wrong entry and the remedy.
        """


class Categorical(Likelihood):
    """One of C classes; outputs are logits (any constant may be added to them).

    Args:
        dim: the class axis, counted from the end: -1 for (batch, C) and (batch, time, C), -3 for
            (batch, C, height, width). Targets are integer labels of the outputs' shape without that axis.
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        if not isinstance(dim, int) or dim >= 0:
            raise ValueError(
                f"dim is {dim!r}, but the class axis is counted from the end, since draws may lead: -1 for "
                "(batch, classes), -3 for (batch, classes, height, width)."
            )
        self.dim = dim

    def extra_repr(self) -> str:
        """Part of the module's representation."""
        return f"dim={self.dim}"

    def _check_shape(self, outputs: Tensor, y: Tensor) -> None:
        _check_pair(outputs, y)
        targets.check_label_dtype(y)
        if outputs.ndim <= -self.dim:
            raise ValueError(
                f"outputs have shape {tuple(outputs.shape)}, in which {self.dim} is not a class axis behind "
                "a batch: pass logits of shape (batch, classes), or another Categorical(dim=…)."
            )
        like = list(outputs.shape)
        del like[self.dim]
        _match(outputs, like, y, self.dim)

    def check_target(self, outputs: Tensor, y: Tensor) -> None:
        """See `Likelihood.check_target`."""
        self._check_shape(outputs, y)
        targets.raise_faults(
            targets.label_fault(y, outputs.shape[self.dim]),
            targets.nan_fault("outputs", outputs, _NAN_REMEDY),
        )

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """See `Likelihood.log_prob`; labels are those of `torch.nn.functional.cross_entropy`."""
        self._check_shape(outputs, y)
        logits = targets.compute_dtype(outputs)
        if outputs.ndim == 2:
            return -F.cross_entropy(logits, y.long(), reduction="none")
        logits = logits.movedim(self.dim, -1)
        labels = y.long().expand(logits.shape[:-1])
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
        return -sum_events(loss.view(labels.shape), outputs.ndim - y.ndim)

    def predictive(self, outputs: Tensor, keep_draws: bool = True, consistent: bool = True) -> Predictive:
        """See `Likelihood.predictive`: softmax per draw, then the mean; never the other way round."""
        return Predictive.from_draws(
            "categorical", outputs, logits=True, keep_draws=keep_draws, consistent=consistent, dim=self.dim
        )


class Bernoulli(Likelihood):
    """Yes or no; outputs are logits: (batch,), (batch, 1) or, for K labels that may go together, (batch, K).

    Targets have the outputs' shape: 0/1 (integers, bools or floats), or probabilities in [0, 1].
    """

    def check_target(self, outputs: Tensor, y: Tensor) -> None:
        """See `Likelihood.check_target`."""
        _check_elementwise(outputs, y)
        targets.raise_faults(targets.binary_fault(y), targets.nan_fault("outputs", outputs, _NAN_REMEDY))

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """See `Likelihood.log_prob`; labels of one datum are summed."""
        lead = _check_elementwise(outputs, y)
        logits = targets.compute_dtype(outputs)
        loss = F.binary_cross_entropy_with_logits(
            logits, y.to(logits.dtype).expand_as(logits), reduction="none"
        )
        return -sum_events(loss, lead + 1)

    def predictive(self, outputs: Tensor, keep_draws: bool = True, consistent: bool = True) -> Predictive:
        """See `Likelihood.predictive`: sigmoid per draw, then the mean."""
        return Predictive.from_draws(
            "bernoulli", outputs, logits=True, keep_draws=keep_draws, consistent=consistent
        )


class Gaussian(Likelihood):
    """Real numbers around the outputs, with noise that is fixed or learned but the same for every input.

    Args:
        noise: standard deviation of the noise (not the variance); the start where it is learned.
        learned: make the logarithm of the standard deviation, `log_noise`, a parameter.
        features: hold one standard deviation for each of the last dimension's features.
    """

    log_noise: Tensor

    def __init__(self, noise: float = 1.0, learned: bool = False, features: int | None = None) -> None:
        super().__init__()
        if not (math.isfinite(noise) and noise > 0):
            raise ValueError(f"noise is {noise}, but it is a standard deviation: a number above zero.")
        if features is not None and features < 1:
            raise ValueError(f"features is {features}, but at least one is needed; None shares the noise.")
        log_noise = torch.full(() if features is None else (features,), math.log(noise))
        if learned:
            self.log_noise = nn.Parameter(log_noise)
        else:
            self.register_buffer("log_noise", log_noise)
        self.features = features

    @property
    def noise(self) -> Tensor:
        """Standard deviation of the noise: a number, or one a feature."""
        return targets.compute_dtype(self.log_noise).exp()

    def extra_repr(self) -> str:
        """Part of the module's representation."""
        learned = isinstance(self.log_noise, nn.Parameter)
        return f"noise={self.noise.detach().tolist()}, learned={learned}"

    def _check_features(self, outputs: Tensor, batch: int) -> None:
        if self.features is None:
            return
        if outputs.ndim <= batch + 1 or outputs.shape[-1] != self.features:
            raise ValueError(
                f"The noise has {self.features} features, but the outputs have shape "
                f"{tuple(outputs.shape)}: their last dimension must be {self.features}, or say "
                "features=None for one noise shared by all."
            )

    def check_target(self, outputs: Tensor, y: Tensor) -> None:
        """See `Likelihood.check_target`."""
        targets.check_tensor("y", y)
        targets.check_real_dtype(y)
        self._check_features(outputs, _check_elementwise(outputs, y))
        targets.raise_faults(targets.finite_fault(y), targets.nan_fault("outputs", outputs, _NAN_REMEDY))

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """See `Likelihood.log_prob`."""
        lead = _check_elementwise(outputs, y)
        self._check_features(outputs, lead)
        means = targets.compute_dtype(outputs)
        variance = self.noise.square().to(means)
        return sum_events(gaussian_log_prob(y.to(means.dtype), means, variance), lead + 1)

    def predictive(self, outputs: Tensor, keep_draws: bool = True, consistent: bool = True) -> Predictive:
        """See `Likelihood.predictive`: noise is the aleatoric part, spread of the draws the epistemic."""
        targets.check_floating("outputs", outputs)
        self._check_features(outputs, 1)
        noise = self.noise.square()
        return Predictive.from_draws(
            "regression", outputs, aleatoric=noise, keep_draws=keep_draws, consistent=consistent
        )


class HeteroscedasticGaussian(Likelihood):
    """Real numbers with a mean and a noise that both depend on the input (Nix and Weigend, 1994).

    The last dimension of the outputs is 2D: D means, then D raw scales, which become standard deviations as
    `softplus(raw) + floor`. Targets are (batch, …, D).

    Args:
        floor: least standard deviation, in the units the target is trained in. Without one the likelihood is
            unbounded: a network that fits one point exactly may let its noise go to zero there.
    """

    def __init__(self, floor: float = 1e-3) -> None:
        super().__init__()
        if not (math.isfinite(floor) and floor > 0):
            raise ValueError(f"floor is {floor}, but it is a least standard deviation: a number above zero.")
        self.floor = floor

    def extra_repr(self) -> str:
        """Part of the module's representation."""
        return f"floor={self.floor}"

    def split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Means and standard deviations, each of the outputs' shape with half the last dimension."""
        targets.check_floating("outputs", outputs)
        if outputs.ndim < 2 or outputs.shape[-1] % 2:
            raise ValueError(
                f"outputs have shape {tuple(outputs.shape)}, but their last dimension must be even, the "
                "means and then as many raw scales: give the network 2 D outputs for D targets."
            )
        means, raw = targets.compute_dtype(outputs).chunk(2, -1)
        return means, F.softplus(raw) + self.floor

    def _check_shape(self, outputs: Tensor, y: Tensor) -> int:
        _check_pair(outputs, y)
        targets.check_real_dtype(y)
        return _match(outputs, [*outputs.shape[:-1], outputs.shape[-1] // 2], y)

    def check_target(self, outputs: Tensor, y: Tensor) -> None:
        """See `Likelihood.check_target`."""
        targets.check_tensor("outputs", outputs)
        self.split(outputs)
        self._check_shape(outputs, y)
        targets.raise_faults(targets.finite_fault(y), targets.nan_fault("outputs", outputs, _NAN_REMEDY))

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """See `Likelihood.log_prob`."""
        means, sds = self.split(outputs)
        lead = self._check_shape(outputs, y)
        return sum_events(gaussian_log_prob(y.to(means.dtype), means, sds.square()), lead + 1)

    def predictive(self, outputs: Tensor, keep_draws: bool = True, consistent: bool = True) -> Predictive:
        """See `Likelihood.predictive`: each draw brings its own mean and its own noise."""
        means, sds = self.split(outputs)
        return Predictive.from_draws(
            "regression", means, aleatoric=sds.square(), keep_draws=keep_draws, consistent=consistent
        )


def likelihood_from_config(config: object) -> Likelihood | None:
    """Likelihood that a Hugging Face config states by its `problem_type`, or None if it states none.

    "single_label_classification" is `Categorical`, "multi_label_classification" `Bernoulli`, "regression" a
    `Gaussian` of unit noise (the mean squared error that `transformers` trains by).

    Args:
        config: an object, or a mapping, that may have `problem_type`.

    Raises:
        ValueError: a problem type that is none of the three.
    """
    read = config.get if isinstance(config, Mapping) else functools.partial(getattr, config)
    stated = read("problem_type", None)
    if stated is None:
        return None
    known: dict[object, type[Likelihood]] = {
        "single_label_classification": Categorical,
        "multi_label_classification": Bernoulli,
        "regression": Gaussian,
    }
    if stated not in known:
        raise ValueError(
            f"The config's problem_type is {stated!r}, but it is one of {', '.join(map(str, known))}; or "
            "pass likelihood=… yourself."
        )
    return known[stated]()


def _check_pair(outputs: Tensor, y: Tensor) -> None:
    targets.check_floating("outputs", outputs)
    targets.check_tensor("y", y)
    if y.ndim == 0:
        raise ValueError("y is a single number, but it needs a batch dimension: pass y.unsqueeze(0).")


def _check_elementwise(outputs: Tensor, y: Tensor) -> int:
    """Check outputs that correspond to targets one to one; the number of leading draw dimensions, 0 or 1."""
    _check_pair(outputs, y)
    return _match(outputs, list(outputs.shape), y)


def _match(outputs: Tensor, like: list[int], y: Tensor, class_axis: int | None = None) -> int:
    """Check that y has the shape the outputs ask for; the number of leading draw dimensions, 0 or 1.

    Args:
        outputs: the outputs.
        like: shape of a target for every draw: that of the outputs, without the classes or raw scales.
        y: the target.
        class_axis: the axis of the classes, where there is one.
    """
    lead = min(max(len(like) - y.ndim, 0), 1)
    targets.check_shape(y, like, lead, tuple(outputs.shape), class_axis)
    return lead
