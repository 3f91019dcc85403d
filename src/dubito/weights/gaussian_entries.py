"""Independent Gaussian entries: drawing them, and their KL, as fast as memory allows.

What mean-field weights and Gaussian factors share. A tensor of entries is given by its mean and by `spread` (log s, or
rho with s = softplus(rho)). Drawing `w = m + s·eps` and the closed-form KL to a Gaussian prior are each bound by
memory traffic, so one autograd function does both: it reads the parameters once and writes one gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Normal
from torch.optim.optimizer import register_optimizer_step_post_hook

from dubito.divergences import KLMethod, kl_divergence
from dubito.priors import ParameterPrior
from dubito.weights.scale_mixture_bound import scale_mixture_bound

LOG_SD_RANGE = (-69.0, 11.0)  # 1e-30 … 6e4: finite in float32 and bfloat16, squared too
Parametrization = Literal["log", "softplus"]


def sd_of(spread: Tensor, parametrization: Parametrization) -> Tensor:
    """Standard deviations, differentiable."""
    if parametrization == "softplus":
        return F.softplus(spread)
    return spread.clamp(*LOG_SD_RANGE).exp()


def log_sd_of(spread: Tensor, parametrization: Parametrization) -> Tensor:
    """Their logarithms (stable for large negative rho, where softplus(rho) ~ exp(rho))."""
    if parametrization == "softplus":
        return torch.where(spread < -20, spread, F.softplus(spread.clamp_min(-20)).log())
    return spread.clamp(*LOG_SD_RANGE)


def spread_of_sd(sd: Tensor, parametrization: Parametrization) -> Tensor:
    """The spread parameter that gives `sd`; 0 becomes the smallest representable one."""
    sd = sd.clamp_min(math.exp(LOG_SD_RANGE[0]))
    if parametrization == "log":
        return sd.log()
    return torch.where(sd < 1e-6, sd.log(), torch.where(sd > 30, sd, sd.clamp_max(30).expm1().log()))


def can_fuse(mean: Tensor, spread: Tensor, parametrization: Parametrization) -> bool:
    """Whether the fused functions below may be used: plain leaves, under autograd."""
    return (
        parametrization == "log"
        and torch.is_grad_enabled()
        and spread.is_leaf
        and mean.is_leaf
        and spread.dtype == mean.dtype
        and spread.dtype in (torch.float32, torch.float64)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()  # which want rules of their own
    )


def draw_with_kl(mean: Tensor, spread: Tensor, prior: ParameterPrior) -> tuple[Tensor, Pending] | None:
    """One draw and its pending KL, or None where the prior is not Gaussian or fusing is not possible."""
    moments = prior.gaussian()
    if moments is None or not can_fuse(mean, spread, "log"):
        return None
    weight, kl = _SampleAndKL.apply(mean, spread, *moments)
    return weight, Pending.of(kl, mean, spread, *prior.parameters())


def moments_with_kl(
    mean: Tensor, spread: Tensor, parametrization: Parametrization, prior: ParameterPrior | None
) -> tuple[Tensor, Tensor, Pending | None]:
    """Mean, variance (in float32 at least) and the pending KL, or None as in `draw_with_kl`."""
    fuse = prior is not None and can_fuse(mean, spread, parametrization)
    moments = prior.gaussian() if prior is not None and fuse else None
    if prior is None or moments is None:
        sd = sd_of(spread, parametrization)
        return mean, sd.to(torch.promote_types(sd.dtype, torch.float32)).square(), None
    same_mean, variance, kl = _MomentsAndKL.apply(mean, spread, *moments)
    return same_mean, variance, Pending.of(kl, mean, spread, *prior.parameters())


def entries_kl(
    mean: Tensor,
    spread: Tensor,
    parametrization: Parametrization,
    prior: ParameterPrior,
    *,
    method: KLMethod = "auto",
    samples: int = 1,
    generator: torch.Generator | None = None,
    pending: Pending | None = None,
) -> Tensor:
    """KL(q || prior) in nats, summed; computed in float32 at least."""
    moments = prior.gaussian() if method in ("auto", "closed") else None
    if moments is not None:
        if pending is not None and pending.valid(mean, spread, *prior.parameters()):
            return pending.kl
        if can_fuse(mean, spread, parametrization):
            kl: Tensor = _GaussianKL.apply(mean, spread, *moments)
            return kl
    if mean.dtype in (torch.float16, torch.bfloat16):
        mean, spread = mean.float(), spread.float()
    sd = sd_of(spread, parametrization)
    if moments is not None:
        return _kl_value(mean, log_sd_of(spread, parametrization).sum(), sd, *moments)
    mixture = prior.scale_mixture() if method in ("auto", "bound") else None
    if mixture is not None:
        return scale_mixture_bound(mean, log_sd_of(spread, parametrization), sd, *mixture)
    q = Normal(mean, sd, validate_args=False)
    return kl_divergence(q, prior.distribution(mean), method, samples, generator).sum()


@dataclass
class Pending:
    """The KL that was made together with the last draw, until it is asked for or what it depends on changes.

    Attributes:
        kl: the KL.
        tensors: the mean, the spread, and the parameters of a learned prior.
        marks: what would tell of a change of theirs, when it was made.
    """

    kl: Tensor
    tensors: tuple[Tensor, ...]
    marks: tuple[int, ...]

    @classmethod
    def of(cls, kl: Tensor, *tensors: Tensor) -> Pending:
        """Keep `kl` as that of the present values of `tensors`."""
        return cls(kl, tensors, _marks(tensors))

    def valid(self, *tensors: Tensor) -> bool:
        """Whether it is still the KL of these parameters."""
        same = len(tensors) == len(self.tensors) and all(
            a is b for a, b in zip(tensors, self.tensors, strict=True)
        )
        return same and self.marks == _marks(tensors) and torch.is_grad_enabled()


_optimizer_steps = 0


def _count_step(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


# Fused optimisers write parameters without raising their version, conversions (`.to`) without changing the object.
register_optimizer_step_post_hook(_count_step)


def _marks(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    return (_optimizer_steps, *(t._version for t in tensors), *(t.data_ptr() for t in tensors))


Moment = Tensor | float  # a float where the prior is the same for all entries: exact, and no synchronisation


def _kl_value(mean: Tensor, log_sd_sum: Tensor, sd: Tensor, loc: Moment, scale: Moment) -> Tensor:
    """sum log(scale/s) + (s² + (m - loc)²) / (2 scale²) - 1/2, in as few passes as the prior's shape allows."""
    if _varies(scale) or isinstance(loc, Tensor):
        wide = scale if isinstance(scale, Tensor) else torch.full_like(mean, scale)
        terms = ((mean - loc).square() + sd.square()) / (2 * wide.square()) + torch.log(wide)
        return terms.sum() - log_sd_sum - 0.5 * mean.numel()
    m, s = mean.reshape(-1), sd.reshape(-1)
    if not isinstance(scale, Tensor) and loc == 0:  # the usual prior; a number costs least as an `alpha`
        constant = log_sd_sum.new_full((), m.numel() * (math.log(scale) - 0.5))
        half_precision = 0.5 / scale**2
        value = torch.add(constant, torch.dot(s, s), alpha=half_precision)
        return torch.add(value, torch.dot(m, m), alpha=half_precision) - log_sd_sum
    if loc != 0:
        m = (
            m - loc
        )  # first of all: expanded, the square would cancel where the scale is small beside the mean
    squares = torch.dot(s, s) + torch.dot(m, m)
    log_scale = scale.log() if isinstance(scale, Tensor) else math.log(scale)
    return squares / (2 * scale**2) - log_sd_sum + m.numel() * (log_scale - 0.5)


