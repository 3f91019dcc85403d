"""Predictive of a regression: a mixture over draws of Gaussians."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dubito import targets
from dubito.gaussian_mixtures import gaussian_entropy, gaussian_log_prob, mixture_entropy, mixture_quantile
from dubito.predictive import (
    AFTER_DRAWS,
    BATCH,
    Kind,
    NotAvailableError,
    Predictive,
    check_expected_entropy,
    sum_events,
    variance_like,
)


def regress(
    means: Tensor, aleatoric: Tensor | float | None, keep: bool, common: dict[str, Any]
) -> Predictive:
    """Reduce draws (S, batch, …) of means, with the variance of the noise, to a predictive."""
    if aleatoric is None:
        raise ValueError(
            "A regression predictive needs aleatoric, the noise variance of the likelihood: the spread of "
            "the draws is epistemic only. Pass 0.0 if the outcome is the function itself, without noise."
        )
    noise = variance_like("aleatoric", aleatoric, means)
    alike = not isinstance(aleatoric, Tensor) or aleatoric.ndim < means.ndim or aleatoric.shape[0] == 1
    return _Regression(
        _mean=means.mean(0),
        _aleatoric=noise[0] if alike else noise.mean(0),
        _epistemic=means.var(0, correction=0),
        _expected_entropy=None if alike else gaussian_entropy(noise).mean(0),
        _means=means if keep else None,
        _noises=None if alike or not keep else noise,
        **common,
    )


def regress_moments(
    mean: Tensor,
    epistemic: Tensor | float | None,
    aleatoric: Tensor | float | None,
    expected_entropy: Tensor | None,
    common: dict[str, Any],
) -> Predictive:
    """Predictive of a mean (batch, …) and the two parts of its variance."""
    if aleatoric is None or epistemic is None:
        raise ValueError(
            "A regression predictive needs both aleatoric (the noise variance, from the likelihood) and "
            "epistemic (the variance of the mean over the weights; 0.0 where they are known)."
        )
    noise, spread = variance_like("aleatoric", aleatoric, mean), variance_like("epistemic", epistemic, mean)
    if expected_entropy is not None:
        check_expected_entropy(expected_entropy, gaussian_entropy(noise + spread))
    return _Regression(
        _mean=mean, _aleatoric=noise, _epistemic=spread, _expected_entropy=expected_entropy, **common
    )


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class _Regression(Predictive):
    """Mixture over draws of Gaussians; one Gaussian where the draws were not kept."""

    _mean: Tensor = dataclasses.field(metadata=BATCH)
    _aleatoric: Tensor = dataclasses.field(metadata=BATCH)
    _epistemic: Tensor = dataclasses.field(metadata=BATCH)
    _expected_entropy: Tensor | None = dataclasses.field(default=None, metadata=BATCH)
    _means: Tensor | None = dataclasses.field(default=None, metadata=AFTER_DRAWS)
    _noises: Tensor | None = dataclasses.field(default=None, metadata=AFTER_DRAWS)  # where it differs by draw

    @property
    def kind(self) -> Kind:
        return "regression"

    @property
    def mean(self) -> Tensor:
        return self._mean

    @property
    def prediction(self) -> Tensor:
        return self._mean

    @property
    def draws(self) -> Tensor | None:
        return self._means

    @property
    def epistemic(self) -> Tensor:
        return self._epistemic

    @property
    def aleatoric(self) -> Tensor:
        return self._aleatoric

    @property
    def std(self) -> Tensor:
        return self.variance.sqrt()

    @property
    def _kept(self) -> bool:
        return self._means is not None

    def components(self) -> tuple[Tensor, Tensor]:
        return self._components()

    def _components(self) -> tuple[Tensor, Tensor]:
        """Means and variances of the mixture, (S, batch, …); S = 1 where the draws were not kept."""
        if self._means is None:
            return self._mean.unsqueeze(0), self.variance.unsqueeze(0)
        noise = self._aleatoric.unsqueeze(0) if self._noises is None else self._noises
        return self._means, noise

    def _noisy(self, variance: Tensor, name: str) -> Tensor:
        if not bool((variance > 0).all()):
            raise NotAvailableError(
                f"{name} needs a density, but the noise variance is zero somewhere: give the likelihood "
                "some noise."
            )
        return variance

    @property
    def entropy(self) -> Tensor:
        means, variances = self._components()
        return mixture_entropy(means, self._noisy(variances, "entropy").sqrt())

    @property
    def expected_entropy(self) -> Tensor:
        self._noisy(self._aleatoric, "expected_entropy")
        return gaussian_entropy(self._aleatoric) if self._expected_entropy is None else self._expected_entropy

    def quantile(self, q: float | Sequence[float] | Tensor) -> Tensor:
        means, variances = self._components()
        if isinstance(q, int | float):
            return mixture_quantile(means, variances.sqrt(), float(q))
        levels = [float(level) for level in q] if not isinstance(q, Tensor) else q.flatten().tolist()
        found = torch.stack([mixture_quantile(means, variances.sqrt(), level) for level in levels])
        return found[0] if isinstance(q, Tensor) and q.ndim == 0 else found

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        if not 0.0 < level < 1.0:
            raise ValueError(
                f"level is {level}, but an interval encloses a probability strictly between 0 and 1."
            )
        return self.quantile(0.5 - 0.5 * level), self.quantile(0.5 + 0.5 * level)

    def affine(self, shift: Tensor | float, scale: Tensor | float) -> Predictive:
        move, factor = (_per_feature(name, v, self._mean) for name, v in (("shift", shift), ("scale", scale)))
        if bool((factor == 0).any()):
            raise ValueError(
                "scale is zero somewhere, which would forget the target: drop that constant feature."
            )
        entropy, means, noises = self._expected_entropy, self._means, self._noises
        return dataclasses.replace(
            self,
            _mean=move + factor * self._mean,
            _aleatoric=factor.square() * self._aleatoric,
            _epistemic=factor.square() * self._epistemic,
            _expected_entropy=None if entropy is None else entropy + factor.abs().log(),
            _means=None if means is None else move + factor * means,
            _noises=None if noises is None else factor.square() * noises,
        )

    def _log_likelihood(self, y: Tensor) -> Tensor:
        means, variances = self._components()
        return sum_events(gaussian_log_prob(y.to(means.dtype), means, self._noisy(variances, "log_prob")), 2)

    def _check_target(self, y: Tensor) -> None:
        targets.check_tensor("y", y)
        targets.check_real_dtype(y)
        targets.check_shape(y, self._mean.shape, 0, tuple(self._mean.shape))
        targets.raise_faults(targets.finite_fault(y))

    def _sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        means, variances = self._components()
        pick = torch.randint(len(means), (n,), generator=generator, device=means.device)
        noise = torch.randn(
            (n, *means.shape[1:]), generator=generator, device=means.device, dtype=means.dtype
        )
        return means[pick] + variances.expand_as(means)[pick].sqrt() * noise


def _per_feature(name: str, value: Tensor | float, mean: Tensor) -> Tensor:
    """A number, or one number a feature, as a tensor that leaves the shape of `mean` alone."""
    value = torch.as_tensor(value, dtype=mean.dtype, device=mean.device)
    if not bool(value.isfinite().all()):
        raise ValueError(f"{name} holds NaN or infinity.")
    if value.numel() == 1:
        return value.reshape(())
    features = mean.shape[1:]
    if value.ndim > len(features) or value.shape != features[len(features) - value.ndim :]:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, but it is one number, or one a feature: "
            f"{tuple(features)}."
        )
    return value
