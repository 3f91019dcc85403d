"""Training objectives. Every loss here is **per datum, in nats, and to be minimised**.

The evidence lower bound of a data set of N is sum_n E log p(y_n | w) - KL(q || p). Its negative over N is
mean NLL + KL/N, which is what `negative_elbo` returns: a mean over the batch goes with KL/N, never with the
whole KL and never with KL over the number of batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from dubito.generalized_variational import GeneralizedVariational, generalized_variational
from dubito.implicit_bias import warn_of_lost_implicit_bias
from dubito.kl_schedules import CyclicalKL, KLWarmup
from dubito.scalar_checks import choice, count, non_negative, positive

__all__ = [
    "CyclicalKL",
    "Elbo",
    "GeneralizedVariational",
    "KLWarmup",
    "expected_loss",
    "expected_nll",
    "generalized_variational",
    "minibatch_elbo",
    "minibatch_weights",
    "negative_elbo",
]

Scheme = Literal["uniform", "geometric"]


class Elbo(NamedTuple):
    """A negative ELBO and its parts; loss = nll + beta * kl_per_datum always.

    Attributes:
        loss: what to minimise, per datum, scalar.
        nll: mean negative log likelihood of the batch, per datum, scalar.
        kl: the whole KL(q || p), summed over the weights, in nats, scalar.
        kl_per_datum: kl / N.
        beta: the weight the KL really had (temperature and minibatch weighting included); 1 is the ELBO.
    """

    loss: Tensor
    nll: Tensor
    kl: Tensor
    kl_per_datum: Tensor
    beta: float


def negative_elbo(
    nll_mean: Tensor,
    kl: Tensor | float,
    n_data: int,
    beta: float = 1.0,
    temperature: float = 1.0,
    check: bool = True,
) -> Elbo:
    """The negative evidence lower bound per datum, nll_mean + beta * temperature * kl / n_data, in nats.

    Minimised by the closest q to p(D | w)^(1/(beta T)) p(w): beta T < 1 counts the data more than once. The
    cold posterior exp(-U/T) of Wenzel et al. (2020) sharpens the prior as well as the likelihood; with a
    Gaussian prior of standard deviation s it is had exactly with this temperature and prior sd s·sqrt(T).
    The loss is not divided by T, so the learning rate keeps its meaning.

    Args:
        nll_mean: scalar mean over the batch (and the draws) of the negative log likelihood.
        kl: scalar sum over all weights of KL(q || p), in nats.
        n_data: number of training examples N, not of a batch nor of the batches.
        beta: weight of the KL in units of the ELBO, >= 0 (a `KLWarmup` gives it).
        temperature: posterior temperature T, > 0.
        check: look for NaN in `nll_mean` and NaN or infinity in `kl`. On an accelerator this waits for the
            device; it is skipped inside `torch.compile` and `torch.vmap`.

    Raises:
        TypeError: `n_data` not a whole number, `nll_mean` not a tensor.
        ValueError: `n_data` below 1, negative or NaN beta, temperature not positive, a loss or KL that is not
            a scalar or not a number.
    """
    size = count("n_data", n_data, "the number of training examples, such as len(train_set)")
    beta = non_negative("beta", beta)
    temperature = positive("temperature", temperature)
    nll_mean, kl = _check_terms(nll_mean, kl, check)
    weight = beta * temperature
    per_datum = kl / size
    return Elbo(nll_mean + weight * per_datum, nll_mean, kl, per_datum, weight)


def minibatch_weights(
    n_batches: int, scheme: Scheme = "uniform", batch_sizes: Sequence[int] | None = None
) -> Tensor:
    """Weights pi_1 … pi_M that spread one KL over the M batches of an epoch. float64, (M,), they sum to 1.

    "uniform" is 1/M; "geometric" is 2^(M-i)/(2^M - 1), i = 1 … M (Blundell et al. 2015, section 3.4),
    evaluated as 2^-i/(1 - 2^-M), which overflows at no M. Geometric gradients differ by orders of magnitude
    from batch to batch, which Adam does not take well: prefer uniform.

    An epoch weighs its batches by size, sum_i (n_i/N) loss_i. For that to hold exactly one KL/N with
    loss_i = nll_i + pi_i M KL/N, sum_i n_i pi_i must equal N/M. Uniform weights do so for any sizes;
    geometric ones only for equal sizes, unless `batch_sizes` is given: then batches of one size hold their
    number's share of the KL between them, geometric within (an odd last batch has 1/M).

    Args:
        n_batches: M >= 1.
        scheme: "uniform" or "geometric".
        batch_sizes: the M sizes, where they differ.

    Raises:
        TypeError: `n_batches` not a whole number.
        ValueError: `n_batches` below 1, unknown scheme, sizes not positive or not M of them.
    """
    total = count("n_batches", n_batches, "the number of batches of an epoch, such as len(loader)")
    choice("scheme", scheme, Scheme)
    sizes = [1] * total if batch_sizes is None else [count("batch_sizes", n, "sizes") for n in batch_sizes]
    if len(sizes) != total:
        raise ValueError(f"batch_sizes must hold n_batches = {total} sizes, got {len(sizes)}.")
    weights = torch.full((total,), 1.0 / total, dtype=torch.float64)
    if scheme == "uniform":
        return weights
    of_batch = torch.tensor(sizes)
    for size in of_batch.unique():
        members = (of_batch == size).nonzero().squeeze(-1)
        weights[members] = _geometric(len(members)) * (len(members) / total)
    return weights


def minibatch_elbo(
    nll_mean: Tensor,
    kl: Tensor | float,
    n_data: int,
    weight: float | Tensor,
    n_batches: int,
    beta: float = 1.0,
    batch_size: int | None = None,
) -> Elbo:
    """The loss of batch i of M under minibatch weights: nll_mean_i + beta * pi_i * M * kl / n_data.

    Averaged over an epoch with batches weighted by size, it is the negative ELBO per datum, whatever the
    batch size, if the weights come from `minibatch_weights` (with `batch_sizes`, where an uneven last batch
    meets "geometric"). With `batch_size` = n_i the loss is nll_mean_i + beta * pi_i * kl / n_i, Blundell's
    own form over n_i, for which that is so with any weights that sum to 1; the two agree for equal batches.

    Args:
        nll_mean: scalar mean negative log likelihood of this batch.
        kl: scalar sum over all weights of KL(q || p), in nats.
        n_data: number of training examples N.
        weight: pi_i of this batch, in [0, 1].
        n_batches: M.
        beta: as in `negative_elbo`.
        batch_size: n_i of this batch.

    Raises:
        TypeError, ValueError: as `negative_elbo`; a weight outside [0, 1]; a batch larger than the data.
    """
    batches = count("n_batches", n_batches, "the number of batches of an epoch, such as len(loader)")
    size = count("n_data", n_data, "the number of training examples, such as len(train_set)")
    share = non_negative("weight", float(weight))
    if share > 1.0:
        raise ValueError(f"weight is pi_i, one batch's share of the KL, and lies in [0, 1], got {share}.")
    factor = float(batches)
    if batch_size is not None:
        members = count("batch_size", batch_size, "the number of examples of this batch")
        if members > size:
            raise ValueError(f"batch_size {members} is larger than n_data {size}.")
        factor = size / members
    return negative_elbo(nll_mean, kl, size, non_negative("beta", beta) * share * factor)


def expected_loss(losses: Tensor, check: bool = True, bayes: Any = None) -> Tensor:
    """The expected loss E_q l: the **mean** over draws of a per-draw loss, scalar.

    Args:
        losses: (S,) the loss of each draw, or (S, batch, …) per datum, which is averaged as well. Summing
            instead would multiply the gradient by the number of draws.
        check: look for NaN, as in `negative_elbo`.
        bayes: the network whose draws they are, where this is the whole objective: a `DubitoWarning` says once if its
            covariance collapses under the expected loss alone (diagonal, Kronecker-factored).

    Raises:
        ValueError: no leading dimension of draws, no draws, or NaN.
    """
    if losses.dim() == 0 or losses.numel() == 0:
        raise ValueError(
            "losses must have a leading dimension of draws (S, …) and not be empty, got shape "
            f"{tuple(losses.shape)}: use a loss with reduction='none', or stack the draws' losses."
        )
    if bayes is not None:
        warn_of_lost_implicit_bias(bayes, "expected_loss")
    mean = losses.mean()
    if check:
        _refuse("losses contain", mean, mean.isnan())
    return mean


class _Bayesian(Protocol):
    """What `expected_nll` needs of a Bayesian module."""

    def draw(self, samples: int, generator: torch.Generator | None = None) -> Any: ...

    def outputs(self, x: Any, *, samples: int | None = None, draws: Any = None) -> Any: ...

    def nll(self, outputs: Any, y: Any) -> Tensor: ...


def expected_nll(
    bayes: _Bayesian,
    x: Any,
    y: Any,
    samples: int = 1,
    generator: torch.Generator | None = None,
    with_kl: bool = False,
) -> Tensor:
    """Expected negative log likelihood of a batch: mean over `samples` draws and over the batch, in nats.

    The objective of IBVI, and the first term of the ELBO.

    Args:
        bayes: a BayesianModule with a likelihood.
        x: the batch's inputs.
        y: its targets.
        samples: weight draws, shared by the batch.
        generator: source of the draws; None is the global one.
        with_kl: a KL goes beside it (an ELBO). Otherwise it is taken for the whole objective, and a `DubitoWarning`
            says once if the covariance collapses under it (diagonal, Kronecker-factored).

    Raises:
        TypeError: `samples` not a whole number.
        ValueError: `samples` below 1, or what the likelihood finds wrong with `y`.
    """
    size = count("samples", samples, "the number of weight draws")
    if not with_kl:
        warn_of_lost_implicit_bias(bayes, "expected_nll")
    if generator is None:
        return bayes.nll(bayes.outputs(x, samples=size), y)
    return bayes.nll(bayes.outputs(x, draws=bayes.draw(size, generator=generator)), y)


def _geometric(size: int) -> Tensor:
    powers = torch.exp2(-torch.arange(1, size + 1, dtype=torch.float64))
    return powers / -math.expm1(-size * math.log(2.0))


def _check_terms(nll_mean: Tensor, kl: Tensor | float, check: bool) -> tuple[Tensor, Tensor]:
    if not isinstance(nll_mean, Tensor):
        raise TypeError(f"nll_mean must be a tensor, got {type(nll_mean).__name__}.")
    if nll_mean.dim():
        raise ValueError(
            f"nll_mean must be a scalar, got shape {tuple(nll_mean.shape)}: take the mean over the batch "
            "(not the sum: the KL is divided by n_data)."
        )
    if not isinstance(kl, Tensor):
        kl = torch.full((), float(kl), dtype=nll_mean.dtype, device=nll_mean.device)
    if kl.dim():
        raise ValueError(f"kl must be a scalar, got shape {tuple(kl.shape)}: take the sum over the weights.")
    if check:
        _refuse("nll_mean is", nll_mean, nll_mean.isnan())
        _refuse("kl is", kl, ~kl.isfinite())
    return nll_mean, kl


def _refuse(subject: str, value: Tensor, wrong: Tensor) -> None:
    if torch.compiler.is_compiling():
        return
    try:
        found = bool(wrong)
    except RuntimeError:  # under vmap there is no one value to look at
        return
    if found:
        raise ValueError(
            f"{subject} {value.item()}: do not take this step. Look for a learning rate that is too large, "
            "NaN in the inputs, or a posterior without density (whose objective is the expected loss)."
        )
