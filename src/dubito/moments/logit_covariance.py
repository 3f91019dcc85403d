"""A covariance of the logits for one-pass propagation, its correlations learned beforehand from draws.

Propagated variances are diagonal: they miss that a weight's noise moves many logits together, and that it is shared
by positions and tokens. What changes little from input to input is measured here once, without labels:

    Cov(x) = g(x)² · D(x) R D(x),      D(x) = diag(propagated standard deviations),
    R = mean over inputs and draws of u uᵀ, made unit-diagonal,  u = (a draw's logits - their mean) / propagated sd
    log g²  = b₀ + b·[log mean propagated variance, log of 1 + margin, entropy of the softmax], by least squares against
              the logarithm of the draws' mean variance

so that a prediction costs one propagation and a few matrices of classes by classes. With labels, two scalars are fitted
after: a temperature of the mean, and a factor on the covariance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dubito.likelihoods import Categorical
from dubito.moments.calibration import Calibration, fingerprint
from dubito.moments.calibration_fitting import batches_of
from dubito.moments.head import predictive_from_moments
from dubito.moments.moments import Context, Moments
from dubito.moments.propagate import gaussian_weights, propagated
from dubito.moments.rule_sets import rule_set
from dubito.predictive import Predictive
from dubito.weights.family import CapabilityError

if TYPE_CHECKING:
    from dubito.bayesian import BayesianModule

_RIDGE = 1e-2


@dataclass(frozen=True)
class LogitCovariance:
    """What is known of the logits' covariance beforehand; made by `fit`.

    Attributes:
        correlation: R, (C, C).
        coefficients: b₀ and b, (4,).
        calibration: of the propagation it was fitted on, or None.
        rules: name of the rule set.
        temperature: the mean is divided by it, the covariance by its square.
        scale: factor on the covariance.
        fingerprint: of the network.
    """

    correlation: Tensor
    coefficients: Tensor
    calibration: Calibration | None
    rules: str
    temperature: float = 1.0
    scale: float = 1.0
    fingerprint: str = ""

    @classmethod
    def fit(
        cls,
        bayes: BayesianModule,
        data: Any,
        calibration: Calibration | None = None,
        *,
        rules: str = "cvp",
        draws: int = 100,
        with_labels: bool = True,
        generator: torch.Generator | None = None,
    ) -> LogitCovariance:
        """Measure correlations on held-out inputs, from draws of the weights.

        Args:
            bayes: a classifier (`Categorical`, classes last) with random weights.
            data: batches of inputs, with targets where `with_labels`.
            calibration: used in the propagation.
            rules: of the propagation.
            draws: of the weights.
            with_labels: also fit temperature and scale by NLL.
            generator: source of the draws.

        Raises:
            CapabilityError: for a likelihood other than `Categorical(dim=-1)`.
            ValueError: no data, or no targets where they are wanted.
        """
        if not isinstance(bayes.likelihood, Categorical) or bayes.likelihood.dim != -1:
            raise CapabilityError("a covariance of logits is for dubito.Categorical() with the classes last")
        batches = batches_of(bayes, data, labels=with_labels)
        made = draws_of = None
        with torch.no_grad():
            kept = bayes.draw(draws, generator)
            pairs = []
            weights = gaussian_weights(bayes)
            for inputs, _ in batches:
                made = propagated(bayes, inputs, Context(rule_set(rules), calibration), weights)
                draws_of = _logits(bayes, inputs, kept)
                pairs.append((made, draws_of))
        mean = torch.cat([m.mean for m, _ in pairs]).flatten(0, -2).double()
        variance = torch.cat([m.variance for m, _ in pairs]).flatten(0, -2).double()
        sampled = torch.cat([d for _, d in pairs], dim=1).flatten(1, -2).double()
        found = _measured(mean, variance, sampled)
        result = cls(*found, calibration, rules, fingerprint=fingerprint(bayes))
        if not with_labels:
            return result
        target = torch.cat([t for _, t in batches if t is not None]).flatten()
        return _with_scalars(result, Moments(mean, variance), target)

    def of(self, moments: Moments) -> tuple[Tensor, Tensor]:
        """Mean (…, C) and covariance (…, C, C) of the logits, from propagated moments."""
        place: dict[str, Any] = {"dtype": moments.mean.dtype, "device": moments.mean.device}
        gain = _summaries(moments) @ self.coefficients.to(**place)
        sd = (moments.variance * (gain.exp() * self.scale).unsqueeze(-1)).clamp_min(
            0
        ).sqrt() / self.temperature
        covariance = sd.unsqueeze(-1) * self.correlation.to(**place) * sd.unsqueeze(-2)
        return moments.mean / self.temperature, covariance

    def check(self, bayes: BayesianModule, rules: str, calibration: object = None) -> None:
        """Refuse another network, rule set or calibration.

        Raises:
            ValueError: saying which.
        """
        if self.fingerprint != fingerprint(bayes) or self.rules != rules:
            raise ValueError(
                f"this covariance was fitted for another network, or under rules={self.rules!r}, not {rules!r}: "
                "fit one by LogitCovariance.fit(bayes, validation)"
            )
        if self.calibration != calibration:
            raise ValueError(
                "calibration: this covariance was fitted on a propagation with another one; pass "
                "calibration=covariance.calibration"
            )

    def predictive(self, bayes: BayesianModule, moments: Moments, head: str = "sampled") -> Predictive:
        """The predictive of propagated moments under this covariance."""
        mean, covariance = self.of(moments)
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        return predictive_from_moments(bayes.require_likelihood(), mean, variance, covariance, head=head)


def _logits(bayes: BayesianModule, inputs: Any, draws: Any) -> Tensor:
    """Logits of every draw, (S, batch, C)."""
    from dubito.monte_carlo import evaluating

    with evaluating(bayes.module):
        return bayes.outputs(inputs, draws=draws, chunk_size=8)


def _summaries(moments: Moments) -> Tensor:
    """What the gain depends on, (…, 4): one, log mean variance, log(1 + margin), entropy."""
    best = moments.mean.topk(2, dim=-1).values
    log_probs = moments.mean.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    level = moments.variance.mean(-1).clamp_min(torch.finfo(moments.mean.dtype).tiny).log()
    margin = (best[..., 0] - best[..., 1]).log1p()
    return torch.stack((torch.ones_like(level), level, margin, entropy), dim=-1)


def _measured(mean: Tensor, variance: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
    """(R, coefficients) from propagated moments (N, C) and draws (S, N, C)."""
    count = sampled.shape[0]
    deviations = sampled - sampled.mean(0)
    spread = deviations.square().sum(0) / (count - 1)
    unit = deviations / variance.clamp_min(1e-300).sqrt()
    # each input counts alike, however large its noise
    unit = unit / unit.square().mean((0, 2), keepdim=True).clamp_min(1e-300).sqrt()
    correlation = _shrunk(torch.einsum("snc,snd->scd", unit, unit) / unit.shape[1])
    inputs = _summaries(Moments(mean, variance))
    wanted = spread.mean(-1).clamp_min(1e-300).log() - variance.mean(-1).clamp_min(1e-300).log()
    penalty = _RIDGE * torch.eye(inputs.shape[-1], dtype=inputs.dtype, device=inputs.device)
    penalty[0, 0] = 0.0
    gram = inputs.mT @ inputs / len(inputs) + penalty
    return correlation, torch.linalg.solve(gram, inputs.mT @ wanted / len(inputs))


def _shrunk(products: Tensor) -> Tensor:
    """A correlation matrix from each draw's mean products (S, C, C), moved towards none by how uncertain it is.

    All inputs share the draws, so there are S independent looks at it, however many inputs. The share moved is that of
    the off-diagonals' squares which is noise (Schäfer & Strimmer 2005).
    """
    second = products.mean(0)
    inverse = second.diagonal().clamp_min(1e-300).rsqrt()
    scale = inverse.unsqueeze(0) * inverse.unsqueeze(1)
    correlation = second * scale
    noise = (products * scale).var(0) / len(products)
    off = ~torch.eye(len(second), dtype=torch.bool, device=second.device)
    share = (noise[off].sum() / correlation[off].square().sum().clamp_min(1e-300)).clamp(0.0, 1.0)
    return torch.where(off, correlation * (1 - share), correlation)


def _with_scalars(found: LogitCovariance, moments: Moments, target: Tensor) -> LogitCovariance:
    """Temperature and scale by NLL, under the sampled head that predictions use."""
    free = torch.zeros(2, dtype=moments.mean.dtype, device=moments.mean.device, requires_grad=True)
    mean, covariance = found.of(moments)
    likelihood = Categorical()
    optimizer = torch.optim.Adam([free], lr=0.05)
    best, kept = math.inf, (0.0, 0.0)
    with torch.enable_grad():
        for _ in range(120):
            temperature, scale = free.exp()
            spread = covariance * (scale / temperature.square())
            variance = spread.diagonal(dim1=-2, dim2=-1)
            predictive = predictive_from_moments(likelihood, mean / temperature, variance, spread)
            loss = -predictive.log_prob(target).mean()
            if float(loss.detach()) < best:
                best, kept = float(loss.detach()), tuple(free.detach().tolist())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return replace(found, temperature=math.exp(kept[0]), scale=math.exp(kept[1]))
