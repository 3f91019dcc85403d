"""Divergences between distributions of weights: KL (closed form, bound, Monte Carlo) and 2-Wasserstein.

All are in nats or squared weight units, differentiable, and never scaled behind the caller's back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributions import Distribution, Laplace, MixtureSameFamily, Normal
from torch.distributions import kl_divergence as torch_kl_divergence

from dubito.scalar_checks import broadcasts_to, choice, computing_dtype, count, positive
from dubito.scale_mixture import ScaleMixture

__all__ = [
    "KLMethod",
    "gaussian_kl",
    "kl_divergence",
    "wasserstein2_gaussian_diagonal",
    "wasserstein2_gaussian_factors",
]

KLMethod = Literal["auto", "closed", "bound", "monte_carlo", "stick_the_landing"]

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)
_ELEMENTS_AT_ONCE = 1 << 22  # of Monte Carlo draws held together


def kl_divergence(
    q: Distribution,
    p: Distribution,
    method: KLMethod = "auto",
    samples: int = 16,
    generator: torch.Generator | None = None,
) -> Tensor:
    """KL(q || p), elementwise, in nats.

    Args:
        q: the posterior: usually Normal, or Laplace; for Monte Carlo any distribution with `rsample`.
        p: the prior.
        method: "closed" where a closed form is known; "bound", for a mixture p = sum_a pi_a g_a, is the upper
            bound -logsumexp_a(log pi_a - KL(q || g_a)), deterministic and differentiable, tight to 0.1 nats
            but where q is as narrow as the spike of the mixture; "monte_carlo" the mean of
            log q(w) - log p(w) over reparametrised draws; "stick_the_landing" the same number with q's
            parameters held fixed inside log q (Roeder et al. 2017), whose gradient is unbiased too and has no
            variance where q = p; "auto" the first of closed, bound (mixtures) and Monte Carlo that applies.
        samples: number of Monte Carlo draws.
        generator: source of the Monte Carlo draws; None is the global one.

    Returns:
        Tensor of the broadcast batch shape. bfloat16 and float16 are computed in float32.

    Raises:
        NotImplementedError: the method does not apply to this pair; the message says which does.
        TypeError: `samples` not a whole number.
        ValueError: unknown method, `samples` below 1, or event shapes that differ.
    """
    choice("method", method, KLMethod)
    if q.event_shape != p.event_shape:
        raise ValueError(
            f"q and p must have the same event shape, got {tuple(q.event_shape)} and {tuple(p.event_shape)}."
        )
    q, p = _at_least_float32(q), _at_least_float32(p)
    if method in ("monte_carlo", "stick_the_landing"):
        return _monte_carlo(q, p, samples, generator, held=method == "stick_the_landing")
    if method == "bound":
        return _mixture_bound(q, p)
    closed = _closed(q, p)
    if closed is not None:
        return closed
    if method == "closed":
        raise NotImplementedError(
            f"no closed form of KL({type(q).__name__} || {type(p).__name__}) is known: use method='auto', "
            "'monte_carlo', or (for a mixture) 'bound'."
        )
    if (isinstance(p, ScaleMixture) and type(q) in (Normal, Laplace)) or (
        isinstance(p, MixtureSameFamily) and _component_kl(q, p) is not None
    ):
        return _mixture_bound(q, p)
    return _monte_carlo(q, p, samples, generator)


def gaussian_kl(
    mean: Tensor, log_sd: Tensor, prior_mean: float | Tensor = 0.0, prior_sd: float | Tensor = 1.0
) -> Tensor:
    """KL(N(mean, exp(log_sd)²) || N(prior_mean, prior_sd²)), **summed** over the entries, in nats.

    With u = log_sd - log prior_sd each entry is ½(exp(2u) - 1 - 2u + ((mean - prior_mean)/prior_sd)²), by
    `expm1` so that it keeps its digits near the prior, and on the logarithm so that a vanishing sd stays
    finite. Floats for the prior avoid any tensor being made.

    Args:
        mean: means, any shape.
        log_sd: logarithms of the standard deviations, broadcastable to `mean`.
        prior_mean: broadcastable to `mean`.
        prior_sd: > 0, broadcastable to `mean` (checked for floats only: a tensor would have to be read).

    Raises:
        ValueError: shapes that do not broadcast to that of `mean`, or a prior_sd that is not positive.
    """
    for name, other in (("log_sd", log_sd), ("prior_mean", prior_mean), ("prior_sd", prior_sd)):
        if isinstance(other, Tensor) and not broadcasts_to(other.shape, mean.shape):
            raise ValueError(
                f"{name} of shape {tuple(other.shape)} does not broadcast to mean's {tuple(mean.shape)}."
            )
    mean, log_sd = _widen(mean), _widen(log_sd)
    if not isinstance(prior_sd, Tensor):
        prior_sd = positive("prior_sd", prior_sd)
    fixed = not any(isinstance(t, Tensor) and t.requires_grad for t in (prior_mean, prior_sd))
    if fixed and log_sd.shape == mean.shape:
        value: Tensor = _SummedGaussianKL.apply(mean, log_sd, prior_mean, prior_sd)[0]
        return value
    log_prior_sd = prior_sd.log() if isinstance(prior_sd, Tensor) else math.log(prior_sd)
    twice = 2.0 * (log_sd - log_prior_sd)
    return 0.5 * (torch.expm1(twice) - twice + ((mean - prior_mean) / prior_sd).square()).sum()


class _SummedGaussianKL(torch.autograd.Function):
    """`gaussian_kl` under a fixed prior: half the memory traffic of autograd, and a gradient without cancellation.

    The derivatives are (mean - prior_mean)/prior_sd² and exp(2u) - 1, and the latter is at hand.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        mean: Tensor, log_sd: Tensor, prior_mean: float | Tensor, prior_sd: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        # in place where it can be: at these sizes fresh memory costs more than arithmetic
        work = (log_sd - (prior_sd.log() if isinstance(prior_sd, Tensor) else math.log(prior_sd))).mul_(2.0)
        excess = torch.expm1(work)
        spread = work.neg_().add_(excess).sum()
        away = mean - prior_mean
        away = away / prior_sd if isinstance(prior_sd, Tensor) else away.div_(prior_sd)
        distance = away.mul_(away).sum()
        return 0.5 * (spread + distance), excess

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        mean, _, ctx.prior_mean, ctx.prior_sd = inputs
        # the excess is an output so that second derivatives reach log_sd through it
        ctx.save_for_backward(mean, output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, by_value: Tensor | None, by_excess: Tensor | None) -> tuple[Tensor | None, ...]:
        mean, excess = ctx.saved_tensors
        by_mean = by_log_sd = None
        if by_value is not None:
            by_mean = (mean - ctx.prior_mean) * (by_value / ctx.prior_sd**2)
            by_log_sd = excess * by_value
        if by_excess is not None:  # second derivatives only: d expm1(2u) = 2 exp(2u)
            by_excess = 2.0 * by_excess * (excess + 1.0)
            by_log_sd = by_excess if by_log_sd is None else by_log_sd + by_excess
        return by_mean, by_log_sd, None, None


