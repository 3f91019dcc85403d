"""Temperature scaling of the averaged predictive (Guo et al. 2017, for networks with random weights).

One number T divides the logits of *every draw*, before the softmax and the average over draws, and is chosen so that
the averaged predictive has the least negative log likelihood on held-out data, under draws that stay fixed during the
search. Calibrating single draws instead would correct for a spread that the average has already removed, and dividing
only the mean logit would leave the spread as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dubito.bayesian import BayesianModule
from dubito.likelihoods import Bernoulli, Categorical, Likelihood, likelihood_from_config
from dubito.monte_carlo import Draws, check_samples, evaluating
from dubito.predictive import Predictive
from dubito.scalar_checks import positive

_GRID = 61
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


class Tempered(Likelihood):
    """A classification likelihood whose logits are divided by a temperature.

    Args:
        likelihood: `Categorical` or `Bernoulli`.
        temperature: T > 0; above 1 predictions become less certain.

    Raises:
        TypeError: for a likelihood without logits.
        ValueError: for a temperature that is not positive.
    """

    log_temperature: Tensor

    def __init__(self, likelihood: Likelihood, temperature: float = 1.0) -> None:
        super().__init__()
        if not isinstance(likelihood, Categorical | Bernoulli):
            raise TypeError(
                f"temperature scaling divides logits, which {type(likelihood).__name__} has none of: it is for "
                "Categorical and Bernoulli (for regression calibrate the noise instead)"
            )
        self.likelihood = likelihood
        value = math.log(positive("temperature", temperature))
        self.register_buffer("log_temperature", torch.tensor(value, dtype=torch.float64))

    @property
    def temperature(self) -> float:
        """T."""
        return math.exp(float(self.log_temperature))

    def scale(self, outputs: Tensor) -> Tensor:
        """Logits over T."""
        return outputs / self.log_temperature.exp().to(outputs.dtype)

    def check_target(self, outputs: Tensor, y: Tensor) -> None:
        """See `Likelihood.check_target`."""
        self.likelihood.check_target(outputs, y)

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """See `Likelihood.log_prob`."""
        return self.likelihood.log_prob(self.scale(outputs), y)

    def predictive(self, outputs: Tensor, keep_draws: bool = True, consistent: bool = True) -> Predictive:
        """See `Likelihood.predictive`: each draw's logits are scaled, then its probabilities averaged."""
        return self.likelihood.predictive(self.scale(outputs), keep_draws, consistent)

    def extra_repr(self) -> str:
        """Part of the module's representation."""
        return f"temperature={self.temperature:.4g}"


class TemperatureScaling(nn.Module):
    """A network with a calibrated temperature; made by `fit`.

    Attributes:
        bayes: the network, unchanged (a plain one is held as a `BayesianModule` without random weights).
        likelihood: the tempered likelihood. `bayes.likelihood = scaling.likelihood` makes it the network's own.
        nll_before, nll_after: negative log likelihood of the calibration data under the averaged predictive, nats a
            datum, at T = 1 and at the T found.
        at_bound: T stands at a bound of the search, as on data that are predicted without an error.
    """

    def __init__(
        self, bayes: BayesianModule, likelihood: Tempered, nll_before: float, nll_after: float, at_bound: bool
    ) -> None:
        super().__init__()
        self.bayes = bayes
        self.likelihood = likelihood
        self.nll_before, self.nll_after, self.at_bound = nll_before, nll_after, at_bound

    @classmethod
    def fit(
        cls,
        model: nn.Module,
        loader: Iterable[Any],
        likelihood: Likelihood | None = None,
        samples: int = 32,
        bounds: tuple[float, float] = (0.05, 20.0),
        generator: torch.Generator | None = None,
    ) -> TemperatureScaling:
        """Find the temperature on held-out data.

        The logits of all draws are kept in memory, `samples · data · classes` numbers. The network, its flags and its
        global random state (where a generator is given) stay as they are.

        Args:
            model: a `BayesianModule`, or a plain module (which has one draw).
            loader: held-out batches (inputs, target), as for `dubito.fit`; not the training data.
            likelihood: `Categorical()` or `Bernoulli()`, where the model has none.
            samples: draws of the weights, the same for every temperature and batch.
            bounds: least and largest T. On data predicted without an error the best T is 0: the bound keeps it finite.
            generator: source of the draws.

        Raises:
            TypeError: a likelihood without logits, or batches without targets.
            ValueError: no likelihood, an empty loader, outputs that are probabilities already, NaN, labels out of
                range, bounds that do not hold 1.
        """
        low, high = (positive("bounds", b) for b in bounds)
        if not low <= 1.0 <= high or low == high:
            raise ValueError(f"bounds={bounds!r} must hold 1, which is no scaling, such as (0.05, 20.0)")
        check_samples(samples)
        bayes = _as_bayesian(model, likelihood)
        own = likelihood if likelihood is not None else bayes.require_likelihood()
        tempered = own if isinstance(own, Tempered) else Tempered(own)
        base = tempered.likelihood  # fitting again starts from the logits, not from the scaled ones
        draws = bayes.draw(samples, generator) if list(bayes.posteriors()) else None
        parts = _collect(bayes, base, loader, draws)
        log_t, before, after = _search(lambda t: _nll(base, parts, t), math.log(low), math.log(high))
        at_bound = min(log_t - math.log(low), math.log(high) - log_t) < 1e-3
        result = Tempered(base, math.exp(log_t)).to(parts[0][0].device)
        return cls(bayes, result, before, after, at_bound)

    @property
    def temperature(self) -> float:
        """T."""
        return self.likelihood.temperature

    def predict(self, x: Any, **options: Any) -> Predictive:
        """As `BayesianModule.predict` (with its options), the logits of every draw divided by T."""
        bayes = self.bayes
        if not list(bayes.posteriors()):
            options = {"samples": 1, **options}
        with bayes._lock:
            before = bayes.likelihood
            bayes.likelihood = self.likelihood
            try:
                return bayes.predict(x, **options)
            finally:
                bayes.likelihood = before

    def extra_repr(self) -> str:
        """Temperature and what it gained."""
        return f"temperature={self.temperature:.4g}, nll={self.nll_before:.4g} -> {self.nll_after:.4g}"