def _varies(moment: Moment) -> bool:
    """Whether it differs from entry to entry; a learned scale is a tensor of one number."""
    return isinstance(moment, Tensor) and moment.numel() > 1


def _sd_and_log_sum(spread: Tensor) -> tuple[Tensor, Tensor]:
    """Standard deviations, and the sum of their logarithms, in one new tensor's memory."""
    sd = spread.clamp(*LOG_SD_RANGE)
    log_sd_sum = sd.sum()
    return sd.exp_(), log_sd_sum


class _SampleAndKL(torch.autograd.Function):
    """`w = m + s·eps` and KL(N(m, s²) || N(loc, scale²)) from (m, log s): one pass forward, one back.

    What backward needs is kept on the context, not in `save_for_backward`, since the two outputs may be
    differentiated in two calls of `backward`; a change of the parameters in between is noticed by version. Where
    log s was clamped its gradient passes as if it were not, so that the posterior finds its way back.
    """

    @staticmethod
    def forward(ctx: Any, mean: Tensor, spread: Tensor, loc: Moment, scale: Moment) -> tuple[Tensor, Tensor]:
        sd, log_sd_sum = _sd_and_log_sum(spread)
        eps = torch.randn_like(sd)
        weight = torch.addcmul(mean, sd, eps)
        ctx.set_materialize_grads(False)
        ctx.inputs = (mean, spread, mean._version, spread._version)
        ctx.kept = (sd, eps, loc, scale)
        return weight, _kl_value(mean, log_sd_sum, sd, loc, scale)

    @staticmethod
    def backward(ctx: Any, grad_weight: Tensor | None, grad_kl: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        mean, spread = _unchanged(ctx)
        sd, eps, loc, scale = ctx.kept
        if torch.is_grad_enabled():
            sd = sd_of(spread, "log")
            again = (
                torch.addcmul(mean, sd, eps),
                _kl_value(mean, spread.clamp(*LOG_SD_RANGE).sum(), sd, loc, scale),
            )
            return differentiable_gradients(ctx, again, (grad_weight, grad_kl), (mean, spread, loc, scale))
        if grad_weight is None:
            return (None,) * 4 if grad_kl is None else _kl_gradients(ctx, mean, sd, loc, scale, grad_kl)
        grad_spread = grad_weight * eps
        if grad_kl is None:
            return grad_weight, grad_spread.mul_(sd), None, None
        per_variance = grad_kl / scale**2
        grad_mean = torch.addcmul(grad_weight, mean, per_variance)
        if isinstance(loc, Tensor) or loc != 0:
            grad_mean.sub_(loc * per_variance)
        grad_spread.addcmul_(sd, per_variance)
        torch.addcmul(grad_kl.neg(), grad_spread, sd, out=grad_spread)
        return grad_mean, grad_spread, None, _scale_gradient(ctx, mean, sd, loc, scale, grad_kl)


class _GaussianKL(torch.autograd.Function):
    """KL(N(m, s²) || N(loc, scale²)) from (m, log s), without a draw."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, spread: Tensor, loc: Moment, scale: Moment) -> Tensor:
        sd, log_sd_sum = _sd_and_log_sum(spread)
        ctx.inputs = (mean, spread, mean._version, spread._version)
        ctx.kept = (sd, loc, scale)
        return _kl_value(mean, log_sd_sum, sd, loc, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        mean, spread = _unchanged(ctx)
        sd, loc, scale = ctx.kept
        if torch.is_grad_enabled():
            again = _kl_value(mean, spread.clamp(*LOG_SD_RANGE).sum(), sd_of(spread, "log"), loc, scale)
            return differentiable_gradients(ctx, (again,), (grad,), (mean, spread, loc, scale))
        return _kl_gradients(ctx, mean, sd, loc, scale, grad)


class _MomentsAndKL(torch.autograd.Function):
    """m, s² and KL(N(m, s²) || N(loc, scale²)) from (m, log s), for outputs that are drawn from their moments.

    The mean passes through so that both of its gradients are added here, in one pass.
    """

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, spread: Tensor, loc: Moment, scale: Moment
    ) -> tuple[Tensor, Tensor, Tensor]:
        sd, log_sd_sum = _sd_and_log_sum(spread)
        kl = _kl_value(mean, log_sd_sum, sd, loc, scale)
        variance = sd.mul_(sd)
        ctx.set_materialize_grads(False)
        ctx.inputs = (mean, spread, mean._version, spread._version)
        ctx.kept = (variance.detach(), loc, scale)  # detached: the output itself would make a cycle
        return mean.view_as(mean), variance, kl

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_mean: Tensor | None, grad_variance: Tensor | None, grad_kl: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        mean, spread = _unchanged(ctx)
        variance, loc, scale = ctx.kept
        if torch.is_grad_enabled():
            sd = sd_of(spread, "log")
            kl = _kl_value(mean, spread.clamp(*LOG_SD_RANGE).sum(), sd, loc, scale)
            again = (mean.view_as(mean), sd.square(), kl)
            gradients = (grad_mean, grad_variance, grad_kl)
            return differentiable_gradients(ctx, again, gradients, (mean, spread, loc, scale))
        if grad_kl is None:
            grad_spread = None if grad_variance is None else (grad_variance * variance).mul_(2)
            return grad_mean, grad_spread, None, None
        by_scale = (
            _scale_gradient(ctx, mean, variance.sqrt(), loc, scale, grad_kl)
            if isinstance(scale, Tensor)
            else None
        )
        per_variance = grad_kl / scale**2
        shifted = mean - loc if isinstance(loc, Tensor) or loc != 0 else mean
        by_mean = (
            shifted * per_variance if grad_mean is None else torch.addcmul(grad_mean, shifted, per_variance)
        )
        if grad_variance is None:
            by_spread = variance * per_variance
        else:
            by_spread = torch.add(per_variance, grad_variance, alpha=2).mul_(variance)
        return by_mean, by_spread.sub_(grad_kl), None, by_scale


def _kl_gradients(
    ctx: Any, mean: Tensor, sd: Tensor, loc: Moment, scale: Moment, grad: Tensor
) -> tuple[Tensor | None, ...]:
    per_variance = grad / scale**2
    shifted = mean - loc if isinstance(loc, Tensor) or loc != 0 else mean
    by_spread = sd.square().mul_(per_variance).sub_(grad)
    return shifted * per_variance, by_spread, None, _scale_gradient(ctx, mean, sd, loc, scale, grad)


def _scale_gradient(
    ctx: Any, mean: Tensor, sd: Tensor, loc: Moment, scale: Moment, grad: Tensor
) -> Tensor | None:
    """1/scale - (s² + (m - loc)²)/scale³, where the prior's scale is learned."""
    if not (isinstance(scale, Tensor) and ctx.needs_input_grad[3]):
        return None
    squares = (mean - loc).square().add_(sd.square())
    return ((1.0 - squares / scale.square()) * (grad / scale)).sum_to_size(scale.shape)


def differentiable_gradients(
    ctx: Any, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Any]
) -> tuple[Tensor | None, ...]:
    """What a fused backward gives, made so that it can be differentiated again (`create_graph=True`).

    Args:
        ctx: the function's context.
        outputs: made once more from `inputs`, by ordinary operators.
        gradients: of the outputs; None where one is not used.
        inputs: all arguments of the function.
    """
    used = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None]
    wanted = [i for i, needed in enumerate(ctx.needs_input_grad) if needed]
    if not used or not wanted:
        return (None,) * len(inputs)
    made = torch.autograd.grad(
        [o for o, _ in used],
        [inputs[i] for i in wanted],
        [g for _, g in used],
        create_graph=True,
        allow_unused=True,
    )
    by_input = dict(zip(wanted, made, strict=True))
    return tuple(by_input.get(i) for i in range(len(inputs)))


def _unchanged(ctx: Any) -> tuple[Tensor, Tensor]:
    mean, spread, mean_version, spread_version = ctx.inputs
    if mean._version != mean_version or spread._version != spread_version:
        raise RuntimeError(
            "the posterior's parameters were changed in place between the forward pass and backward "
            "(an optimiser step, or a copy): run backward first, or draw again"
        )
    return mean, spread