def wasserstein2_gaussian_diagonal(m1: Tensor, sd1: Tensor, m2: Tensor, sd2: Tensor) -> Tensor:
    """Squared 2-Wasserstein distance between Gaussians with independent entries, summed over the entries.

    ||m1 - m2||² + ||sd1 - sd2||². All four have one shape; standard deviations are not negative (zero is
    allowed: the distance to a point is finite, unlike the KL).

    Raises:
        ValueError: shapes that differ.
    """
    shapes = {tuple(t.shape) for t in (m1, sd1, m2, sd2)}
    if len(shapes) > 1:
        raise ValueError(f"m1, sd1, m2 and sd2 must have one shape, got {sorted(shapes)}.")
    return (_widen(m1) - _widen(m2)).square().sum() + (_widen(sd1) - _widen(sd2)).square().sum()


def wasserstein2_gaussian_factors(m1: Tensor, S1: Tensor, m2: Tensor, S2: Tensor) -> Tensor:
    """Squared 2-Wasserstein distance between N(m1, S1 S1ᵀ) and N(m2, S2 S2ᵀ), from the factors alone.

    ||m1 - m2||² + ||S1||² + ||S2||² - 2 ||S1ᵀ S2||_* with the nuclear norm, evaluated as
    ||m1 - m2||² + min_Q ||S1 - S2 Q||² (orthogonal Procrustes), which is the same number without its
    cancellation and never negative. Covariances may be singular. Cost O(P R²), no P×P matrix.

    The optimal Q is held fixed in backward, which by the envelope theorem gives the exact *first* derivative
    wherever there is one. It is finite everywhere: coinciding singular values of S1ᵀS2 do no harm, and where
    some are zero the distance has a kink and this is one of its one-sided slopes. Second derivatives are not
    those of the distance.

    Args:
        m1: mean, (P,).
        S1: factor, (P, R1).
        m2: mean, (P,).
        S2: factor, (P, R2); the ranks may differ.

    Raises:
        ValueError: shapes that do not fit together.
    """
    size = m1.shape[0] if m1.dim() == 1 else -1
    if m2.shape != m1.shape or any(S.dim() != 2 or S.shape[0] != size for S in (S1, S2)):
        raise ValueError(
            "means must be (P,) and factors (P, R), got "
            f"m1 {tuple(m1.shape)}, S1 {tuple(S1.shape)}, m2 {tuple(m2.shape)}, S2 {tuple(S2.shape)}."
        )
    m1, S1, m2, S2 = (_widen(t) for t in (m1, S1, m2, S2))
    means = (m1 - m2).square().sum()
    wide, narrow = (S1, S2) if S1.shape[1] >= S2.shape[1] else (S2, S1)
    if narrow.shape[1] == 0:  # one of them is a point
        return means + wide.square().sum()
    with torch.no_grad():
        left, _, right = torch.linalg.svd(narrow.mT @ wide, full_matrices=False)
        rotation: Tensor = left @ right
    return means + (wide - narrow @ rotation).square().sum()