def _as_bayesian(model: nn.Module, likelihood: Likelihood | None) -> BayesianModule:
    """A plain module as a network without random weights."""
    if isinstance(model, BayesianModule):
        return model
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    if likelihood is None:
        likelihood = likelihood_from_config(getattr(model, "config", None))
    bayes = BayesianModule(model, [], {}, likelihood, None)
    bayes.training = model.training
    return bayes


def _collect(
    bayes: BayesianModule, likelihood: Likelihood, loader: Iterable[Any], draws: Draws | None
) -> list[tuple[Tensor, Tensor]]:
    """Logits (S, batch, …) and targets of every batch, under the same draws."""
    from dubito.training.batches import split_batch

    device = next((p.device for p in bayes.parameters()), None)
    parts: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad(), evaluating(bayes.module):
        for item in loader:
            batch = split_batch(_to(item, device))
            if draws is None:
                logits = bayes.select(bayes.run({}, batch.args, batch.kwargs))[None]
            else:
                logits = bayes.outputs(batch.inputs, draws=draws)
            likelihood.check_target(logits, batch.target)
            parts.append((logits.detach(), batch.target))
    if not parts:
        raise ValueError("loader is empty: it gave no batch to calibrate on")
    _check_logits(likelihood, parts)
    return parts


def _to(item: Any, device: torch.device | None) -> Any:
    return torch.utils._pytree.tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, item)


def _check_logits(likelihood: Likelihood, parts: list[tuple[Tensor, Tensor]]) -> None:
    """Refuse probabilities: dividing them by T means nothing."""
    given = "the outputs are probabilities already ({}), and temperature scaling divides logits: take the {} out of "
    given += "the network, or pass output=lambda p: p.log() to bayesianize"
    logits = [outputs for outputs, _ in parts]
    if isinstance(likelihood, Categorical):
        simplex = (bool((p >= 0).all() & ((p.sum(likelihood.dim) - 1).abs() < 1e-3).all()) for p in logits)
        if all(simplex):
            raise ValueError(given.format("each sums to 1", "softmax"))
    elif all(bool(((p >= 0) & (p <= 1)).all()) for p in logits) and any(bool((p != 0).any()) for p in logits):
        raise ValueError(given.format("all lie in [0, 1]", "sigmoid"))


def _nll(likelihood: Likelihood, parts: list[tuple[Tensor, Tensor]], log_t: float) -> float:
    """Of the averaged predictive, nats a datum."""
    total, size = 0.0, 0
    for logits, y in parts:
        log_prob = likelihood.log_prob(logits.double() * math.exp(-log_t), y)
        mixture = torch.logsumexp(log_prob, 0) - math.log(len(log_prob))
        total, size = total - float(mixture.sum()), size + mixture.numel()
    return total / size


def _search(nll: Callable[[float], float], low: float, high: float) -> tuple[float, float, float]:
    """(log T, NLL at T = 1, NLL at T): the best of a grid, refined by golden sections; never worse than T = 1.

    An average of draws need not have one minimum, so the grid comes first.
    """
    grid = sorted({0.0, *(low + (high - low) * i / (_GRID - 1) for i in range(_GRID))})
    values = [nll(t) for t in grid]
    before = values[grid.index(0.0)]
    best = min(range(len(grid)), key=values.__getitem__)
    left, right = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    found = [(values[best], grid[best])]
    a, b = right - _GOLDEN * (right - left), left + _GOLDEN * (right - left)
    fa, fb = nll(a), nll(b)
    while right - left > 1e-6:
        found += [(fa, a), (fb, b)]
        if fa < fb:
            right, b, fb = b, a, fa
            a = right - _GOLDEN * (right - left)
            fa = nll(a)
        else:
            left, a, fa = a, b, fb
            b = left + _GOLDEN * (right - left)
            fb = nll(b)
    after, log_t = min(found)
    return log_t, before, after
