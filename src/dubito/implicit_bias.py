"""When the expected loss alone does not end where the theory of the implicit bias says, said once and with the reason.

Without a KL nothing but the path of (stochastic) gradient descent holds the spread up: from the prior it ends at the
minimiser of the expected loss that is nearest to the prior in 2-Wasserstein distance. A covariance that cannot keep
its unseen part apart has no such minimiser but a point, adaptive steps change the distance, and decay moves its centre.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import SGD, Optimizer

from dubito.weights.family import DubitoWarning, WeightPosterior

_DIAGONAL = (
    "is diagonal, and the expected loss drives the variance of every weight that has an effect to zero: it collapses "
    "to a point"
)
_said: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def lost_implicit_bias(
    model: Any, optimizer: Optimizer | str | None = None, decayed: Sequence[str] = ()
) -> list[str]:
    """Why minimising only the expected loss of `model` ends in a point, or elsewhere than near the prior.

    Args:
        model: a `BayesianModule`; of anything else nothing is said.
        optimizer: what takes the steps: an optimizer, or the name of its kind ("sgd", "adam"); None: not known.
        decayed: names of random weights that weight decay touches, besides those that the optimizer's groups decay.

    Returns:
        One sentence a reason; empty where the theory applies.
    """
    posteriors = _posteriors(model)
    reasons = []
    for kind, why, names in _collapsing(posteriors):
        reasons.append(
            f"the covariance of {kind} on {_some(names)} {why} (use LowRankCovariance, or an ELBO)"
        )
    adaptive = _adaptive(optimizer)
    if posteriors and adaptive:
        reasons.append(
            f"{adaptive} rescales each coordinate, so training ends at another minimiser than the one nearest to the "
            "prior: the implicit bias is lost (use SGD, with or without momentum)"
        )
    if isinstance(optimizer, Optimizer):
        decayed = [*decayed, *_decayed(model, posteriors, optimizer)]
    if posteriors and decayed:
        reasons.append(
            f"weight decay on the variational parameters {_some(decayed)} pulls them to zero instead of leaving them "
            "at the prior: the implicit bias is lost (weight_decay=0 for them)"
        )
    return reasons


def warn_of_lost_implicit_bias(
    model: Any,
    where: str,
    optimizer: Optimizer | str | None = None,
    decayed: Sequence[str] = (),
    stacklevel: int = 3,
) -> None:
    """Say what `lost_implicit_bias` finds in one `DubitoWarning`; each reason once for each model.

    Args:
        model: as there.
        where: what minimises the expected loss, such as "objective='expected_loss'"; it begins the message.
        optimizer, decayed: as there.
        stacklevel: 3 points at the caller of the function that calls this one.
    """
    reasons = lost_implicit_bias(model, optimizer, decayed)
    if not reasons:
        return
    said = _said.setdefault(model, set())
    fresh = [reason for reason in reasons if reason not in said]
    said.update(fresh)
    if fresh:
        warnings.warn(f"{where}: {'; '.join(fresh)}", DubitoWarning, stacklevel=stacklevel)


def _posteriors(model: Any) -> list[WeightPosterior]:
    posteriors = getattr(model, "posteriors", None)
    return [p for p in posteriors() if isinstance(p, WeightPosterior)] if callable(posteriors) else []


def _collapsing(posteriors: Iterable[WeightPosterior]) -> list[tuple[str, str, list[str]]]:
    """(family, reason, parameters) of the families that end in a point."""
    found: dict[str, tuple[str, str, list[str]]] = {}
    for posterior in posteriors:
        why = posterior.collapses or (_DIAGONAL if posterior.diagonal else None)
        if why is not None:
            kind = type(posterior).__name__.removesuffix("Posterior")
            found.setdefault(kind, (kind, why, []))[2].extend(slot.name for slot in posterior.slots)
    return list(found.values())


def _adaptive(optimizer: Optimizer | str | None) -> str | None:
    if optimizer is None or isinstance(optimizer, SGD):
        return None
    if isinstance(optimizer, str):
        return None if optimizer.lower() == "sgd" else optimizer.capitalize()
    return type(optimizer).__name__


def _decayed(model: Any, posteriors: Sequence[WeightPosterior], optimizer: Optimizer) -> list[str]:
    random = {id(p) for posterior in posteriors for p in posterior.parameters()}
    random |= {id(s.parameter) for p in posteriors if not p.takes_over for s in p.slots}
    names = {id(p): name for name, p in model.named_parameters()}
    return [
        names.get(id(p), "?")
        for group in optimizer.param_groups
        if group.get("weight_decay", 0) > 0
        for p in group["params"]
        if id(p) in random
    ]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