def _normal_normal(q: Normal, p: Normal) -> Tensor:
    # torch squares the ratio of the scales before the logarithm, which underflows: KL = inf from sd 1e-23 on
    twice = 2.0 * (q.scale.log() - p.scale.log())
    return 0.5 * (torch.expm1(twice) - twice + ((q.loc - p.loc) / p.scale).square())


def _laplace_normal(q: Laplace, p: Normal) -> Tensor:
    spread = (q.scale / p.scale).square() + 0.5 * ((q.loc - p.loc) / p.scale).square()
    return spread + p.scale.log() - q.scale.log() + (_HALF_LOG_TWO_PI - math.log(2.0) - 1.0)


_STABLE: dict[tuple[type, type], Callable[[Any, Any], Tensor]] = {
    (Normal, Normal): _normal_normal,
    (Laplace, Normal): _laplace_normal,
}


def _closed(q: Distribution, p: Distribution) -> Tensor | None:
    stable = _STABLE.get((type(q), type(p)))
    if stable is not None:
        return stable(q, p)
    try:
        value: Tensor = torch_kl_divergence(q, p)
        return value
    except NotImplementedError:
        return None


def _mixture_bound(q: Distribution, p: Distribution) -> Tensor:
    if isinstance(p, ScaleMixture):
        terms = [(log_weight, _closed(q, component)) for log_weight, component in p.components()]
        first, second = (None if kl is None else log_weight - kl for log_weight, kl in terms)
        if first is None or second is None:
            raise NotImplementedError(_no_component_form(q, "Normal"))
        return -torch.logaddexp(first, second)
    if isinstance(p, MixtureSameFamily):
        kl = _component_kl(q, p)
        if kl is None:
            raise NotImplementedError(_no_component_form(q, type(p.component_distribution).__name__))
        return -torch.logsumexp(torch.log_softmax(p.mixture_distribution.logits, dim=-1) - kl, dim=-1)
    raise NotImplementedError(
        f"method='bound' is for mixtures (ScaleMixture, MixtureSameFamily), p is {type(p).__name__}: "
        "use method='closed' or 'monte_carlo'."
    )


def _no_component_form(q: Distribution, component: str) -> str:
    return (
        f"the bound needs a closed form of KL({type(q).__name__} || {component}) for each component and none "
        "is known: use method='monte_carlo'."
    )


def _component_kl(q: Distribution, p: MixtureSameFamily) -> Tensor | None:
    """KL(q || g_a) for each component, components last; None where no closed form is known."""
    if p.event_shape or type(q) not in (Normal, Laplace):
        return None
    kind: Any = type(q)
    loc, scale = (getattr(q, name).unsqueeze(-1) for name in ("loc", "scale"))
    return _closed(kind(loc, scale, validate_args=False), p.component_distribution)


def _monte_carlo(
    q: Distribution, p: Distribution, samples: int, generator: torch.Generator | None, held: bool = False
) -> Tensor:
    wanted = count("samples", samples, "the number of Monte Carlo draws")
    if not q.has_rsample:
        raise NotImplementedError(
            f"{type(q).__name__} has no rsample, so its Monte Carlo KL would carry no gradient: use "
            "method='closed', or a posterior that can be reparametrised."
        )
    elements = math.prod(torch.broadcast_shapes(q.batch_shape, p.batch_shape)) * max(1, q.event_shape.numel())
    chunk = max(1, min(wanted, _ELEMENTS_AT_ONCE // max(1, elements)))
    total: Tensor | None = None
    for start in range(0, wanted, chunk):
        draws, log_q = _draw(q, min(chunk, wanted - start), generator, held)
        part = (log_q - p.log_prob(draws)).sum(dim=0)
        total = part if total is None else total + part
    assert total is not None
    return total / wanted


def _draw(
    q: Distribution, size: int, generator: torch.Generator | None, held: bool = False
) -> tuple[Tensor, Tensor]:
    """Reparametrised draws (size, …) and their log density, from the noise where that is more exact.

    With `held` the parameters inside the density are constants, and only the draws carry gradient.
    """
    shape = (size, *q.batch_shape)
    if type(q) is Normal:
        noise = torch.randn(shape, generator=generator, dtype=q.loc.dtype, device=q.loc.device)
        z, scale = _standardised(noise, q.loc, q.scale, held)
        return q.loc + q.scale * noise, -0.5 * z.square() - scale.log() - _HALF_LOG_TWO_PI
    if type(q) is Laplace:
        uniform = torch.rand((2, *shape), generator=generator, dtype=q.loc.dtype, device=q.loc.device)
        noise = torch.log1p(-uniform[0]) - torch.log1p(-uniform[1])  # difference of two exponentials
        z, scale = _standardised(noise, q.loc, q.scale, held)
        return q.loc + q.scale * noise, -z.abs() - (2.0 * scale).log()
    if held:
        raise NotImplementedError(
            f"method='stick_the_landing' is for Normal and Laplace posteriors, q is {type(q).__name__}: use "
            "method='monte_carlo'."
        )
    if generator is None:
        draws = q.rsample(torch.Size((size,)))
    else:  # rsample knows only the global generator: seed a fork of it from the one given
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            draws = q.rsample(torch.Size((size,)))
    return draws, q.log_prob(draws)


def _standardised(noise: Tensor, loc: Tensor, scale: Tensor, held: bool) -> tuple[Tensor, Tensor]:
    """(draw - loc)/scale, which is the noise, and scale; `held`, with the draw's gradient alone."""
    if not held:
        return noise, scale
    at, width = loc.detach(), scale.detach()
    return noise + ((loc - at) + (scale - width) * noise) / width, width


def _at_least_float32(distribution: Distribution) -> Distribution:
    kind: Any = type(distribution)
    if kind in (Normal, Laplace) and distribution.mean.dtype.itemsize < 4:
        loc, scale = (getattr(distribution, name).float() for name in ("loc", "scale"))
        return kind(loc, scale, validate_args=False)  # type: ignore[no-any-return]
    return distribution


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(computing_dtype(tensor.dtype))
